"""Checks of the values in scales, orders of inputs and stored shapes, which must be read for it."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error
from cpumoe.checkpoint.quantized_storage import Stored
from cpumoe.checkpoint.safetensors import TensorRef


@cache
def _own_order(k: int, group: int) -> NDArray[np.int32]:
    return (np.arange(k) // (group or k)).astype(np.int32)


def check_scales(ref: TensorRef) -> None:
    """Refuse scales that are no finite number, or 0.

    Scales of 8 bits may be 0: they stand for blocks too small for them.
    """
    bad = _bad_scales(ref)
    if bad is not None:
        index = [int(i) for i in np.unravel_index(bad, ref.shape)]
        raise Error(
            f"{ref.file}: tensor {ref.name}: scales must be finite numbers other than 0; got "
            f"{_values(ref)[bad]} at {index}. The file is damaged or was not downloaded completely"
        )


def check_order(ref: TensorRef, group: int) -> None:
    """Refuse inputs whose scales are not those of their own group of `group` (0: of all)."""
    if not np.array_equal(ref.array(), _own_order(ref.shape[0], group)):
        raise Error(
            f"{ref.file}: tensor {ref.name}: inputs must be in their own order, i // group; got "
            "another one (act-order, desc_act). Use a checkpoint that was quantised with desc_act "
            "false"
        )


def check_values(stored: Stored) -> None:
    """Both checks, and of a shape that is stored with the matrix."""
    check_scales(stored.scales)
    if stored.order is not None:
        check_order(stored.order, stored.scheme.grid[1])
    sizes = stored.sizes
    if sizes is not None and sizes.array().tolist() != list(stored.shape):
        raise Error(
            f"{sizes.file}: tensor {sizes.name}: must say {list(stored.shape)} by config.json; "
            f"got {sizes.array().tolist()}"
        )


def _values(ref: TensorRef) -> NDArray[np.float32]:
    """The scales as fp32, flat."""
    data = ref.data
    if ref.format in ("e8m0", "uint8"):
        found = np.ldexp(np.float32(1), np.minimum(data.astype(np.int32), 254) - 127).astype(
            np.float32
        )
        return np.where(data == 255, np.float32(np.nan), found)
    if ref.format == "e4m3":
        low, exponent = (data & 7).astype(np.float32), (data >> 3 & 15).astype(np.int32)
        found = np.ldexp(np.where(exponent > 0, 8 + low, low), np.maximum(exponent, 1) - 10)
        found = np.where(data & 127 == 127, np.float32(np.nan), found)
        return np.where(data > 127, -found, found).astype(np.float32)
    if ref.format == "bf16":
        return (ref.array().ravel().astype(np.uint32) << 16).view(np.float32)
    return ref.array().ravel().astype(np.float32)


def _bad_scales(ref: TensorRef) -> int | None:
    """Flat index of a scale that is not a finite number or, of 16 bits or more, 0."""
    data = ref.data
    if ref.format in ("e8m0", "uint8"):
        bad = data == 255
    elif ref.format == "e4m3":
        bad = data & 127 == 127
    else:
        width, exponent = {"fp32": ("<u4", 0x7F800000), "fp16": ("<u2", 0x7C00)}.get(
            ref.format, ("<u2", 0x7F80)
        )
        units = data.view(width)
        bad = (units & exponent == exponent) | (units << 1 == 0)
    return int(bad.argmax()) if bad.any() else None

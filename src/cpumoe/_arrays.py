"""Arrays of any library at the border to the native module.

The native module takes an array that speaks DLPack or the buffer protocol, or a pair
``(array of raw units, format name)`` for what neither protocol can name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from cpumoe import _core

# Endings of the names of dtypes that neither protocol can name -> ours.
_BYTES = {"float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0"}


class SupportsDLPack(Protocol):
    """An array that can be exported by DLPack: numpy, torch, jax and others."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Export the array as a capsule."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return the DLPack device type and id."""


def native(array: Any) -> Any:
    """Return `array` as the native module wants it.

    bfloat16 of numpy and the 8-bit floats of numpy and torch as raw units and a name.
    """
    dtype = str(getattr(array, "dtype", ""))
    if isinstance(array, np.ndarray) and dtype == "bfloat16":
        return array.view(np.uint16), "bf16"
    for ending, name in _BYTES.items():
        if dtype.endswith(ending):
            byte = np.uint8 if isinstance(array, np.ndarray) else sys.modules["torch"].uint8
            return array.view(byte), name
    return array


def natives(array: Any) -> Any:
    """Like `native`, for one array or a list or tuple with one array per expert."""
    if isinstance(array, list | tuple):
        return [native(a) for a in array]
    return native(array)


def plain(array: Any) -> Any:
    """Wrap what speaks only the buffer protocol (memoryview, array.array) as a numpy array."""
    if hasattr(array, "__dlpack__") or isinstance(array, list | tuple):
        return array
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        return array


def _importer(array: Any) -> Callable[[Any], Any] | None:
    """Return from_dlpack of the library that `array` belongs to."""
    if hasattr(array, "__array_namespace__"):
        space = array.__array_namespace__()
    else:
        space = sys.modules.get(type(array).__module__.partition(".")[0])
    importer: Callable[[Any], Any] | None = getattr(space, "from_dlpack", None)
    return importer


def empty_like(array: Any, shape: Sequence[int]) -> tuple[Any, Callable[[], Any]]:
    """Allocate an array of `array`'s dtype for the native module to write into.

    Returns what to pass to it, and a function that gives the same memory as an array of `array`'s
    library once it is written.
    """
    if isinstance(array, np.ndarray):
        out = np.empty(shape, array.dtype)
        return native(out), lambda: out
    if hasattr(array, "new_empty"):
        tensor = array.new_empty(tuple(shape))
        return tensor, lambda: tensor
    buffer = _core.empty_like(array, list(shape))
    importer = _importer(array)
    return buffer, lambda: np.from_dlpack(buffer) if importer is None else importer(buffer)


def convert_like(array: Any, result: np.ndarray[Any, Any]) -> Any:
    """Return `result` (int32 or float32) as an array of `array`'s library, without a copy."""
    if isinstance(array, np.ndarray):
        return result
    importer = _importer(array)
    return result if importer is None else importer(result)

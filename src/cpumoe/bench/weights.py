"""Random weights of one layer of experts, made fast and in bounded memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cpumoe
from cpumoe import Error
from cpumoe.bench.formats import Array, Format, Row
from cpumoe.bench.packed import make_packed
from cpumoe.bench.shapes import Shape

# Length of the random block that is repeated: a prime, so no two rows of a matrix start alike.
_PERIOD = 4_194_301

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass
class Weights:
    """One layer's weights and the operator's view of them.

    Args:
        shape: with the layout that the format is published in.
        arrays: ``gate_up``, ``down`` and with biases ``gate_up_bias``, ``down_bias``, all experts;
            indexed by an expert they give its values.
        experts: the same bytes as cpumoe.Experts, in place.
        expert_bytes: bytes of one expert, biases included.
    """

    shape: Shape
    format: Format
    arrays: dict[str, Any]
    experts: cpumoe.Experts
    expert_bytes: int


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays of one layer, in elements."""
    e, h, i = shape.experts, shape.hidden, shape.inter
    if shape.layout == "rows":
        sizes: dict[str, tuple[int, ...]] = {"gate_up": (e, 2 * i, h), "down": (e, h, i)}
    else:
        sizes = {"gate_up": (e, h, 2 * i), "down": (e, i, h)}
    if shape.bias:
        sizes |= {"gate_up_bias": (e, 2 * i), "down_bias": (e, h)}
    return sizes


def available_memory() -> int:
    """Bytes that may be allocated without swapping (MemAvailable of Linux)."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise Error(
        "bench: /proc/meminfo must name MemAvailable; it does not. Linux 3.14 or newer is needed"
    )


def require_memory(shape: Shape, need: int) -> None:
    """Raises Error when `need` bytes are more than nine tenths of the available memory."""
    free = available_memory()
    if need > 0.9 * free:
        raise Error(
            f"bench: {shape.name} must fit into memory with a tenth to spare; it needs "
            f"{need / 1e9:.1f} GB and {free / 1e9:.1f} GB are available. Cut the experts "
            f"(--shape {shape.name}-32e) or choose a smaller format"
        )


def allocate(count: int, dtype: np.dtype[np.generic], huge_pages: bool) -> Array:
    """A page-aligned array of `count` elements in anonymous memory, with or without huge pages."""
    memory = mmap.mmap(
        -1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    # madvise fails where the kernel has no transparent huge pages: then all pages are small anyway.
    try:
        memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    except OSError:
        if huge_pages:
            raise Error(
                "bench: the kernel must offer transparent huge pages; it refused them. "
                "Use --pages small"
            ) from None
    return np.frombuffer(memory, dtype=dtype, count=count)


def fill(array: Array, block: Array, report: Callable[[int], None] | None = None) -> None:
    """Repeats `block` over `array` (both flat, one type), reporting the bytes of each piece."""
    target, source = array.view(np.uint8), block.view(np.uint8)
    for start in range(0, target.size, source.size):
        piece = target[start : start + source.size]
        piece[:] = source[: piece.size]
        if report:
            report(piece.size)


def make_weights(
    shape: Shape,
    format: Format,
    *,
    huge_pages: bool = True,
    progress: Progress | None = None,
    seed: int = 0,
) -> Weights:
    """Makes one layer: every projection of unit variance gives outputs of unit variance.

    Raises:
        Error: the layer does not fit into the available memory.
    """
    if format.packed is not None:
        return _make_packed_weights(shape, format, format.packed, huge_pages, progress, seed)
    sizes = weight_shapes(shape)
    total = sum(int(np.prod(s)) for s in sizes.values()) * format.dtype.itemsize
    require_memory(shape, total)
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(_PERIOD, dtype=np.float32)
    spread = {"gate_up": shape.hidden**-0.5, "down": shape.inter**-0.5}
    done = 0

    def report(piece: int) -> None:
        nonlocal done
        done += piece
        if progress:
            progress(done, total)

    arrays: dict[str, Array] = {}
    for name, size in sizes.items():
        flat = allocate(int(np.prod(size)), format.dtype, huge_pages)
        fill(flat, (block * spread.get(name, 0.1)).astype(format.dtype), report)
        arrays[name] = flat.reshape(size)
    return Weights(shape, format, arrays, _experts(shape, arrays), total // shape.experts)


def _experts(shape: Shape, arrays: dict[str, Any]) -> cpumoe.Experts:
    return cpumoe.Experts(
        **arrays,
        activation=shape.activation,  # type: ignore[arg-type]
        alpha=shape.alpha,
        limit=shape.limit,
        layout=shape.layout,  # type: ignore[arg-type]
        interleaved=shape.interleaved,
    )


def _make_packed_weights(
    shape: Shape,
    format: Format,
    row: Row,
    huge_pages: bool,
    progress: Progress | None,
    seed: int,
) -> Weights:
    """As make_weights, in a quantised format and the layout that it is published in."""
    shape = replace(shape, layout="columns" if row.columns_only else "rows")
    e, h, i = shape.experts, shape.hidden, shape.inter
    bits = 8 * row.block_bytes / (row.block_elements * row.block_lines)
    total = int(e * 3 * h * i * bits / 8)
    require_memory(shape, int(1.1 * total))  # a tenth for scales and zero points
    rng = np.random.default_rng(seed)
    done = 0

    def report(piece: int) -> None:
        nonlocal done
        done += piece
        if progress:
            progress(min(done, total), total)

    def make(n: int, k: int) -> Any:
        return make_packed(
            row,
            (e, n, k),
            k**-0.5,
            lambda count, dtype: allocate(count, dtype, huge_pages),
            lambda array, block: fill(array, block, report),
            rng,
        )

    arrays: dict[str, Any] = {"gate_up": make(2 * i, h), "down": make(h, i)}
    given = {name: packed.weight for name, packed in arrays.items()}
    nbytes = sum(w.nbytes for w in given.values())
    if shape.bias:
        for name, size in (("gate_up_bias", 2 * i), ("down_bias", h)):
            bias = (0.1 * rng.standard_normal((e, size), dtype=np.float32)).astype(format.dtype)
            arrays[name] = given[name] = bias
            nbytes += bias.nbytes
    return Weights(shape, format, arrays, _experts(shape, given), nbytes // e)

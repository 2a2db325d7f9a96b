"""Random weights of the quantised formats: bytes that are valid codes, scales and zero points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cpumoe
from cpumoe import Error
from cpumoe.bench.formats import Array, Row

# Blocks are drawn once and repeated: a prime number of them, so that no two rows start alike.
_BLOCKS = 65_521
_SCALES = 262_139

# GGUF code -> (byte of the fp16 scale, byte of the fp16 minimum, minimum / scale that centres the
# values). No minimum: the codes are centred.
_GGUF_FIELDS: Mapping[str, tuple[int, int | None, float]] = {
    "q8_0": (0, None, 0.0),
    "q4_0": (0, None, 0.0),
    "q4_1": (0, 2, -7.5),
    "q5_0": (0, None, 0.0),
    "q5_1": (0, 2, -15.5),
    "q2_k": (80, 82, 1.5),
    "q3_k": (108, None, 0.0),
    "q4_k": (0, 2, 7.5),
    "q5_k": (0, 2, 15.5),
    "q6_k": (208, None, 0.0),
    "iq4_nl": (0, None, 0.0),
    "iq4_xs": (0, None, 0.0),
}


def _spread(row: Row, blocks: Array, scales: Array | None, zeros: Array | None) -> float:
    """Standard deviation of the values of some blocks with scale 1."""
    n, k = 64, max(row.block_elements, 256)
    columns = row.columns_only
    need = n * k // (row.block_elements * row.block_lines) * row.block_bytes
    along, across = _grid(row, n, k)
    groups = along * across
    w = cpumoe.Weight(
        blocks.reshape(-1)[:need],
        format=row.name,
        shape=(n, k),
        scales=None if scales is None else np.ones(groups, np.float32),
        zeros=None if zeros is None else zeros[:groups],
        layout="columns" if columns else "rows",
    )
    return float(w.decode().std())


def _grid(row: Row, n: int, k: int) -> tuple[int, int]:
    """Groups of features and of inputs; no groups without scales."""
    if row.scale_rows == 0:
        return 0, 0
    along = 1 if row.scale_rows == -1 else math.ceil(n / row.scale_rows)
    across = 1 if row.scale_cols == -1 else math.ceil(k / row.scale_cols)
    return along, across


def _gguf_blocks(row: Row, spread: float, rng: np.random.Generator) -> Array:
    """Blocks whose values have this standard deviation."""
    blocks = rng.integers(0, 256, (_BLOCKS, row.block_bytes), dtype=np.uint8)
    if row.code == "gguf_mxfp4":  # the e8m0 scale leads the block
        blocks[:, 0] = 127
        blocks[:, 0] = 127 + round(math.log2(spread / _spread(row, blocks, None, None)))
        return blocks
    scale, minimum, centre = _GGUF_FIELDS[row.code]

    def put(at: int, values: Array) -> None:
        blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)

    factor = 1.0
    for _ in range(2):  # with scale 1, then with what that showed
        d = rng.uniform(0.75, 1.25, _BLOCKS).astype(np.float32) * factor
        put(scale, d)
        if minimum is not None:
            put(minimum, d * centre)
        factor *= spread / _spread(row, blocks, None, None)
    return blocks


@dataclass
class Packed:
    """E matrices [N, K] in one format: the parts of a `cpumoe.Weight` and the Weight itself.

    `packed[e]` gives the values of matrix e as fp32 [N, K] ([K, N] in columns layout).
    """

    row: Row
    shape: tuple[int, int, int]
    layout: str
    data: Array
    scales: Array | None
    scale_type: str
    zeros: Array | None
    global_scale: float
    weight: cpumoe.Weight

    def __getitem__(self, expert: int) -> Array:
        """Decode one matrix."""
        scales: Any = None
        if self.scales is not None:
            scales = self.scales[expert]
            if self.scale_type not in ("fp32", "fp16"):
                scales = (scales, self.scale_type)
        w = cpumoe.Weight(
            self.data[expert],
            format=self.row.name,
            shape=self.shape[1:],
            scales=scales,
            zeros=None if self.zeros is None else self.zeros[expert],
            layout=self.layout,  # type: ignore[arg-type]
            global_scale=self.global_scale,
        )
        values: Array = w.decode()
        return values if self.layout == "rows" else values.T


def _scale_values(row: Row, scale: float, rng: np.random.Generator) -> tuple[Array, str]:
    """Random scales around `scale` in the type that the format's publishers use."""
    values = rng.uniform(0.75, 1.25, _SCALES).astype(np.float32) * scale
    if row.name == "mxfp4":
        exponent = np.round(np.log2(values)).astype(np.int32) + 127
        return exponent.astype(np.uint8), "e8m0"
    if row.name == "nvfp4":  # one e4m3 code: the scale itself belongs to global_scale
        return rng.integers(0x30, 0x40, _SCALES).astype(np.uint8), "e4m3"
    if row.code == "e4m3":
        return values, "fp32"
    if row.columns_only:
        return values.astype(np.float16), "fp16"
    return (values.view(np.uint32) >> 16).astype(np.uint16), "bf16"


def make_packed(
    row: Row,
    shape: tuple[int, int, int],
    spread: float,
    allocate: Any,
    fill: Any,
    rng: np.random.Generator,
) -> Packed:
    """Draw E matrices [N, K] whose values have about this standard deviation.

    Args:
        allocate: count, dtype -> flat array. fill: repeats the second array over the first.
    """
    e, n, k = shape
    layout = "columns" if row.columns_only else "rows"
    length, lines = (k, n) if layout == "rows" else (n, k)
    if length % row.block_elements or lines % row.block_lines:
        raise Error(
            f"bench: {row.name} must have whole blocks of {row.block_elements * row.block_lines}; "
            f"got {n} features of {k} inputs. Choose another shape"
        )
    line = length // row.block_elements * row.block_bytes
    size = e * (lines // row.block_lines) * line
    scales: Array | None = None
    scale_type = "fp32"
    zeros: Array | None = None
    factor = 1.0
    if row.scale_rows == 0:
        blocks = _gguf_blocks(row, spread, rng)
    else:
        blocks = rng.integers(0, 256, (_BLOCKS * 31, row.block_bytes), dtype=np.uint8)
        if row.code == "e4m3":  # no NaN
            blocks[(blocks & 0x7F) == 0x7F] ^= 1
        stored = row.zeros.startswith("stored")
        bits = 8 * row.block_bytes // (row.block_elements * row.block_lines)
        points = rng.integers(2 ** (bits - 1) - 1, 2 ** (bits - 1) + 1, _SCALES, dtype=np.uint8)
        along, across = _grid(row, n, k)
        unit = np.ones(1, np.float32)
        scale = spread / _spread(row, blocks, unit, points if stored else None)
        values, scale_type = _scale_values(row, scale, rng)
        if row.name == "nvfp4":
            factor = scale
        grid = (e, along, across) if layout == "rows" else (e, across, along)
        scales = np.resize(values, grid)
        if stored and bits == 4 and grid[2] % 2 == 0:  # packed, as publishers do
            both = points[: _SCALES - 1 : 2] | points[1::2] << 4
            zeros = np.resize(both, (*grid[:2], grid[2] // 2))
        elif stored:
            zeros = np.resize(points, grid)
    flat = allocate(size, np.dtype(np.uint8))
    fill(flat, blocks.reshape(-1))
    data = flat.reshape(e, lines // row.block_lines, line)
    given: Any = scales
    if scale_type not in ("fp32", "fp16"):
        given = (scales, scale_type)
    weight = cpumoe.Weight(
        data,
        format=row.name,
        shape=shape,
        scales=given,
        zeros=zeros,
        layout=layout,  # type: ignore[arg-type]
        global_scale=factor,
    )
    return Packed(row, shape, layout, data, scales, scale_type, zeros, factor, weight)

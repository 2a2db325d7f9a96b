"""Rows of a source matrix as fp32, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error
from cpumoe.checkpoint import TensorRef
from cpumoe.weight import Weight

Floats = NDArray[np.float32]

FLOAT_TYPES = {
    "fp32": np.dtype("<f4"),
    "fp16": np.dtype("<f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """kv_b_proj [heads * (nope + value), rank] of a GGUF file that holds its two parts apart.

    k: [heads, rank, nope]; v: [heads, value, rank].
    """

    k: TensorRef
    v: TensorRef

    @property
    def rows_per_head(self) -> int:
        """nope + value."""
        return self.k.shape[2] + self.v.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Extents of kv_b_proj."""
        return self.k.shape[0] * self.rows_per_head, self.v.shape[2]

    @property
    def format(self) -> str:
        """That of the values."""
        return self.v.format

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.k.nbytes + self.v.nbytes

    def read(self, first: int, count: int) -> Floats:
        """Rows [first, first + count), whole heads."""
        per = self.rows_per_head
        heads = range(first // per, (first + count) // per)
        parts = [(self.k.part(h), self.v.part(h)) for h in heads]
        rows = [
            part
            for k, v in parts
            for part in (read_rows(k, 0, k.shape[0]).T, read_rows(v, 0, v.shape[0]))
        ]
        return np.concatenate(rows)


Matrix = TensorRef | Weight | KeysAndValues

# Rows that are read together are a multiple of this: FP8 blocks share a scale over so many.
ROW_STEP = 128


def step_of(weight: Matrix) -> int:
    """Rows that can be read apart from others are multiples of this; 0: only all together."""
    if isinstance(weight, KeysAndValues):
        return weight.rows_per_head
    return 0 if isinstance(weight, Weight) and weight.format == "fp8_tensor" else ROW_STEP


def read_rows(weight: Matrix, first: int, count: int) -> Floats:
    """Rows [first, first + count) of a matrix [N, K] (or elements of a vector) as fp32, a copy."""
    if isinstance(weight, KeysAndValues):
        return weight.read(first, count)
    if isinstance(weight, TensorRef) and weight.format in FLOAT_TYPES:
        part = weight.part(slice(first, first + count))
        rows: Floats = (
            part.data.view(FLOAT_TYPES[weight.format]).reshape(part.shape).astype(np.float32)
        )
        return rows
    whole = weight if isinstance(weight, Weight) else _as_weight(weight)
    if first == 0 and count == whole.shape[0]:
        return whole.decode()
    return whole.features(first, count).decode()


def _as_weight(ref: TensorRef) -> Weight:
    """A tensor whose format needs no scales beside it (GGUF)."""
    if len(ref.shape) != 2:
        raise Error(
            f"{ref.file}: tensor {ref.name} must be a matrix to be decoded from {ref.format}; "
            f"it is {list(ref.shape)}"
        )
    return Weight(ref.data, format=ref.format, shape=ref.shape)


def source_bytes(weight: Matrix) -> int:
    """Bytes that reading the whole of it takes."""
    return int(weight.nbytes)

"""Weight formats of the benchmark as numpy types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cpumoe import Error

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Format:
    """How one element is stored.

    Args:
        name: the name of the core's format table.
        dtype: numpy type of the elements (ml_dtypes' for bf16).
        roundoff: unit roundoff, half the distance from 1 to the next value.
    """

    name: str
    dtype: Any
    roundoff: float


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", np.dtype(np.float32), 2.0**-24),
        Format("fp16", np.dtype(np.float16), 2.0**-11),
        Format("bf16", np.dtype(ml_dtypes.bfloat16), 2.0**-8),
    )
}


def find_format(name: str) -> Format:
    """The format called `name`; Error lists the known ones."""
    if name not in FORMATS:
        raise Error(
            f"bench: the format must be one of {', '.join(FORMATS)}; got {name!r}. "
            "Choose one of these"
        )
    return FORMATS[name]


def decode(array: Array) -> Array:
    """`array` in float64, exactly."""
    return array.astype(np.float64)

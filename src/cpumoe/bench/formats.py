"""Weight formats of the benchmark: numpy types, and rows of the core's table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cpumoe import Error, _core

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Row:
    """A row of the core's table of formats, as `cpumoe._core.formats()` gives it."""

    name: str
    code: str
    block_elements: int
    block_lines: int
    block_bytes: int
    scale_rows: int
    scale_cols: int
    zeros: str
    act_class: str

    @property
    def columns_only(self) -> bool:
        """Packed for the columns layout: GPTQ and AWQ."""
        return self.code.endswith(("_gptq", "_awq"))


ROWS: Mapping[str, Row] = {r["name"]: Row(**r) for r in _core.formats()}


@dataclass(frozen=True)
class Format:
    """How weights are stored, and hidden states beside them.

    Args:
        name: the name of the core's format table.
        dtype: numpy type of the hidden states (ml_dtypes' for bf16), and of plain weights.
        roundoff: its unit roundoff, half the distance from 1 to the next value.
        packed: its row, when weights are no plain floats.
    """

    name: str
    dtype: Any
    roundoff: float
    packed: Row | None = None


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", np.dtype(np.float32), 2.0**-24),
        Format("fp16", np.dtype(np.float16), 2.0**-11),
        Format("bf16", np.dtype(ml_dtypes.bfloat16), 2.0**-8),
    )
}


def families(names: Sequence[str]) -> str:
    """Names as a list for people: those that differ in the group of their scales together.

    Example:
        >>> families(["bf16", "fp8_row", "int4_g32", "int4_row", "u2_g32", "u2_row"])
        'bf16, fp8_row; int4, u2 with _g32, _row'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if match := re.fullmatch(r"(.+)(_g\d+|_row)", name):
            groups.setdefault(match[1], []).append(match[2])
    grouped = {family: ", ".join(ends) for family, ends in groups.items() if len(ends) > 1}
    alone = [n for n in names if re.sub(r"(_g\d+|_row)$", "", n) not in grouped]
    by_ends: dict[str, list[str]] = {}
    for family, ends in grouped.items():
        by_ends.setdefault(ends, []).append(family)
    return "; ".join(
        [", ".join(alone), *(f"{', '.join(of)} with {ends}" for ends, of in by_ends.items())]
    )


def find_format(name: str) -> Format:
    """The format called `name`; Error lists the known ones."""
    if name in FORMATS:
        return FORMATS[name]
    if name not in ROWS:
        raise Error(
            f"format: must be one of {families(list(ROWS))}; got {name!r}. Choose one of these"
        )
    return Format(name, FORMATS["bf16"].dtype, FORMATS["bf16"].roundoff, ROWS[name])


def decode(array: Array) -> Array:
    """`array` in float64, exactly."""
    return array.astype(np.float64)

"""Weight: matrices in a published format, as views of their bytes, scales and zero points."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cpumoe import _core
from cpumoe._arrays import SupportsDLPack, native, plain


class Weight:
    """One matrix W[N, K], or a stack [E, N, K], in a format of the table in docs/formats.md.

    Args:
        data: the codes as published, contiguous, any dtype: only the bytes count.
        format: a row of the table: "int4_g128", "fp8_block", "mxfp4", "q4_k", "gptq4_g128", ...
        shape: (N, K) or (E, N, K), in elements: N output features, K inputs.
        scales: contiguous fp32, fp16, bf16, or bytes as a pair (array, "e4m3" or "e8m0");
            [groups of features, groups of inputs] in rows layout, transposed in columns layout,
            after E. None where the format has none.
        zeros: zero points on the grid of the scales: a byte each, or packed as the codes are.
        layout: "rows" where the inputs of a feature are contiguous, "columns" where the features
            of an input are (GPTQ, AWQ).
        global_scale: multiplies every scale; one number, or one per expert (NVFP4).

    Nothing is copied; the arrays are kept alive. Raises Error when sizes do not fit the format.

    Source: the element is `(code - zero) * (scale * global_scale)`; formats and their publishers
    are in docs/formats.md.

    >>> import numpy as np, cpumoe
    >>> codes = np.array([[0x98, 0x0f]], np.uint8)  # nibbles 8 9 15 0, low first
    >>> w = cpumoe.Weight(codes, format="int4_row", shape=(1, 4), scales=np.float32([[0.5]]))
    >>> w.decode()
    array([[ 0. ,  0.5,  3.5, -4. ]], dtype=float32)
    """

    __slots__ = ("_native",)

    def __init__(
        self,
        data: SupportsDLPack,
        *,
        format: str,
        shape: Sequence[int],
        scales: SupportsDLPack | tuple[SupportsDLPack, str] | None = None,
        zeros: SupportsDLPack | None = None,
        layout: Literal["rows", "columns"] = "rows",
        global_scale: float | Sequence[float] = 1.0,
    ) -> None:
        """See the class."""
        self._native = _core.Weight(
            format=_text(format, "format"),
            shape=_integers(shape, "shape"),
            data=_bytes(data),
            scales=None if scales is None else native(plain(scales)),
            zeros=None if zeros is None else _bytes(zeros),
            layout=_text(layout, "layout"),
            global_scale=_factors(global_scale),
        )

    @property
    def format(self) -> str:
        """Name of its format."""
        return self._native.format

    @property
    def layout(self) -> str:
        """rows or columns."""
        return self._native.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K) or (E, N, K), in elements."""
        return tuple(self._native.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self._native.nbytes

    def features(self, first: int, count: int) -> Weight:
        """Return features [first, first + count) of every matrix, in place.

        Raises Error when they do not begin where a block or a scale does.
        """
        part: Weight = object.__new__(Weight)
        part._native = self._native.features(*_integers((first, count), "features"))
        return part

    def decode(self) -> NDArray[np.float32]:
        """Return the values in fp32, a copy: the reference that kernels are tested against."""
        return self._native.decode()

    def __repr__(self) -> str:
        """Show the shape, the format and the layout."""
        return f"Weight({list(self.shape)}, {self.format}, {self.layout})"


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _core.Error(
            f"Weight: {name} must be a string; got {type(value).__name__}. Pass its name"
        )
    return value


def _integers(values: Any, name: str) -> list[int]:
    try:
        numbers = [operator.index(n) for n in values]
    except TypeError:
        numbers = [-1]
    if not all(0 <= n < 2**62 for n in numbers):
        raise _core.Error(
            f"Weight: {name} must be sizes below 2^62; got {values!r:.100}. Pass integers"
        )
    return numbers


def _factors(value: Any) -> list[float]:
    """One number, or one per expert, of any library."""
    try:
        factors: list[float] = np.asarray(value, np.float64).ravel().tolist()
    except (TypeError, ValueError):
        factors = []
    if not factors or not all(abs(f) <= np.finfo(np.float32).max for f in factors):
        raise _core.Error(
            f"Weight: global_scale must be finite numbers of fp32; got {value!r:.100}. "
            "Pass one, or one per expert"
        )
    return factors


def _bytes(array: Any) -> Any:
    """Return codes or zero points as the native module takes them: dtypes do not matter."""
    if array is None or isinstance(array, tuple):
        raise _core.Error(
            f"Weight: data and zeros must be arrays; got {type(array).__name__}. Pass the bytes"
        )
    given = native(plain(array))
    return given[0] if isinstance(given, tuple) else given

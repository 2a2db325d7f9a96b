"""Weight: matrices in a published format, as views of their bytes, scales and zero points."""

from __future__ import annotations

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
        factors = [global_scale] if isinstance(global_scale, int | float) else list(global_scale)
        self._native = _core.Weight(
            format=format,
            shape=[int(n) for n in shape],
            data=_bytes(data),
            scales=None if scales is None else native(plain(scales)),
            zeros=None if zeros is None else _bytes(zeros),
            layout=layout,
            global_scale=[float(f) for f in factors],
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
        part._native = self._native.features(first, count)
        return part

    def decode(self) -> NDArray[np.float32]:
        """Return the values in fp32, a copy: the reference that kernels are tested against."""
        return self._native.decode()

    def __repr__(self) -> str:
        """Show the shape, the format and the layout."""
        return f"Weight({list(self.shape)}, {self.format}, {self.layout})"


def _bytes(array: Any) -> Any:
    """Return codes or zero points as the native module takes them: dtypes do not matter."""
    given = native(plain(array))
    return given[0] if isinstance(given, tuple) else given

"""How publishers store one quantised matrix: which tensors, dtypes and shapes -> cpumoe.Weight.

A `Storage` is a row: names, dtypes and order of the codes. A `Scheme` is a row plus what
quantization_config says of some modules: bits and scale grid. `read_stored` checks the tensors of
one matrix against its scheme. Values are not read, except a matrix's single `factor` and zero
points that must be unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error
from cpumoe.checkpoint.directory import Checkpoint
from cpumoe.checkpoint.safetensors import TensorRef
from cpumoe.weight import Weight

Shape = tuple[int, ...]
FLOAT_SCALES = ("fp32", "fp16", "bf16")


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _plain(n: int, k: int, bits: int) -> Shape:
    return (n, k)


def _words(n: int, k: int, bits: int) -> Shape:
    return (n, ceil_div(k * bits, 32))


def _pairs(n: int, k: int, bits: int) -> Shape:
    return (n, k // 2)


def _word_rows(n: int, k: int, bits: int) -> Shape:
    return (k * bits // 32, n)


def _word_columns(n: int, k: int, bits: int) -> Shape:
    return (k, n * bits // 32)


def _zero_columns(n: int, groups: int, bits: int) -> Shape:
    return (groups, n * bits // 32)


def _zero_words(n: int, groups: int, bits: int) -> Shape:
    return (ceil_div(n * bits, 32), groups)


@dataclass(frozen=True, slots=True)
class Storage:
    """The tensors of one matrix W[N, K]: each is the module's name and an ending.

    codes_shape(n, k, bits); scales have the scheme's grid, transposed where `layout` is columns;
    zeros_shape(n, groups, bits). unpack: zeros are words along the features and become a byte each.
    factor: a number that multiplies (divides, with `divide`) every scale. n_unit, k_unit: N and K
    elements must fill whole units of so many bits.
    unread: endings of tensors that say nothing of the weight's value: scales of activations, which
    are not rounded that way here, and shapes.
    """

    name: str
    codes: str
    codes_format: str
    codes_shape: Callable[[int, int, int], Shape]
    scales: tuple[str, ...]
    scale_formats: tuple[str, ...] = FLOAT_SCALES
    zeros: str = ""
    zeros_shape: Callable[[int, int, int], Shape] = _zero_columns
    unpack: bool = False
    factor: str = ""
    divide: bool = False
    layout: Literal["rows", "columns"] = "rows"
    n_unit: int = 1
    k_unit: int = 1
    shape: str = ""
    order: str = ""
    unread: tuple[str, ...] = ()

    @property
    def endings(self) -> tuple[str, ...]:
        """Of every tensor that may belong to a matrix."""
        named = (self.zeros, self.factor, self.shape, self.order)
        return (self.codes, *self.scales, *filter(None, named), *self.unread)


_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")

FP8 = Storage(
    "FP8",
    ".weight",
    "e4m3",
    _plain,
    (".weight_scale_inv", ".weight_scale"),
    (*FLOAT_SCALES, "e8m0"),
    unread=_ACTIVATIONS,
)
FP8_STACK = replace(FP8, codes="", scales=("_scale_inv",), unread=("_activation_scale",))
INT8 = Storage("int8", ".weight", "int8", _plain, (".weight_scale",), unread=_ACTIVATIONS)
PACKED = Storage(
    "packed integers",
    ".weight_packed",
    "int32",
    _words,
    (".weight_scale",),
    k_unit=32,
    shape=".weight_shape",
    unread=_ACTIVATIONS,
)
PACKED_ZEROS = replace(PACKED, zeros=".weight_zero_point", zeros_shape=_zero_words, unpack=True)
FP4_PACKED = Storage(
    "packed FP4",
    ".weight_packed",
    "uint8",
    _pairs,
    (".weight_scale",),
    ("e4m3",),
    factor=".weight_global_scale",
    divide=True,
    k_unit=8,
    unread=_ACTIVATIONS,
)
MXFP4_PACKED = replace(FP4_PACKED, scale_formats=("uint8", "e8m0"), factor="", divide=False)
MODELOPT_FP4 = replace(FP4_PACKED, codes=".weight", factor=".weight_scale_2", divide=False)
MXFP4_STACK = Storage(
    "MXFP4",
    "_blocks",
    "uint8",
    lambda n, k, bits: (n, k // 32, 16),
    ("_scales",),
    ("uint8", "e8m0"),
    k_unit=128,
)
GPTQ = Storage(
    "GPTQ",
    ".qweight",
    "int32",
    _word_rows,
    (".scales",),
    zeros=".qzeros",
    layout="columns",
    n_unit=32,
    k_unit=32,
    order=".g_idx",
)
AWQ = Storage(
    "AWQ",
    ".qweight",
    "int32",
    _word_columns,
    (".scales",),
    zeros=".qzeros",
    layout="columns",
    n_unit=32,
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What the config says of the weights of some modules. text: the same, for errors.

    grid: features and inputs that share a scale; 0: all of them. ordered: inputs may be permuted
    (act-order), so that `order` must be read.
    """

    storage: Storage
    format: str
    bits: int
    grid: tuple[int, int]
    text: str
    ordered: bool = False

    def scale_shapes(self, n: int, k: int) -> list[Shape]:
        """Shapes that the scales of W[n, k] may have; the first one has the rank of the grid."""
        rows = ceil_div(n, self.grid[0]) if self.grid[0] else 1
        cols = ceil_div(k, self.grid[1]) if self.grid[1] else 1
        if self.storage.layout == "columns":
            return [(cols, rows)]
        shapes: list[Shape] = [(rows, cols)]
        if not self.grid[1]:
            shapes += [(rows,)] if self.grid[0] else [(1,), ()]
        return shapes


@dataclass(frozen=True, slots=True)
class Stored:
    """One matrix [N, K], or a stack [E, N, K], whose tensors fit its scheme."""

    scheme: Scheme
    shape: Shape
    codes: TensorRef
    scales: TensorRef
    zeros: TensorRef | NDArray[np.uint8] | None = None
    factor: float = 1.0
    order: TensorRef | None = None
    sizes: TensorRef | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def weight(self) -> Weight:
        """The matrix in place."""
        zeros = self.zeros.data if isinstance(self.zeros, TensorRef) else self.zeros
        return Weight(
            self.codes.data,
            format=self.scheme.format,
            shape=self.shape,
            scales=scale_operand(self.scales),
            zeros=zeros,
            layout=self.scheme.storage.layout,
            global_scale=self.factor,
        )

    def turned(self, first: int, count: int) -> Weight:
        """Features [first, first + count) as the matrix [K, count] whose columns they are.

        In place where a scale covers as many features as inputs (FP8 blocks, FP8 per tensor); else
        a copy in fp32.
        """
        k, (rows, cols) = self.shape[1], self.scheme.grid
        if self.scheme.storage.layout == "rows" and rows == cols and first % (rows or 1) == 0:
            lines = slice(first // rows, ceil_div(first + count, rows)) if rows else None
            return Weight(
                self.codes.part(slice(first, first + count)).data,
                format=self.scheme.format,
                shape=(k, count),
                scales=scale_operand(self.scales if lines is None else self.scales.part(lines)),
                layout="columns",
            )
        values = self.weight().features(first, count).decode()
        return Weight(values, format="fp32", shape=(k, count), layout="columns")

    def expert(self, index: int, first: int, count: int) -> Stored:
        """Features [first, first + count) of matrix `index` of a stack without zero points."""
        rows = self.scheme.grid[0] or self.shape[1]
        if first % rows or (count % rows and first + count != self.shape[1]):
            raise Error(
                f"{self.codes.file}: tensor {self.codes.name}: gate and up share scales, since "
                f"{count} features are no multiple of {rows}. Use a checkpoint with one tensor for "
                "each of gate and up"
            )
        grid = slice(first // rows, ceil_div(first + count, rows))
        return replace(
            self,
            shape=(count, self.shape[2]),
            codes=self.codes.part(index, slice(first, first + count)),
            scales=self.scales.part(index, grid),
        )


def scale_operand(ref: TensorRef) -> Any:
    """A scale tensor as `Weight` takes it: the bytes of a type that numpy lacks with its name."""
    if ref.format in ("e4m3", "e8m0", "uint8"):
        return ref.data, "e8m0" if ref.format == "uint8" else ref.format
    array = ref.array()
    return (array, "bf16") if ref.format == "bf16" else array


def _fail(ref: TensorRef, scheme: Scheme, what: str, must: str, got: object) -> Error:
    return Error(
        f"{ref.file}: tensor {ref.name}: {what} must be {must} by quantization_config "
        f"({scheme.text}); got {got}"
    )


def _take(
    checkpoint: Checkpoint,
    scheme: Scheme,
    name: str,
    formats: tuple[str, ...],
    shapes: list[Shape],
) -> TensorRef:
    ref = checkpoint.tensors.get(name)
    if ref is None:
        raise Error(
            f"{checkpoint.path}: tensor {name} is missing, though quantization_config says "
            f"{scheme.text}. The checkpoint is incomplete, or its config is another one's"
        )
    if ref.format not in formats:
        raise _fail(ref, scheme, "format", " or ".join(formats), ref.format)
    if ref.shape not in shapes:
        must = " or ".join(str(list(s)) for s in shapes)
        raise _fail(ref, scheme, "shape", must, list(ref.shape))
    checkpoint.used.add(name)
    return ref


def read_stored(
    checkpoint: Checkpoint, scheme: Scheme, prefix: str, n: int, k: int, experts: int = 0
) -> Stored:
    """The tensors of module `prefix`, W[n, k], or [experts, n, k] with `experts`.

    Raises Error when one is missing or has another dtype or shape than the scheme asks for.
    """
    s, bits = scheme.storage, scheme.bits
    for size, unit, of in ((n, s.n_unit, "outputs"), (k, s.k_unit, "inputs")):
        step = unit // math.gcd(unit, bits)
        if size % step:
            raise Error(
                f"{checkpoint.path}: module {prefix}: {of} must be a multiple of {step} to be "
                f"stored as {scheme.text}; got {size}"
            )
    lead = (experts,) if experts else ()
    codes = _take(
        checkpoint,
        scheme,
        prefix + s.codes,
        (s.codes_format,),
        [lead + s.codes_shape(n, k, bits)],
    )
    scale_shapes = [lead + shape for shape in scheme.scale_shapes(n, k)]
    end = next((e for e in s.scales if prefix + e in checkpoint), s.scales[0])
    scales = _take(checkpoint, scheme, prefix + end, s.scale_formats, scale_shapes)
    zeros = None
    if s.zeros:
        groups = scale_shapes[0][0 if s.layout == "columns" else 1]
        shape = s.zeros_shape(n, groups, bits)
        ref = _take(checkpoint, scheme, prefix + s.zeros, ("int32",), [shape])
        zeros = unpack_zeros(ref, n, bits) if s.unpack else ref
    stored = Stored(scheme, (*lead, n, k), codes, scales, zeros)
    if s.factor:
        stored = replace(stored, factor=_read_factor(checkpoint, scheme, prefix + s.factor))
    if s.order and prefix + s.order in checkpoint:
        order = _take(checkpoint, scheme, prefix + s.order, ("int32",), [(k,)])
        stored = replace(stored, order=order)
    if s.shape and prefix + s.shape in checkpoint:
        sizes = _take(checkpoint, scheme, prefix + s.shape, ("int32", "int64"), [(2,)])
        stored = replace(stored, sizes=sizes)
    checkpoint.used.update(prefix + e for e in s.unread)
    return stored


def _read_factor(checkpoint: Checkpoint, scheme: Scheme, name: str) -> float:
    ref = _take(checkpoint, scheme, name, ("fp32",), [(1,), (), (1, 1)])
    value = float(ref.array().reshape(()))
    if not np.isfinite(value) or value <= 0:
        raise _fail(ref, scheme, "value", "a finite number above 0", value)
    return float(np.float32(1) / np.float32(value)) if scheme.storage.divide else value


def unpack_zeros(ref: TensorRef, n: int, bits: int) -> NDArray[np.uint8]:
    """Zero points [n, groups], a byte each, of words [ceil(n * bits / 32), groups].

    The words of a column are one little-endian stream of `bits`-bit numbers.
    """
    columns = np.ascontiguousarray(ref.array().T).view(np.uint8)
    stream = np.unpackbits(columns, axis=1, bitorder="little")[:, : n * bits]
    numbers = np.packbits(stream.reshape(-1, n, bits), axis=2, bitorder="little")
    return np.ascontiguousarray(numbers[:, :, 0].T)

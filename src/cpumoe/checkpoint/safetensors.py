"""Reader of one safetensors file: header checked in full, then mapped read-only.

File = 8 bytes little-endian header length N, N bytes of JSON, then the tensors' bytes. The JSON
maps a name to {"dtype", "shape", "data_offsets": [begin, end)}, counted from the header's end.
The tensors tile the rest of the file: no overlap, no hole, nothing behind the last one.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error
from cpumoe.checkpoint.json_file import parse_json_object, require_regular_file
from cpumoe.checkpoint.mapping import Memory, Report, map_file

# Bytes per element and our name of each dtype the file format defines in whole bytes.
_DTYPES: Mapping[str, tuple[int, str]] = {
    "F64": (8, "fp64"),
    "F32": (4, "fp32"),
    "F16": (2, "fp16"),
    "BF16": (2, "bf16"),
    "F8_E4M3": (1, "e4m3"),
    "F8_E5M2": (1, "e5m2"),
    "F8_E8M0": (1, "e8m0"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
_NUMPY: Mapping[str, str] = {
    **{n: n for n in ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")},
    "fp64": "<f8",
    "fp32": "<f4",
    "fp16": "<f2",
    "bf16": "<u2",
    "bool": "?",
}
_MAX_HEADER = 100_000_000  # the reference reader's bound
_MAX_RANK = 16


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor in a mapped file: a view, never a copy.

    data: its bytes as uint8 [n], read-only, any alignment; it keeps the mapping alive.
    format: "bf16", "fp16", "fp32", or the name of another element type.
    shape: extents in elements, last one contiguous. file, offset: where the bytes lie.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    data: NDArray[np.uint8] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes

    def array(self) -> NDArray[Any]:
        """The tensor as a read-only numpy array; bf16 comes as its uint16 units."""
        dtype = _NUMPY.get(self.format)
        if dtype is None:
            raise Error(f"{self.name}: numpy has no type for the format {self.format}")
        return self.data.view(dtype).reshape(self.shape)

    def part(self, *index: int | slice) -> TensorRef:
        """The contiguous part at leading indices; only the last one may be a slice (step 1).

        `t.part(3)` of shape [E, N, K] is expert 3 as [N, K]; `t.part(3, slice(0, 8))` its first
        8 rows. Indices are not negative.
        """
        begin, unit, shape = 0, self.nbytes, self.shape
        for axis, i in enumerate(index):
            size = shape[0]
            unit = unit // size if size else 0
            low, high = (i.start or 0, i.stop) if isinstance(i, slice) else (i, i + 1)
            if not 0 <= low <= high <= size or (isinstance(i, slice) and axis + 1 < len(index)):
                raise Error(f"{self.name}: has no part {index}; its shape is {list(self.shape)}")
            begin += low * unit
            if isinstance(i, slice):
                shape, unit = (high - low, *shape[1:]), unit * (high - low)
            else:
                shape = shape[1:]
        return TensorRef(
            f"{self.name}{list(index)}",
            self.format,
            shape,
            self.file,
            self.offset + begin,
            self.data[begin : begin + unit],
        )


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A mapped file of tensors: by name, with the file's metadata and its size in bytes."""

    path: Path
    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, Any]
    size: int
    mapping: mmap.mmap = field(repr=False)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_entry(
    name: str, entry: object, room: int, where: str
) -> tuple[str, list[int], int, int]:
    """(our format, shape, begin, end) of one header entry; `room`: bytes behind the header."""
    what = f"{where}: tensor {name[:200]!r}"
    if not isinstance(entry, dict) or not set(entry) >= {"dtype", "shape", "data_offsets"}:
        raise Error(f"{what}: must have dtype, shape and data_offsets; got {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Error(f"{what}: dtype must be one of {' '.join(_DTYPES)}; got {dtype!r:.200}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        raise Error(
            f"{what}: shape must be a list of at most {_MAX_RANK} sizes below 2^63; "
            f"got {shape!r:.200}"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise Error(f"{what}: data_offsets must be two sizes; got {offsets!r:.200}")
    begin, end = offsets
    if begin > end:
        raise Error(f"{what}: data_offsets must not fall; got {offsets}")
    if end > room:
        raise Error(
            f"{what}: its bytes end at {end}, but only {room} bytes follow the header. "
            "The file is truncated: download it again"
        )
    width, name_of_format = _DTYPES[dtype]
    if math.prod(shape) * width != end - begin:
        raise Error(
            f"{what}: {dtype} {shape} takes {math.prod(shape) * width} bytes; "
            f"data_offsets span {end - begin}"
        )
    return name_of_format, shape, begin, end


def _check_tiling(spans: list[tuple[int, int, str]], room: int, where: str) -> None:
    """The spans must cover [0, room) once."""
    at, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin < at:
            raise Error(f"{where}: tensors {before!r} and {name[:200]!r} overlap at byte {begin}")
        if begin > at:
            raise Error(
                f"{where}: bytes {at} to {begin}, before {name[:200]!r}, belong to no tensor"
            )
        at, before = end, name[:200]
    if at != room:
        raise Error(f"{where}: {room - at} bytes behind the last tensor belong to no tensor")


def parse_header(data: bytes, room: int, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Checked header: (name -> (format, shape, begin, end), metadata).

    data: the JSON bytes. room: how many bytes the file has behind them. Raises Error.
    """
    header = parse_json_object(data, f"{where}: header", unique=True)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Error(f"{where}: __metadata__ must map names to strings; got {metadata!r:.200}")
    entries = {name: _check_entry(name, entry, room, where) for name, entry in header.items()}
    _check_tiling([(b, e, name) for name, (_, _, b, e) in entries.items()], room, where)
    return entries, metadata


def open_safetensors(
    path: str | os.PathLike[str], memory: Memory = "mapped", report: Report | None = None
) -> TensorFile:
    """Map `path` read-only and check its header in full; no tensor byte is read.

    memory, report: as map_file says; with "huge" all bytes are read.
    Raises Error when the file is missing, truncated, or its header is malformed in any way.

    Example:
        >>> import numpy as np, safetensors.numpy, tempfile, cpumoe.checkpoint
        >>> w = np.ones((2, 3), np.float32)
        >>> with tempfile.TemporaryDirectory() as d:
        ...     safetensors.numpy.save_file({"w": w}, f"{d}/a.safetensors")
        ...     cpumoe.checkpoint.open_safetensors(f"{d}/a.safetensors").tensors["w"].shape
        (2, 3)
    """
    path = Path(path)
    require_regular_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise Error(
                    f"{path}: a safetensors file begins with 8 bytes of header length; "
                    f"got {size} bytes. The file is truncated: download it again"
                )
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise Error(
                    f"{path}: the header must fit in the file; it claims {length} bytes, "
                    f"{size - 8} are there. The file is truncated or is no safetensors file"
                )
            if length > _MAX_HEADER:
                raise Error(
                    f"{path}: the header must be at most {_MAX_HEADER} bytes; got {length}. "
                    "The file is damaged"
                )
            header = file.read(length)
            mapping = map_file(file, size, memory, report)
    except OSError as e:
        raise Error(f"{path}: cannot be read ({e.strerror or e})") from None
    start = 8 + length
    entries, metadata = parse_header(header, size - start, str(path))
    everything = np.frombuffer(mapping, np.uint8)
    tensors = {
        name: TensorRef(
            name, form, tuple(shape), path, start + begin, everything[start + begin : start + end]
        )
        for name, (form, shape, begin, end) in entries.items()
    }
    return TensorFile(path, tensors, metadata, size, mapping)

"""Bounded parser of a GGUF header: metadata and tensor infos, every length checked before use.

File = "GGUF", u32 version, u64 tensors, u64 metadata entries; the entries (string key, u32 type,
value); the tensor infos (string name, u32 rank, u64 extents with the contiguous one first, u32
type, u64 offset); padding to the alignment; the tensors' bytes. All little-endian. A string is a
u64 length and that many bytes of UTF-8.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from cpumoe._core import Error
from cpumoe.checkpoint.gguf_types import GGUF_TYPES, WEIGHT_TYPES

Buffer = bytes | memoryview

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q"}
_SCALARS[12] = "<d"
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NAMES = "uint8 int8 uint16 int16 uint32 int32 float32 bool string array uint64 int64 float64"
_TYPE_NAMES = _NAMES.split()
_MIN_ENTRY = 8 + 4 + 1  # empty key, type, one byte of value
_MIN_INFO = 8 + 4 + 8 + 4 + 8  # empty name, rank, one extent, type, offset
_MAX_KEY = 65535  # by the specification
_MAX_RANK = 4  # of every tensor that the format's own library can hold
_MAX_DEPTH = 4  # arrays of arrays; published files have none deeper than one
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says of one tensor. begin, end: its bytes, counted from the file's start."""

    name: str
    format: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. metadata: ints, floats, bools, strings; arrays as numpy or lists."""

    version: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]


class _Cursor:
    """Reads values in turn; nothing is read or allocated beyond the bytes that are there."""

    def __init__(self, data: Buffer, where: str) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self.where = where

    def fail(self, what: str, must: str) -> NoReturn:
        raise Error(f"{self.where}: {what}: {must}. The file is truncated or damaged")

    def take(self, count: int, what: str) -> int:
        """Position of the next `count` bytes, which are skipped."""
        begin = self.at
        if count > self.size - begin:
            self.fail(
                what,
                f"must end within the file; {count} bytes at {begin} go beyond its {self.size}",
            )
        self.at = begin + count
        return begin

    def unpack(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def count(self, least: int, what: str) -> int:
        """A u64 count of things of at least `least` bytes each."""
        n = int(self.unpack("<Q", what))
        room = (self.size - self.at) // least
        if n > room:
            self.fail(what, f"must be at most {room}, all that the file has room for; got {n}")
        return n

    def text(self, what: str, longest: int = 1 << 62) -> str:
        n = self.count(1, f"{what}: length")
        if n > longest:
            self.fail(what, f"must be at most {longest} bytes long; got {n}")
        begin = self.take(n, what)
        try:
            return bytes(self.data[begin : begin + n]).decode()
        except UnicodeDecodeError:
            self.fail(what, "must be UTF-8")


def _texts(cursor: _Cursor, count: int, what: str) -> list[str]:
    """`count` strings; the loop is kept plain, for vocabularies of hundreds of thousands."""
    data, size, at = cursor.data, cursor.size, cursor.at
    length = struct.Struct("<Q").unpack_from
    result = []
    for i in range(count):
        begin = at + 8
        at = begin + length(data, at)[0] if begin <= size else size + 1
        if at > size:
            cursor.fail(f"{what}[{i}]", f"the string must end within the file of {size} bytes")
        try:
            result.append(str(data[begin:at], "utf-8"))
        except UnicodeDecodeError:
            cursor.fail(f"{what}[{i}]", "must be UTF-8")
    cursor.at = at
    return result


def _array(cursor: _Cursor, what: str, depth: int) -> Any:
    kind = cursor.unpack("<I", what)
    if kind in _SCALARS or kind == _BOOL:
        form = _SCALARS.get(kind, "<B")
        count = cursor.count(struct.calcsize(form), f"{what}: length")
        begin = cursor.take(count * struct.calcsize(form), what)
        values = np.frombuffer(cursor.data, form, count, begin).copy()
        if kind == _BOOL:
            if values.size and values.max() > 1:
                cursor.fail(what, "each bool must be 0 or 1")
            return values.astype(bool)
        return values
    if kind == _STRING:
        return _texts(cursor, cursor.count(8, f"{what}: length"), what)
    if kind != _ARRAY:
        cursor.fail(what, f"element type must be from 0 to 12; got {kind}")
    if depth >= _MAX_DEPTH:
        cursor.fail(what, f"arrays must nest at most {_MAX_DEPTH} deep")
    count = cursor.count(12, f"{what}: length")
    return [_array(cursor, f"{what}[{i}]", depth + 1) for i in range(count)]


def _value(cursor: _Cursor, what: str) -> Any:
    kind = cursor.unpack("<I", f"{what}: type")
    if kind in _SCALARS:
        return cursor.unpack(_SCALARS[kind], what)
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _array(cursor, what, 1)
    if kind != _BOOL:
        cursor.fail(what, f"type must be from 0 to 12 ({' '.join(_TYPE_NAMES)}); got {kind}")
    flag = cursor.unpack("<B", what)
    if flag > 1:
        cursor.fail(what, f"a bool must be 0 or 1; got {flag}")
    return bool(flag)


def _info(cursor: _Cursor, index: int) -> tuple[str, int, tuple[int, ...], int]:
    """(name, type, shape in numpy's order, offset) of the next tensor info."""
    name = cursor.text(f"name of tensor {index}", _MAX_KEY)
    what = f"tensor {name[:200]!r}"
    rank = cursor.unpack("<I", what)
    if not 1 <= rank <= _MAX_RANK:
        cursor.fail(what, f"must have 1 to {_MAX_RANK} dimensions; got {rank}")
    extents = struct.unpack_from(f"<{rank}Q", cursor.data, cursor.take(8 * rank, what))
    kind = cursor.unpack("<I", what)
    offset = cursor.unpack("<Q", what)
    return name, kind, extents[::-1], offset


def _place(
    where: str, entry: tuple[str, int, tuple[int, ...], int], start: int, size: int, alignment: int
) -> TensorInfo:
    """Checked info of one tensor; `start`: where the tensors' bytes begin in a file of `size`."""
    name, kind, shape, offset = entry
    what = f"{where}: tensor {name[:200]!r}"
    known = GGUF_TYPES.get(kind)
    if known is None:
        raise Error(
            f"{what}: type must be one of {' '.join(WEIGHT_TYPES)}; got the unknown number {kind}. "
            "The file is damaged or newer than this version of cpumoe"
        )
    if not known.format:
        raise Error(
            f"{what}: type must be one of {' '.join(WEIGHT_TYPES)}; got {known.name}, which is not "
            "supported. Take a file of this model in another type, for example Q4_K_M"
        )
    if 0 in shape or math.prod(shape) >= 1 << 62:
        raise Error(
            f"{what}: extents must be at least 1 and their product below 2^62; got {list(shape)}. "
            "The file is damaged"
        )
    if shape[-1] % known.elements:
        raise Error(
            f"{what}: {known.name} comes in blocks of {known.elements}, which must divide the last "
            f"extent; got {list(shape)}"
        )
    length = math.prod(shape) // known.elements * known.nbytes
    if offset % alignment:
        raise Error(
            f"{what}: its offset must be a multiple of the alignment {alignment}; got {offset}"
        )
    if offset + length > size - start:
        raise Error(
            f"{what}: {known.name} {list(shape)} takes {length} bytes at offset {offset}, but only "
            f"{max(size - start, 0)} bytes follow the header. The file is truncated: "
            "download it again"
        )
    return TensorInfo(name, known.format, shape, start + offset, start + offset + length)


def _refuse_overlaps(where: str, tensors: list[TensorInfo]) -> None:
    before: TensorInfo | None = None
    for t in sorted(tensors, key=lambda t: t.begin):
        if before is not None and t.begin < before.end:
            raise Error(
                f"{where}: tensors {before.name[:200]!r} and {t.name[:200]!r} overlap at byte "
                f"{t.begin}. The file is damaged"
            )
        before = t


def _prologue(cursor: _Cursor) -> int:
    """Version of the file, behind its magic."""
    where = cursor.where
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise Error(f"{where}: a GGUF file begins with 'GGUF'; got {magic!r}. Is it another file?")
    cursor.at = 4
    version = int(cursor.unpack("<I", "version"))
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0:
        raise Error(f"{where}: the file must be little-endian; it is written big-endian")
    raise Error(f"{where}: version must be 2 or 3; got {version}. Convert the model again")


def parse_header(data: Buffer, where: str) -> Header:
    """The checked header of the GGUF file whose bytes are `data`. Raises Error, naming `where`."""
    cursor = _Cursor(data, where)
    version = _prologue(cursor)
    n_tensors = int(cursor.unpack("<Q", "number of tensors"))
    n_entries = cursor.count(_MIN_ENTRY, "number of metadata entries")
    if n_tensors > (room := (cursor.size - cursor.at) // _MIN_INFO):
        cursor.fail("number of tensors", f"must be at most {room}; got {n_tensors}")
    metadata: dict[str, Any] = {}
    for i in range(n_entries):
        key = cursor.text(f"key of metadata entry {i}", _MAX_KEY)
        if key in metadata:
            cursor.fail(f"metadata {key[:200]!r}", "must be there once; it is there twice")
        metadata[key] = _value(cursor, f"metadata {key[:200]!r}")
    entries = [_info(cursor, i) for i in range(n_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8 or alignment > 1 << 20:
        raise Error(
            f"{where}: general.alignment must be a multiple of 8 up to 2^20; got {alignment!r:.100}"
        )
    start = -(-cursor.at // alignment) * alignment
    tensors = [_place(where, entry, start, cursor.size, alignment) for entry in entries]
    if len({t.name for t in tensors}) != len(tensors):
        names = sorted(t.name for t in tensors)
        twice = next(a for a, b in itertools.pairwise(names) if a == b)
        raise Error(f"{where}: tensor {twice[:200]!r} is there twice. The file is damaged")
    _refuse_overlaps(where, tensors)
    return Header(version, metadata, tensors)

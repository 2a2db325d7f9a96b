"""Builder of GGUF bytes by hand, whole and damaged."""

import struct

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = range(10)
UINT64, INT64, FLOAT64 = 10, 11, 12
F32, F16, Q4_0 = 0, 1, 2


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    """One metadata entry."""
    return text(key) + struct.pack("<I", kind) + payload


def u32(key: str, value: int) -> bytes:
    return entry(key, UINT32, struct.pack("<I", value))


def u16(key: str, value: int) -> bytes:
    return entry(key, UINT16, struct.pack("<H", value))


def array(key: str, kind: int, count: int, payload: bytes) -> bytes:
    """A metadata entry that holds an array."""
    return entry(key, ARRAY, struct.pack("<IQ", kind, count) + payload)


def info(name: str | bytes, dims: list[int], kind: int = F32, offset: int = 0) -> bytes:
    """One tensor info; dims in the file's order, contiguous first."""
    head = text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return head + struct.pack("<IQ", kind, offset)


def pack(
    entries: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """The file. counts: (tensors, entries) to state instead of the true ones."""
    n = counts or (len(infos), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *n) + b"".join(entries) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data

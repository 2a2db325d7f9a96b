"""The safetensors reader: what it maps, and every malformation it refuses."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from cpumoe import Error
from cpumoe.checkpoint import open_safetensors
from hostile import header_of, pack, write

TWO = {"a": ("F32", [2, 3]), "b": ("BF16", [4])}
DATA = bytes(range(24)) + bytes(range(8))


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_reference_library_writes(tmp_path):
    arrays = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "h": np.arange(5, dtype=np.float16),
        "b": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "i": np.arange(3, dtype=np.int64),
        "empty": np.zeros((0, 7), np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors", {"format": "pt"})
    file = open_safetensors(tmp_path / "m.safetensors")
    assert set(file.tensors) == set(arrays)
    assert file.metadata == {"format": "pt"}
    for name, want in arrays.items():
        got = file.tensors[name].array()
        assert got.shape == want.shape
        assert np.array_equal(got, want.view(np.uint16) if name == "b" else want)
        assert not got.flags.writeable
    assert file.tensors["b"].format == "bf16"


def test_views_are_the_mapped_file(tmp_path):
    path = write(tmp_path / "m.safetensors", pack(header_of(TWO), DATA))
    ref = open_safetensors(path).tensors["b"]
    assert path.read_bytes()[ref.offset : ref.offset + ref.nbytes] == ref.data.tobytes()
    with path.open("r+b") as f:  # a copy would not see this
        f.seek(ref.offset)
        f.write(b"\xff")
    assert ref.data[0] == 0xFF


def test_parts(tmp_path):
    path = tmp_path / "m.safetensors"
    w = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    safetensors.numpy.save_file({"w": w}, path)
    ref = open_safetensors(path).tensors["w"]
    assert np.array_equal(ref.part(2).array(), w[2])
    assert np.array_equal(ref.part(1, slice(1, 3)).array(), w[1, 1:3])
    assert np.array_equal(ref.part(slice(0, 2)).array(), w[:2])
    for bad in ((3,), (-1,), (0, slice(3, 5)), (slice(0, 1), 0)):
        with pytest.raises(Error, match="no part"):
            ref.part(*bad)


def test_unaligned_tensors(tmp_path):
    header = json.dumps(header_of(TWO)).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length puts every tensor at an odd address
    path = write(tmp_path / "m.safetensors", pack(header, DATA))
    ref = open_safetensors(path).tensors["a"]
    assert ref.offset % 2 == 1
    assert ref.array().tobytes() == DATA[:24]


BAD_HEADERS = {
    "not json": (b"{not json", "valid JSON"),
    "not utf-8": (b'{"\xff": 1}', "UTF-8"),
    "empty": (b"", "valid JSON"),
    "a list": ([], "JSON object"),
    "deep": (b"[" * 100_000, "nests too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nests too deeply"),
    "duplicate name": (
        b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2),
        "appears twice",
    ),
    "duplicate field": (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "appears twice"),
    "NaN": (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', "no JSON number"),
    "giant number": (b'{"a": {"shape": [' + b"9" * 10_000 + b"]}}", "valid JSON"),
    "entry no object": ({"a": 3}, "must have dtype, shape and data_offsets"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "must have dtype"),
    "unknown dtype": ({"a": entry(dtype="F31")}, "dtype must be one of"),
    "dtype no string": ({"a": entry(dtype=7)}, "dtype must be one of"),
    "shape no list": ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "shape must"),
    "negative extent": ({"a": entry(shape=[-2])}, "shape must"),
    "fraction": ({"a": entry(shape=[2.0])}, "shape must"),
    "boolean": ({"a": entry(shape=[True, 2])}, "shape must"),
    "rank": ({"a": entry(shape=[1] * 40 + [2])}, "shape must"),
    "beyond 2^63": ({"a": entry(shape=[2**64, 0], offsets=[0, 0])}, "shape must"),
    "product overflows": ({"a": entry(shape=[2**62, 2**62, 8])}, "takes"),
    "one offset": ({"a": entry(offsets=[8])}, "two sizes"),
    "negative offset": ({"a": entry(offsets=[-8, 0])}, "two sizes"),
    "reversed": ({"a": entry(offsets=[8, 0])}, "must not fall"),
    "past the end": ({"a": entry(shape=[3], offsets=[0, 12])}, "truncated"),
    "far past the end": ({"a": entry(shape=[2**40], offsets=[0, 2**42])}, "truncated"),
    "size": ({"a": entry(shape=[1])}, "takes 4 bytes"),
    "overlap": ({"a": entry(shape=[1], offsets=[0, 4]), "b": entry()}, "overlap"),
    "hole before": ({"a": entry(shape=[1], offsets=[4, 8])}, "belong to no tensor"),
    "hole behind": ({"a": entry(shape=[1], offsets=[0, 4])}, "belong to no tensor"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry()}, "__metadata__"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header_is_refused(tmp_path, name):
    header, message = BAD_HEADERS[name]
    path = write(tmp_path / "m.safetensors", pack(header, bytes(8)))
    with pytest.raises(Error, match=message):
        open_safetensors(path)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_truncated_file_is_refused(tmp_path, size):
    path = write(tmp_path / "m.safetensors", pack(header_of(TWO), DATA)[:size])
    with pytest.raises(Error, match="truncated"):
        open_safetensors(path)


def test_every_truncation_and_extension_is_refused(tmp_path):
    whole = pack(header_of(TWO), DATA)
    path = tmp_path / "m.safetensors"
    for size in range(len(whole)):
        write(path, whole[:size])
        with pytest.raises(Error):
            open_safetensors(path)
    write(path, whole + b"\0")
    with pytest.raises(Error, match="belong to no tensor"):
        open_safetensors(path)
    write(path, whole)
    assert set(open_safetensors(path).tensors) == {"a", "b"}


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**9, 200])
def test_header_longer_than_the_file_is_refused(tmp_path, length):
    path = write(tmp_path / "m.safetensors", pack(b"{}", DATA, length=length))
    with pytest.raises(Error, match="header must fit"):
        open_safetensors(path)


def test_huge_header_is_refused_unread(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as f:
        f.write((10**11).to_bytes(8, "little"))
        f.truncate(10**11 + 8)  # sparse: takes no room on the disk
    with pytest.raises(Error, match="at most"):
        open_safetensors(path)


def test_things_that_are_no_files(tmp_path):
    with pytest.raises(Error, match="cannot be read"):
        open_safetensors(tmp_path / "absent.safetensors")
    with pytest.raises(Error, match="regular file"):
        open_safetensors(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer for ever
    with pytest.raises(Error, match="regular file"):
        open_safetensors(tmp_path / "pipe")
    with pytest.raises(Error):
        open_safetensors("a\0b")

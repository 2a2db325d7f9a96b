"""Checkpoint directories: one file, shards, and what is missing or at odds."""

import json

import pytest

import cpumoe
from cpumoe import Error
from cpumoe.checkpoint import open_checkpoint
from hostile import checkpoint, header_of, pack, qwen3_tensors, values, write


def sharded(path):
    """The tiny checkpoint in two shards with an index; returns the index."""
    checkpoint(path)
    (path / "model.safetensors").unlink()
    tensors = list(qwen3_tensors().items())
    weight_map = {}
    for i, part in enumerate((dict(tensors[:9]), dict(tensors[9:])), 1):
        name = f"model-{i:05d}-of-00002.safetensors"
        write(path / name, pack(header_of(part), values(part)))
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    save_index(path, index)
    return index


def save_index(path, index):
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_opens_one_file_and_shards(tmp_path):
    one, many = checkpoint(tmp_path / "one"), tmp_path / "many"
    sharded(many)
    assert len(open_checkpoint(many).files) == 2
    for path in (one, many):
        assert cpumoe.load(path).generate([3, 4], max_tokens=3, temperature=0, ignore_eos=True).ids


def test_a_lone_file_of_another_name(tmp_path):
    path = checkpoint(tmp_path)
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert len(open_checkpoint(path).tensors) == len(qwen3_tensors())


def test_touch_reads_everything_once(tmp_path):
    opened = open_checkpoint(checkpoint(tmp_path))
    done = list(opened.touch(step=4096))
    assert done == sorted(done)
    assert done[-1] == (tmp_path / "model.safetensors").stat().st_size


def test_nothing_is_written(tmp_path, monkeypatch):
    path, elsewhere = checkpoint(tmp_path / "model"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    cpumoe.load(path).generate([3, 4], max_tokens=3)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_absent_directory():
    with pytest.raises(Error, match="no such directory"):
        cpumoe.load("/nonexistent/model")


def test_a_file_is_no_directory(tmp_path):
    with pytest.raises(Error, match="got another file"):
        cpumoe.load(write(tmp_path / "x.safetensors", b""))


def test_without_config(tmp_path):
    (checkpoint(tmp_path) / "config.json").unlink()
    with pytest.raises(Error, match=r"config\.json is missing"):
        cpumoe.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"a":' * 50_000])
def test_damaged_config(tmp_path, text):
    (checkpoint(tmp_path) / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(Error, match=r"config\.json"):
        cpumoe.load(tmp_path)


def test_without_weights(tmp_path):
    path = checkpoint(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(Error, match=r"pytorch_model\.bin"):
        cpumoe.load(path)


def test_missing_shard(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(Error, match=r"1 of 2 weight files are missing: model-00002"):
        cpumoe.load(tmp_path)


def test_truncated_shard(tmp_path):
    sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    write(shard, shard.read_bytes()[:-1])
    with pytest.raises(Error, match=r"model-00002.*truncated"):
        cpumoe.load(tmp_path)


def test_index_names_an_absent_tensor(tmp_path):
    index = sharded(tmp_path)
    index["weight_map"]["model.norm.bias"] = "model-00001-of-00002.safetensors"
    save_index(tmp_path, index)
    with pytest.raises(Error, match=r"model\.norm\.bias"):
        cpumoe.load(tmp_path)


@pytest.mark.parametrize("shard", ["../x", "/etc/passwd", "a/b", "..", "", 3, None, "a\0b"])
def test_index_may_only_name_files_beside_it(tmp_path, shard):
    index = sharded(tmp_path)
    index["weight_map"]["lm_head.weight"] = shard
    save_index(tmp_path, index)
    with pytest.raises(Error, match="file name without a folder"):
        cpumoe.load(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": 3}])
def test_index_without_a_map(tmp_path, index):
    sharded(tmp_path)
    save_index(tmp_path, index)
    with pytest.raises(Error, match="weight_map"):
        cpumoe.load(tmp_path)


def test_several_files_without_an_index(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(Error, match=r"need model\.safetensors\.index\.json"):
        cpumoe.load(tmp_path)

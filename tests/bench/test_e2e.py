"""The synthetic checkpoint and `cpumoe bench e2e` on a tiny one."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

import cpumoe
from cpumoe.bench import e2e
from cpumoe.bench.result import problems
from cpumoe.cli.main import main

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/e2e/make_synthetic.py"
SIZES = {
    "layers": 2,
    "hidden": 64,
    "inter": 32,
    "experts": 8,
    "top-k": 2,
    "heads": 4,
    "kv-heads": 2,
    "head-dim": 16,
    "vocab": 512,
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_synthetic", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    options = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    shard = script.SHARD_BYTES
    script.SHARD_BYTES = 200_000  # several shards
    script.main([str(folder), *options])
    script.SHARD_BYTES = shard
    return folder


def test_files_are_whole_safetensors(script, checkpoint):
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    names = set()
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        assert (8 + size) % 64 == 0
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__")
        end = 0
        for name, entry in header.items():
            assert entry["data_offsets"] == [end, end + 2 * math.prod(entry["shape"])]
            end = entry["data_offsets"][1]
            assert index["weight_map"][name] == path.name
        assert len(data) == 8 + size + end
        names |= set(header)
    assert names == set(index["weight_map"])
    assert len(set(index["weight_map"].values())) > 1
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in names


def test_the_default_geometry_is_that_of_qwen3_30b(script):
    parsed = {}
    script_make, script.make = script.make, lambda a: parsed.update(vars(a))
    try:
        script.main(["x"])
    finally:
        script.make = script_make
    import argparse

    a = argparse.Namespace(**parsed)
    shape = {name: size for name, size, _ in script.tensors(a)}
    assert shape["model.layers.7.mlp.experts.127.gate_proj.weight"] == (768, 2048)
    assert shape["lm_head.weight"] == (151936, 2048)
    total = sum(2 * math.prod(size) for size in shape.values())
    assert 11.0e9 < total < 11.5e9


def test_it_opens_and_its_tokenizer_keeps_every_character(checkpoint):
    model = cpumoe.load(checkpoint)
    ids = model.tokenizer.encode("Grüße, 世界\n")
    assert model.tokenizer.decode(ids) == "Grüße, 世界\n"
    assert model.spec.family == "qwen3_moe"


def test_too_little_disk_is_told(script, tmp_path):
    with pytest.raises(SystemExit, match=r"must have .* GB free"):
        script.main([str(tmp_path), "--vocab", str(10**12)])
    assert not list(tmp_path.iterdir())


def test_active_elements_are_what_a_token_meets(checkpoint):
    layers, head = e2e.active_elements(cpumoe.load(checkpoint).spec)
    attention = 64 * 64 * 2 + 64 * 32 * 2
    assert layers == 2 * (attention + 8 * 64 + 2 * 3 * 64 * 32)
    assert head == 512 * 64


def test_bench_e2e(capsys, checkpoint, steady):
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "bench",
                "e2e",
                str(checkpoint),
                "--prompt",
                "9",
                "--new",
                "4",
                "--tries",
                "1",
                "--json",
                "-",
            ]
        )
    out = capsys.readouterr()
    assert not stop.value.code, out.err
    result = json.loads(out.out)
    assert problems(result) == []
    prompt, decode = result["cells"]
    assert (prompt["phase"], prompt["tokens"], prompt["context"]) == ("prompt", 9, 0)
    assert (decode["phase"], decode["tokens"], decode["context"]) == ("decode", 1, 9)
    assert len(decode["samples_s"]) == 4
    layers, head = e2e.active_elements(cpumoe.load(checkpoint).spec)
    assert decode["flops"] == 2 * (layers + head)
    assert prompt["flops"] == 2 * (9 * layers + head)
    # One token reads each of its weights once, 2 bytes each.
    assert decode["bytes"] >= 2 * (layers + head)
    assert decode["bytes"] < 2.05 * (layers + head) + 4096  # norms and the embedding's row besides
    assert decode["time_over_bandwidth"] > 0
    assert prompt["mapped_bytes"] > 0
    assert prompt["peak_rss_bytes"] > prompt["mapped_bytes"]
    assert prompt["beyond_bytes"] == (
        prompt["peak_rss_bytes"] - prompt["mapped_bytes"] - prompt["kv_bytes"]
    )


def test_an_absent_model_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "e2e", "no/such/model"])
    assert stop.value.code == 2
    assert "no/such/model" in capsys.readouterr().err

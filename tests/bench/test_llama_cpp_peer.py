"""The llama.cpp peer: what it is checked against, and `bench layer --peer llama_cpp`."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import cpumoe
from cpumoe.bench import check
from cpumoe.bench.peers import load_file, load_peer, peer_names
from cpumoe.bench.result import problems
from cpumoe.bench.shapes import Shape
from cpumoe.cli.main import main
from llama_cpp_here import ggml, needs_llama_cpp

FAST = ["--seconds", "0", "--rounds", "2", "--tries", "1", "--threads", "1"]
# Every type where its blocks allow: 256 features for the K types.
WIDE = (
    "hidden = 512\ninter = 256\nexperts = 8\ntop_k = 2\nrenormalize = yes\nmodel_type = qwen3_moe"
)
NARROW = WIDE.replace("512", "64").replace("256", "96")


def bench(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "layer", *map(str, args)])
    out = capsys.readouterr()
    return stop.value.code or 0, out.out, out.err


@pytest.fixture
def wide(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text(WIDE)
    return path


def test_our_formats_find_their_types():
    peer = load_file("llama_cpp")
    wanted = {
        "bf16": "bf16",
        "q4_k": "q4_k",
        "int4_g128": "q4_0",
        "int4_row": "q4_0",
        "gptq4_v2_g64": "q4_0",
        "awq4_g128": "q4_0",
        "int8_g32": "q8_0",
        "fp8_block": "q8_0",
        "gguf_mxfp4": "mxfp4",
        "nvfp4": "nvfp4",
        "u2_zp_g64": "q2_k",
        "u3_g64": "q3_k",
    }
    assert {name: peer.type_name(name) for name in wanted} == wanted
    assert peer.type_name("int5_g32") is None


def test_helpers_are_no_peers():
    assert peer_names() == ["llama_cpp", "transformers"]


def q8(values, block):
    """ggml's rounding of activations [K, M], as published: d = amax / 127, codes to nearest."""
    k, m = values.shape
    v = values.reshape(k // block, block, m).astype(np.float32)
    d = np.abs(v).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.round(np.where(d > 0, v / np.where(d > 0, d, 1), 0))
    if block == 32:
        d = d.astype(np.float16).astype(np.float32)
    return (codes * d).reshape(k, m)


@pytest.mark.parametrize(("kind", "block"), [(8, 32), (15, 256)])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-5])
def test_rounding_bounds_hold_and_are_not_wide(kind, block, scale):
    rng = np.random.default_rng(1)
    v = scale * rng.standard_normal((512, 64)) * np.exp(rng.normal(0, 2, (512, 64)))
    independent, fixed = ggml.rounding(kind)(v)
    error = np.abs(q8(v, block) - v)
    assert (error <= independent + fixed).all()
    assert (error / (independent + fixed)).max() > (0.9 if scale >= 1 else 0.1)


def test_rounding_of_16_bit_types():
    v = np.random.default_rng(2).standard_normal((64, 8))
    half = np.abs(v.astype(np.float16).astype(np.float64) - v)
    assert (half <= ggml.rounding(1)(v)[0]).all()
    assert ggml.rounding(0)(v)[0].max() == 0
    assert (ggml.rounding(30)(v)[0] == 2.0**-8 * np.abs(v)).all()


def test_the_check_takes_rounded_activations():
    """A layer computed from rounded activations is within the bound that knows of it only."""
    rng = np.random.default_rng(3)
    shape = Shape("s", hidden=256, inter=128, experts=2, top_k=2, renormalize=True)
    weights = {
        "gate_up": rng.standard_normal((2, 256, 256)) / 16,
        "down": rng.standard_normal((2, 256, 128)) / 12,
    }
    x = rng.standard_normal((3, 256)).astype(np.float32)
    ids, scores = np.tile([[0, 1]], (3, 1)), np.full((3, 2), 0.5, np.float32)
    out = np.zeros((3, 256))
    for e in range(2):
        both = weights["gate_up"][e] @ q8(x.T, 32).astype(np.float64)
        h = both[:128] / (1 + np.exp(-both[:128])) * both[128:]
        out += 0.5 * (weights["down"][e] @ q8(h, 32).astype(np.float64)).T
    where = (np.arange(3), np.arange(256))

    def ratio(rounding, output=out):
        known = check.reference(shape, weights, x, ids, scores, where, rounding=rounding)
        return check.error_over_bound(known, output, 2.0**-24)

    assert 0.02 < ratio(ggml.rounding(8)) <= 1
    assert ratio(None) > 10
    assert ratio(ggml.rounding(8), out[:, ::-1]) > 1


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("transformers:fast", "takes no option; got 'fast'"),
        ("llama_cpp:q9_9", "no type 'q9_9'. Write one of"),
        ("_ggml", "must be one of llama_cpp, transformers"),
    ],
)
def test_bad_peers_are_named(capsys, wide, steady, peer, message):
    code, _, err = bench(capsys, "--shape", wide, "--tokens", 1, "--peer", peer)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("python", ["/nonexistent/python", sys.executable])
def test_an_interpreter_without_the_library(capsys, wide, steady, monkeypatch, tmp_path, python):
    monkeypatch.setenv("CPUMOE_PEER_PYTHON", python)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    if python == sys.executable:
        isolated = tmp_path / "python"
        isolated.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        isolated.chmod(0o755)
        monkeypatch.setenv("CPUMOE_PEER_PYTHON", str(isolated))
    code, _, err = bench(capsys, "--shape", wide, "--tokens", 1, "--peer", "llama_cpp")
    assert code == 2
    assert "no llama-cpp-python" in err
    assert "CPUMOE_PEER_PYTHON" in err


# Bits of an element: the published block layouts.
BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "q8_0": 8.5, "q6_k": 6.5625, "q5_0": 5.5, "q5_k": 5.5}
BITS |= {"q4_0": 4.5, "q4_k": 4.5, "iq4_nl": 4.5, "iq4_xs": 4.25, "mxfp4": 4.25, "nvfp4": 4.5}
BITS |= {"q3_k": 3.4375, "q2_k": 2.625}


@needs_llama_cpp
@pytest.mark.parametrize("type_", sorted(ggml.TYPES))
def test_every_type_is_run_and_checked(capsys, wide, steady, type_):
    args = ["--shape", wide, "--tokens", "1,6", "--peer", f"llama_cpp:{type_}", "--json", "-"]
    code, out, err = bench(capsys, *args, *FAST)
    assert code == 0, err
    result = json.loads(out)
    assert problems(result) == []
    for cell in result["cells"]:
        peer = cell["peer"]
        assert peer["name"] == "llama_cpp"
        assert peer["setting"]["format"] == type_
        assert 0 < peer["error_over_bound"] <= 1
        trials = peer["setting"]["trials_s"]
        assert trials[peer["setting"]["variant"]] == min(trials.values())
        assert ("repack" in trials) == peer["setting"]["repack"]
        assert 16 * peer["bytes"] / cell["bytes"] == BITS[type_]  # ours is bf16


@needs_llama_cpp
@pytest.mark.parametrize("type_", ["q8_0", "mxfp4", "bf16"])
def test_gpt_oss_with_biases_and_its_activation(capsys, tmp_path, tiny_gpt_oss, steady, type_):
    path = tmp_path / "gpt-oss.txt"
    path.write_text(Path(tiny_gpt_oss).read_text().replace("inter = 48", "inter = 96"))
    args = ["--shape", path, "--tokens", "5", "--peer", f"llama_cpp:{type_}", "--json", "-"]
    code, out, err = bench(capsys, *args, *FAST)
    assert code == 0, err
    assert 0 < json.loads(out)["cells"][0]["peer"]["error_over_bound"] <= 1


@needs_llama_cpp
def test_a_wrong_result_is_noticed(capsys, wide, steady, monkeypatch):
    peer = load_peer("llama_cpp:q8_0")
    right = type(peer).stored

    def swapped(self):
        stored = right(self)
        names = stored.arrays["gate_up"]._names
        stored.arrays["gate_up"]._names = names[::-1]
        return stored

    monkeypatch.setattr(type(peer), "stored", swapped)
    monkeypatch.setattr("cpumoe.bench.peers.load_peer", lambda name: peer)
    code, _, err = bench(capsys, "--shape", wide, "--tokens", 2, "--peer", "llama_cpp", *FAST)
    assert code == 2
    assert "peer llama_cpp" in err
    assert "times the bound" in err


@needs_llama_cpp
def test_shapes_that_it_cannot_cut(capsys, tmp_path, steady):
    path = tmp_path / "narrow.txt"
    path.write_text(NARROW)
    args = ["--shape", path, "--tokens", 2, *FAST]
    code, _, err = bench(capsys, *args, "--peer", "llama_cpp:q4_k")
    assert code == 2
    assert "blocks of 256 for q4_k; narrow has 64 and 96 features" in err
    path.write_text(NARROW + "\nactivation = gelu\n")
    code, _, err = bench(capsys, *args, "--peer", "llama_cpp:q8_0")
    assert code == 2
    assert "no MoE block with gelu" in err


@needs_llama_cpp
def test_decoded_experts_are_the_bytes_it_runs(steady):
    """The library's quantiser and decoder agree with the format's definition for q8_0."""
    library = ggml.Library(ggml.package_folder())
    rows = np.random.default_rng(5).standard_normal((7, 64)).astype(np.float32)
    data = library.quantize(ggml.TYPES["q8_0"], rows)
    assert data.shape == (7, 2 * 34)
    blocks = data.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    values = scale * blocks[:, 2:].copy().view(np.int8)
    assert (library.decode(ggml.TYPES["q8_0"], data, 7 * 64) == values.reshape(-1)).all()
    assert np.abs(values.reshape(7, 64) - rows).max() < 0.02


def test_importing_the_peer_loads_nothing_else():
    assert cpumoe.__version__
    before = set(sys.modules)
    load_file("llama_cpp")
    assert not {m for m in set(sys.modules) - before if m.startswith(("torch", "llama", "gguf"))}

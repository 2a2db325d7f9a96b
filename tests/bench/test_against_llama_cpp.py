"""The synthetic GGUF is the synthetic checkpoint; llama.cpp and we agree on it; the runner."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import cpumoe
from cpumoe.bench import e2e
from cpumoe.bench.measure import Run
from cpumoe.bench.result import problems
from cpumoe.checkpoint import open_gguf
from llama_cpp_here import needs_llama_cpp

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/e2e"
SIZES = {
    "layers": 2,
    "hidden": 256,
    "inter": 256,
    "experts": 8,
    "top-k": 2,
    "heads": 8,
    "kv-heads": 2,
    "head-dim": 64,
    "vocab": 1024,
}
GEOMETRY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def scripts():
    """Imports a script of benchmarks/e2e by name."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def files(scripts, tmp_path_factory):
    """type -> path; "dir" is the checkpoint directory."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("synthetic")
    scripts("make_synthetic").main([str(folder / "dir"), *GEOMETRY])
    made = {"dir": folder / "dir"}
    for type_ in ("fp32", "q8_0", "q4_0", "q4_k"):
        made[type_] = folder / f"{type_}.gguf"
        scripts("make_synthetic_gguf").main([str(made[type_]), "--type", type_, *GEOMETRY])
    return made


@pytest.fixture(scope="module")
def llama(scripts):
    """Makes a LlamaCpp; all are ended."""
    made = []

    def start(path, context=128):
        made.append(scripts("against_llama_cpp").LlamaCpp(path, context, 1))
        return made[-1]

    yield start
    for peer in made:
        peer.close()


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1024, count).astype(np.int32)


@needs_llama_cpp
def test_the_file_holds_the_numbers_of_the_checkpoint(files):
    import gguf

    reader = gguf.GGUFReader(files["q8_0"])
    read = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    checkpoint = cpumoe.load(files["dir"]).checkpoint

    def published(name):
        raw = checkpoint.tensors[name]
        bits = np.frombuffer(bytes(raw.data), np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(raw.shape)

    exact = published("model.layers.1.mlp.gate.weight")
    assert (read["blk.1.ffn_gate_inp.weight"] == exact).all()
    assert (read["blk.0.attn_q_norm.weight"] == 1).all()
    for e in (0, 7):
        for part in ("gate", "up", "down"):
            want = published(f"model.layers.1.mlp.experts.{e}.{part}_proj.weight")
            got = read[f"blk.1.ffn_{part}_exps.weight"][e]
            assert np.abs(got - want).max() <= np.abs(want).max() / 200
    want = published("lm_head.weight")
    assert np.abs(read["output.weight"] - want).max() <= np.abs(want).max() / 200


# Both decode the same bytes, so what differs is llama.cpp's rounding of activations to 8 bits
# (measured: 0.01) and for fp32 nothing but the order of sums and the fp16 cache (0.0004).
@needs_llama_cpp
@pytest.mark.parametrize(("type_", "bound"), [("fp32", 2e-3), ("q8_0", 0.05), ("q4_0", 0.05)])
def test_both_sides_agree_on_the_same_file(files, llama, type_, bound):
    asked = ids(24)
    own = cpumoe.load(files[type_], activations="fp32").logits(asked.tolist())[-1]
    peer = llama(files[type_])
    theirs = peer.logits(asked)
    assert np.abs(theirs - own).max() <= bound * np.abs(own).max()
    # A prompt, and the same prompt with its last token in a step of its own.
    peer.prompt(asked[:-1])
    peer._next = int(asked[-1])
    peer.step()
    assert peer._next == int(theirs.argmax())


@needs_llama_cpp
@pytest.mark.parametrize("pair", [("dir", "q4_0"), ("q4_0", "q4_0")])
def test_the_runner(files, scripts, monkeypatch, tmp_path, steady, pair):
    runner = scripts("against_llama_cpp")
    monkeypatch.setattr(runner, "probe", steady)
    target = tmp_path / "found.json"
    options = ["--prompt", "20", "--new", "3", "--threads", "1", "--tries", "1"]
    runner.main([*(str(files[p]) for p in pair), *options, "--json", str(target)])
    result = json.loads(target.read_text())
    assert problems(result) == []
    prompt, decode = result["cells"]
    for cell in (prompt, decode):
        peer = cell["peer"]
        assert peer["name"] == "llama_cpp"
        assert peer["setting"]["version"]
        assert "CPU" in peer["setting"]["system"]
        assert peer["correlation"] > (0.99 if pair[0] == pair[1] else 0.7)
        assert peer["ratio"] == pytest.approx(peer["median_s"] / cell["median_s"])
        assert peer["flops"] == pytest.approx(cell["flops"], rel=1e-3)
    assert decode["peer"]["bytes"] < prompt["peer"]["bytes"]
    if pair[0] == pair[1]:
        assert decode["peer"]["bytes"] == pytest.approx(decode["bytes"], rel=0.02)
    assert len(decode["peer"]["samples_s"]) == 3


@needs_llama_cpp
def test_active_bytes_of_a_file(files, scripts):
    token, prompt, layers, head = scripts("against_llama_cpp").active(files["fp32"])
    tensors = open_gguf(files["fp32"]).tensors
    assert prompt == sum(t.data.nbytes for n, t in tensors.items() if n != "token_embd.weight")
    in_layers, in_head = e2e.active_elements(cpumoe.load(files["dir"]).spec)
    assert (layers, head) == (in_layers, in_head)
    assert token == pytest.approx(4 * (layers + head), rel=0.01)  # and the norms


@needs_llama_cpp
def test_two_models_are_refused(files, scripts, tmp_path, steady, monkeypatch):
    other = tmp_path / "other.gguf"
    scripts("make_synthetic_gguf").main([str(other), "--type", "q8_0", *GEOMETRY, "--seed", "9"])
    runner = scripts("against_llama_cpp")
    monkeypatch.setattr(runner, "probe", steady)
    with pytest.raises(SystemExit, match="must run the same model; its logits correlate"):
        runner.main([str(files["dir"]), str(other), "--prompt", "20", "--new", "2"])


def test_a_peer_of_another_vocabulary_is_refused(bundled):
    class Other:
        name = "other"

        def logits(self, asked):
            return np.zeros(5, np.float32)

        def setting(self):
            return {}

        def prompt(self, asked):
            return Run(1.0, 1, 1)

        step = prompt

    model = cpumoe.load(bundled)
    with pytest.raises(cpumoe.Error, match=f"its vocabulary is 5, ours {model.spec.vocab}"):
        e2e.same_model(model, Other(), ids(4))


@needs_llama_cpp
def test_an_interpreter_that_cannot(files, scripts, monkeypatch, tmp_path):
    runner = scripts("against_llama_cpp")
    monkeypatch.setenv("CPUMOE_PEER_PYTHON", "/nonexistent/python")
    with pytest.raises(SystemExit, match="must be an interpreter"):
        runner.main([str(files["dir"]), str(files["q8_0"])])
    monkeypatch.setenv("CPUMOE_PEER_PYTHON", "/bin/false")
    with pytest.raises(SystemExit, match="ended with status 1"):
        runner.main([str(files["dir"]), str(files["q8_0"])])

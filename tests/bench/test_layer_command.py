"""`cpumoe bench layer` from the command line to the JSON, on shapes that take milliseconds."""

import json

import pytest

import cpumoe
from cpumoe.bench.result import CELL_FIELDS, problems
from cpumoe.cli.main import main

FAST = ["--seconds", "0", "--rounds", "2", "--tries", "1"]


def bench(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "layer", *args])
    out = capsys.readouterr()
    return stop.value.code or 0, out.out, out.err


def test_json_on_standard_output_is_the_result_and_nothing_else(capsys, tiny_shape, steady):
    code, out, err = bench(
        capsys,
        "--shape",
        tiny_shape,
        "--tokens",
        "1,5",
        "--threads",
        "1,2",
        "--format",
        "bf16,fp32",
        "--json",
        "-",
        *FAST,
    )
    assert code == 0, err
    result = json.loads(out)
    assert problems(result) == []
    cells = result["cells"]
    assert [(c["format"], c["threads"], c["tokens"]) for c in cells] == [
        (f, n, t) for f in ("bf16", "fp32") for n in (1, 2) for t in (1, 5)
    ]
    assert "of bandwidth" in err  # the table
    for cell in cells:
        assert cell["error_over_bound"] <= 1
        assert cell["flops"] == cell["tokens"] * 2 * 2 * 3 * 64 * 48
        expert = 3 * 64 * 48 * (2 if cell["format"] == "bf16" else 4)
        assert {b % expert for b in cell["samples_bytes"]} == {0}
        touched = {b // expert for b in cell["samples_bytes"]}
        assert touched == {2} if cell["tokens"] == 1 else touched <= set(range(2, 9))
        assert len(cell["samples_s"]) == len(cell["samples_bytes"]) == 2
        assert (cell["overhead_share"] is None) == (cell["tokens"] != 1)
        assert cell["kernel"]
        assert cell["isa"] == cpumoe.machine().isa[-1]
        assert cell["share_of_bandwidth"] == pytest.approx(cell["gb_per_s"] / 40, rel=1e-6)
    assert result["machine"]["read_gb_per_s"] == 40.0
    assert result["machine"]["fma_gflop_per_s"] == 200.0


def test_with_the_measured_limits(capsys, tmp_path, tiny_gpt_oss):
    target = tmp_path / "result.json"
    code, out, err = bench(
        capsys,
        "--shape",
        tiny_gpt_oss,
        "--tokens",
        "3",
        "--json",
        str(target),
        "--pages",
        "small",
        *FAST,
    )
    assert code == 0, err
    assert "of bandwidth" in out
    result = json.loads(target.read_text())
    assert problems(result) == []
    assert result["machine"]["read_gb_per_s"] > 0
    assert result["machine"]["fma_gflop_per_s"] > 0
    assert result["cells"][0]["pages"] == "small"


def test_a_wrong_operator_stops_the_command(capsys, monkeypatch, tiny_shape, steady):
    right = cpumoe.moe

    def wrong(x, experts, ids, weights, **kwargs):
        return right(x, experts, ids[:, ::-1].copy(), weights, **kwargs)

    monkeypatch.setattr(cpumoe, "moe", wrong)
    code, out, err = bench(capsys, "--shape", tiny_shape, "--tokens", "4", "--json", "-", *FAST)
    assert code == 2
    assert out == ""
    assert "must stay within its bound" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "nothing"], "the name must be one of"),
        (["--format", "int3"], "--format: must be one of fp32, fp16, bf16, fp8_block"),
        (["--tokens", "1,x"], "--tokens: must be integers from 1 to 1048576"),
        (["--tokens", "0"], "--tokens: must be integers from 1 to 1048576"),
        (["--threads", "1025"], "--threads: must be integers from 1 to 1024"),
        (["--isa", "sse"], "--isa: must be one of scalar"),
        (["--json", "/nowhere/x"], "--json: must name a file in a directory"),
        (["--peer", "nobody"], "--peer: must be one of llama_cpp, transformers"),
        (["--pages", "large"], "'large' is not one of"),
    ],
)
def test_bad_options_are_named(capsys, steady, tiny_shape, args, message):
    code, _, err = bench(capsys, *(["--shape", tiny_shape] if args[0] != "--shape" else []), *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_layer_that_does_not_fit_is_refused_before_it_is_made(capsys, monkeypatch, steady):
    monkeypatch.setattr("cpumoe.bench.weights.available_memory", lambda: 1 << 30)
    code, _, err = bench(capsys, "--shape", "deepseek-v3", "--tokens", "1")
    assert code == 2
    assert "needs 22.5 GB and 1.1 GB are available" in err
    assert "deepseek-v3-32e" in err


@pytest.mark.parametrize("shape", ["tiny_shape", "tiny_gpt_oss"])
def test_transformers_as_a_peer(capsys, request, steady, shape):
    pytest.importorskip("transformers")
    path = request.getfixturevalue(shape)
    # One thread: torch's own threads wait for each other by spinning, minutes on a busy machine.
    args = ["--shape", path, "--tokens", "1,6", "--threads", "1", "--peer", "transformers"]
    code, out, err = bench(capsys, *args, "--json", "-", *FAST)
    assert code == 0, err
    result = json.loads(out)
    assert problems(result) == []
    for cell in result["cells"]:
        peer = cell["peer"]
        assert peer["name"] == "transformers"
        assert peer["ratio"] == pytest.approx(peer["median_s"] / cell["median_s"])
        assert 0 < peer["error_over_bound"] <= 1
        assert peer["samples_bytes"] == cell["samples_bytes"]  # the same experts
        trials = peer["setting"]["trials_s"]
        chosen = f"{peer['setting']['implementation']} {peer['setting']['format']}"
        assert trials[chosen] == min(trials.values())
        assert "eager bf16" in trials
        assert "eager fp32" in trials


def test_a_peer_that_is_wrong_stops_the_command(capsys, monkeypatch, tmp_path, tiny_shape, steady):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/zero.py").write_text(
        "import numpy as np\n"
        "class Peer:\n"
        "    name = 'zero'\n"
        "    def available(self): return None\n"
        "    def prepare(self, weights, small, threads, memory): pass\n"
        "    def stored(self): return None\n"
        "    def settle(self, x, ids, scores): return {}\n"
        "    def run(self, x, ids, scores): return 1.0, np.zeros(x.shape, np.float32)\n"
        "    def release(self): pass\n"
        "    def roundoff(self, tokens): return 2.0**-8\n"
    )
    monkeypatch.setattr("cpumoe.bench.peers.data_folder", lambda name: tmp_path / name)
    code, _, err = bench(capsys, "--shape", tiny_shape, "--tokens", "2", "--peer", "zero", *FAST)
    assert code == 2
    assert "peer zero" in err
    (tmp_path / "peers/absent.py").write_text(
        "class Peer:\n    name = 'absent'\n    def available(self): return 'no such library'\n"
    )
    code, _, err = bench(capsys, "--shape", tiny_shape, "--peer", "absent", *FAST)
    assert code == 2
    assert "no such library" in err


def test_every_field_of_a_cell_is_checked():
    cell = dict.fromkeys(CELL_FIELDS)
    found = problems({"kind": "layer", "cells": [cell, {}]})
    assert sum(f.startswith("cell 1: ") for f in found) == len(CELL_FIELDS)
    may_be_null = {"peer", "overhead_share", "first_call_s"}
    assert sum(f.startswith("cell 0: ") for f in found) == len(CELL_FIELDS) - len(may_be_null)

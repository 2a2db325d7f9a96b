"""`cpumoe eval` as a user sees it."""

import json
import re

import pytest

import cli_runs
import cpumoe
from cpumoe import _core
from cpumoe.cli.eval import uncertain
from cpumoe.engine.evaluate import Evaluator, evaluate


def run(capsys, *args):
    """(exit code, standard output, standard error) of `cpumoe eval ARGS`."""
    return cli_runs.run(capsys, "eval", *args)


@pytest.fixture(scope="module")
def story(bundled, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text((bundled / "heldout.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    return path


def test_help(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "completion" not in out
    for option in ("--text", "--against", "--window", "--stride", "--tokens", "--json", "--kv"):
        assert option in out


def test_perplexity(capsys, bundled, story):
    code, out, err = run(capsys, bundled, "--text", story, "--window", 64)
    want = evaluate(cpumoe.load(bundled), story.read_text(encoding="utf-8"), window=64).figures()
    assert code == 0
    assert out.startswith(f"{bundled.name}: perplexity {want['perplexity']:.2f} ± ")
    assert f"({want['tokens']} tokens scored in {want['windows']} windows of 64)" in out
    assert len(out.splitlines()) == 1
    assert "tokens/s scored" in err


def test_figures_have_the_digits_that_their_errors_allow():
    assert uncertain(17.34567, 0.01234) == "17.346 ± 0.012"
    assert uncertain(6766.4, 1425.3) == "6766 ± 1425"
    assert uncertain(0.0123456, 0.0004, " %", 100) == "1.235 ± 0.040 %"
    assert uncertain(1.2346e-9, 3e-11) == "(1.235 ± 0.030)e-09"
    assert uncertain(17.345678, None) == "17.346"
    assert uncertain(1.0, 0.0) == "1 ± 0"


def test_comparison_of_two_settings(capsys, bundled, story):
    code, out, _ = run(capsys, bundled, "--text", story, "--against-kv", "fp32", "--tokens", 200)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"{bundled.name}: ")
    assert lines[1].startswith(f"{bundled.name} (kv fp32): perplexity ")
    assert re.search(r"change [+-]\S+ %$", lines[1])  # a single window: no standard error
    assert re.match(r"KL divergence \S+ nats a token; same likeliest token \S+ %$", lines[2])


def test_comparison_of_two_activation_classes(capsys, bundled, story):
    """Weights that are not quantised have no integer products: they keep their own class."""
    options = ["--activations", "fp32", "--against-activations", "int8", "--tokens", 150]
    code, out, _ = run(capsys, bundled, "--text", story, *options)
    assert code == 0
    assert out.startswith(f"{bundled.name} (activations fp32): perplexity ")
    assert f"\n{bundled.name} (activations int8): perplexity " in out
    kl = float(re.search(r"KL divergence (\S+) nats", out)[1])
    own = _core.class_for("bf16", "rows", "int8")
    assert kl == 0 if own == "fp32" else 0 < kl < 1e-4


def test_json(capsys, bundled, story, tmp_path):
    options = ["--text", story, "--against", bundled, "--window", 100, "--stride", 50]
    target = tmp_path / "found.json"
    code, out, err = run(capsys, bundled, *options, "--json", target)
    assert code == 0, err
    assert "KL divergence 0 ± 0 nats" in out
    found = json.loads(target.read_text())
    assert {"commit", "command", "machine", "settings", "text_tokens"} <= set(found)
    assert found["kind"] == "eval"
    assert found["machine"]["cpu_name"]
    assert found["complete"] is True
    assert found["kl"] == 0
    assert found["agreement"] == 1
    assert found["window"] == 100
    assert found["stride"] == 50
    code, out, _ = run(capsys, bundled, *options, "--json", "-")
    again = json.loads(out)
    assert again["perplexity"] == found["perplexity"]
    assert again["settings"] == {"kv": "fp16", "activations": "auto"}
    assert again["against_settings"] == again["settings"]


def test_standard_input(capsys, bundled, story, monkeypatch):
    import io
    import sys

    class Input:
        buffer = io.BytesIO(story.read_bytes())

    monkeypatch.setattr(sys, "stdin", Input)
    assert run(capsys, bundled, "--text", "-")[1] == run(capsys, bundled, "--text", story)[1]


def interrupt_after(monkeypatch, windows):
    """Ctrl-C as the next window begins."""
    run_all = Evaluator.run

    def run_some(self):
        for step in run_all(self):
            if len(self.result.sums) >= windows:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Evaluator, "run", run_some)


def test_an_interrupt_reports_what_was_measured(capsys, bundled, story, monkeypatch):
    interrupt_after(monkeypatch, 3)
    code, out, err = run(capsys, bundled, "--text", story, "--window", 50, "--json", "-")
    found = json.loads(out)
    assert code == 130
    assert found["windows"] == 3
    assert found["tokens"] == 3 * 49
    assert found["complete"] is False
    assert re.search(r"Interrupted: \d+ tokens were not scored", err)


def test_an_interrupt_before_anything_was_measured(capsys, bundled, story, monkeypatch):
    interrupt_after(monkeypatch, 0)
    code, out, err = run(capsys, bundled, "--text", story)
    assert code == 130
    assert out == ""
    assert "nothing to report" in err


BAD = {
    "no text": (["MODEL"], "--text"),
    "absent text": (["MODEL", "--text", "/nonexistent"], "/nonexistent: cannot be read"),
    "a directory": (["MODEL", "--text", "/"], "must be a regular file"),
    "a device": (["MODEL", "--text", "/dev/zero"], "must be a regular file"),
    "empty": (["MODEL", "--text", "empty"], "got 0 tokens"),
    "one token": (["MODEL", "--text", "one"], "got 1 token."),
    "no UTF-8": (["MODEL", "--text", "bytes"], "must be UTF-8 text; byte 2 is not"),
    "absent model": (["/nonexistent", "--text", "story"], "no such directory"),
    "absent other": (["MODEL", "--text", "story", "--against", "/none"], "no such directory"),
    "window": (["MODEL", "--text", "story", "--window", "5000"], "the window must be"),
    "stride": (["MODEL", "--text", "story", "--stride", "513"], "the stride must be"),
    "kv": (["MODEL", "--text", "story", "--against-kv", "int3"], "'--against-kv'"),
    "activations": (
        ["MODEL", "--text", "story", "--against-activations", "x"],
        "'--against-activations'",
    ),
    "tokens": (["MODEL", "--text", "story", "--tokens", "0"], "--tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_sentence(name, capsys, bundled, story, tmp_path):
    files = {"empty": b"", "one": b"a", "bytes": b"ab\xff", "story": story.read_bytes()}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    args, message = BAD[name]
    words = [bundled if a == "MODEL" else tmp_path / a if a in files else a for a in args]
    cli_runs.require_a_sentence(capsys, ["eval", *words], message)


def test_commands_of_the_page_parse():
    assert cli_runs.parse_commands("docs/eval.md") > 2

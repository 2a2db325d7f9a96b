"""`cpumoe quantize` as a user sees it."""

import re

import pytest

import cli_runs
import cpumoe


def run(capsys, *args):
    """(exit code, standard output, standard error) of `cpumoe quantize ARGS`."""
    return cli_runs.run(capsys, "quantize", *args)


def test_help(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for option in ("--format", "--attention", "--head", "--scales", "--calibrate", "--text"):
        assert option in out


def test_errors_of_the_weights_and_the_perplexities(capsys, bundled, tmp_path):
    out = tmp_path / "int8"
    code, text, err = run(capsys, bundled, out, "--format", "int8_g128", "--tokens", 300)
    assert code == 0, err
    lines = text.splitlines()
    assert lines[0].split() == ["matrices", "parameters", "bits", "each", "error"]
    assert re.fullmatch(r"experts +288 +9,437,184 +8\.13 +0\.6\d\d %", lines[1])
    assert re.fullmatch(r"attention +24 +1,179,648 +8\.13 +0\.6\d\d %", lines[2])
    assert re.fullmatch(r"all +312 +10,616,832 +8\.13 +0\.6\d\d %", lines[3])
    assert lines[4].startswith(f"{out}: int8_g128, 0.013 GB from 0.023 GB in ")
    assert lines[5].startswith("tiny-stories-moe: perplexity 1.7")
    assert re.match(r"int8: perplexity 1\.7\d+, change [+-]?0\.\d+ %", lines[6])
    assert lines[7].startswith("KL divergence ")
    assert cpumoe.load(out).generate("Once", max_tokens=2, temperature=0).ids


def test_without_a_text_it_says_so(capsys, tmp_path, bundled):
    source = tmp_path / "source"
    source.mkdir()
    for file in bundled.iterdir():
        if file.name != "heldout.txt":
            (source / file.name).symlink_to(file)
    code, text, _ = run(capsys, source, tmp_path / "out")
    assert code == 0
    assert text.splitlines()[-1] == (
        "Perplexity was not measured, for want of a text: give --text FILE."
    )
    code, text, _ = run(capsys, source, tmp_path / "again", "--no-eval", "--format", "mxfp4")
    assert code == 0
    assert "erplexity" not in text


BAD = {
    "format": (["MODEL", "OUT", "--format", "q5"], "--format: must be mxfp4, or one of int8"),
    "scales": (["MODEL", "OUT", "--scales", "best"], "'best' is not one of 'search'"),
    "absent model": (["/nonexistent", "OUT"], "no such directory"),
    "absent text": (["MODEL", "OUT", "--text", "/nonexistent"], "cannot be read"),
    "absent calibration": (["MODEL", "OUT", "--calibrate", "/nonexistent"], "cannot be read"),
    "tied head": (["MODEL", "OUT", "--head"], "must have a head of its own"),
    "into itself": (["MODEL", "MODEL"], "a directory apart from the model"),
    "shards": (["MODEL", "OUT", "--shard-gb", "0"], "'--shard-gb'"),
    "endless shards": (["MODEL", "OUT", "--shard-gb", "nan"], "'--shard-gb'"),
    "a file": (["MODEL", "FILE"], "the output must be a new directory"),
    "scale type": (
        ["MODEL", "OUT", "--scale-dtype", "BF8"],
        "'BF8' is not one",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_sentence(name, capsys, bundled, tmp_path):
    args, message = BAD[name]
    (tmp_path / "file").touch()
    named = {"MODEL": bundled, "OUT": tmp_path / "out", "FILE": tmp_path / "file"}
    words = [named.get(a, a) for a in args]
    cli_runs.require_a_sentence(capsys, ["quantize", *words], message)
    assert not (tmp_path / "out").exists()


def test_commands_of_the_page_parse():
    assert cli_runs.parse_commands("docs/quantize.md") > 2

"""Runs of the command line in this process, and the commands of a page."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from cpumoe.cli.main import app, main

ROOT = Path(__file__).resolve().parents[1]


def run(capsys, *args):
    """(exit code, standard output, standard error) of `cpumoe ARGS`."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, args)])
    out = capsys.readouterr()
    return stop.value.code or 0, out.out, out.err


def require_a_sentence(capsys, args, message):
    """`cpumoe ARGS` refuses bad input in words that hold `message`."""
    code, out, err = run(capsys, *args)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert out == ""


def parse_commands(page):
    """Parses the `$ cpumoe ...` lines of a page without running them; how many there are."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\$ cpumoe (.*)$", text, re.M)
    for line in commands:
        verb, *words = shlex.split(line)
        group = typer.main.get_command(app)
        context = group.make_context("cpumoe", [verb, *words])
        _, command, rest = group.resolve_command(context, [verb, *words])
        command.make_context(verb, rest, parent=context)
    return len(commands)

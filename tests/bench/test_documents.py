"""The pages about benchmarks: fields, commands and examples are true."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import typer

import cpumoe.bench
from cpumoe.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/benchmarks.md", *sorted((ROOT / "benchmarks/layer").glob("*.sh"))]
MODULES = [m.name for m in pkgutil.iter_modules(cpumoe.bench.__path__)]


def commands():
    """Every `cpumoe ...` command of the pages, as words."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ )?(cpumoe .*)$", text, re.M):
            yield pytest.param(shlex.split(line.replace("$out", "."))[1:], id=line)


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_parses(words):
    context = typer.main.get_command(app).make_context("cpumoe", list(words))
    while True:
        command = context.command
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        _, command, rest = command.resolve_command(context, rest)
        context = command.make_context(command.name, rest, parent=context)


def test_the_table_of_fields_is_the_one_that_is_printed():
    spec = importlib.util.spec_from_file_location("fields", ROOT / "benchmarks/fields.py")
    fields = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fields)
    text = (ROOT / "benchmarks/README.md").read_text()
    assert text.endswith(fields.tables()), "run benchmarks/fields.py and paste"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"cpumoe.bench.{name}")
    assert doctest.testmod(module).failed == 0


def test_the_package_imports_no_framework():
    import subprocess
    import sys

    code = (
        "import sys, importlib\n"
        f"for name in {MODULES}: importlib.import_module(f'cpumoe.bench.{{name}}')\n"
        "print([m for m in ('torch', 'transformers', 'rich', 'typer') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"

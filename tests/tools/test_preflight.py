from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PREFLIGHT = Path(__file__).parents[2] / "tools" / "preflight"


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PREFLIGHT)], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def refusal(**environment: str) -> str:
    """The one sentence of a refusal."""
    done = run(**environment)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("cpumoe: ")
    assert line.endswith(".")
    return line


def test_this_machine_passes_silently() -> None:
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_programs() -> None:
    assert "there is no nowhere" in refusal(PYTHON="nowhere")
    assert "there is no nowhere" in refusal(CXX="nowhere")


# A python that answers the probes of preflight in order: version, 3.11, venv, headers.
@pytest.mark.parametrize(
    ("fails_at", "reason"),
    [
        ("version_info\\[:2\\]", "does not start"),
        ("(3, 11)", "is 3.9"),
        ("import venv", "apt install python3-venv"),
        ("Python.h", "apt install python3-dev"),
    ],
)
def test_unusable_python(tmp_path: Path, fails_at: str, reason: str) -> None:
    script = f"case \"$2\" in *'{fails_at.replace(chr(92), '')}'*) exit 1 ;; esac; echo 3.9"
    assert reason in refusal(PYTHON=program(tmp_path / "python3", script))


def test_old_compiler(tmp_path: Path) -> None:
    cxx = program(tmp_path / "g++", "echo '11 __clang__'")
    assert "is version 11" in refusal(CXX=cxx)


def test_clang_passes_and_newer_gcc_passes(tmp_path: Path) -> None:
    assert run(CXX=program(tmp_path / "clang++", "echo '4 1'")).returncode == 0
    assert run(CXX=program(tmp_path / "g++", "echo '14 __clang__'")).returncode == 0


def test_broken_compiler() -> None:
    assert "cannot preprocess" in refusal(CXX="true")

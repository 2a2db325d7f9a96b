from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parents[2] / "src" / "cpumoe" / "_core.pyi"


def test_stub_says_what_the_module_has(tmp_path: Path) -> None:
    made = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q"]
    command += ["-m", "cpumoe._core", "-o", str(made)]
    subprocess.run(command, check=True)
    assert made.read_text() == STUB.read_text(), "run `make stubs`"

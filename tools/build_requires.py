"""Print what pyproject.toml requires to build, one requirement a line."""

from __future__ import annotations

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

if __name__ == "__main__":
    print(*tomllib.loads(PYPROJECT.read_text())["build-system"]["requires"], sep="\n")

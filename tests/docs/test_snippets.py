"""Every ```python block of the README and docs runs, in order, one namespace per page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = page.read_text()
    if "import torch" in source or "import transformers" in source:
        pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def test_readme_first_screen() -> None:
    """One sentence, one command, five lines of Python, one table, within the first 45 lines."""
    text = (ROOT / "README.md").read_text()
    first = "\n".join(text.splitlines()[:45])
    python = BLOCK.findall(first)
    assert len(python) == 1
    assert len([line for line in python[0].splitlines() if line.strip()]) <= 5
    assert "make run" in first
    assert re.search(r"^\|.*\|$", first, re.M), "the first screen holds one table"

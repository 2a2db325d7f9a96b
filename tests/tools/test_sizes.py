from __future__ import annotations

from pathlib import Path

import pytest

from tools import sizes

ROOT = Path(__file__).parents[2]


def write(path: Path, lines: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n" * lines)


def test_this_repository_holds() -> None:
    assert sizes.main([str(ROOT)]) == 0


def test_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "core" / "kernels" / "dot" / "a.cc", 800)
    write(tmp_path / "core" / "b.h", 400)
    assert sizes.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "warning: core/kernels/dot/a.cc: 800 lines" in text
    assert "b.h" not in text
    assert "core/kernels/dot      1    800      800" in text
    write(tmp_path / "src" / "c.py", 801)
    assert sizes.main([str(tmp_path)]) == 1
    assert "src/c.py:1: 801 lines; at most 800" in capsys.readouterr().out


def test_an_empty_tree_fails(tmp_path: Path) -> None:
    assert sizes.main([str(tmp_path)]) == 1

"""Print lines of code per folder and hold every file to its budget.

Usage: python tools/sizes.py [ROOT]

A file over 400 lines is listed; one over 800 fails (exit code 1).
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SOFT, HARD = 400, 800
SUFFIXES = {".cc", ".h", ".inc", ".py", ".pyi", ".cmake", ".md", ".toml", ".html", ".css", ".js"}
NAMES = {"CMakeLists.txt", "Makefile", "run", "preflight"}
# Made by a tool from another file of the repository.
GENERATED = {"src/cpumoe/_core.pyi"}


def listed_files(root: Path) -> list[str]:
    """Tracked and new files that git does not ignore; every file where there is no git."""
    try:
        text = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        return sorted(set(text.splitlines()))
    except (OSError, subprocess.CalledProcessError):
        return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def count_lines(root: Path) -> dict[str, int]:
    """Lines of each source file."""
    counts = {}
    for name in listed_files(root):
        path = root / name
        source = path.suffix in SUFFIXES or path.name in NAMES
        if source and name not in GENERATED and path.is_file():
            counts[name] = len(path.read_text(errors="replace").splitlines())
    return counts


def folder_of(name: str) -> str:
    """The row of the table: two levels, as core/kernels or src/cpumoe; three below these."""
    parts = name.split("/")[:-1]
    depth = 3 if parts[:2] in (["core", "kernels"], ["src", "cpumoe"]) else 2
    return "/".join(parts[:depth]) or "."


def main(arguments: list[str]) -> int:
    """Print the table and the files over budget; the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    counts = count_lines(root)
    if not counts:
        print(f"sizes: no source file below {root}")
        return 1
    table: dict[str, list[int]] = defaultdict(list)
    for name, lines in counts.items():
        table[folder_of(name)].append(lines)
    width = max(len(folder) for folder in table)
    print(f"{'folder':<{width}}  files  lines  longest")
    for folder, lines_of in sorted(table.items()):
        print(f"{folder:<{width}}  {len(lines_of):5}  {sum(lines_of):5}  {max(lines_of):7}")
    print(f"{'all':<{width}}  {len(counts):5}  {sum(counts.values()):5}")
    failed = False
    for name, lines in sorted(counts.items(), key=lambda item: -item[1]):
        if lines > HARD:
            failed = True
            print(f"{name}:1: {lines} lines; at most {HARD} are allowed")
        elif lines > SOFT:
            print(f"warning: {name}: {lines} lines; aim for {SOFT}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

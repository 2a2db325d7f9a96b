"""Print the support table of docs/formats.md: which kernels read which weight format.

Usage: python tools/support_table.py [--write]

Made from the lists that the native module is compiled from (core/formats/formats.inc and
core/kernels/dot/kernels.inc) and from the list of model families; --write puts it into
docs/formats.md between its markers. It needs an x86-64 build, which holds every kernel row.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from cpumoe import _core
from cpumoe.models import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "formats.md"
BEGIN, END = "<!-- support table: tools/support_table.py -->\n", "<!-- end of table -->\n"
GROUP = re.compile(r"_g\d+$|_row$")
CELLS = (
    ("avx512_bf16", "bf16"),
    ("avx512", "fp32"),
    ("avx512", "int8"),
    ("avx2", "fp32"),
    ("avx2", "int8"),
    ("scalar", "fp32"),
    ("scalar", "int8"),
)

Row = dict[str, Any]


def shapes(kernels: list[Row], code: str, layout: str, isa: str, act_class: str) -> str:
    """The kernel shapes of one cell: "stream, block"; a dash where there are none."""
    names = []
    for k in kernels:
        if (k["code"], k["layout"], k["isa"], k["act_class"]) == (code, layout, isa, act_class):
            shape = re.sub(f"^{isa}_|_{layout}_.*$", "", k["name"])
            names.append(shape.removesuffix("_int8"))
    return ", ".join(dict.fromkeys(names)) or "-"


def scale_grid(members: list[Row]) -> str:
    """What shares a scale, in features x inputs: "1 x 16, 32, ..., row"."""
    first = members[0]
    if first["scale_rows"] == 0:
        return "in the block" if first["block_elements"] > 8 else "none"
    if first["scale_rows"] == -1:
        return "tensor"
    inputs = ", ".join("row" if m["scale_cols"] == -1 else str(m["scale_cols"]) for m in members)
    return f"{first['scale_rows']} x {inputs}"


def table() -> str:
    """The table and the list of families."""
    kernels = [k for k in _core.kernels() if k["room"] == "dot"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for f in _core.formats():
        base = f["name"] if f["scale_cols"] == 0 else GROUP.sub("_*", f["name"])
        groups.setdefault((base, f["code"]), []).append(f)
    lines = [
        "| format | a scale for | zero point | class | layout | "
        + " | ".join(f"{isa}, {act_class}" for isa, act_class in CELLS)
        + " |",
        "| " + " | ".join(["---"] * (5 + len(CELLS))) + " |",
    ]
    for (base, code), members in groups.items():
        name = base if len(members) > 1 else members[0]["name"]
        for layout in ("rows", "columns"):
            cells = [shapes(kernels, code, layout, *cell) for cell in CELLS]
            if set(cells) == {"-"}:
                continue
            fixed = (scale_grid(members), members[0]["zeros"], members[0]["act_class"], layout)
            lines.append(f"| `{name}` | " + " | ".join((*fixed, *cells)) + " |")
    families = ", ".join(f"`{name}`" for name in FAMILIES)
    lines += ["", f"Families, each with every format above: {families}."]
    return "\n".join(lines) + "\n"


def page_with(page: str, contents: str) -> str:
    """The page with new contents between its markers."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + contents + END + rest.split(END)[1]


def main(arguments: list[str]) -> int:
    """Print the table, or write it into the page; the exit code."""
    if arguments == ["--write"]:
        PAGE.write_text(page_with(PAGE.read_text(), table()))
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""docs/formats.md holds the table that the kernel and format lists give."""

import re

import pytest

from cpumoe import _core
from tools import support_table


def test_page_holds_the_tools_table() -> None:
    """`python tools/support_table.py --write` brings it up to date."""
    if not any(k["isa"] == "avx2" for k in _core.kernels()):
        pytest.skip("this build has no x86-64 kernels")
    page = support_table.PAGE.read_text()
    assert support_table.page_with(page, support_table.table()) == page


def test_every_format_has_a_row_and_a_scalar_kernel() -> None:
    """No format that a kernel does not read, in its default class, on any CPU."""
    rows = re.findall(r"^\| `(\S+)` \|(.*)\|$", support_table.table(), re.M)
    names = {name for name, _ in rows}
    for f in _core.formats():
        assert names & {f["name"], support_table.GROUP.sub("_*", f["name"])}, f["name"]
    for name, cells in rows:
        assert "plain" in cells.split("|")[-2], name
        assert "plain" in cells.split("|")[-1], name


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    """The text around the table is the author's."""
    page = "a\n" + support_table.BEGIN + "old\n" + support_table.END + "b\n"
    assert support_table.page_with(page, "new\n") == page.replace("old", "new")

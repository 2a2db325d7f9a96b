#!/usr/bin/env python3
"""Prints the tables of result fields that benchmarks/README.md ends with.

python benchmarks/fields.py
"""

from __future__ import annotations

from cpumoe.bench import result


def tables() -> str:
    """All tables as markdown."""
    parts = []
    for title, fields in (
        ("the object", result.RESULT_FIELDS),
        ("`machine`", result.MACHINE_FIELDS),
        ("a cell of `bench layer`", result.CELL_FIELDS),
        ("its `peer`", result.PEER_FIELDS),
        ("a cell of `bench e2e`", result.E2E_FIELDS),
        ("its `peer` (`benchmarks/e2e/against_llama_cpp.py`)", result.E2E_PEER_FIELDS),
    ):
        rows = [f"| `{name}` | {meaning} |" for name, (_, meaning) in fields.items()]
        parts.append("\n".join([f"### {title}", "", "| field | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(tables(), end="")

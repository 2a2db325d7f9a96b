"""Check that code compiled for one instruction set cannot end up in what another CPU runs.

Usage: python tools/check_isa_leak.py BUILD_DIR

Reads BUILD_DIR/compile_commands.json. A file called <isa>.cc is compiled with that ISA's flags, so
its object may define nothing that the linker could merge with a portable copy (weak symbols),
nothing outside namespace cpumoe::<isa>, no static initialiser, and may call only a short list of
functions. Every other file must be compiled without those flags.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ISA_ROW = re.compile(
    r"^cpumoe_isa\((\w+) +(?:\"[^\"]*\"|\w+)((?:\s+-[\w=.+-]+)*)\s*\)", re.MULTILINE
)
# What a kernel may call: moves that the compiler emits itself, libm, and the linker's own symbols.
ALLOWED_CALLS = {
    "memcpy", "memmove", "memset", "memcmp",
    "expf", "exp", "tanhf", "erff", "logf", "sqrtf", "fmaf",
    "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail", "__stack_chk_guard",
}  # fmt: skip


@dataclass(frozen=True)
class Symbol:
    """One line of nm: demangled name and type letter."""

    name: str
    kind: str


@dataclass(frozen=True)
class Unit:
    """One compiled file: source, object, compiler arguments."""

    source: str
    object: Path
    arguments: list[str]


def read_isas(text: str) -> dict[str, list[str]]:
    """ISA name -> its flags, from the rows of cmake/isa.cmake; rows without flags are left out."""
    return {name: flags.split() for name, flags in ISA_ROW.findall(text) if flags}


def read_units(build: Path) -> list[Unit]:
    """The compile commands of a build."""
    units = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        arguments = shlex.split(entry["command"])
        output = Path(entry["directory"]) / arguments[arguments.index("-o") + 1]
        units.append(Unit(entry["file"], output, arguments))
    return units


def read_symbols(path: Path) -> list[Symbol]:
    """Symbols of an object file."""
    text = subprocess.run(
        ["nm", "--demangle", "--format=posix", str(path)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    symbols = []
    for line in text.splitlines():
        # Demangled names hold blanks; the type is the last lone letter, before address and size.
        match = re.match(r"^(.*) ([A-Za-z?])(?: +[0-9a-f]+)*\s*$", line)
        if match:
            symbols.append(Symbol(match[1], match[2]))
    return symbols


def symbol_problem(symbol: Symbol, isa: str) -> str | None:
    """Why an object of `isa` may not have this symbol; None if it may."""
    name, kind = symbol.name, symbol.kind
    inside = f"cpumoe::{isa}::" in name.split("(")[0]
    if kind in "WVvwui":
        return f"weak symbol {name}: the linker may give this copy to every CPU"
    if "_GLOBAL__sub_I" in name or "static_initialization_and_destruction" in name:
        return f"static initialiser {name}: it runs on every CPU"
    if kind == "U":
        if inside or name in ALLOWED_CALLS:
            return None
        return f"calls {name}, which is not on the list of allowed functions"
    if kind.isupper() and not inside:
        return f"defines {name} outside namespace cpumoe::{isa}"
    return None


def isa_of(source: str, isas: dict[str, list[str]]) -> str | None:
    """The ISA that a file is compiled for, by its name."""
    name = Path(source).stem
    return name if name in isas and Path(source).suffix == ".cc" else None


def problems(units: list[Unit], isas: dict[str, list[str]]) -> Iterator[str]:
    """Every problem of a build, one line each."""
    for unit in units:
        isa = isa_of(unit.source, isas)
        for name, flags in isas.items():
            used = [f for f in flags if f in unit.arguments]
            if name == isa and used != flags:
                yield f"{unit.source}: compiled without {' '.join(flags)}"
            elif name != isa and used and not (isa and set(used) <= set(isas[isa])):
                yield f"{unit.source}: compiled with {' '.join(used)}, flags of {name}"
        if isa is None:
            continue
        if "-ffp-contract=off" not in unit.arguments:
            yield f"{unit.source}: compiled without -ffp-contract=off"
        if not unit.object.exists():
            yield f"{unit.source}: {unit.object} is missing; build first"
            continue
        for symbol in read_symbols(unit.object):
            reason = symbol_problem(symbol, isa)
            if reason:
                yield f"{unit.source}: {reason}"


def main(arguments: list[str]) -> int:
    """Check one build; the exit code."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    cmake = Path(__file__).parents[1] / "cmake" / "isa.cmake"
    isas = read_isas(cmake.read_text())
    units = read_units(Path(arguments[0]))
    found = list(problems(units, isas))
    for line in found:
        print(line)
    checked = sum(1 for u in units if isa_of(u.source, isas))
    print(f"check_isa_leak: {checked} objects of {', '.join(isas)}, {len(found)} problems")
    if checked == 0:
        print("check_isa_leak: this build has no ISA files, so nothing was checked")
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

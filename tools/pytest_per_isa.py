"""Run pytest under the instruction sets of this machine, the best one first.

Usage: python tools/pytest_per_isa.py [PYTEST ARGUMENT ...]

The best one runs every test. A lower one changes which kernels are chosen and nothing else, so it
runs the tests that compare numbers and are not marked `slow`: under scalar and avx2 operators and a
model of each family, under the ones between operators only, nowhere refusals. (The C++ tests take
every kernel that the CPU has.) Ends with 1 if a run fails.
"""

from __future__ import annotations

import os
import subprocess
import sys

from cpumoe import _core

OPERATORS = ["tests/ops", "tests/property"]
MODELS = ["tests/models/test_logits.py"]
# With a kernel of their own for every code; the others take some from these.
WHOLE = ("scalar", "avx2")


def chosen(isa: str, best: str) -> list[str]:
    """What pytest is told to run under `isa`."""
    if isa == best:
        return []
    options = ["-m", "not slow", "--ignore-glob=*_refusals.py"]
    return [*options, *OPERATORS, *(MODELS if isa in WHOLE else [])]


def main(arguments: list[str]) -> int:
    """Run them all, also after a failure; the exit code."""
    isas = list(reversed(_core.Machine.probe().isa))
    failed = []
    for isa in isas:
        command = [sys.executable, "-m", "pytest", *chosen(isa, isas[0]), *arguments]
        print(f"CPUMOE_ISA={isa} {' '.join(command[1:])}", flush=True)
        done = subprocess.run(command, env=os.environ | {"CPUMOE_ISA": isa}, check=False)
        if done.returncode != 0:
            failed.append(isa)
    if failed:
        print(f"pytest_per_isa: failed under {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

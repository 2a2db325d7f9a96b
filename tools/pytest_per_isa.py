"""Run pytest once under each instruction set of this machine, the best one first.

Usage: python tools/pytest_per_isa.py [PYTEST ARGUMENT ...]

The best one runs every test; the others leave out those marked `slow`. Ends with 1 if a run fails.
"""

from __future__ import annotations

import os
import subprocess
import sys

from cpumoe import _core


def main(arguments: list[str]) -> int:
    """Run them all, also after a failure; the exit code."""
    isas = list(reversed(_core.Machine.probe().isa))
    failed = []
    for isa in isas:
        chosen = [] if isa == isas[0] else ["-m", "not slow"]
        command = [sys.executable, "-m", "pytest", *chosen, *arguments]
        print(f"CPUMOE_ISA={isa} {' '.join(command[1:])}", flush=True)
        done = subprocess.run(command, env=os.environ | {"CPUMOE_ISA": isa}, check=False)
        if done.returncode != 0:
            failed.append(isa)
    if failed:
        print(f"pytest_per_isa: failed under {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""No object of the native module, however it was made, ends the process."""

from __future__ import annotations

import subprocess
import sys

from cpumoe import _core

CLASSES = sorted(
    name
    for name, value in vars(_core).items()
    if isinstance(value, type) and not issubclass(value, BaseException)
)

# What a process does with an object whose __init__ never ran: `refused` when none can be made.
_PROGRAM = """
import sys, warnings
from cpumoe import _core

warnings.simplefilter("ignore")  # nanobind warns beside the exception
kind = getattr(_core, sys.argv[1])
try:
    made = eval(sys.argv[2])(kind)
except TypeError:
    sys.exit("refused")
for name, member in vars(kind).items():
    if name.startswith("__") and name != "__repr__":
        continue
    if isinstance(member, staticmethod) or type(member).__name__ == "nb_func":
        continue  # takes no object
    try:
        value = getattr(made, name)
        if callable(value):
            value()
    except TypeError:
        continue
    sys.exit(f"{name} gave {value!r}")
for use in (
    lambda: _core.linear(made, made, None, "rows", made, made, "auto"),
    lambda: _core.moe(made, made, made, made, made, made, False, "auto"),
    lambda: _core.Decoder(None, made),
    lambda: _core.KvCache(made, 8),
):
    try:
        use()
    except Exception:
        continue
    sys.exit("an operator took it")
sys.exit("raised")
"""


def test_objects_without_init_raise_and_do_not_abort() -> None:
    assert {"Weight", "Executor", "Decoder", "KvCache", "Machine", "Probe"} <= set(CLASSES)
    for name in CLASSES:
        for make in ("object.__new__", "lambda kind: kind.__new__(kind)"):
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, name, make], capture_output=True, text=True
            )
            end = done.stderr.strip().splitlines()[-1]
            assert done.returncode == 1, (name, make, done.returncode, end)
            assert end in ("refused", "raised"), (name, make, end)

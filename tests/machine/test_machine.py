from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpumoe
from cpumoe import _core


def test_error_is_a_value_error_that_names_the_place() -> None:
    assert issubclass(cpumoe.Error, ValueError)
    with pytest.raises(cpumoe.Error, match=r"^Executor: threads must be at least 1; got 0\. "):
        cpumoe.Executor(0)
    with pytest.raises(cpumoe.Error, match=r"threads must be from 1 to 1024.*got 5000"):
        cpumoe.Executor(5000)


def test_machine_is_this_machine() -> None:
    machine = cpumoe.machine()
    facts = machine.as_dict()
    assert facts["cores"] == machine.cores
    allowed = os.sched_getaffinity(0)
    cpus = [cpu for _, core in machine.cores for cpu in core]
    assert sorted(cpus) == sorted(allowed)
    assert machine.isa[0] == "scalar"
    assert 1 <= machine.default_threads <= len(machine.cores)
    assert 0 < machine.memory_available <= machine.memory
    assert machine.cpu_name in repr(machine)
    for name, value in facts.items():
        assert getattr(machine, name) == value
    with pytest.raises(AttributeError):
        machine.memory = 1  # type: ignore[misc]


def test_machine_of_another_root(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text("Cpus_allowed_list:\t0-2\n")
    machine = _core.Machine.probe_root(str(tmp_path), "scalar")
    assert machine.cores == [(0, [0]), (0, [1]), (0, [2])]
    assert machine.isa == ["scalar"]
    assert machine.isa_reason == "forced by CPUMOE_ISA=scalar"
    with pytest.raises(cpumoe.Error, match="must name an instruction set"):
        _core.Machine.probe_root(str(tmp_path), "mmx")


def python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_thread_count_comes_from_the_environment() -> None:
    code = "import cpumoe; print(cpumoe.Executor().threads, cpumoe.Executor(2).threads)"
    assert python(code, CPUMOE_THREADS="3") == "3 2"
    refused = "import cpumoe\ntry: cpumoe.Executor()\nexcept cpumoe.Error as e: print(e)"
    text = python(refused, CPUMOE_THREADS="many")
    assert text.startswith('CPUMOE_THREADS: must be a number from 1 to 1024; got "many".')


def test_affinity_mask_limits_the_threads() -> None:
    code = (
        "import os, cpumoe; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "print(cpumoe.machine().default_threads)"
    )
    assert python(code) == "1"


def test_an_executor_keeps_the_callers_affinity() -> None:
    code = (
        "import os, cpumoe; before = os.sched_getaffinity(0); e = cpumoe.Executor(2);"
        "p = cpumoe._core.Probe(1 << 20); p.read_gb_per_s(e);"
        "print(os.sched_getaffinity(0) == before)"
    )
    assert python(code) == "True"


def test_importing_imports_no_framework() -> None:
    code = (
        "import sys, cpumoe; print(sorted({m.split('.')[0] for m in sys.modules} &"
        "{'torch', 'jax', 'transformers', 'tokenizers', 'typer', 'rich', 'jinja2', 'ml_dtypes'}))"
    )
    assert python(code) == "[]"


def test_probe_measures() -> None:
    probe = _core.Probe(8 << 20)
    executor = cpumoe.Executor()
    assert probe.bytes == 8 << 20
    assert probe.read_gb_per_s(executor) > 0
    assert probe.fma_gflop_per_s(executor) > 0
    with pytest.raises(cpumoe.Error, match="bytes must be at least 1048576; got 5"):
        _core.Probe(5)
    with pytest.raises(TypeError):
        probe.read_gb_per_s(3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_executor_works_in_a_forked_child() -> None:
    executor = cpumoe.Executor(2)
    probe = _core.Probe(1 << 20)
    probe.read_gb_per_s(executor)
    child = os.fork()
    if child == 0:
        os._exit(0 if probe.read_gb_per_s(executor) > 0 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0

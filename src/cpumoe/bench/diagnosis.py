"""What ``cpumoe doctor`` knows: facts of the machine, chosen kernels with reasons, and advice."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import cpumoe
from cpumoe import _core
from cpumoe.bench.formats import ROWS, Row
from cpumoe.bench.measure import disagreement
from cpumoe.bench.result import machine_facts

# CPU features that this version has no kernels for: flag of /proc/cpuinfo -> name. A feature stops
# being reported once an instruction set of that name is compiled in.
_UNUSED = {"avx512f": "avx512", "amx_tile": "amx"}

_PASSES = 7


def _read(path: Path) -> str | None:
    """Text of a file of /proc or /sys, None when it does not exist or may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _chosen(text: str | None) -> str | None:
    """The word in brackets: ``always [madvise] never`` -> ``madvise``."""
    if text is None or "[" not in text:
        return text
    return text.partition("[")[2].partition("]")[0]


def system_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Settings of the system that move figures. None stands for: the system does not say.

    Args:
        root: where ``proc`` and ``sys`` are (tests).
    """
    cpu = root / "sys/devices/system/cpu"
    no_turbo, boost = _read(cpu / "intel_pstate/no_turbo"), _read(cpu / "cpufreq/boost")
    info = _read(root / "proc/cpuinfo") or ""
    flags: set[str] = set()
    for line in info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
            break
    load = _read(root / "proc/loadavg")
    smt = _read(cpu / "smt/active")
    return {
        "governor": _read(cpu / "cpu0/cpufreq/scaling_governor"),
        "turbo": no_turbo == "0"
        if no_turbo is not None
        else boost == "1"
        if boost is not None
        else None,
        "smt": smt == "1" if smt is not None else None,
        "huge_pages": _chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        "virtual": "hypervisor" in flags if flags else None,
        "unused_features": [name for flag, name in _UNUSED.items() if flag in flags],
        "load_average": float(load.split()[0]) if load else None,
        "memory_used": _cgroup_memory(root),
        "environment": {
            k: os.environ[k] for k in ("CPUMOE_ISA", "CPUMOE_THREADS") if k in os.environ
        },
    }


def _cgroup_memory(root: Path) -> int | None:
    text = _read(root / "sys/fs/cgroup/memory.current")
    return int(text) if text and text.isdigit() else None


def chosen_kernels() -> dict[str, Any]:
    """The dot kernel for each code, layout and number of tokens, with what refused the others.

    Formats that share a code share its kernels: each code stands under the name of its first one,
    in that format's default class of activations.

    Returns:
        ``dot``: list of {format, code, class, layout, tokens_min, tokens_max (None: any), kernel,
        refused}, refused being [{kernel, reason}]; ``other``: room -> kernel.
    """
    table: list[dict[str, Any]] = []
    rows = [row for row in _core.kernels() if row["room"] == "dot"]
    first: dict[str, Row] = {}
    for row in ROWS.values():
        first.setdefault(row.code, row)
    for format in first.values():
        for layout in ("rows", "columns"):
            act_class = _core.class_for(format.name, layout)
            key = (format.code, layout, act_class)
            mine = [r for r in rows if (r["code"], r["layout"], r["act_class"]) == key]
            starts = {1} | {r["m_min"] for r in mine} | {r["m_max"] + 1 for r in mine}
            found: list[dict[str, Any]] = []
            for tokens in sorted(s for s in starts if mine and 1 <= s < 1 << 31):
                kernel, why = _core.select_dot(format.name, layout, tokens)
                if found and found[-1]["kernel"] == kernel:
                    continue
                if found:
                    found[-1]["tokens_max"] = tokens - 1
                found.append(
                    {
                        "format": format.name,
                        "code": format.code,
                        "class": act_class,
                        "layout": layout,
                        "tokens_min": tokens,
                        "tokens_max": None,
                        "kernel": kernel,
                        "refused": _refusals(why, {str(r["name"]) for r in mine}),
                    }
                )
            table += found
    return {"dot": table, "other": dict(_core.selected())}


def _refusals(why: str, candidates: set[str]) -> list[dict[str, str]]:
    """The refusals of `candidates` out of the core's sentence: ``name reason; name reason``."""
    parts = [part.partition(" ") for part in why.rpartition(": ")[2].split("; ") if part]
    return [{"kernel": n, "reason": reason} for n, _, reason in parts if n in candidates]


def measured_limits(threads: Sequence[int]) -> list[dict[str, Any]]:
    """Medians of read bandwidth and multiply-add rate for each number of threads."""
    from cpumoe.bench.limits import probe

    result = []
    for count in threads:
        limits = probe(cpumoe.Executor(threads=count))
        limits.read_gb_per_s()
        read = [limits.read_gb_per_s() for _ in range(_PASSES)]
        fma = [limits.fma_gflop_per_s() for _ in range(_PASSES)]
        result.append(
            {
                "threads": count,
                "read_gb_per_s": statistics.median(read),
                "fma_gflop_per_s": statistics.median(fma),
                "disagreement": max(disagreement(list(pairwise(x))) for x in (read, fma)),
            }
        )
    return result


def diagnose(measure: bool = True) -> dict[str, Any]:
    """Everything: machine, system, kernels, limits (None when not measured) and advice."""
    machine = machine_facts()
    system = system_facts()
    threads = cpumoe.Executor().threads
    limits = measured_limits(sorted({1, threads})) if measure else None
    return {
        "version": cpumoe.__version__,
        "machine": machine
        | {
            "threads": threads,
            "affinity": sorted(os.sched_getaffinity(0)),
            "online": os.cpu_count(),
        },
        "system": system,
        "kernels": chosen_kernels(),
        "limits": limits,
        "advice": advice(machine | {"threads": threads}, system, limits),
    }


def advice(
    machine: Mapping[str, Any],
    system: Mapping[str, Any],
    limits: Sequence[Mapping[str, Any]] | None,
) -> list[str]:
    """What to change, one sentence each: the finding, then what to do. Empty when nothing is found.

    Example:
        >>> machine = {"cores": [(0, [0])], "cgroup_cpus": 0, "threads": 4, "isa": ["avx2"],
        ...            "nodes": 1, "cgroup_memory": 0, "memory": 1, "memory_available": 1}
        >>> advice(machine, {}, None)
        ['4 threads are more than the 1 cores that may be used: unset CPUMOE_THREADS or lower it']
    """
    cores, quota = len(machine["cores"]), machine["cgroup_cpus"]
    say: list[str] = []
    if machine["threads"] > cores:
        say.append(
            f"{machine['threads']} threads are more than the {cores} cores that may be used: "
            "unset CPUMOE_THREADS or lower it"
        )
    elif machine["threads"] < cores and not 0 < quota < cores:
        say.append(
            f"{machine['threads']} threads leave {cores - machine['threads']} cores idle: "
            "unset CPUMOE_THREADS or raise it"
        )
    if 0 < quota < cores:
        say.append(
            f"the cgroup allows {quota:g} CPUs of {cores} cores: raise the quota "
            "(cpu.max, docker --cpus) for more speed"
        )
    if machine["isa"] == ["scalar"]:
        say.append(
            f"only scalar kernels may be used ({machine.get('isa_reason', '')}): unset CPUMOE_ISA, "
            "or use a CPU with AVX2, FMA and F16C"
        )
    unused = [f for f in system.get("unused_features", []) if f not in machine["isa"]]
    if unused and "CPUMOE_ISA" not in system.get("environment", {}):
        say.append(
            f"the CPU has {' and '.join(unused)}, for which this version has no kernels: "
            "nothing to change, a later version may be faster"
        )
    if machine["nodes"] > 1:
        say.append(
            f"the cores lie on {machine['nodes']} NUMA nodes: if one node holds the model, bind "
            "the process to it (numactl --cpunodebind=0 --membind=0)"
        )
    if system.get("governor") not in (None, "performance"):
        say.append(
            f"the frequency governor is {system['governor']}: set it to performance "
            "(cpupower frequency-set -g performance)"
        )
    if system.get("turbo") is False:
        say.append("turbo is off: allow it in the firmware or in /sys/devices/system/cpu")
    if system.get("huge_pages") == "never":
        say.append(
            "transparent huge pages are off: set them to madvise "
            "(/sys/kernel/mm/transparent_hugepage/enabled)"
        )
    load = system.get("load_average")
    if load is not None and load > 0.5:
        say.append(
            f"the load average is {load:.1f}: other programs are at work, so figures will be low; "
            "close them"
        )
    limit = machine["cgroup_memory"]
    if 0 < limit < machine["memory"]:
        say.append(
            f"the cgroup allows {limit / 1e9:.1f} GB of {machine['memory'] / 1e9:.1f} GB memory: a "
            "larger model is read from the disk again and again; raise the limit"
        )
    if machine["memory_available"] < 0.25 * machine["memory"]:
        say.append(
            f"only {machine['memory_available'] / 1e9:.1f} GB of memory are free: close other "
            "programs before opening a model larger than that"
        )
    for one in limits or ():
        if one["disagreement"] > 0.10:
            say.append(
                f"the limits with {one['threads']} threads differ by {one['disagreement']:.0%} "
                "from pass to pass: measure again when the machine is quiet"
            )
    return say

"""The result of a benchmark: one JSON object, its fields, and the table made from it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cpumoe
from cpumoe import Error

Field = tuple[tuple[type, ...], str]
"""Accepted types and what the field means, with its unit."""

_NUMBER = (int, float)
_MAYBE = (int, float, type(None))

RESULT_FIELDS: dict[str, Field] = {
    "kind": ((str,), "`layer` or `e2e`"),
    "commit": (
        (str,),
        "git commit of the checkout, `+changes` when files differ from it; or the version",
    ),
    "command": ((str,), "command line that made it"),
    "machine": ((dict,), "what `doctor` knows of the machine, with the measured limits"),
    "cells": ((list,), "one object per measurement, in the order of time"),
}

MACHINE_FIELDS: dict[str, Field] = {
    "cpu_name": ((str,), "as the CPU calls itself"),
    "isa": ((list,), "instruction sets that may be used, the fastest last"),
    "cores": ((list,), "(NUMA node, logical CPUs) of each physical core that may be used"),
    "l3": ((int,), "bytes of last-level cache of a group of cores"),
    "memory": ((int,), "bytes"),
    "read_gb_per_s": (_NUMBER, "measured read bandwidth, 10^9 bytes/s: median over all cells"),
    "fma_gflop_per_s": (_NUMBER, "measured fp32 multiply-add peak, GFLOP/s: median over all cells"),
    "load_average": (_NUMBER, "load of the last minute before the first cell"),
}

_TIMES: dict[str, Field] = {
    "median_s": (_NUMBER, "median wall time, seconds"),
    "spread": (_NUMBER, "distance of the quartiles over the median"),
    "bytes": (_NUMBER, "weight bytes read: each touched expert once; median over the runs"),
    "flops": (_NUMBER, "floating point operations of the three products (a multiply-add is 2)"),
    "gb_per_s": (_NUMBER, "median over the runs of bytes / seconds, 10^9 bytes/s"),
    "gflop_per_s": (_NUMBER, "median over the runs of flops / seconds, 10^9/s"),
    "share_of_bandwidth": (
        _NUMBER,
        "median over the runs of gb_per_s over the bandwidth beside the run",
    ),
    "share_of_peak": (_NUMBER, "median over the runs of gflop_per_s over the peak beside the run"),
    "read_gb_per_s": (_NUMBER, "median bandwidth beside the runs"),
    "fma_gflop_per_s": (_NUMBER, "median multiply-add rate beside the runs"),
    "limit_disagreement": (_NUMBER, "how far neighbouring limits differ, relative"),
    "noisy": ((bool,), "limit_disagreement is over 0.10 even after the last try"),
    "tries": ((int,), "how often the cell was measured"),
    "samples_s": ((list,), "wall time of every run, seconds"),
    "samples_bytes": ((list,), "weight bytes of every run"),
}

CELL_FIELDS: dict[str, Field] = {
    "shape": ((str,), "file in benchmarks/shapes"),
    "format": ((str,), "weight format; hidden states have it too"),
    "activation": ((str,), "precision class of activations inside the products"),
    "tokens": ((int,), "tokens of one call"),
    "threads": ((int,), "worker threads, the caller included"),
    "isa": ((str,), "fastest instruction set that may be used"),
    "kernel": ((str,), "dot kernels of the experts of one run, joined by +"),
    **_TIMES,
    "error_over_bound": (
        _NUMBER,
        "largest error against float64 over its derived bound; at most 1",
    ),
    "overhead_share": (_MAYBE, "fixed cost of the op over median_s, an upper bound; 1 token only"),
    "first_call_s": (_MAYBE, "fixed cost when the program's code is in no cache; 1 token only"),
    "route_s": (_NUMBER, "median time of routing within median_s, seconds"),
    "pages": ((str,), "`huge` or `small` pages behind the weights"),
    "peer": ((dict, type(None)), "the same runs through a peer, or null"),
}

PEER_FIELDS: dict[str, Field] = {
    "name": ((str,), "file in benchmarks/peers"),
    "setting": ((dict,), "version and the setting that was fastest in a trial"),
    **_TIMES,
    "error_over_bound": (
        _NUMBER,
        "error against float64 over the bound of the peer's own arithmetic",
    ),
    "ratio": (_NUMBER, "peer's median_s over ours"),
}

E2E_PEER_FIELDS: dict[str, Field] = {
    "name": ((str,), "the peer"),
    "setting": ((dict,), "version and settings"),
    "correlation": (_NUMBER, "of the peer's logits with ours behind a short prompt"),
    **_TIMES,
    "tokens_per_s": (_NUMBER, "tokens of a call / median_s"),
    "ratio": (_NUMBER, "peer's median_s over ours"),
}

E2E_FIELDS: dict[str, Field] = {
    "model": ((str,), "name of the checkpoint directory"),
    "phase": ((str,), "`prompt` or `decode`"),
    "tokens": ((int,), "tokens of one call"),
    "context": ((int,), "tokens in the cache before the first timed call"),
    "threads": ((int,), "worker threads, the caller included"),
    "isa": ((str,), "fastest instruction set that may be used"),
    **_TIMES,
    "tokens_per_s": (_NUMBER, "tokens of a call / median_s"),
    "time_over_bandwidth": (_NUMBER, "median time of a call over (bytes / bandwidth beside it)"),
    "open_s": (_NUMBER, "seconds from the path to a model that can run"),
    "first_pass_s": (_NUMBER, "seconds of the first, untimed prompt: it maps the pages it touches"),
    "peak_rss_bytes": ((int,), "largest resident memory before the limits are measured"),
    "mapped_bytes": ((int,), "resident bytes of the checkpoint's files"),
    "mapped_huge_bytes": ((int,), "bytes of the files that huge pages mapped when it was timed"),
    "kv_bytes": ((int,), "bytes of keys and values in use"),
    "beyond_bytes": ((int,), "peak_rss_bytes - mapped_bytes - kv_bytes"),
    "peer": ((dict, type(None)), "the same phase in a peer, or null"),
}


def problems(result: Mapping[str, Any]) -> list[str]:
    """What is wrong with a result, as sentences; empty when it fits the schema.

    Example:
        >>> problems({"kind": "layer"})[0]
        'result: commit is missing'
    """
    found = _missing("result", result, RESULT_FIELDS)
    found += _missing("machine", result.get("machine", {}), MACHINE_FIELDS)
    whole = result.get("kind") == "e2e"
    cell_fields = E2E_FIELDS if whole else CELL_FIELDS
    peer_fields = E2E_PEER_FIELDS if whole else PEER_FIELDS
    for i, cell in enumerate(result.get("cells", [])):
        found += _missing(f"cell {i}", cell, cell_fields)
        if isinstance(cell.get("peer"), dict):
            found += _missing(f"cell {i} peer", cell["peer"], peer_fields)
    return found


def _missing(where: str, values: Mapping[str, Any], wanted: Mapping[str, Field]) -> list[str]:
    found = []
    for name, (types, _) in wanted.items():
        if name not in values:
            found.append(f"{where}: {name} is missing")
        elif not isinstance(values[name], types) or (
            isinstance(values[name], bool) and bool not in types
        ):
            found.append(f"{where}: {name} must be {' or '.join(t.__name__ for t in types)}")
    return found


def commit() -> str:
    """Commit of the checkout that this package lies in, else its version."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {cpumoe.__version__}"


def machine_facts() -> dict[str, Any]:
    """What the machine is, without the measured limits."""
    facts: dict[str, Any] = cpumoe.machine().as_dict()
    return facts | {
        "kernel_release": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def make_result(
    kind: str, machine: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], command: str
) -> dict[str, Any]:
    """Puts the object together; raises Error when it does not fit its own schema."""
    result = {
        "kind": kind,
        "commit": commit(),
        "command": command,
        "machine": dict(machine),
        "cells": list(cells),
    }
    wrong = problems(result)
    if wrong:
        raise Error(f"bench: the result must fit its schema; got: {'; '.join(wrong)}. Report this")
    return result


def write_json(result: Mapping[str, Any], target: str) -> None:
    """Writes `result` to the file `target`, or to standard output for ``-``."""
    text = json.dumps(result, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _percent(value: Any) -> str:
    return "-" if value is None else f"{value:.1%}"


def _peer(p: Mapping[str, Any] | None) -> str:
    """A peer's time, our advantage, and where the peer stands against the limits."""
    if not p:
        return "-"
    shares = f"{_percent(p['share_of_bandwidth'])} / {_percent(p['share_of_peak'])}"
    return f"{p['name']} {p['median_s'] * 1e3:.3f} ms, {p['ratio']:.2f}x ({shares} of the limits)"


def table_rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the printed table."""
    peers = any(c["peer"] for c in result["cells"])
    if result["kind"] == "e2e":
        header = [
            "phase",
            "tokens",
            "threads",
            "tok/s",
            "ms",
            "GB/s",
            "of bandwidth",
            "time/limit",
            "GFLOP/s",
            "of peak",
            "noisy",
            *(["peer"] if peers else []),
        ]
        return header, [
            [
                c["phase"],
                str(c["tokens"]),
                str(c["threads"]),
                f"{c['tokens_per_s']:.2f}",
                f"{c['median_s'] * 1e3:.2f}",
                f"{c['gb_per_s']:.1f}",
                _percent(c["share_of_bandwidth"]),
                f"{c['time_over_bandwidth']:.3f}",
                f"{c['gflop_per_s']:.1f}",
                _percent(c["share_of_peak"]),
                "yes" if c["noisy"] else "",
                *([_peer(c["peer"])] if peers else []),
            ]
            for c in result["cells"]
        ]
    header = [
        "shape",
        "format",
        "tokens",
        "threads",
        "isa",
        "ms",
        "spread",
        "GB/s",
        "of bandwidth",
        "GFLOP/s",
        "of peak",
        "overhead",
        "error/bound",
        "noisy",
    ]
    rows = []
    for c in result["cells"]:
        row = [
            c["shape"],
            c["format"],
            str(c["tokens"]),
            str(c["threads"]),
            c["isa"],
            f"{c['median_s'] * 1e3:.3f}",
            _percent(c["spread"]),
            f"{c['gb_per_s']:.1f}",
            _percent(c["share_of_bandwidth"]),
            f"{c['gflop_per_s']:.1f}",
            _percent(c["share_of_peak"]),
            _percent(c["overhead_share"]),
            f"{c['error_over_bound']:.2g}",
            "yes" if c["noisy"] else "",
        ]
        if peers:
            row.append(_peer(c["peer"]))
        rows.append(row)
    return header + (["peer"] if peers else []), rows

"""`cpumoe doctor`: what this machine is, what was chosen and why, what to change."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cpumoe.cli import _options as options

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    json: options.Json = "",
    measure: Annotated[
        bool, typer.Option(help="Measure the read bandwidth and the multiply-add peak.")
    ] = True,
) -> None:
    """Show what this machine is, which kernels are chosen and why, and what to change."""
    from cpumoe.bench.diagnosis import diagnose
    from cpumoe.bench.result import write_json

    found = diagnose(measure)
    if json:
        write_json(found, json)
    if json != "-":
        show(found)


def show(found: dict[str, Any]) -> None:
    """Prints a diagnosis for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160

    def section(title: str, lines: list[tuple[str, str]]) -> None:
        console.print(f"\n{title}", style="bold")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for name, value in lines:
            table.add_row(f"  {name}", value)
        console.print(table)

    console.print(f"cpumoe {found['version']}", style="bold")
    section("Machine", machine_lines(found["machine"], found["system"]))
    section("Limits", limit_lines(found["limits"]))
    section("Kernels", kernel_lines(found["kernels"]))
    console.print("\nTo change", style="bold")
    for sentence in found["advice"] or ["nothing found"]:
        console.print(f"  - {sentence}", soft_wrap=True)


def _size(count: int) -> str:
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_:
            return f"{count / bytes_:.4g} {unit}"
    return f"{count} B"


def _said(value: Any) -> str:
    """A setting as words; the system may not say."""
    return {None: "not told by the system", True: "on", False: "off"}.get(value, str(value))


def machine_lines(machine: dict[str, Any], system: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines about the machine: name and text."""
    quota, limit = machine["cgroup_cpus"], machine["cgroup_memory"]
    load = system["load_average"]
    return [
        ("CPU", machine["cpu_name"] + (" (virtual machine)" if system["virtual"] else "")),
        (
            "cores",
            f"{len(machine['cores'])} that may be used, on {machine['nodes']} NUMA node(s); "
            f"{len(machine['affinity'])} of {machine['online']} logical CPUs in the affinity mask; "
            f"quota {f'{quota:g} CPUs' if quota else 'none'}",
        ),
        ("threads", str(machine["threads"])),
        (
            "caches",
            f"L1d {_size(machine['l1d'])} and L2 {_size(machine['l2'])} a core, "
            f"L3 {_size(machine['l3'])} a group",
        ),
        (
            "memory",
            f"{_size(machine['memory'])}, {_size(machine['memory_available'])} available; "
            f"limit {_size(limit) if limit else 'none'}",
        ),
        ("instruction sets", f"{', '.join(machine['isa'])} ({machine['isa_reason']})"),
        ("hyper-threading", _said(system["smt"])),
        ("turbo", _said(system["turbo"])),
        ("governor", _said(system["governor"])),
        ("huge pages", _said(system["huge_pages"])),
        ("load average", "not told by the system" if load is None else f"{load:.2f}"),
    ]


def limit_lines(limits: list[dict[str, Any]] | None) -> list[tuple[str, str]]:
    """Lines about the measured limits."""
    if limits is None:
        return [("", "not measured (leave out --no-measure)")]
    return [
        (
            f"{one['threads']} thread(s)",
            f"{one['read_gb_per_s']:.1f} GB/s read, "
            f"{one['fma_gflop_per_s']:.0f} GFLOP/s fp32 multiply-add; "
            f"passes differ by {one['disagreement']:.0%}",
        )
        for one in limits
    ]


def kernel_lines(kernels: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines about the chosen kernels, a line for each code and layout, and why others were not."""
    lines: dict[str, str] = {}
    for row in kernels["dot"]:
        top = row["tokens_max"]
        tokens = f"{row['tokens_min']}+" if top is None else f"{row['tokens_min']}-{top}"
        text = f"{row['kernel'] or 'none'} for {tokens} tokens"
        needs = [f"{r['kernel']} {r['reason']}" for r in row["refused"] if "needs" in r["reason"]]
        if needs:
            text += f" ({'; '.join(needs)})"
        name = f"dot {row['code']} {row['layout']}, activations {row['class']}"
        lines[name] = f"{lines[name]}, {text}" if name in lines else text
    return [*lines.items(), *((room, name or "none") for room, name in kernels["other"].items())]

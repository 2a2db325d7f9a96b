"""`cpumoe bench layer` and `cpumoe bench e2e`: figures beside the limits of this machine."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated, Any, Literal

import typer

from cpumoe._core import Error
from cpumoe.cli import _options as options

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure one layer or a whole model, as shares of this machine's bandwidth and peak.",
)

Isa = Annotated[
    str,
    typer.Option(
        metavar="ISA",
        help="Highest instruction set to use, scalar for example. Default: the best one.",
        show_default=False,
    ),
]
Tries = Annotated[int, typer.Option(min=1, help="Measurements of a cell whose limits disagree.")]


def numbers(text: str, option: str, most: int = 1 << 20) -> list[int]:
    """The integers from 1 to `most` of a comma-separated list; Error names the option."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or max(values) > most:
        raise Error(
            f"{option}: must be integers from 1 to {most} joined by commas; got {text!r}. "
            f"Write for example {option} 1,4"
        )
    return values


def names(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def force_isa(isa: str) -> None:
    """Limits the instruction sets of this process. Must come before the native module is used."""
    from cpumoe import _core

    if not isa:
        return
    os.environ.pop("CPUMOE_ISA", None)
    known = _core.Machine.probe().isa
    if isa not in known:
        raise Error(f"--isa: must be one of {', '.join(known)}; got {isa!r}. Choose one of these")
    os.environ["CPUMOE_ISA"] = isa


def thread_counts(text: str) -> list[int]:
    """Values of --threads, or this machine's default."""
    import cpumoe

    return numbers(text, "--threads", 1024) if text else [cpumoe.Executor().threads]


def command_line() -> str:
    """The command as it can be typed again."""
    return shlex.join(["cpumoe", *sys.argv[1:]])


def finish(kind: str, cells: list[dict[str, Any]], json: str) -> None:
    """Adds the machine, writes the JSON and prints the table (to stderr beside JSON on stdout)."""
    import statistics

    from rich.console import Console
    from rich.table import Table

    from cpumoe.bench import result

    machine = result.machine_facts()
    for limit in ("read_gb_per_s", "fma_gflop_per_s"):
        machine[limit] = statistics.median(cell[limit] for cell in cells)
    whole = result.make_result(kind, machine, cells, command_line())
    if json:
        result.write_json(whole, json)
    console = Console(stderr=json == "-")
    header, rows = result.table_rows(whole)
    table = Table(box=None, pad_edge=False)
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:
        console.width = 250
    console.print(table)
    console.print(
        f"limits: {machine['read_gb_per_s']:.1f} GB/s read, "
        f"{machine['fma_gflop_per_s']:.0f} GFLOP/s fp32 multiply-add (medians beside the runs)",
        highlight=False,
    )
    if any(cell["noisy"] for cell in cells):
        console.print(
            "noisy: the limits around these runs differ by over 10 %; other programs are at work",
            highlight=False,
        )


@app.command()
def layer(
    shape: Annotated[
        str,
        typer.Option(
            help="Files of benchmarks/shapes, joined by commas; NAME-32e cuts to 32 experts."
        ),
    ] = "qwen3-30b-a3b",
    format: Annotated[
        str, typer.Option(help="Weight formats, joined by commas: bf16, q4_0, int4_g128, ...")
    ] = "bf16",
    activations: options.Activations = "auto",
    tokens: Annotated[str, typer.Option(help="Tokens of one call, joined by commas.")] = "1,4,256",
    threads: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Worker threads, as 1,2. Default: CPUMOE_THREADS, or one a physical core.",
            show_default=False,
        ),
    ] = "",
    isa: Isa = "",
    peer: Annotated[
        str,
        typer.Option(
            metavar="PEER",
            help="Measure this peer between our runs: transformers, llama_cpp[:TYPE]. "
            "Default: none.",
            show_default=False,
        ),
    ] = "",
    json: options.Json = "",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time the runs of one cell fill.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Fewest runs of a cell.")] = 5,
    tries: Tries = 3,
    pages: Annotated[
        Literal["huge", "small"], typer.Option(help="Pages behind the weights.")
    ] = "huge",
) -> None:
    """One layer of experts, from router logits to hidden states, weights from memory.

    Every run has fresh inputs and routing and stands between two measurements of the read bandwidth
    (which empties the caches) and of the multiply-add peak. The output is compared with float64
    first.
    """
    force_isa(isa)
    from cpumoe.bench.formats import find_format
    from cpumoe.bench.layer import Options, run_layers
    from cpumoe.bench.limits import probe
    from cpumoe.bench.peers import load_peer
    from cpumoe.bench.shapes import load_shape
    from cpumoe.cli._common import progress

    settings = Options(
        numbers(tokens, "--tokens"),
        thread_counts(threads),
        seconds,
        rounds,
        tries,
        pages == "huge",
        activations,
    )
    with options.named_as_typed(shape="--shape", format="--format", peer="--peer"):
        shapes = [load_shape(name) for name in names(shape)]
        for name in names(format):
            find_format(name)
        other = load_peer(peer) if peer else None
    cells = run_layers(
        shapes,
        names(format),
        settings,
        probe,
        peer=other,
        progress=progress,
        report=report,
    )
    finish("layer", cells, json)


@app.command()
def e2e(
    model: options.ModelPath,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option(min=1, help="Tokens to decode, one call each.")] = 32,
    threads: options.Threads = None,
    isa: Isa = "",
    activations: options.Activations = "auto",
    huge_pages: options.HugePages = False,
    json: options.Json = "",
    tries: Tries = 3,
) -> None:
    """A whole model: prompt and decode speed, opening time and memory, beside the limits."""
    force_isa(isa)
    from cpumoe.bench.e2e import run_model
    from cpumoe.bench.limits import probe

    cells = run_model(
        model,
        probe,
        prompt=prompt,
        new=new,
        threads=threads,
        tries=tries,
        activations=activations,
        huge_pages=huge_pages,
    )
    finish("e2e", cells, json)


def report(cell: dict[str, Any]) -> None:
    """One line on standard error as soon as a cell is done."""
    peer = f", {cell['peer']['name']} {cell['peer']['ratio']:.2f}x" if cell["peer"] else ""
    print(
        f"{cell['shape']} {cell['format']} {cell['tokens']} tokens, {cell['threads']} threads: "
        f"{cell['median_s'] * 1e3:.3f} ms, {cell['share_of_bandwidth']:.1%} of bandwidth, "
        f"{cell['share_of_peak']:.1%} of peak{peer}{' (noisy)' if cell['noisy'] else ''}",
        file=sys.stderr,
        flush=True,
    )

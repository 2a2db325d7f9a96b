"""`cpumoe quantize MODEL OUT --format FORMAT`: the model with smaller weights, for any reader."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cpumoe.cli import _common as common
from cpumoe.cli import _options as options
from cpumoe.cli.eval import lines, read_text

if TYPE_CHECKING:
    from cpumoe.quantize import Report

app = typer.Typer(add_completion=False)

# A text beside the weights that the perplexities are measured on unless another one is given.
_OWN_TEXT = "heldout.txt"


def table(report: Report) -> list[str]:
    """The report as lines: a class of matrices each, then all."""
    weighted = any(c.error != c.weighted_error for c in report.classes.values())
    rows = [["", "matrices", "parameters", "bits each", "error"]]
    rows[0] += ["weighted"] if weighted else []
    for name, c in report.classes.items():
        bits = f"{8 * c.bytes / c.elements:.2f}"
        row = [name, str(c.matrices), f"{c.elements:,}", bits, f"{100 * c.error:.3f} %"]
        rows.append([*row, f"{100 * c.weighted_error:.3f} %"] if weighted else row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def summary(report: Report) -> list[str]:
    """What was written, and how fast."""
    done = f"{report.path}: {report.format}, {report.bytes / 1e9:.3f} GB"
    speed = report.source_bytes / report.seconds / 1e6
    text = [f"{done} from {report.source_bytes / 1e9:.3f} GB in {report.seconds:.1f} s"]
    if report.resumed:
        text[0] += f", continued after {report.resumed} of {report.tasks} steps"
    else:
        text[0] += f" ({speed:.0f} MB/s)"
    return text


def measure(source: Path, made: Path, text: Path | None, tokens: int) -> list[str]:
    """Perplexity of both models, as lines; or why it was not measured."""
    from cpumoe.engine import load
    from cpumoe.engine.evaluate import Evaluator

    if text is None:
        text = source / _OWN_TEXT if source.is_dir() else None
    if text is None or not text.is_file():
        return ["Perplexity was not measured, for want of a text: give --text FILE."]
    base = load(source)
    other = load(made, executor=base.executor)
    evaluator = Evaluator(base, read_text(text), other=other, tokens=tokens)
    with common.progress("Scoring", "tokens") as report:
        for done, total in evaluator.run():
            report(done, total)
    found: dict[str, Any] = evaluator.result.figures()
    return lines(found, source.resolve().name, made.resolve().name, evaluator.window)


@app.command(help="Write a model with quantised weights, in the layout of compressed-tensors.")
def quantize(
    model: options.ModelPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.", show_default=False)],
    format: Annotated[
        str,
        typer.Option(
            help="int8, int4 or u2, with _g16, _g32, _g64, _g128, _g256 or _row; or mxfp4.",
        ),
    ] = "int4_g32",
    attention: Annotated[
        bool,
        typer.Option("--attention/--no-attention", help="Quantise attention's projections, too."),
    ] = True,
    head: Annotated[bool, typer.Option("--head/--no-head", help="Quantise lm_head, too.")] = False,
    scales: Annotated[
        Literal["search", "absmax"],
        typer.Option(help="search: by the smallest error; absmax: by the largest weight."),
    ] = "search",
    scale_dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        typer.Option(help="Type of integer formats' scales; auto: the model's own."),
    ] = "auto",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text: weigh errors by what each matrix receives when the model reads it. "
            "Default: all inputs weigh the same."
        ),
    ] = None,
    calibrate_tokens: Annotated[
        int, typer.Option(min=2, help="Read this many tokens of it.")
    ] = 4096,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Size of an output file at most, GB.")
    ] = 4.0,
    threads: options.Threads = None,
    evaluate: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Compare the perplexities of both models.")
    ] = True,
    text: Annotated[
        Path | None,
        typer.Option(help=f"UTF-8 text for that. Default: the model's own {_OWN_TEXT}, if any."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Score this many tokens of it.")] = 4096,
) -> None:
    """Quantise; Ctrl-C, a kill or a full disk leave what the same command continues."""
    from cpumoe.quantize import calibrate as record
    from cpumoe.quantize import quantize_model
    from cpumoe.quantize.target import find_target

    if text is not None:
        read_text(text)  # refused now, not after hours
    with options.named_as_typed(format="--format"):
        find_target(format)
    importance = None
    try:
        if calibrate is not None:
            words = read_text(calibrate)
            with common.progress("Calibrating", "windows") as report:
                importance = record(
                    model, words, tokens=calibrate_tokens, threads=threads, progress=report
                )
        with common.progress("Quantising") as report:
            made = quantize_model(
                model,
                out,
                format=format,
                attention=attention,
                head=head,
                scales=scales,
                scale_dtype=scale_dtype,
                importance=importance,
                shard_bytes=int(shard_gb * 1e9),
                threads=threads,
                progress=report,
            )
    except KeyboardInterrupt:
        common.note("Interrupted. The same command continues where it stopped.")
        raise typer.Exit(130) from None
    for line in [*table(made), *summary(made)]:
        print(line)
    if evaluate:
        for line in measure(model, out, text, tokens):
            print(line)

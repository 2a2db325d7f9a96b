"""`cpumoe eval MODEL --text FILE`: perplexity, and how far a second model or setting differs."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpumoe.cli import _common as common
from cpumoe.cli import _options as options
from cpumoe.ops import ActivationClass

if TYPE_CHECKING:
    from cpumoe.engine import Model

app = typer.Typer(add_completion=False)


def read_text(path: Path) -> str:
    """The text of `path`, or of standard input for `-`. Raises Error unless it is UTF-8."""
    from cpumoe import Error
    from cpumoe.checkpoint.json_file import require_regular_file

    if str(path) == "-":
        data = sys.stdin.buffer.read()
    else:
        require_regular_file(path)
        data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Error(
            f"{path}: must be UTF-8 text; byte {e.start} is not. Convert the file"
        ) from None


def open_with(path: Path, settings: dict[str, Any], warm: bool) -> Model:
    """The model at `path`, loaded with `settings`."""
    from cpumoe.engine import load

    model = load(path, **settings)
    if warm:
        common.read_weights(model)
    return model


def uncertain(value: float, error: float | None, unit: str = "", scale: float = 1.0) -> str:
    """`value` and its standard error, both to the second digit of the error.

    Example:
        >>> uncertain(17.34567, 0.01234), uncertain(1.2346e-9, 3e-11), uncertain(17.34567, None)
        ('17.346 ± 0.012', '(1.235 ± 0.030)e-09', '17.346')
    """
    value *= scale
    if not error or not math.isfinite(value) or not math.isfinite(error):
        return f"{value:.5g}" + ("" if error is None else f" ± {error:g}") + unit
    error *= scale
    digits = 1 - math.floor(math.log10(error))
    if digits <= 6:
        return f"{value:.{max(digits, 0)}f} ± {error:.{max(digits, 0)}f}{unit}"
    power = math.floor(math.log10(max(abs(value), error)))
    digits += power
    ten = 10.0**power
    return f"({value / ten:.{digits}f} ± {error / ten:.{digits}f})e{power:03d}{unit}"


def lines(found: dict[str, Any], name: str, other: str, window: int) -> list[str]:
    """The figures as sentences."""

    def figure(key: str, unit: str = "", scale: float = 1.0) -> str:
        return uncertain(found[key], found[f"{key}_se"], unit, scale)

    count = found["windows"]
    text = [
        f"{name}: perplexity {figure('perplexity')} ({found['tokens']} tokens scored in "
        f"{count} window{'s' if count != 1 else ''} of {window})"
    ]
    if "kl" in found:
        text += [
            f"{other}: perplexity {figure('other_perplexity')}, "
            f"change {'+' if found['change'] >= 0 else ''}{figure('change', ' %', 100)}",
            f"KL divergence {figure('kl')} nats a token; same likeliest token "
            f"{figure('agreement', ' %', 100)}",
        ]
    return text


def describe(path: Path, settings: dict[str, Any]) -> str:
    """Name of a model and the settings that differ from the defaults."""
    extra = ", ".join(f"{k} {v}" for k, v in settings.items() if v not in ("fp16", "auto"))
    name = path.resolve().name
    return f"{name} ({extra})" if extra else name


@app.command(help="Perplexity on a text; with --against, how far another model or setting differs.")
def evaluate(
    model: options.ModelPath,
    text: Annotated[
        Path, typer.Option(help="UTF-8 text to score; - reads standard input.", show_default=False)
    ],
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with this model, of the same tokenizer. Default: MODEL."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens of one forward pass. Default: 512.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens between windows. Default: windows do not overlap."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Use only the first tokens of the text. Default: all.")
    ] = None,
    activations: options.Activations = "auto",
    against_activations: Annotated[
        ActivationClass | None,
        typer.Option(help="The same for the model compared with. Default: as --activations."),
    ] = None,
    kv: options.Kv = "fp16",
    against_kv: Annotated[
        options.KvElements | None,
        typer.Option(help="The same for the model compared with. Default: as --kv."),
    ] = None,
    threads: options.Threads = None,
    warm: options.Warm = True,
    json: options.Json = "",
) -> None:
    """Score a text window by window; Ctrl-C reports the windows that were finished."""
    from cpumoe.engine.evaluate import Evaluator

    words = read_text(text)
    first = {"kv": kv, "activations": activations}
    given = {"kv": against_kv, "activations": against_activations}
    second = first | {name: value for name, value in given.items() if value}
    compared = against is not None or any(given.values())
    base = open_with(model, first | {"threads": threads}, warm)
    other_path = against or model
    same_file = other_path.resolve() == model.resolve()
    other = None
    if compared:
        shared = second | {"executor": base.executor}
        other = open_with(other_path, shared, warm and not same_file)
    evaluator = Evaluator(base, words, other=other, window=window, stride=stride, tokens=tokens)
    interrupted = False
    with common.progress("Scoring", "tokens") as report:
        try:
            for done, total in evaluator.run():
                report(done, total)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted and not evaluator.result.sums:
        common.note("Interrupted before the first window was finished: there is nothing to report.")
        raise typer.Exit(130)
    found = evaluator.result.figures()
    if json:
        inputs = {
            "model": str(model),
            "settings": first,
            "against": str(other_path) if compared else None,
            "against_settings": second if compared else None,
            "text": str(text),
            "text_tokens": len(evaluator.ids),
            "window": evaluator.window,
            "stride": evaluator.stride,
            "start_tokens": evaluator.start,
            "threads": base.executor.threads,
        }
        write_result(inputs | found, json)
    if json != "-":
        for line in lines(
            found, describe(model, first), describe(other_path, second), evaluator.window
        ):
            print(line)
    common.note(f"{found['tokens'] / found['seconds']:.0f} tokens/s scored")
    if interrupted:
        left = evaluator.result.total - found["tokens"]
        common.note(f"Interrupted: {left} tokens were not scored.")
        raise typer.Exit(130)


def write_result(values: dict[str, Any], target: str) -> None:
    """The figures with commit, command and machine, as the benchmarks write them."""
    from cpumoe.bench.result import commit, machine_facts, write_json

    command = shlex.join(["cpumoe", *sys.argv[1:]])
    head = {"kind": "eval", "commit": commit(), "command": command, "machine": machine_facts()}
    write_json(head | values, target)

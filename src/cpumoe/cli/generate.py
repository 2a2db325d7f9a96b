"""`cpumoe generate MODEL PROMPT`: continue a text, or answer one message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cpumoe.cli import _common as common
from cpumoe.cli import _options as options

app = typer.Typer(add_completion=False)


def _prompt(words: str | None, file: Path | None) -> str:
    """The prompt from the argument, from standard input (`-`), or from a file."""
    from cpumoe import Error

    if (words is None) == (file is None):
        raise Error("prompt: give either PROMPT (or - for standard input) or --file")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode("utf-8") if words == "-" else str(words)
    except UnicodeDecodeError as e:
        raise Error(f"prompt: must be UTF-8 text; byte {e.start} is not") from None


@app.command(help="Continue a text (or, with --chat, answer a message) and print it as it comes.")
@options.grouped
def generate(
    model: options.ModelPath,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text; - reads standard input.", show_default=False),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put the prompt into the model's chat template.")
    ] = False,
    echo: Annotated[
        bool | None,
        typer.Option("--echo/--no-echo", help="Print the prompt first. Default: on a terminal."),
    ] = None,
    *,
    sampling: options.Sampling,
    opening: options.Opening,
    stats: options.ShowStats = True,
) -> None:
    """Print generated text, then the figures of the run."""
    text = _prompt(prompt, file)
    loaded = common.open_model(model, opening)
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else text
    params = common.sampling_params(loaded, sampling)
    with common.progress("Prompt", "tokens") as report:
        stream = loaded.stream_request(
            loaded.request(ids, params, after_prompt=not chat), progress=report
        )
        first = next(stream, "")
    if echo or (echo is None and not chat and sys.stdout.isatty()):
        common.write(text)
    interrupted = False
    try:
        common.write(first)
        for piece in stream:
            common.write(piece)
    except KeyboardInterrupt:
        stream.close()
        interrupted = True
    common.write("\n")
    if stats:
        common.note(common.closing_line(loaded, stream.completion.stats))
    if interrupted:
        raise typer.Exit(130)

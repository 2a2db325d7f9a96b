"""`cpumoe generate MODEL PROMPT`: continue a text, or answer one message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cpumoe.cli import _common as common

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
def generate(
    model: common.ModelPath,
    prompt: Annotated[str | None, typer.Argument(help="Text; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put the prompt into the model's chat template.")
    ] = False,
    echo: Annotated[
        bool | None,
        typer.Option("--echo/--no-echo", help="Print the prompt first. Default: on a terminal."),
    ] = None,
    max_tokens: common.MaxTokens = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    min_p: common.MinP = None,
    repetition_penalty: common.RepetitionPenalty = None,
    seed: common.Seed = None,
    stop: common.Stop = None,
    threads: common.Threads = None,
    context: common.Context = None,
    kv: common.Kv = "fp16",
    activations: common.Activations = "auto",
    warm: common.Warm = True,
    huge_pages: common.HugePages = False,
    stats: common.ShowStats = True,
) -> None:
    """Print generated text, then the figures of the run."""
    text = _prompt(prompt, file)
    loaded = common.open_model(
        model,
        threads=threads,
        kv=kv,
        context=context,
        activations=activations,
        warm=warm,
        huge_pages=huge_pages,
    )
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else text
    params = loaded.params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
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

"""What the verbs that run a model share: opening with progress, the closing figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cpumoe.cli._options import Opening, Sampling, named_as_typed

if TYPE_CHECKING:
    from cpumoe import _core
    from cpumoe.engine import Model, SamplingParams, Stats

# A step that takes longer than this shows a progress bar.
PATIENCE_S = 2.0
# Passes of the closing bandwidth measurement; the median counts. About 0.1 s in all.
_PROBE_PASSES = 5


def note(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Generated text on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def progress(title: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
    """Gives report(done, total); a bar with ETA appears on standard error after two seconds.

    unit: "bytes" shows sizes and speed, anything else counts.
    """
    start = time.monotonic()
    bar: Any = None
    task: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar, task
        if bar is None:
            if time.monotonic() - start < PATIENCE_S or done >= total:
                return
            bar, task = _make_bar(title, unit, total)
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


def _make_bar(title: str, unit: str, total: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    sizes = unit == "bytes"
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(bar_width=30)]
    columns += [DownloadColumn(), TransferSpeedColumn()] if sizes else [MofNCompleteColumn()]
    if not sizes:
        columns.append(TextColumn(unit))
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    return bar, bar.add_task(title, total=total)


def open_model(path: Path, options: Opening) -> Model:
    """Load the model; with `warm`, read its weights from the disk if they fit into memory."""
    from cpumoe.engine import load, weight_file_bytes

    total, done = weight_file_bytes(path) if options.huge_pages else 0, 0
    with progress(f"Reading {path.name}") as shown:

        def report(piece: int) -> None:
            nonlocal done
            done += piece
            shown(done, total)

        with named_as_typed(context="--context", memory="--huge-pages"):
            model = load(
                path,
                threads=options.threads,
                kv=options.kv,
                context=options.context,
                activations=options.activations,
                memory="huge" if options.huge_pages else "mapped",
                report=report,
            )
    if options.warm and not options.huge_pages:
        read_weights(model)
    return model


def sampling_params(model: Model, sampling: Sampling) -> SamplingParams:
    """The checkpoint's parameters with those that were given."""
    values = sampling.values()
    with named_as_typed(**{name: "--" + name.replace("_", "-") for name in values}):
        return model.params(**values)


def read_weights(model: Model) -> None:
    """Bring the weights into memory in file order, with a progress bar.

    Skipped when less than 1 GB would stay free: pages would push each other out again.
    """
    from cpumoe import _core

    total = sum(f.size for f in model.checkpoint.files)
    if total + 1e9 > _core.Machine.probe().memory_available:
        note("The weights do not fit into free memory: they are read as they are needed.")
        return
    with progress(f"Reading {model.path.name}") as report:
        for done in model.checkpoint.touch():
            report(done, total)


def measure_read_bandwidth(machine: _core.Machine, executor: _core.Executor) -> float:
    """10^9 bytes per second that this machine's memory delivers now to its default threads.

    executor: used when it has that many. Reads four times the last-level cache, so that little of
    it can stay there.
    """
    from cpumoe import _core

    if executor.threads != machine.default_threads:
        executor = _core.Executor(machine.default_threads)
    probe = _core.Probe(min(max(4 * machine.l3, 64 << 20), 256 << 20))
    return median(probe.read_gb_per_s(executor) for _ in range(_PROBE_PASSES))


def closing_line(model: Model, stats: Stats) -> str:
    """`describe_stats` beside the bandwidth measured now, if anything was decoded."""
    from cpumoe import _core

    if not stats.decode_tokens:
        return describe_stats(stats, 0.0, cached=False)
    machine = _core.Machine.probe()
    per_token = stats.weight_bytes / stats.decode_tokens
    cached = min(per_token, model.nbytes) <= machine.l3
    return describe_stats(stats, measure_read_bandwidth(machine, model.executor), cached=cached)


def describe_stats(stats: Stats, read_gb_per_s: float, *, cached: bool) -> str:
    """The closing line: prompt and decode speed, weights streamed, share of the bandwidth.

    cached: the weights of a token fit into the last-level cache, so memory is not their source.
    """
    reused = f" (+{stats.cached_tokens} cached)" if stats.cached_tokens else ""
    prompt = f"prompt {stats.prompt_tokens} tokens{reused}"
    text = f"{prompt}, {stats.prompt_per_second:.1f} tokens/s"
    if not stats.decode_tokens:
        return text
    rate, limit = stats.weight_gb_per_second, read_gb_per_s
    source = ", from its caches" if cached or rate >= limit else ""
    return (
        f"{text}; decode {stats.decode_tokens} tokens, {stats.decode_per_second:.1f} tokens/s; "
        f"weights {rate:.2f} GB/s = {100 * rate / limit:.0f} % of this machine's "
        f"{limit:.1f} GB/s read bandwidth{source}"
    )

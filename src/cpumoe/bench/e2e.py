"""``cpumoe bench e2e``: a whole model from a checkpoint directory, prompt and decode."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import cpumoe
from cpumoe import Error
from cpumoe.bench.formats import Array
from cpumoe.bench.layer import times
from cpumoe.bench.measure import Limits, Run, Series, measure
from cpumoe.bench.peers import ModelPeer
from cpumoe.bench.weights import available_memory
from cpumoe.ops import ActivationClass

_WARM_PROMPT = 512
"""Tokens of the first, untimed prompt."""

_CHECK_PROMPT = 16
"""Tokens of the prompt whose logits are compared with a peer's."""

_CORRELATION = 0.5
"""Least correlation of our logits with a peer's. Two 4-bit roundings of the same random weights
give 0.7 to 0.95, other weights or a wrong graph 0 within a few 1 / sqrt(vocabulary)."""


@dataclass
class Memory:
    """Resident memory of this process in bytes, from /proc/self.

    Args:
        peak: the most there ever was.
        mapped: what the checkpoint's files hold of it now.
        huge: what of that is mapped in huge pages.
    """

    peak: int
    mapped: int
    huge: int = 0


def memory(folder: Path) -> Memory:
    """Resident memory, split by whether the file `folder`, or one below it, is behind it."""
    peak = 0
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            peak = int(line.split()[1]) * 1024
    root, mapped, huge, inside = str(folder.resolve()), 0, 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if line.startswith("Rss:"):
            mapped += int(line.split()[1]) * 1024 if inside else 0
        elif line.startswith("FilePmdMapped:"):
            huge += int(line.split()[1]) * 1024 if inside else 0
        elif "-" in line.split(" ", 1)[0]:  # the first line of a mapping: address range ... path
            path = line.rstrip().split(maxsplit=5)[-1]
            inside = path == root or path.startswith(root + "/")
    return Memory(peak, mapped, huge)


def active_elements(spec: Any) -> tuple[int, int]:
    """Weight elements that one token is multiplied with: (in all layers, in the output matrix)."""

    def size(*weights: Any) -> int:
        present = [w.w if hasattr(w, "w") else w for w in weights if w is not None]
        return sum(math.prod(w.shape) for w in present)

    total = 0
    for layer in spec.layers:
        a, f = layer.attn, layer.ffn
        total += size(a.q, a.k, a.v, a.o, f.gate, f.up, f.down, f.router_w)
        total += size(f.shared_gate, f.shared_up, f.shared_down, f.shared_score)
        if f.router is not None:
            every = size(*f.expert_gate, *f.expert_up, *f.expert_down)  # views, or stacks of them
            total += f.router.top_k * every // f.router.experts
    return total, size(spec.head)


class Text:
    """One sequence that grows by greedy decoding, timed call by call."""

    def __init__(self, model: cpumoe.Model) -> None:
        """An empty sequence of `model`."""
        self.model = model
        self.in_layers, self.in_head = active_elements(model.spec)
        self.session = model.session()
        self.next = np.zeros(1, np.int32)

    def feed(self, ids: Array) -> Run:
        """Appends `ids` [T] int32 in one native call and chooses the token behind them."""
        start = time.perf_counter()
        logits = np.asarray(self.model.decoder.forward([(self.session.cache, ids)]))
        choice = int(np.argmax(logits[0]))
        seconds = time.perf_counter() - start
        self.next = np.array([choice], np.int32)
        flops = 2 * (len(ids) * self.in_layers + self.in_head)
        return Run(seconds, int(self.model.decoder.last_weight_bytes), flops)

    def step(self) -> Run:
        """Decodes one token."""
        return self.feed(self.next)


def same_model(model: cpumoe.Model, peer: ModelPeer, ids: Array) -> float:
    """Correlation of both sides' logits behind `ids`; Error when they are of different models."""
    theirs = peer.logits(ids)
    if theirs.shape != (model.spec.vocab,):
        raise Error(
            f"bench: {peer.name} must run the same model; its vocabulary is {theirs.shape[0]}, "
            f"ours {model.spec.vocab}. Give both files of one model"
        )
    own = model.logits(ids.tolist())[-1].astype(np.float64)
    value = float(np.corrcoef(own, theirs.astype(np.float64))[0, 1])
    if not value >= _CORRELATION:
        raise Error(
            f"bench: {peer.name} must run the same model; its logits correlate with ours by "
            f"{value:.3f}, below {_CORRELATION}. Give both files of one model, or report this"
        )
    return value


def peer_steps(
    peer: ModelPeer, random_ids: Callable[[int], Array], prompt: int, new: int
) -> Iterator[Run]:
    """Decodes for ever, `new` tokens behind each prompt, as ours does."""
    while True:
        peer.prompt(random_ids(prompt))
        for _ in range(new):
            yield peer.step()


def peer_cell(
    peer: ModelPeer, series: Series, tokens: int, own_median: float, correlation: float | None
) -> dict[str, Any]:
    """The `peer` of a cell."""
    theirs = times(series)
    return {
        "name": peer.name,
        "setting": peer.setting(),
        "correlation": correlation,
        **theirs,
        "tokens_per_s": tokens / theirs["median_s"],
        "ratio": theirs["median_s"] / own_median,
    }


def run_model(
    path: Path,
    make_limits: Callable[[cpumoe.Executor], Limits],
    *,
    prompt: int,
    new: int,
    threads: int | None,
    tries: int,
    activations: ActivationClass = "auto",
    huge_pages: bool = False,
    peer: ModelPeer | None = None,
) -> list[dict[str, Any]]:
    """Opens the checkpoint at `path`, measures prompts and decoding and returns the two cells.

    A first prompt and a few tokens run untimed and map the pages they touch. Memory is read after
    them, before the bandwidth probe allocates its buffer; then the rest of the weights is mapped.

    Args:
        prompt: tokens of a prompt; new: tokens to decode after one.
        threads: None for this machine's default.
        tries: how often a phase is measured whose limits disagree.
        activations: as of `cpumoe.load`.
        huge_pages: copy the weights into memory with huge pages instead of mapping the files.
        peer: runs between our runs, on the same prompts.
    """
    start = time.perf_counter()
    pages: Literal["huge", "mapped"] = "huge" if huge_pages else "mapped"
    model = cpumoe.load(path, threads=threads, activations=activations, memory=pages)
    opened = time.perf_counter() - start
    rng = np.random.default_rng(0)

    def random_ids(count: int) -> Array:
        return rng.integers(0, model.spec.vocab, count).astype(np.int32)

    warm = Text(model)
    first = warm.feed(random_ids(min(_WARM_PROMPT, model.context - 4)))
    for _ in range(3):
        warm.step()
    held = memory(model.path)
    kv = warm.session.cache.length * warm.session.cache.bytes_per_token
    del warm
    if pages == "mapped" and sum(f.size for f in model.checkpoint.files) < available_memory():
        for _ in model.checkpoint.touch():  # what is timed is a model that is in memory
            pass

    limits = make_limits(model.executor)
    facts = {
        "model": model.path.resolve().name,
        "threads": model.executor.threads,
        "pages": pages,
        "isa": cpumoe.machine().isa[-1],
        "open_s": opened,
        "first_pass_s": first.seconds,
        "peak_rss_bytes": held.peak,
        "mapped_bytes": held.mapped,
        "mapped_huge_bytes": memory(model.path).huge,
        "kv_bytes": kv,
        "beyond_bytes": held.peak - held.mapped - kv,
    }
    correlation = None if peer is None else same_model(model, peer, random_ids(_CHECK_PROMPT))
    asked = random_ids(prompt)

    def run_prompt() -> Run:
        nonlocal asked
        asked = random_ids(prompt)
        return Text(model).feed(asked)

    def steps() -> Iterator[Run]:
        while True:  # a new attempt starts a new text
            text = Text(model)
            text.feed(random_ids(prompt))
            for _ in range(new):
                yield text.step()

    ours = steps()
    prompt_runners, decode_runners = [run_prompt], [lambda: next(ours)]
    if peer is not None:
        theirs = peer_steps(peer, random_ids, prompt, new)
        prompt_runners.append(lambda: peer.prompt(asked))
        decode_runners.append(lambda: next(theirs))
    prompts = measure(prompt_runners, limits, seconds=1.0, min_rounds=3, tries=tries)
    decoded = measure(
        decode_runners, limits, seconds=0, min_rounds=new, max_rounds=new, tries=tries
    )
    cells = []
    for phase, (series, *others), tokens, context in (
        ("prompt", prompts, prompt, 0),
        ("decode", decoded, 1, prompt),
    ):
        over = statistics.median(
            run.seconds / (run.bytes / statistics.mean(pair) / 1e9)
            for run, pair in zip(series.runs, series.read, strict=True)
        )
        own = times(series)
        cells.append(
            {
                "phase": phase,
                "tokens": tokens,
                "context": context,
                **facts,
                **own,
                "tokens_per_s": tokens / own["median_s"],
                "time_over_bandwidth": over,
                "peer": peer_cell(peer, others[0], tokens, own["median_s"], correlation)
                if peer is not None
                else None,
            }
        )
    return cells

"""``cpumoe bench layer``: one layer of experts, from router logits to hidden states."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cpumoe
from cpumoe import _core
from cpumoe.bench import check
from cpumoe.bench.formats import FORMATS, Array, Format, decode, find_format
from cpumoe.bench.measure import Limits, Run, Series, measure, spread
from cpumoe.bench.peers import Peer
from cpumoe.bench.shapes import Shape
from cpumoe.bench.weights import Progress, Weights, available_memory, make_weights

_ACT_GROUP = 32
"""Inputs of a token that share a scale in class int8 (core/kernels/dot/quantize.h)."""

_SMALL_INTER = 16
"""Intermediate features of the layer whose time is nearly all fixed cost."""

_WARM_TOKENS = 4
"""Most tokens of the warm-up before a run: more of them would only take longer."""

_CHECK_ELEMENTS = 200_000_000
"""Weight elements that the correctness gate may decode, per cell."""


@dataclass(frozen=True)
class Options:
    """What to measure and for how long.

    Args:
        tokens, threads: values of the cells, in this order.
        seconds: time the runs of one cell should fill.
        min_rounds: fewest runs of a cell.
        tries: how often a noisy cell is measured.
        huge_pages: what stands behind the weights.
        activations: class of activations, "auto": the format's own.
    """

    tokens: Sequence[int]
    threads: Sequence[int]
    seconds: float = 1.0
    min_rounds: int = 5
    tries: int = 3
    huge_pages: bool = True
    activations: str = "auto"


@dataclass
class Inputs:
    """Fresh inputs of one run: x [T, H] in the weights' format, logits [T, E] fp32."""

    x: Array
    logits: Array


def make_inputs(shape: Shape, format: Format, tokens: int, rng: np.random.Generator) -> Inputs:
    """Draws one run's inputs. Logits alike in distribution make all experts equally likely."""
    x = rng.standard_normal((tokens, shape.hidden), dtype=np.float32).astype(format.dtype)
    return Inputs(x, rng.standard_normal((tokens, shape.experts), dtype=np.float32))


def route(shape: Shape, logits: Array) -> tuple[Array, Array]:
    """The shape's router on `logits` [T, E]: ids [T, k] int32 and weights [T, k] fp32."""
    return cpumoe.route(
        logits,
        shape.top_k,
        kind=shape.router,  # type: ignore[arg-type]
        renormalize=shape.renormalize,
        scale=shape.scale,
        groups=shape.groups,
        top_groups=shape.top_groups,
    )


class Op:
    """Our operator on one layer: routes and runs, timed."""

    def __init__(
        self,
        weights: Weights,
        tokens: int,
        executor: cpumoe.Executor,
        seed: int,
        small: Weights | None = None,
        activations: str = "auto",
    ) -> None:
        """Keeps an output buffer and draws inputs from `seed` on.

        Args:
            small: the same layer as `small_weights` makes it, for the warm-up before each run.
        """
        self.weights, self.tokens, self.executor = weights, tokens, executor
        self.activations = activations
        self.rng = np.random.default_rng(seed)
        self.out = np.zeros((tokens, weights.shape.hidden), weights.format.dtype)
        self.inputs = self._draw()
        self.last: tuple[Array, Array, Array] | None = None
        self.warm = (
            None
            if small is None
            else Op(small, min(tokens, _WARM_TOKENS), executor, seed, None, activations)
        )

    def _draw(self) -> Inputs:
        return make_inputs(self.weights.shape, self.weights.format, self.tokens, self.rng)

    def timed(self) -> tuple[float, float]:
        """(seconds in all, seconds of routing) on the inputs drawn last."""
        start = time.perf_counter()
        ids, scores = route(self.weights.shape, self.inputs.logits)
        routed = time.perf_counter()
        self.call(self.inputs.x, ids, scores, self.out)
        end = time.perf_counter()
        self.last = (self.inputs.x, ids, scores)
        return end - start, routed - start

    def run(self) -> Run:
        """One run on inputs and routing that no run had before; the next ones are drawn behind it.

        Two calls on the small layer go before it. The first brings the program's own code back into
        the caches that the limits have emptied, as the layer before does in a model; the second is
        timed as the fixed cost. Neither touches the weights that are measured.
        """
        parts = {}
        if self.warm is not None:
            parts["first"], _ = self.warm.timed()
            parts["fixed"], _ = self.warm.timed()
        seconds, parts["route"] = self.timed()
        assert self.last is not None
        touched = len(np.unique(self.last[1])) * self.weights.expert_bytes
        self.inputs = self._draw()
        return Run(seconds, touched, self.weights.shape.flops(self.tokens), parts)

    def call(self, x: Array, ids: Array, scores: Array, out: Array) -> None:
        """The operator alone, into `out` [T, H]."""
        cpumoe.moe(
            x,
            self.weights.experts,
            ids,
            scores,
            out=out,
            executor=self.executor,
            activations=self.activations,  # type: ignore[arg-type]
        )

    def act_class(self) -> str:
        """The class that the format's products run in."""
        w = self.weights
        return _core.class_for(w.format.name, w.shape.layout, self.activations)


def int8_rounding(x: Array) -> tuple[Array, Array]:
    """Errors of class int8 for activations [K, M]: half a code each, independent of each other.

    A code is amax / 127 of its group; 1 % more than half of it covers the fp32 roundings.
    """
    step = np.zeros_like(x)
    for start in range(0, x.shape[0], _ACT_GROUP):
        group = slice(start, start + _ACT_GROUP)
        step[group] = np.abs(x[group]).max(axis=0) / 127
    return 0.505 * step, np.zeros_like(x)


def bf16_rounding(x: Array) -> tuple[Array, Array]:
    """Errors of class bf16 for activations [K, M]: half a place each, none where x is in bf16."""
    exact = x == decode(x.astype(FORMATS["bf16"].dtype))
    return np.where(exact, 0, FORMATS["bf16"].roundoff * np.abs(x)), np.zeros_like(x)


_ROUNDINGS = {"fp32": None, "bf16": bf16_rounding, "int8": int8_rounding}


def verify(op: Op, rng: np.random.Generator) -> float:
    """Runs `op` once more than it is timed and compares it with float64.

    The result is taken in fp32, where no rounding of the output hides an error, and in the weights'
    format, as it is timed.

    Returns:
        the largest error of the fp32 result over its bound.

    Raises:
        Error: an error is above its bound.
    """
    op.run()
    assert op.last is not None
    x, ids, scores = op.last
    shape, format = op.weights.shape, op.weights.format
    where = check.sample(shape, ids, rng, _CHECK_ELEMENTS)
    rounding = _ROUNDINGS[op.act_class()]
    expected = check.reference(shape, op.weights.arrays, x, ids, scores, where, rounding=rounding)
    name = f"bench layer {shape.name} {format.name}, {op.tokens} tokens"
    check.require_correct(name, check.error_over_bound(expected, op.out, format.roundoff))
    wide = np.zeros(op.out.shape, np.float32)
    op.call(x, ids, scores, wide)
    ratio = check.error_over_bound(expected, wide, FORMATS["fp32"].roundoff)
    check.require_correct(name, ratio)
    return ratio


def kernel_names(op: Op, ids: Array) -> str:
    """Names of the dot kernels that serve the experts of `ids`, joined by +."""
    names: dict[str, None] = {}
    for tokens in sorted(set(np.bincount(ids.ravel()).tolist()) - {0}):
        w = op.weights
        choice = _core.select_dot(w.format.name, w.shape.layout, tokens, op.activations)
        names[str(choice[0])] = None
    return "+".join(names)


def small_weights(weights: Weights, huge_pages: bool) -> Weights:
    """The same layer with few intermediate features: nearly all its time is fixed cost.

    Few: _SMALL_INTER, or a block of the format. Routing, packing of the tokens, two phases over the
    workers and the combination of k outputs are those of the whole layer.
    """
    shape, row = weights.shape, weights.format.packed
    block = 1 if row is None else max(row.block_elements, row.scale_rows)
    small = replace(shape, inter=min(max(_SMALL_INTER, block), shape.inter))
    return make_weights(small, weights.format, huge_pages=huge_pages)


def times(series: Series) -> dict[str, Any]:
    """The fields of a cell that come from one Series."""
    seconds = [run.seconds for run in series.runs]
    return {
        "median_s": series.median_seconds(),
        "spread": spread(seconds),
        "bytes": statistics.median(run.bytes for run in series.runs),
        "flops": statistics.median(run.flops for run in series.runs),
        "gb_per_s": series.gb_per_s(),
        "gflop_per_s": series.gflop_per_s(),
        "share_of_bandwidth": series.share_of_bandwidth(),
        "share_of_peak": series.share_of_peak(),
        "read_gb_per_s": series.read_gb_per_s(),
        "fma_gflop_per_s": series.fma_gflop_per_s(),
        "limit_disagreement": series.disagreement(),
        "noisy": series.noisy(),
        "tries": series.tries,
        "samples_s": seconds,
        "samples_bytes": [run.bytes for run in series.runs],
    }


def peer_runner(peer: Peer, op: Op) -> Callable[[], Run]:
    """A runner that gives `peer` the inputs of our last run."""

    stored = peer.stored()
    expert_bytes = op.weights.expert_bytes if stored is None else stored.expert_bytes

    def run() -> Run:
        assert op.last is not None
        x, ids, scores = op.last
        seconds, _ = peer.run(x, ids, scores)
        touched = len(np.unique(ids)) * expert_bytes
        return Run(seconds, touched, op.weights.shape.flops(op.tokens))

    return run


def verify_peer(peer: Peer, op: Op, rng: np.random.Generator) -> tuple[dict[str, Any], float]:
    """Settles the peer on the inputs of our last run and checks its output as we check ours."""
    assert op.last is not None
    x, ids, scores = op.last
    setting = peer.settle(x, ids, scores)
    _, out = peer.run(x, ids, scores)
    store = peer.roundoff(op.tokens)
    stored = peer.stored()
    shape, rounding = op.weights.shape, None
    arrays: Mapping[str, Any] = op.weights.arrays
    if stored is not None:
        shape, arrays, rounding = stored.shape, stored.arrays, stored.rounding
    where = check.sample(shape, ids, rng, _CHECK_ELEMENTS)
    expected = check.reference(shape, arrays, x, ids, scores, where, store=store, rounding=rounding)
    ratio = check.error_over_bound(expected, out, store)
    check.require_correct(
        f"bench layer: peer {peer.name} on {shape.name}, {op.tokens} tokens", ratio
    )
    return setting, ratio


def measure_cell(
    op: Op, limits: Limits, options: Options, threads: int, peer: Peer | None = None
) -> dict[str, Any]:
    """One cell: correctness first, then runs between limits, and a peer's runs between ours."""
    rng = np.random.default_rng(3)
    shape, format = op.weights.shape, op.weights.format
    error = verify(op, rng)
    runners = [op.run]
    setting: dict[str, Any] = {}
    peer_error = 0.0
    if peer is not None:
        setting, peer_error = verify_peer(peer, op, rng)
        runners.append(peer_runner(peer, op))
    series = measure(
        runners, limits, seconds=options.seconds, min_rounds=options.min_rounds, tries=options.tries
    )
    assert op.last is not None
    own = times(series[0])

    def part(name: str) -> float:
        return statistics.median(run.parts[name] for run in series[0].runs)

    other = None
    if peer is not None:
        theirs = times(series[1])
        other = {
            "name": peer.name,
            "setting": setting,
            **theirs,
            "error_over_bound": peer_error,
            "ratio": theirs["median_s"] / own["median_s"],
        }
    return {
        "shape": shape.name,
        "format": format.name,
        "activation": op.act_class(),
        "tokens": op.tokens,
        "threads": threads,
        "isa": cpumoe.machine().isa[-1],
        "kernel": kernel_names(op, op.last[1]),
        **own,
        "error_over_bound": error,
        "overhead_share": part("fixed") / own["median_s"] if op.tokens == 1 else None,
        "first_call_s": part("first") if op.tokens == 1 else None,
        "route_s": part("route"),
        "pages": "huge" if options.huge_pages else "small",
        "peer": other,
    }


@contextmanager
def silent(title: str) -> Iterator[Progress]:
    """Progress that nobody sees."""
    yield lambda done, total: None


def run_layers(
    shapes: Iterable[Shape],
    formats: Iterable[str],
    options: Options,
    make_limits: Callable[[cpumoe.Executor], Limits],
    *,
    peer: Peer | None = None,
    progress: Callable[[str], AbstractContextManager[Progress]] = silent,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """All cells of shapes x formats x threads x tokens, weights made once per shape and format.

    Args:
        make_limits: measures the machine with the given threads.
        progress: given a title, enters a callback for (bytes done, bytes in all).
        report: called with each finished cell.
    """
    cells = []
    executors = {n: cpumoe.Executor(threads=n) for n in options.threads}
    limits = {n: make_limits(executor) for n, executor in executors.items()}
    kinds = [find_format(name) for name in formats] or [FORMATS["bf16"]]
    for shape in shapes:
        for format in kinds:
            with progress(f"Making {shape.name} in {format.name}") as count:
                weights = make_weights(shape, format, huge_pages=options.huge_pages, progress=count)
            small = small_weights(weights, options.huge_pages)
            for threads, executor in executors.items():
                if peer is not None:
                    peer.prepare(weights, small, threads, int(0.8 * available_memory()))
                for tokens in options.tokens:
                    op = Op(weights, tokens, executor, tokens, small, options.activations)
                    cells.append(measure_cell(op, limits[threads], options, threads, peer))
                    if report:
                        report(cells[-1])
            if peer is not None:
                peer.release()
            del weights, op
    return cells

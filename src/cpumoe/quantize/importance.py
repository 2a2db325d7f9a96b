"""What each linear map of a model receives on a text: the mean square of every input.

The model runs over the text as it is published. What reaches a layer's projections is seen by the
decoder's tap; what reaches a down projection is computed from that, by the same operators.

Input k of a module gets E[x_k^2] over the tokens that reach it. An expert that few tokens reach
would know little of its inputs, so PRIOR tokens with the layer's average are added to its own.
Modules behind a low rank (DeepSeek's q_b_proj) are not seen: their inputs all count the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpumoe.checkpoint import TensorRef
from cpumoe.engine import Model, load
from cpumoe.engine.evaluate import Evaluator
from cpumoe.models.spec import FfnSpec
from cpumoe.ops import Experts, linear, moe, route
from cpumoe.quantize.plan import read_names
from cpumoe.quantize.source import FLOAT_TYPES
from cpumoe.weight import Weight

Floats = NDArray[np.float32]
Key = tuple[int, str, int]
"""(layer, what is seen, expert or -1)."""

PRIOR = 16
TOKENS = 4096
# No input counts less than this share of the mean: a text does not show everything.
_FLOOR = 1e-3
# Features of a gated product that are computed at a time.
_SLICE = 512

_MODULE = re.compile(
    r"model\.layers\.(\d+)\.(?:\w+)\.(?:experts\.(\d+)\.|(shared_experts?)\.)?(\w+)$"
)
_INPUTS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
_DOWN = ("down_proj", "w2")


@dataclass
class Sums:
    """Sum of squares of each input, over `count` tokens."""

    total: NDArray[np.float64] | None = None
    count: int = 0

    def add(self, x: Floats) -> None:
        """Takes the rows of x [tokens, K]."""
        squares = np.square(x, dtype=np.float64).sum(axis=0)
        self.total = squares if self.total is None else self.total + squares
        self.count += len(x)

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean squares [K]."""
        assert self.total is not None
        return self.total / self.count


@dataclass
class Recorder:
    """Collects what the tap shows of `model`."""

    model: Model
    sums: dict[Key, Sums] = field(default_factory=lambda: defaultdict(Sums))

    def tap(self, layer: int, site: str, x: Floats) -> None:
        """What `Decoder.forward` calls."""
        self.sums[layer, site, -1].add(x)
        if site == "feed_forward":
            self._feed_forward(layer, self.model.spec.layers[layer].ffn, x)

    def _feed_forward(self, layer: int, ffn: FfnSpec, x: Floats) -> None:
        for kind, gate, up in (
            ("down", ffn.gate, ffn.up),
            ("shared down", ffn.shared_gate, ffn.shared_up),
        ):
            if gate is not None and up is not None:
                self._gated(ffn, (layer, kind, -1), x, gate.w, up.w, gate.bias, up.bias)
        if ffn.router is None or ffn.router_w is None or ffn.interleaved:
            return
        ids = self._route(ffn, x)
        for e in np.unique(ids):
            rows = np.ascontiguousarray(x[(ids == e).any(axis=1)])
            self.sums[layer, "expert", int(e)].add(rows)
            biases = [b[e] if b else None for b in (ffn.expert_gate_bias, ffn.expert_up_bias)]
            weights = ffn.expert_gate[e], ffn.expert_up[e]
            self._gated(ffn, (layer, "expert down", int(e)), rows, *weights, *biases)

    def _route(self, ffn: FfnSpec, x: Floats) -> NDArray[Any]:
        r, w = ffn.router, ffn.router_w
        assert r is not None
        assert w is not None
        logits = linear(x, _operand(w.w), _vector(w.bias), executor=self.model.executor)
        ids, _ = route(
            logits,
            r.top_k,
            kind=r.kind,
            renormalize=r.renormalize,
            correction=_vector(ffn.correction),
            groups=r.groups,
            top_groups=r.top_groups,
            group_score="max" if r.group_max else "top2",
        )
        return ids

    def _gated(
        self,
        ffn: FfnSpec,
        key: Key,
        x: Floats,
        gate: TensorRef | Weight,
        up: TensorRef | Weight,
        gate_bias: TensorRef | None,
        up_bias: TensorRef | None,
    ) -> None:
        """Adds act(gate x) * up x, which an expert gives whose down is a part of the identity."""
        parts, inter, hidden = [], gate.shape[0], x.shape[1]
        step = min(_SLICE, hidden)
        ids, ones = np.zeros((len(x), 1), np.int32), np.ones((len(x), 1), np.float32)
        for at in range(0, inter, step):
            count = min(step, inter - at)
            experts = Experts(
                gate=[_features(gate, at, count)],
                up=[_features(up, at, count)],
                down=[np.eye(hidden, count, dtype=np.float32)],
                gate_bias=_bias(gate_bias, at, count),
                up_bias=_bias(up_bias, at, count),
                activation=ffn.activation,  # type: ignore[arg-type]
                alpha=ffn.alpha,
                limit=None if ffn.limit == float("inf") else ffn.limit,
            )
            parts.append(moe(x, experts, ids, ones, executor=self.model.executor)[:, :count])
        middle = np.concatenate(parts, axis=1)
        self.sums[key].add(middle)
        if key[2] >= 0:
            self.sums[key[0], key[1], -1].add(middle)


def _operand(w: TensorRef | Weight) -> Any:
    """A weight as the operators take it."""
    if isinstance(w, Weight):
        return w
    if w.format in FLOAT_TYPES:
        return w.data.view(FLOAT_TYPES[w.format]).reshape(w.shape)
    return Weight(w.data, format=w.format, shape=w.shape)


def _features(w: TensorRef | Weight, first: int, count: int) -> Any:
    if isinstance(w, TensorRef):
        return _operand(w.part(slice(first, first + count)))
    whole = first == 0 and count == w.shape[0]
    return w if whole else w.features(first, count)


def _vector(v: TensorRef | None) -> Any:
    return None if v is None else v.data.view(FLOAT_TYPES[v.format])


def _bias(v: TensorRef | None, first: int, count: int) -> Any:
    return None if v is None else [_vector(v)[first : first + count]]


def _key(module: str) -> tuple[Key, Key] | None:
    """(what a module receives, the layer's average of it), or None where that is not seen."""
    match = _MODULE.fullmatch(module)
    if match is None:
        return None
    layer, expert, shared, name = int(match[1]), match[2], match[3], match[4]
    down = name in _DOWN
    if expert is not None:
        kind = "expert down" if down else "expert"
        return (layer, kind, int(expert)), (layer, kind if down else "feed_forward", -1)
    if name in _INPUTS:
        kind = "attention"
    elif name == "o_proj":
        kind = "output"
    elif down:
        kind = "shared down" if shared else "down"
    elif name in ("gate_proj", "up_proj"):
        kind = "feed_forward"
    else:
        return None
    return (layer, kind, -1), (layer, kind, -1)


def importance_of(sums: Mapping[Key, Sums], modules: Iterator[str]) -> dict[str, Floats]:
    """Module -> fp32 [K], its inputs' mean squares, for those that were seen."""
    found: dict[str, Floats] = {}
    for module in modules:
        keys = _key(module)
        if keys is None or keys[1] not in sums:
            continue
        own, average = sums.get(keys[0], Sums()), sums[keys[1]].mean
        if own.total is None:
            mean = average
        elif keys[0] == keys[1]:
            mean = own.mean
        else:
            mean = (own.total + PRIOR * average) / (own.count + PRIOR)
        if mean.any():
            found[module] = np.maximum(mean, _FLOOR * mean.mean()).astype(np.float32)
    return found


def calibrate(
    source: str | Path,
    text: str | Sequence[int],
    *,
    tokens: int = TOKENS,
    window: int | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Floats]:
    """Module -> fp32 [K], the mean square of what it receives on `text` (or token ids).

    The model at `source` runs over the first `tokens` tokens in windows, as in engine.evaluate.
    Give the result to quantize_model as `importance`. Raises Error for a text of fewer than two
    tokens, or a model that cannot be loaded.

    Source: weighting each input's error by its mean square is the diagonal of the second moment
    matrix that GPTQ (Frantar et al., 2022) takes as the Hessian of the layer's squared error.

    Example:
        >>> from cpumoe.quantize import calibrate
        >>> found = calibrate("models/tiny-stories-moe", "Once upon a time, there was a cat.")
        >>> found["model.layers.0.self_attn.q_proj"].shape
        (256,)
    """
    # In class fp32: what is recorded must not depend on the CPU.
    model = load(source, threads=threads, kv="fp32", activations="fp32")
    windows = Evaluator(model, text, window=window, tokens=tokens)
    recorder, session = Recorder(model), model.session()
    for done, part in enumerate(windows.windows, 1):
        ids = np.asarray([*windows.start, *windows.ids[part.begin : part.end]], np.int32)
        session.cache.truncate(0)
        model.decoder.forward([(session.cache, ids)], tap=recorder.tap)
        if progress is not None:
            progress(done, len(windows.windows))
    reader, _ = read_names(model.checkpoint)
    return importance_of(recorder.sums, iter(reader.modules))

"""Logits -> next token. Filters and their order as in Transformers' generation.

Order: repetition penalty; then, unless greedy, temperature, top-k, top-p, min-p, draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error

# Candidates that top-p sorts at first; nearly always enough, else eight times as many, and so on.
_FIRST_SORT = 1024
# Outside of these a penalty only takes logits out of fp32's range.
_PENALTIES = (1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature 0 means greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 mean off.
    seed: None draws differently each time. max_tokens: new tokens at most, None = until the end of
    text or of the context. stop: strings that end the answer and are not part of it.
    Raises Error for values of another type or out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            _require(name, value, _is(value, Real), "a number")
        for name in ("top_k", "seed", "max_tokens"):
            value = getattr(self, name)
            optional = name != "top_k" and value is None
            _require(name, value, optional or _is(value, Integral), "an integer")
        _require("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "at least 0")
        _require("top_k", self.top_k, self.top_k >= 0, "at least 0")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        penalty = self.repetition_penalty
        low, high = _PENALTIES
        _require("repetition_penalty", penalty, low <= penalty <= high, f"from {low} to {high:.0f}")
        if self.seed is not None:
            _require("seed", self.seed, self.seed >= 0, "at least 0")
        if self.max_tokens is not None:
            _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        good = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        _require("stop", self.stop, good, "strings that are not empty")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0


def _is(value: object, kind: type) -> bool:
    """Whether `value` is a number of that kind; a truth value is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _require(name: str, value: object, good: bool, must: str) -> None:
    if not good:
        shown = f"{value!r:.100}"
        raise Error(f"{name}: must be {must}; got {shown}. Choose another value")


def softmax(scores: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    """Probabilities of `scores` / temperature in float64; -inf gives 0."""
    behind = scores.astype(np.float64) - float(scores.max())
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, probability 0
        values = np.exp(behind / temperature)
    return np.asarray(values / values.sum())


def penalise(
    scores: NDArray[np.float32], seen: NDArray[np.int64], penalty: float
) -> NDArray[np.float32]:
    """Divide positive and multiply negative scores of the tokens `seen` by `penalty`; a copy."""
    out = scores.copy()
    values = out[seen]
    with np.errstate(over="ignore"):  # `Sampler.next` refuses what becomes infinite
        out[seen] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))
    return out


def candidates(
    scores: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(token ids, their probabilities) that survive temperature, top-k, top-p and min-p.

    scores: fp32 [vocab], after the penalty. At least one token survives. Tokens that tie with the
    k-th best stay, as in Transformers.
    """
    if 0 < params.top_k < len(scores):
        kth = np.partition(scores, len(scores) - params.top_k)[len(scores) - params.top_k]
        ids = np.flatnonzero(scores >= kth)
    else:
        ids = np.arange(len(scores))
    probs = softmax(scores[ids], float(params.temperature))
    if params.top_p < 1:
        keep = _nucleus(probs, params.top_p)
        ids, probs = ids[keep], probs[keep] / probs[keep].sum()
    if params.min_p > 0:
        keep = np.flatnonzero(probs >= params.min_p * probs.max())
        ids, probs = ids[keep], probs[keep] / probs[keep].sum()
    return ids, probs


def _nucleus(probs: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the smallest set of largest probabilities whose sum reaches top_p."""
    count, size = len(probs), _FIRST_SORT
    while size < count:
        best = np.sort(np.argpartition(probs, count - size)[count - size :])
        if probs[best].sum() >= top_p:
            return np.asarray(best[_sorted_nucleus(probs[best], top_p)])
        size *= 8
    return _sorted_nucleus(probs, top_p)


def _sorted_nucleus(probs: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    return order[: max(1, int(np.searchsorted(before, top_p, side="left")))]


class Sampler:
    """Chooses the tokens of one sequence. context: the prompt's ids, which the penalty counts.

    Example:
        >>> import numpy as np
        >>> Sampler(SamplingParams(temperature=0), [], 4).next(np.array([0, 3, 1, 2], np.float32))
        1
    """

    def __init__(self, params: SamplingParams, context: Iterable[int], vocab: int) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)
        self._seen = np.zeros(vocab, bool)
        self._seen[[i for i in context if 0 <= i < vocab]] = True

    def next(self, scores: NDArray[np.float32]) -> int:
        """The next token from fp32 logits [vocab]. Raises Error when they hold a NaN."""
        if self.params.repetition_penalty != 1:
            scores = penalise(scores, np.flatnonzero(self._seen), self.params.repetition_penalty)
        best = int(np.argmax(scores))  # a NaN counts as the largest
        if not np.isfinite(scores[best]):
            raise Error(
                f"logits: must be finite; got {scores[best]} for token {best}. "
                "The weights are damaged, or the model overflows"
            )
        token = best if self.params.greedy else self._draw(scores)
        self._seen[token] = True
        return token

    def _draw(self, scores: NDArray[np.float32]) -> int:
        ids, probs = candidates(scores, self.params)
        at = np.searchsorted(np.cumsum(probs), self._random.random() * probs.sum(), side="right")
        return int(ids[min(int(at), len(ids) - 1)])

"""Perplexity of a model on a text, and how far two models (or settings) differ on it.

Method. The text is tokenised once, as a whole. It is cut into windows of `window` tokens; each
window is run on its own, from an empty cache, at positions 0, 1, ...

- Start token: when the tokenizer puts tokens before a text (a beginning-of-text token), every
  window begins with them, within its `window` tokens; they are context and never scored.
- Non-overlapping windows (`stride` left out): windows follow each other without a gap. Without a
  start token the first token of a window has no context and is not scored, so a window scores
  `window - 1` tokens.
- Strided windows (`stride` below the window's text tokens): windows begin `stride` tokens apart and
  a token is scored in the first window that holds it, so it is seen with at least
  `window - stride` tokens before it. This costs window/stride times as much and measures a model
  with its context full. Without a start token only the first token of the text is not scored.
- The last window may be shorter.

For a scored token t with logits z the loss is logsumexp(z) - z[t] in nats, computed in float64
from the fp32 logits. Perplexity = exp(sum of losses / number of scored tokens).

Comparison of a base model P with another Q, both given the same tokens: KL = mean over the scored
tokens of sum_i P_i (log P_i - log Q_i) over the whole vocabulary, in nats; agreement = share of the
scored tokens before which both have the same likeliest next token; change = perplexity of Q /
perplexity of P - 1.

Standard errors take windows, not tokens, as independent: losses within a window are correlated. For
a mean r = sum s_w / sum n_w over m windows it is sqrt(m/(m-1) sum (s_w - r n_w)^2) / sum n_w (the
ratio estimator; W. Cochran, Sampling Techniques, 1977, section 6.4). That of the change is paired:
s_w is the difference of both losses in one window. Those of exponentials follow to first order.

Memory: the logits of at most LOGIT_BYTES per model exist at a time, whatever window and vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error
from cpumoe.engine.model import Model, Prompt
from cpumoe.engine.run import PREFILL_TOKENS, Progress
from cpumoe.engine.session import Session, common_prefix

WINDOW = 512
"""Tokens of a window unless the caller says otherwise."""

LOGIT_BYTES = 256 << 20
"""fp32 logits of one native call, per model."""

_BLOCK = 1 << 19  # logits taken to float64 at a time and thread (4 MiB)

Logits = NDArray[np.float32]
Losses = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [begin, end) of the text in one forward pass; those from `first` on are scored."""

    begin: int
    first: int
    end: int


def cut_windows(tokens: int, room: int, stride: int, *, started: bool) -> list[Window]:
    """Windows over a text of `tokens` tokens, as the module's docstring describes.

    room: text tokens of a window. started: a start token stands before each window.

    Example:
        >>> cut_windows(10, 4, 4, started=False)[1:]
        [Window(begin=4, first=5, end=8), Window(begin=8, first=9, end=10)]
        >>> [w.first for w in cut_windows(10, 4, 2, started=False)]
        [1, 4, 6, 8]
    """
    windows, scored = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + room, tokens)
        first = max(scored, begin + (0 if started else 1))
        if first < end:
            windows.append(Window(begin, first, end))
        scored = end
        if end == tokens:
            break
    return windows


@dataclass
class Evaluation:
    """What has been measured so far. Losses and divergences in nats.

    tokens: scored tokens. total: those that the whole evaluation scores.
    sums: one row per finished window: scored tokens, loss, other model's loss, KL, agreements.
    """

    compared: bool
    total: int = 0
    sums: list[tuple[float, float, float, float, float]] = field(default_factory=list)
    seconds: float = 0.0

    def _mean(self, column: Losses, counts: Losses) -> tuple[float, float | None]:
        """(sum of column / sum of counts, its standard error over windows or None for one)."""
        number = float(counts.sum())
        mean = float(column.sum()) / number
        m = len(column)
        if m < 2:
            return mean, None
        spread = float(np.square(column - mean * counts).sum())
        return mean, math.sqrt(m / (m - 1) * spread) / number

    @property
    def tokens(self) -> int:
        """Tokens scored so far."""
        return int(sum(row[0] for row in self.sums))

    @property
    def complete(self) -> bool:
        """Whether every window has been measured."""
        return self.tokens == self.total

    def figures(self) -> dict[str, Any]:
        """Everything by name; `*_se` are standard errors, None for a single window.

        Keys: tokens, windows, complete, seconds, loss, perplexity; of a comparison also
        other_loss, other_perplexity, change (relative, of the perplexity), kl, agreement.
        Raises Error when no window has been finished.
        """
        if not self.sums:
            raise Error("eval: at least one window must have been measured; got none")
        counts, loss, other, kl, agree = np.asarray(self.sums, np.float64).T
        mean, error = self._mean(loss, counts)
        found: dict[str, Any] = {
            "tokens": self.tokens,
            "windows": len(self.sums),
            "complete": self.complete,
            "seconds": self.seconds,
            "loss": mean,
            "loss_se": error,
        }
        found |= _with_error("perplexity", _exp(mean), error, _exp(mean))
        if not self.compared:
            return found
        mean, error = self._mean(other, counts)
        found |= _with_error("other_loss", mean, error, 1.0)
        found |= _with_error("other_perplexity", _exp(mean), error, _exp(mean))
        mean, error = self._mean(other - loss, counts)
        found |= _with_error("change", math.expm1(min(mean, 700.0)), error, _exp(mean))
        found |= _with_error("kl", *self._mean(kl, counts), 1.0)
        found |= _with_error("agreement", *self._mean(agree, counts), 1.0)
        return found


def _exp(x: float) -> float:
    """exp(x), the largest float instead of an overflow."""
    return math.exp(min(x, 709.0))


def _with_error(name: str, value: float, error: float | None, slope: float) -> dict[str, Any]:
    return {name: value, f"{name}_se": None if error is None else slope * error}


def log_softmax(logits: Logits) -> Losses:
    """float64 log-probabilities [n, vocab] of fp32 logits."""
    z = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity - infinity: the caller refuses the NaN
        z -= z.max(axis=1, keepdims=True)
        z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
    return z


def score(logits: Logits, other: Logits | None, targets: NDArray[np.int32]) -> Losses:
    """[n, 4] loss, the other model's loss, KL and agreement (0 or 1) of each target.

    logits, other: [n, vocab] in front of the targets [n]. Without `other` the last three are 0.
    """
    out = np.zeros((len(targets), 4))
    rows = np.arange(len(targets))
    base = log_softmax(logits)
    out[:, 0] = -base[rows, targets]
    if other is not None:
        second = log_softmax(other)
        out[:, 1] = -second[rows, targets]
        np.subtract(base, second, out=second)
        np.exp(base, out=base)
        out[:, 2] = np.einsum("ij,ij->i", base, second)
        out[:, 3] = logits.argmax(axis=1) == other.argmax(axis=1)
    return out


def start_tokens(model: Model) -> list[int]:
    """The tokens that the model's tokenizer puts before a text; mostly none or one."""
    plain = model.tokenizer.encode("a", special=False)
    full = model.tokenizer.encode("a")
    for k in range(len(full) - len(plain) + 1):
        if full[k : k + len(plain)] == plain:
            return full[:k]
    return []


def require_same_vocabulary(model: Model, other: Model) -> None:
    """Raises Error unless both models give logits for equally many tokens."""
    if model.spec.vocab != other.spec.vocab:
        raise Error(
            f"eval: both models must have the same vocabulary; got {model.spec.vocab} tokens in "
            f"{model.path} and {other.spec.vocab} in {other.path}. Compare models of one tokenizer"
        )


def require_same_tokenizer(model: Model, other: Model, text: str, ids: Sequence[int]) -> None:
    """Raises Error unless both models give `text` the same ids, and every id the same text."""
    if model.path == other.path:
        return
    a, b = model.tokenizer, other.tokenizer
    why = ""
    if a.size != b.size:
        why = f"{a.size} and {b.size} tokens"
    elif (others := b.encode(text, special=False)) != list(ids):
        why = f"the text becomes other tokens after {common_prefix(ids, others)} common ones"
    elif start_tokens(model) != start_tokens(other):
        why = "another token begins a text"
    else:
        for i in range(a.size):
            if a.decode([i], skip_special=False) != b.decode([i], skip_special=False):
                why = f"token {i} is another text"
                break
    if why:
        raise Error(
            f"eval: both models must have the same tokenizer; got {why} ({model.path}, "
            f"{other.path}). Compare models of one tokenizer"
        )


class Evaluator:
    """One evaluation: checks its inputs when made; `run` measures window by window.

    text: what to score; or its token ids, which are scored as they are, without a start token and
    without a look at any tokenizer. other: the model to compare with; it may be the same checkpoint
    with other settings. window: tokens of a window, the start token included; default WINDOW, or
    the context where that is less. stride: text tokens from one window to the next; default: so
    many that windows do not overlap. tokens: use only the first so many tokens of the text.
    Raises Error for a text of fewer than two tokens, sizes that do not fit or another tokenizer.
    """

    def __init__(
        self,
        model: Model,
        text: Prompt,
        *,
        other: Model | None = None,
        window: int | None = None,
        stride: int | None = None,
        tokens: int | None = None,
    ) -> None:
        self.model, self.other = model, other
        self.start: list[int] = []
        if isinstance(text, str):
            self.start = start_tokens(model)
            ids = model.tokenizer.encode(text, special=False)
        else:
            ids = [int(i) for i in text]
        context = min(m.context for m in self._models())
        window = min(WINDOW, context) if window is None else window
        room = window - len(self.start)
        if not (2 <= window <= context and room >= 1):
            raise Error(
                f"eval: the window must be from {max(2, 1 + len(self.start))} to {context} tokens, "
                f"the context; got {window}. Choose another window"
            )
        self.window, self.stride = window, room if stride is None else stride
        if not 1 <= self.stride <= room:
            raise Error(
                f"eval: the stride must be from 1 to {room}, the text tokens of a window; "
                f"got {stride}. Choose another stride"
            )
        if tokens is not None and tokens < 1:
            raise Error(f"eval: tokens must be at least 1; got {tokens}")
        if other is not None:
            require_same_vocabulary(model, other)
            if isinstance(text, str):
                require_same_tokenizer(model, other, text, ids)
        ids = ids if tokens is None else ids[:tokens]
        if len(ids) < (1 if self.start else 2):
            raise Error(
                f"eval: the text must hold a token to score and one before it; got {len(ids)} "
                f"token{'' if len(ids) == 1 else 's'}. Give a longer text"
            )
        beyond = [i for i in ids if not 0 <= i < model.spec.vocab]
        if beyond:
            raise Error(
                f"eval: the tokens of the text must be in [0, {model.spec.vocab}), the vocabulary "
                f"of {model.path}; got {beyond[0]}. This tokenizer belongs to another model"
            )
        self.ids = ids
        self.windows = cut_windows(len(ids), room, self.stride, started=bool(self.start))
        self.result = Evaluation(
            compared=other is not None, total=sum(w.end - w.first for w in self.windows)
        )
        self._rows = max(1, min(LOGIT_BYTES // (4 * model.spec.vocab), PREFILL_TOKENS))

    def run(self) -> Iterator[tuple[int, int]]:
        """Measures; yields (scored tokens, all tokens to score) after each step.

        `result` holds the finished windows, also after an interrupt.
        """
        models = self._models()
        sessions = [m.session() for m in models]
        begin, done = time.perf_counter(), 0
        with ThreadPoolExecutor(max(m.executor.threads for m in models)) as pool:
            for window in self.windows:
                sums = np.zeros(4)
                for session in sessions:
                    session.cache.truncate(0)
                for part in self._chunks(window, models, sessions, pool):
                    sums += part.sum(axis=0)
                    done += len(part)
                    yield done, self.result.total
                loss, second, kl, agree = map(float, sums)
                self.result.sums.append((window.end - window.first, loss, second, kl, agree))
                self.result.seconds = time.perf_counter() - begin

    def _chunks(
        self,
        window: Window,
        models: Sequence[Model],
        sessions: Sequence[Session],
        pool: ThreadPoolExecutor,
    ) -> Iterator[Losses]:
        """Scores of one window, a chunk of bounded logits at a time."""
        tokens = np.asarray([*self.start, *self.ids[window.begin : window.end]], np.int32)
        first = len(self.start) + window.first - window.begin
        # The last token is a target only, and so needs no forward pass.
        for at in range(0, first - 1, PREFILL_TOKENS):
            piece = tokens[at : min(at + PREFILL_TOKENS, first - 1)]
            for model, session in zip(models, sessions, strict=True):
                model.decoder.forward([(session.cache, piece)])
        for at in range(first - 1, len(tokens) - 1, self._rows):
            piece = tokens[at : min(at + self._rows, len(tokens) - 1)]
            logits = [
                model.decoder.forward([(session.cache, piece)], all=True)
                for model, session in zip(models, sessions, strict=True)
            ]
            yield self._score(logits, tokens[at + 1 : at + 1 + len(piece)], pool)

    def _score(
        self, logits: Sequence[Logits], targets: NDArray[np.int32], pool: ThreadPoolExecutor
    ) -> Losses:
        step = max(1, _BLOCK // logits[0].shape[1])

        def block(at: int) -> Losses:
            part = slice(at, at + step)
            other = logits[1][part] if len(logits) > 1 else None
            return score(logits[0][part], other, targets[part])

        found = np.concatenate(list(pool.map(block, range(0, len(targets), step))))
        if not np.isfinite(found).all():
            raise Error(
                "eval: every logit must be a finite number; got NaN or infinity. The weights are "
                f"damaged or overflow ({', '.join(str(m.path) for m in self._models())})"
            )
        return found

    def _models(self) -> list[Model]:
        return [m for m in (self.model, self.other) if m is not None]


def evaluate(
    model: Model,
    text: Prompt,
    *,
    other: Model | None = None,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity of `model` on `text`; with `other` also KL divergence and agreement.

    Arguments as in Evaluator. progress(done, total): scored tokens so far, called now and then.
    Raises Error for bad arguments, or logits that are no numbers.

    Example:
        >>> import cpumoe
        >>> from cpumoe.engine.evaluate import evaluate
        >>> model = cpumoe.load("models/tiny-stories-moe")
        >>> found = evaluate(model, "Once upon a time, there was a little cat.", other=model)
        >>> found.figures()["kl"], found.figures()["agreement"]
        (0.0, 1.0)
    """
    evaluator = Evaluator(model, text, other=other, window=window, stride=stride, tokens=tokens)
    for done, total in evaluator.run():
        if progress is not None:
            progress(done, total)
    return evaluator.result

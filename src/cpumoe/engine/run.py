"""The generation loop: prefill, then sample and decode, for one prompt or a ragged batch.

Between two native calls Python only samples and detokenises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cpumoe import _core
from cpumoe.engine.sampling import Sampler, SamplingParams
from cpumoe.engine.session import Session
from cpumoe.engine.text import StopMatcher, TextStream

# Tokens of one native prefill call: longer prompts come back to Python in between, for progress and
# Ctrl-C. At 1024 tokens a weight read from memory serves enough of them that this costs nothing.
PREFILL_TOKENS = 1024

FinishReason = Literal["stop", "length", "context", ""]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Stats:
    """Times and amounts of one generation (of the whole batch, when there are several prompts).

    prompt_tokens counts what was computed, cached_tokens what the KV cache already held.
    decode_tokens are the tokens after the first; seconds exclude the caller's own work.
    weight_bytes: bytes of weights read in decode, each weight once per step.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    weight_bytes: int = 0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second; 0 when nothing was measured."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """Decoded tokens per second; 0 when nothing was measured."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def weight_gb_per_second(self) -> float:
        """10^9 bytes of weights per second in decode; 0 when nothing was measured."""
        return self.weight_bytes / self.decode_seconds / 1e9 if self.decode_seconds else 0.0


@dataclass(slots=True)
class Request:
    """One sequence being generated, and its result so far."""

    session: Session
    prompt: Sequence[int]
    params: SamplingParams
    sampler: Sampler
    text: TextStream | None
    stops: StopMatcher
    eos_ids: frozenset[int]
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: FinishReason = ""

    def accept(self, token: int) -> str:
        """Take one sampled token; returns the text that has become certain."""
        self.ids.append(token)
        if token in self.eos_ids and not self.params.ignore_eos:
            self.finish = "stop"
        elif self.params.max_tokens is not None and len(self.ids) >= self.params.max_tokens:
            self.finish = "length"
        elif self.session.room < 1:
            self.finish = "context"
        piece = ""
        if self.text is not None:
            ended = self.finish == "stop"
            piece = self.stops.push("" if ended else self.text.push(token))
            if self.finish and self.stops.found is None:
                piece += self.stops.push(self.text.finish())
            if self.stops.found is not None:
                self.finish = "stop"
            elif self.finish:
                piece += self.stops.finish()
        self.pieces.append(piece)
        return piece


def _forward(
    decoder: _core.Decoder, batch: Sequence[tuple[Request, Sequence[int]]]
) -> NDArray[np.float32]:
    """One native call; the sessions' ids follow their caches only when it has succeeded."""
    segments = [(r.session.cache, np.asarray(ids, np.int32)) for r, ids in batch]
    logits: NDArray[np.float32] = decoder.forward(segments)
    for request, ids in batch:
        request.session.ids.extend(ids)
    return logits


def prefill(
    decoder: _core.Decoder, requests: Sequence[Request], stats: Stats, progress: Progress | None
) -> list[NDArray[np.float32]]:
    """Compute every prompt; returns the logits [vocab] behind the last token of each."""
    todo = [r.session.begin(r.prompt) for r in requests]
    total = sum(map(len, todo))
    stats.cached_tokens += sum(len(r.prompt) for r in requests) - total
    last: dict[int, NDArray[np.float32]] = {}
    while len(last) < len(requests):
        room, batch, which = PREFILL_TOKENS, [], []
        for i, ids in enumerate(todo):
            if ids and room:
                batch.append((requests[i], ids[:room]))
                which.append(i)
                todo[i] = ids[room:]
                room -= len(batch[-1][1])
        start = time.perf_counter()
        logits = _forward(decoder, batch)
        stats.prompt_seconds += time.perf_counter() - start
        stats.prompt_tokens += PREFILL_TOKENS - room
        last.update((i, logits[row]) for row, i in enumerate(which) if not todo[i])
        if progress is not None:
            progress(stats.prompt_tokens, total)
    return [last[i] for i in range(len(requests))]


def run(
    decoder: _core.Decoder,
    requests: Sequence[Request],
    stats: Stats,
    progress: Progress | None = None,
) -> Generator[tuple[int, str], None, None]:
    """Generate for all requests together; yields (index of the request, new text).

    The text may be empty: a token has come, its character has not. `stats` is filled on the way.
    The sessions are reserved from the first step until the end, an exception or close(); each of
    these leaves them usable. Raises Error when another generation has one of them.
    """
    with ExitStack() as reserved:
        for request in requests:
            reserved.enter_context(request.session.generating())
        yield from _steps(decoder, requests, stats, progress)


def _steps(
    decoder: _core.Decoder, requests: Sequence[Request], stats: Stats, progress: Progress | None
) -> Generator[tuple[int, str], None, None]:
    rows = prefill(decoder, requests, stats, progress)
    active = list(range(len(requests)))
    start = time.perf_counter()
    while True:
        pieces = [
            requests[i].accept(requests[i].sampler.next(row))
            for i, row in zip(active, rows, strict=True)
        ]
        stats.decode_seconds += time.perf_counter() - start
        yield from zip(active, pieces, strict=True)
        active = [i for i in active if not requests[i].finish]
        if not active:
            return
        start = time.perf_counter()
        logits = _forward(decoder, [(requests[i], requests[i].ids[-1:]) for i in active])
        rows = list(logits)
        stats.decode_tokens += len(active)
        stats.weight_bytes += decoder.last_weight_bytes

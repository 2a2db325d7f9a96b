"""One sequence and its KV cache, reused over turns as far as the new prompt repeats the old one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cpumoe import _core
from cpumoe._core import Error


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class Session:
    """Keys and values of one sequence. `ids`: the tokens they stand for.

    The cache may hold more tokens than `ids` after an interrupt, never fewer; `begin` cuts it.
    """

    def __init__(self, decoder: _core.Decoder, capacity: int, kv: str) -> None:
        self.cache = _core.KvCache(decoder, capacity, kv)
        self.ids: list[int] = []
        self._busy = threading.Lock()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Reserve the session for one generation; Error when another one has it."""
        if not self._busy.acquire(blocking=False):
            raise Error(
                "session: must serve one generation at a time; got a second one before the first "
                "ended. Finish or close its stream, or use a session for each"
            )
        try:
            yield
        finally:
            self._busy.release()

    def begin(self, prompt: Sequence[int]) -> list[int]:
        """Keep what `prompt` shares with the cache; returns the tokens still to be computed.

        At least one token is returned, because its logits are wanted.
        Raises Error for an empty prompt or one longer than the context.
        """
        if not prompt:
            raise Error("prompt: must hold at least one token; got an empty prompt")
        if len(prompt) > self.cache.capacity:
            raise Error(
                f"prompt: must be at most {self.cache.capacity} tokens (the context); "
                f"got {len(prompt)}. Shorten it or raise the context"
            )
        keep = min(common_prefix(self.ids, prompt), len(prompt) - 1)
        del self.ids[keep:]
        self.cache.truncate(keep)
        return list(prompt[keep:])

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return int(self.cache.capacity) - len(self.ids)

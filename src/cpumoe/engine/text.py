"""Tokens -> text while they arrive: whole characters only, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
# A UTF-8 character spans at most four bytes, so at most three tokens can still wait for its end.
_MAX_WAIT = 3
# Tokens before the first new one that the decoder looks at (a leading space depends on them).
_CONTEXT = 64


class TextStream:
    """Turns token ids into text, piece by piece.

    push() returns the text that has become certain: a character split over tokens is held back
    until its last byte. The pieces joined are decode(context + ids) without decode(context).
    decode: ids -> text. context: the tokens before; the last few matter.

    Example:
        >>> stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"))
        >>> [stream.push(b) for b in "é!".encode()] + [stream.finish()]
        ['', 'é', '!', '']
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)[-_CONTEXT:]  # decoded together: a clean start, then what is new
        while self._ids and decode(self._ids).startswith(_BROKEN):
            del self._ids[0]  # cut inside a character
        self._done = len(self._ids)  # ids before it are in the text returned so far
        self._text = decode(self._ids)  # of ids[:done]

    def push(self, token: int) -> str:
        """Add one token; returns the new whole characters, often none."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(_BROKEN):
            return self._advance(len(self._ids), text)
        settled = len(self._ids) - _MAX_WAIT
        if settled <= self._done:
            return ""
        return self._advance(settled, self._decode(self._ids[:settled]))

    def finish(self) -> str:
        """What was held back; broken bytes come as U+FFFD."""
        return self._advance(len(self._ids), self._decode(self._ids))

    def _advance(self, done: int, text: str) -> str:
        """Return what `text`, of ids[:done], adds, and forget the ids before the last addition."""
        new = text[len(self._text) :]
        last = self._decode(self._ids[self._done : done])
        if last:  # else a leading space would be taken for the first of the text
            del self._ids[: self._done]
            done -= self._done
            text = last
        self._done, self._text = done, text
        return new


class StopMatcher:
    """Passes text through until one of `stops` occurs; never lets a part of one out.

    push() returns the text that cannot belong to a stop string any more. After `found` is set,
    the text before the match has been returned and the rest is dropped.

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> [matcher.push(t) for t in ("aE", "x E", "ND b")], matcher.found
        (['a', 'Ex ', ''], 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is certain to stay."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        hits = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: hit[0])
            return self._take(at, drop=True)
        return self._take(len(self._held) - self._partial())

    def finish(self) -> str:
        """The text held back, when no stop string came."""
        return self._take(len(self._held))

    def _partial(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for n in range(longest, 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stops):
                return n
        return 0

    def _take(self, count: int, drop: bool = False) -> str:
        text, rest = self._held[:count], self._held[count:]
        self._held = "" if drop else rest
        return text

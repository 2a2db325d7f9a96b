"""Output files planned before a byte is computed: which tensor lies where in which shard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

# Tensors begin at a multiple of this where the sizes allow it: a cache line.
_ALIGNMENT = 64
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor of the output. dtype: as safetensors names it. order: place among its neighbours."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * _SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its header, and where each tensor begins, in bytes from the start of the file."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def _shard(name: str, tensors: Sequence[OutTensor]) -> Shard:
    """The file of `tensors`: in order of `order`, so that odd sizes do not misalign large ones."""
    placed, at = {}, 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for t in sorted(tensors, key=lambda t: t.order):
        placed[t.name] = at
        entries[t.name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [at, at + t.nbytes],
        }
        at += t.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {n: o + len(header) for n, o in placed.items()}
    return Shard(name, header, offsets, len(header) + at)


def plan_shards(groups: Iterable[Sequence[OutTensor]], limit: int) -> list[tuple[Shard, int]]:
    """Shards of at most `limit` bytes of tensors, with how many groups each holds.

    The tensors of a group stay together; a group larger than the limit is a shard of its own.
    """
    bins: list[list[OutTensor]] = []
    counts: list[int] = []
    room = -1
    for group in groups:
        size = sum(t.nbytes for t in group)
        if size > room:
            bins.append([])
            counts.append(0)
            room = limit
        bins[-1].extend(group)
        counts[-1] += 1
        room -= size
    of = len(bins)
    names = [f"model-{i + 1:05d}-of-{of:05d}.safetensors" for i in range(of)]
    if of == 1:
        names = ["model.safetensors"]
    return [
        (_shard(name, tensors), count)
        for name, tensors, count in zip(names, bins, counts, strict=True)
    ]


def index_json(shards: Iterable[Shard], total: int) -> dict[str, object]:
    """model.safetensors.index.json; total: bytes of all tensors."""
    weight_map = {name: s.name for s in shards for name in s.offsets}
    return {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }

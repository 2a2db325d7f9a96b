#!/usr/bin/env python3
"""Where the time of a decoded token goes: the parts of the layers, with their bytes.

    python benchmarks/e2e/phases.py MODEL [--context 512] [--steps 24] [--huge-pages]

Prints for each part the median time of a token in all layers together, the weight bytes it reads
and what share of the read bandwidth, measured before and after each token, that is. A callback
between the parts costs some 10 us each time; it counts as no part. For layers of routed experts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import cpumoe
from cpumoe import Error
from cpumoe.bench.e2e import memory
from cpumoe.bench.limits import probe

_PARTS = ("q, k, v and attention", "o and norm", "router, experts and norm", "head", "around")


def size(*weights: Any) -> int:
    """Bytes of the weights that are there."""
    present = [w.w if hasattr(w, "w") else w for w in weights if w is not None]
    return sum(int(w.nbytes) for w in present)


def part_bytes(spec: Any) -> list[int]:
    """Weight bytes of a token, for each of _PARTS."""
    qkv = o = ffn = 0
    for layer in spec.layers:
        a, f = layer.attn, layer.ffn
        qkv += size(a.q, a.k, a.v)
        o += size(a.o)
        ffn += size(f.gate, f.up, f.down, f.router_w, f.shared_gate, f.shared_up, f.shared_down)
        if f.router is not None:
            every = size(*f.expert_gate, *f.expert_up, *f.expert_down)
            ffn += f.router.top_k * every // f.router.experts
    return [qkv, o, ffn, size(spec.head), 0]


class Clock:
    """A tap of `Decoder.forward` that notes when each site was reached and left."""

    def __init__(self) -> None:
        """Nothing noted."""
        self.marks: list[tuple[float, str, float]] = []

    def __call__(self, layer: int, site: str, x: Any) -> None:
        """Notes one site."""
        now = time.perf_counter()
        self.marks.append((now, site, time.perf_counter()))

    def parts(self, start: float, end: float, stop: float) -> list[float]:
        """Seconds of _PARTS; start, end: of the native call; stop: when the token was chosen.

        The last layer's experts and the head have no site between them: the experts are taken to
        cost what those of the other layers do.
        """
        spent = dict.fromkeys(("attention", "output", "feed_forward"), 0.0)
        last = 0.0
        ends = [m[0] for m in self.marks[1:]] + [end]
        for (_, site, left), reached in zip(self.marks, ends, strict=True):
            spent[site] += reached - left
            last = reached - left
        layers = len(self.marks) // 3
        experts = (spent["feed_forward"] - last) / max(1, layers - 1)
        around = self.marks[0][0] - start + stop - end
        return [
            spent["attention"],
            spent["output"],
            spent["feed_forward"] - last + experts,
            last - experts,
            around,
        ]


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, measures and prints."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", type=Path, help="a checkpoint directory or a GGUF file")
    p.add_argument("--context", type=int, default=512, help="tokens before the first; default 512")
    p.add_argument("--steps", type=int, default=24, help="tokens to measure; default 24")
    p.add_argument("--threads", type=int, default=None, help="default: this machine's")
    p.add_argument("--huge-pages", action="store_true", help="copy the weights into huge pages")
    a = p.parse_args(argv)
    if a.context < 1 or a.steps < 1:
        p.error(f"--context and --steps must be at least 1; got {a.context} and {a.steps}")
    try:
        model = cpumoe.load(a.model, threads=a.threads, memory="huge" if a.huge_pages else "mapped")
        for _ in model.checkpoint.touch():
            pass
        limits = probe(model.executor)
        session = model.session()
        ids = np.random.default_rng(0).integers(0, model.spec.vocab, a.context).astype(np.int32)
        times: list[list[float]] = []
        shares: list[float] = []
        reads: list[float] = []
        before = limits.read_gb_per_s()
        for step in range(-2, a.steps):
            clock = Clock()
            start = time.perf_counter()
            logits = np.asarray(model.decoder.forward([(session.cache, ids)], tap=clock))
            end = time.perf_counter()
            ids = np.array([int(np.argmax(logits[0]))], np.int32)
            stop = time.perf_counter()
            after = limits.read_gb_per_s()
            if step >= 0:
                reads.append((before + after) / 2)
                times.append(clock.parts(start, end, stop))
                ideal = model.decoder.last_weight_bytes / reads[-1] / 1e9
                shares.append(sum(times[-1]) / ideal)
            before = after
    except Error as e:
        sys.exit(f"phases: {e}")
    read = statistics.median(reads)
    print(f"{'part':<26}{'us':>8}{'MB':>8}{'GB/s':>7}{'of bandwidth':>14}")
    for i, (name, count) in enumerate(zip(_PARTS, part_bytes(model.spec), strict=True)):
        us = statistics.median(t[i] for t in times) * 1e6
        rate = count / us / 1e3
        print(f"{name:<26}{us:>8.0f}{count / 1e6:>8.1f}{rate:>7.1f}{100 * rate / read:>13.1f}%")
    held = memory(model.path)
    print(
        f"time over bytes / bandwidth {statistics.median(shares):.3f}, bandwidth {read:.1f} GB/s, "
        f"{held.huge / 1e9:.2f} of {held.mapped / 1e9:.2f} GB mapped in huge pages"
    )


if __name__ == "__main__":
    main()

"""Timing beside the limits: each run stands between two measurements of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MAX_DISAGREEMENT = 0.10
"""Neighbouring limits further apart than this make a cell noisy: it is measured again."""

LONG_RUN = 1.0
"""Seconds from which a run is so long that three of them are enough."""


class Limits(Protocol):
    """What this machine can do at best, measured now with the threads of the run."""

    def read_gb_per_s(self) -> float:
        """Bandwidth of a pass of reads over a buffer that no cache holds, GB/s (10^9 bytes)."""

    def fma_gflop_per_s(self) -> float:
        """Rate of independent fp32 multiply-adds, GFLOP/s."""


@dataclass
class Run:
    """One timed call.

    Args:
        seconds: wall time of the call.
        bytes: weight bytes that it had to read, each touched expert counted once.
        flops: floating point operations of the products.
        parts: shares of the wall time in seconds, by name.
    """

    seconds: float
    bytes: int
    flops: int
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class Series:
    """Runs of one thing and the limits before and after each.

    Args:
        runs: in the order of time.
        read, fma: (before, after) each run, in GB/s and GFLOP/s.
        tries: how often the series was measured; the calmest one was kept.
    """

    runs: list[Run] = field(default_factory=list)
    read: list[tuple[float, float]] = field(default_factory=list)
    fma: list[tuple[float, float]] = field(default_factory=list)
    tries: int = 1

    def disagreement(self) -> float:
        """Relative disagreement of the neighbouring limits, the worse of the two kinds."""
        return max(disagreement(self.read), disagreement(self.fma))

    def noisy(self) -> bool:
        """Whether the limits moved too much for the figures to be trusted."""
        return self.disagreement() > MAX_DISAGREEMENT

    def median_seconds(self) -> float:
        """Median wall time."""
        return statistics.median(r.seconds for r in self.runs)

    def read_gb_per_s(self) -> float:
        """Median bandwidth beside the runs."""
        return statistics.median(value for pair in self.read for value in pair)

    def fma_gflop_per_s(self) -> float:
        """Median multiply-add rate beside the runs."""
        return statistics.median(value for pair in self.fma for value in pair)

    def gb_per_s(self) -> float:
        """Median rate of weight bytes."""
        return statistics.median(r.bytes / r.seconds for r in self.runs) / 1e9

    def gflop_per_s(self) -> float:
        """Median rate of floating point operations."""
        return statistics.median(r.flops / r.seconds for r in self.runs) / 1e9

    def share_of_bandwidth(self) -> float:
        """Median over the runs of their rate of bytes over the mean of the limits beside them."""
        return statistics.median(
            r.bytes / r.seconds / 1e9 / statistics.mean(pair)
            for r, pair in zip(self.runs, self.read, strict=True)
        )

    def share_of_peak(self) -> float:
        """The same for floating point operations and the multiply-add rate."""
        return statistics.median(
            r.flops / r.seconds / 1e9 / statistics.mean(pair)
            for r, pair in zip(self.runs, self.fma, strict=True)
        )


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 0 for fewer than two values.

    Example:
        >>> spread([1.0, 1.0, 1.0, 1.0])
        0.0
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def disagreement(pairs: Sequence[tuple[float, float]]) -> float:
    """How far limits before and after a run differ: the larger of a typical pair and of the halves.

    The median over the pairs of their difference sees a machine that jitters all the time; the
    medians of the first and the second half see one that drifts. One outlier moves neither.

    Example:
        >>> round(disagreement([(40.0, 40.0), (40.0, 30.0), (30.0, 30.0)]), 2)
        0.29
    """
    if not pairs:
        return 0.0
    values = [value for pair in pairs for value in pair]
    half = len(values) // 2
    jitter = statistics.median(abs(a - b) for a, b in pairs)
    drift = abs(statistics.median(values[:half]) - statistics.median(values[half:]))
    return max(jitter, drift) / statistics.median(values)


def measure(
    runners: Sequence[Callable[[], Run]],
    limits: Limits,
    *,
    seconds: float,
    min_rounds: int = 5,
    max_rounds: int = 60,
    tries: int = 3,
) -> list[Series]:
    """Times each runner in turn until the first one's runs fill `seconds`, limits between all runs.

    The pass over memory that measures the bandwidth also empties the caches of weights, so every
    run reads its weights from memory. When the limits disagree by more than MAX_DISAGREEMENT all is
    measured again, at most `tries` times; the calmest measurement is returned and says if it is
    still noisy.

    Args:
        runners: ours first, then a peer's.
        seconds: time the first runner's runs should fill.
        min_rounds, max_rounds: bounds of their number; runs of LONG_RUN or more need only three.

    Returns:
        One Series per runner.
    """

    def probe() -> tuple[float, float]:
        return limits.read_gb_per_s(), limits.fma_gflop_per_s()

    best: list[Series] = []
    worst = float("inf")
    attempt = 0
    for attempt in range(1, tries + 1):  # noqa: B007
        series = [Series() for _ in runners]
        spent, rounds, enough = 0.0, 0, False
        before = probe()
        while not enough:
            for runner, one in zip(runners, series, strict=True):
                one.runs.append(runner())
                after = probe()
                one.read.append((before[0], after[0]))
                one.fma.append((before[1], after[1]))
                before = after
            rounds += 1
            spent += series[0].runs[-1].seconds
            least = min(3, min_rounds) if series[0].runs[-1].seconds >= LONG_RUN else min_rounds
            enough = rounds >= max_rounds or (rounds >= least and spent >= seconds)
        noise = max(one.disagreement() for one in series)
        if noise < worst:
            best, worst = series, noise
        if noise <= MAX_DISAGREEMENT:
            break
    for one in best:
        one.tries = attempt
    return best

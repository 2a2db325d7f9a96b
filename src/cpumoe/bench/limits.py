"""The limits of this machine, measured by the native probe with an executor's threads."""

from __future__ import annotations

import cpumoe
from cpumoe import _core


class ProbeLimits:
    """Limits measured now. One instance keeps one buffer, several times the last-level cache."""

    def __init__(self, executor: cpumoe.Executor) -> None:
        """Uses the threads of `executor`."""
        self._executor = executor
        self._probe = _core.Probe()

    def read_gb_per_s(self) -> float:
        """Bandwidth of one pass of reads, GB/s."""
        return float(self._probe.read_gb_per_s(self._executor))

    def fma_gflop_per_s(self) -> float:
        """Rate of independent fp32 multiply-adds, GFLOP/s."""
        return float(self._probe.fma_gflop_per_s(self._executor))


def probe(executor: cpumoe.Executor) -> ProbeLimits:
    """Limits for the threads of `executor`."""
    return ProbeLimits(executor)

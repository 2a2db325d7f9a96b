"""Runs between limits: the order of things, and what a noisy machine does to it."""

import pytest

from cpumoe.bench.measure import Run, Series, disagreement, measure, spread


class FakeLimits:
    """Bandwidths from a list, a constant peak; notes that it was asked."""

    def __init__(self, log, read):
        self.log, self.read = log, iter(read)

    def read_gb_per_s(self):
        self.log.append("read")
        return next(self.read)

    def fma_gflop_per_s(self):
        self.log.append("fma")
        return 200.0


def runner(log, name, seconds=0.001):
    def run():
        log.append(name)
        return Run(seconds, bytes=10_000_000, flops=1_000_000)

    return run


def constant(value):
    while True:
        yield value


def test_every_run_stands_between_limits():
    log = []
    ours, peer = measure(
        [runner(log, "ours"), runner(log, "peer")],
        FakeLimits(log, constant(40.0)),
        seconds=0,
        min_rounds=2,
    )
    assert log == ["read", "fma", *["ours", "read", "fma", "peer", "read", "fma"] * 2]
    assert len(ours.runs) == len(peer.runs) == len(ours.read) == 2
    assert ours.tries == 1
    assert not ours.noisy()


def test_figures_are_shares_of_the_limits_beside_the_run():
    (series,) = measure([runner([], "x")], FakeLimits([], constant(40.0)), seconds=0, min_rounds=3)
    assert series.gb_per_s() == pytest.approx(10.0)  # 10 MB in 1 ms
    assert series.share_of_bandwidth() == pytest.approx(0.25)
    assert series.gflop_per_s() == pytest.approx(1.0)
    assert series.share_of_peak() == pytest.approx(1 / 200)
    assert series.read_gb_per_s() == 40.0
    assert series.fma_gflop_per_s() == 200.0


def test_a_share_uses_the_mean_of_before_and_after():
    (series,) = measure(
        [runner([], "x")], FakeLimits([], [20.0, 30.0]), seconds=0, min_rounds=1, tries=1
    )
    assert series.share_of_bandwidth() == pytest.approx(10 / 25)


def test_a_noisy_cell_is_measured_again_until_it_is_calm():
    noisy = [40.0, 30.0, 40.0, 30.0]
    log = []
    (series,) = measure(
        [runner(log, "x")],
        FakeLimits(log, noisy * 2 + [40.0] * 4),
        seconds=0,
        min_rounds=3,
        tries=5,
    )
    assert log.count("x") == 9
    assert series.tries == 3
    assert not series.noisy()
    assert series.read == [(40.0, 40.0)] * 3


def test_a_cell_that_stays_noisy_says_so_and_keeps_the_calmest_try():
    tries = [[40.0, 30.0, 40.0], [40.0, 34.0, 40.0], [40.0, 20.0, 40.0]]
    log = []
    (series,) = measure(
        [runner(log, "x")],
        FakeLimits(log, [v for t in tries for v in t]),
        seconds=0,
        min_rounds=2,
        tries=3,
    )
    assert log.count("x") == 6
    assert series.noisy()
    assert series.tries == 3
    assert series.read == [(40.0, 34.0), (34.0, 40.0)]


def test_runs_until_the_time_is_filled():
    (series,) = measure(
        [runner([], "x", 0.01)], FakeLimits([], constant(1.0)), seconds=0.0795, min_rounds=2
    )
    assert len(series.runs) == 8
    (series,) = measure(
        [runner([], "x", 0.01)], FakeLimits([], constant(1.0)), seconds=9, max_rounds=6
    )
    assert len(series.runs) == 6
    (series,) = measure([runner([], "x", 2.0)], FakeLimits([], constant(1.0)), seconds=1)
    assert len(series.runs) == 3  # long runs: three are enough


@pytest.mark.parametrize(
    ("pairs", "value"),
    [
        ([], 0.0),
        ([(40.0, 40.0)] * 4, 0.0),
        (
            [(40.0, 40.0), (40.0, 10.0), (10.0, 40.0), (40.0, 40.0), (40.0, 40.0)],
            0.0,
        ),  # one outlier
        ([(40.0, 30.0), (30.0, 40.0)] * 3, 10 / 35),  # jitter
        ([(40.0, 40.0)] * 3 + [(30.0, 30.0)] * 3, 10 / 35),  # drift
    ],
)
def test_disagreement(pairs, value):
    assert disagreement(pairs) == pytest.approx(value)


def test_spread_is_the_quartiles_over_the_median():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([3.0]) == 0.0


def test_limits_of_both_kinds_count():
    calm, jitter = [(40.0, 40.0)] * 3, [(200.0, 100.0)] * 3
    assert not Series(read=calm, fma=calm).noisy()
    assert Series(read=calm, fma=jitter).noisy()

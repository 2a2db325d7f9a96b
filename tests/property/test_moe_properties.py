"""What must hold for any experts, tokens and routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import moe_reference as reference
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cpumoe

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)
ONE, THREE = cpumoe.Executor(1), cpumoe.Executor(3)


@dataclass
class Problem:
    weights: reference.Weights
    gate_up: Any
    down: Any
    experts: cpumoe.Experts
    x: Any
    ids: Any
    share: Any

    def reference(self) -> tuple[Any, Any]:
        return reference.moe(self.weights, self.x.astype(float), self.ids, self.share.astype(float))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    e, k = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    h, i = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    tokens = draw(st.sampled_from([1, 2, 3, 8, 13, 40]))
    gate_up = rng.standard_normal((e, 2 * i, h)).astype(np.float32)
    down = rng.standard_normal((e, h, i)).astype(np.float32)
    wide = gate_up.astype(float)
    return Problem(
        weights=reference.Weights(wide[:, :i], wide[:, i:], down.astype(float)),
        gate_up=gate_up,
        down=down,
        experts=cpumoe.Experts(gate_up=gate_up, down=down),
        x=rng.standard_normal((tokens, h)).astype(np.float32),
        ids=rng.integers(0, e, (tokens, k)),
        share=rng.standard_normal((tokens, k)).astype(np.float32),
    )


def run(p: Problem, executor: cpumoe.Executor = ONE) -> Any:
    return cpumoe.moe(p.x, p.experts, p.ids, p.share, executor=executor)


@given(problems())
@SETTINGS
def test_equals_float64(p: Problem) -> None:
    want, bound = p.reference()
    assert (np.abs(run(p) - want) <= bound).all()


@given(problems())
@SETTINGS
def test_thread_count_changes_no_bit(p: Problem) -> None:
    assert run(p, ONE).tobytes() == run(p, THREE).tobytes()


@given(problems(), st.randoms(use_true_random=False))
@SETTINGS
def test_permuted_tokens_permute_outputs(p: Problem, random: Any) -> None:
    order = list(range(len(p.x)))
    random.shuffle(order)
    got = cpumoe.moe(p.x[order], p.experts, p.ids[order], p.share[order], executor=ONE)
    _, bound = p.reference()
    assert (np.abs(got - run(p)[order]) <= 2 * bound[order]).all()


@given(problems(), st.integers(0, 40))
@SETTINGS
def test_split_batches_change_nothing(p: Problem, at: int) -> None:
    """Batches of another size may take another kernel: equal within twice the bound."""
    cut = min(at, len(p.x))
    parts = [
        cpumoe.moe(p.x[s], p.experts, p.ids[s], p.share[s], executor=ONE)
        for s in (slice(None, cut), slice(cut, None))
    ]
    _, bound = p.reference()
    assert (np.abs(np.concatenate(parts) - run(p)) <= 2 * bound).all()


@given(problems())
@SETTINGS
def test_scaled_routing_weights_scale_outputs(p: Problem) -> None:
    """By a power of two, so that no rounding differs."""
    got = cpumoe.moe(p.x, p.experts, p.ids, p.share * 4, executor=ONE)
    assert (got == run(p) * 4).all()


@given(problems())
@SETTINGS
def test_duplicated_experts(p: Problem) -> None:
    """The same weights under another id give the same output; a list is as good as a stack."""
    e = p.experts.experts
    twice = cpumoe.Experts(gate_up=[*p.gate_up, *p.gate_up], down=[*p.down, *p.down])
    got = cpumoe.moe(p.x, twice, p.ids + e, p.share, executor=ONE)
    assert got.tobytes() == run(p).tobytes()


@given(problems())
@SETTINGS
def test_slots_may_be_permuted_and_split(p: Problem) -> None:
    """Reversed slots, and one expert named twice with half the weight, change only the rounding."""
    _, bound = p.reference()
    got = cpumoe.moe(p.x, p.experts, p.ids[:, ::-1], p.share[:, ::-1], executor=ONE)
    assert (np.abs(got - run(p)) <= 2 * bound).all()
    halves = cpumoe.moe(
        p.x,
        p.experts,
        np.repeat(p.ids, 2, axis=1),
        np.repeat(p.share / 2, 2, axis=1),
        executor=ONE,
    )
    assert (np.abs(halves - run(p)) <= 3 * bound).all()


@given(problems())
@SETTINGS
def test_columns_equal_rows(p: Problem) -> None:
    def turned(a: Any) -> Any:
        return np.ascontiguousarray(a.transpose(0, 2, 1))

    columns = cpumoe.Experts(gate_up=turned(p.gate_up), down=turned(p.down), layout="columns")
    got = cpumoe.moe(p.x, columns, p.ids, p.share, executor=ONE)
    want, bound = p.reference()
    assert (np.abs(got - want) <= bound).all()


@given(problems())
@SETTINGS
def test_nan_stays_in_its_token(p: Problem) -> None:
    x = p.x.copy()
    x[0] = np.nan
    got = cpumoe.moe(x, p.experts, p.ids, p.share, executor=ONE)
    assert np.isnan(got[0]).all()
    assert (got[1:] == run(p)[1:]).all()

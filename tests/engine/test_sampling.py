"""Sampling filters against Transformers' processors, the draw against its distribution."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from cpumoe import Error
from cpumoe.engine.sampling import Sampler, SamplingParams, candidates, penalise


def scores_of(vocab, seed, spread=3.0):
    return (np.random.default_rng(seed).normal(0, spread, vocab)).astype(np.float32)


def transformers_probs(scores, params):
    """Probabilities [vocab] after Transformers' warpers in Transformers' order."""
    x = torch.tensor(scores)[None]
    if params.temperature != 1:
        x = hf.TemperatureLogitsWarper(params.temperature)(None, x)
    if params.top_k:
        x = hf.TopKLogitsWarper(params.top_k)(None, x)
    if params.top_p < 1:
        x = hf.TopPLogitsWarper(params.top_p)(None, x)
    if params.min_p:
        x = hf.MinPLogitsWarper(params.min_p)(None, x)
    return x.softmax(-1)[0].numpy()


CASES = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.7, "top_k": 300, "top_p": 0.5},
    {"temperature": 5.0, "top_p": 0.97},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocab", [5, 300, 5000])
def test_filters_equal_transformers(vocab, case):
    params = SamplingParams(**case)
    for seed in range(4):
        scores = scores_of(vocab, seed)
        ids, probs = candidates(scores, params)
        got = np.zeros(vocab)
        got[ids] = probs
        want = transformers_probs(scores, params)
        # A token at the nucleus' edge may fall on either side: theirs sums in fp32, ours in fp64.
        edge = (got > 0) != (want > 0)
        assert edge.sum() <= 1
        if not edge.any():
            # fp32 softmax: rounding of exp and of a sum of `vocab` terms.
            assert np.abs(got - want).max() < 2.0**-24 * (8 + np.sqrt(vocab))
        else:
            assert want[edge].sum() + got[edge].sum() < 2e-2


def test_ties_with_the_kth_stay_as_in_transformers():
    scores = np.array([1, 3, 2, 2, 2, 0], np.float32)
    ids, _ = candidates(scores, SamplingParams(top_k=2))
    want = transformers_probs(scores, SamplingParams(top_k=2))
    assert ids.tolist() == np.flatnonzero(want).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
def test_repetition_penalty_equals_transformers(penalty):
    scores, seen = scores_of(50, 1), [3, 7, 7, 49, 0]
    want = hf.RepetitionPenaltyLogitsProcessor(float(penalty))(
        torch.tensor([seen]), torch.tensor(scores)[None].clone()
    )[0].numpy()
    got = penalise(scores, np.unique(seen), penalty)
    assert np.array_equal(got, want)


def test_penalty_counts_prompt_and_new_tokens():
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=10.0), [0], 3)
    scores = np.array([5, 4, 3], np.float32)
    assert [sampler.next(scores) for _ in range(3)] == [1, 2, 0]


def test_greedy_is_the_first_maximum():
    sampler = Sampler(SamplingParams(temperature=0), [], 4)
    assert sampler.next(np.array([1, 7, 7, 0], np.float32)) == 1


def test_same_seed_same_tokens():
    scores = scores_of(1000, 5, spread=1.0)

    def draw(seed):
        sampler = Sampler(SamplingParams(seed=seed), [], 1000)
        return [sampler.next(scores) for _ in range(50)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_draw_follows_the_probabilities():
    """Chi-squared over 20 000 draws; 29.6 is its 0.1 % point with 10 degrees of freedom."""
    scores = scores_of(11, 6, spread=1.0)
    params = SamplingParams(temperature=0.8, seed=7)
    sampler = Sampler(params, [], 11)
    counts = np.bincount([sampler.next(scores) for _ in range(20_000)], minlength=11)
    want = 20_000 * transformers_probs(scores, params)
    assert ((counts - want) ** 2 / want).sum() < 29.6


def test_large_vocabulary_top_p_takes_the_partial_path():
    scores = scores_of(151_936, 8)
    params = SamplingParams(top_p=0.8)
    ids, _ = candidates(scores, params)
    assert set(ids) == set(np.flatnonzero(transformers_probs(scores, params)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(value, temperature):
    scores = scores_of(10, 9)
    scores[4] = value
    with pytest.raises(Error, match="logits: must be finite"):
        Sampler(SamplingParams(temperature=temperature), [], 10).next(scores)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", None),
        ("top_p", None),
        ("seed", 1.0),
        ("max_tokens", 2.0),
        ("max_tokens", "3"),
        ("ignore_eos", 1),
        ("stop", 3),
        ("stop", "END"),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("max_tokens", 0),
        ("stop", ("",)),
    ],
)
def test_bad_parameters(name, value):
    with pytest.raises(Error, match=rf"^{name}: must be .*; got "):
        SamplingParams(**{name: value})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e300])
def test_any_temperature_gives_probabilities(temperature):
    """A tiny one is greedy, with even chances among equal scores; no warning is printed."""
    scores = np.array([3e38, -3e38, 3e38, -np.inf, 0], np.float32)
    for seed in range(8):
        params = SamplingParams(temperature=temperature, seed=seed, top_p=0.99)
        ids, probs = candidates(scores, params)
        if temperature < 1:
            assert ids.tolist() == [0, 2]
            assert probs.tolist() == [0.5, 0.5]
            assert Sampler(params, [], 5).next(scores) in (0, 2)
        else:
            assert np.isfinite(probs).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("penalty", [1e-3, 1e6])
def test_extreme_penalties_do_not_warn(penalty):
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=penalty), [0, 1], 3)
    assert sampler.next(np.array([-3e38, 1, 3e38], np.float32)) == 2

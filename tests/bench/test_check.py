"""The correctness gate: its reference, its bound, and that a wrong operator does not pass it."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cpumoe
from cpumoe import Error
from cpumoe.bench import check, layer
from cpumoe.bench.formats import FORMATS, find_format
from cpumoe.bench.shapes import Shape
from cpumoe.bench.weights import make_weights

ROWS = Shape("rows", hidden=40, inter=24, experts=6, top_k=2, renormalize=True)
COLUMNS = replace(
    ROWS,
    name="columns",
    layout="columns",
    interleaved=True,
    bias=True,
    activation="swiglu_oai",
    limit=1.0,
    router="topk_softmax",
)
GELU = replace(ROWS, name="gelu", activation="gelu", bias=True)
SHAPES = [
    ROWS,
    COLUMNS,
    GELU,
    replace(ROWS, name="tanh", activation="gelu_tanh"),
    replace(ROWS, name="relu", activation="relu", interleaved=True),
]


def plain(shape, weights, x, ids, scores):
    """The layer token by token in float64, written without the reference's blocks."""
    from math import erf

    w = {name: array.astype(np.float64) for name, array in weights.items()}
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for e, score in zip(ids[t], scores[t], strict=True):
            gate_up, down = w["gate_up"][e], w["down"][e]
            if shape.layout == "columns":
                gate_up, down = gate_up.T, down.T
            v = (
                gate_up @ x[t].astype(np.float64)
                + w.get("gate_up_bias", np.zeros(shape.experts))[e]
            )
            g, u = (v[0::2], v[1::2]) if shape.interleaved else np.split(v, 2)
            if shape.limit is not None:
                g, u = np.minimum(g, shape.limit), np.clip(u, -shape.limit, shape.limit)
            if shape.activation == "swiglu_oai":
                h = (u + 1) * g / (1 + np.exp(-shape.alpha * g))
            else:
                h = u * {
                    "silu": lambda g: g / (1 + np.exp(-g)),
                    "relu": lambda g: g * (g > 0),
                    "gelu": lambda g: g * np.array([0.5 + 0.5 * erf(v / 2**0.5) for v in g]),
                    "gelu_tanh": lambda g: (
                        g / (1 + np.exp(-1.5957691216057308 * (g + 0.044715 * g**3)))
                    ),
                }[shape.activation](g)
            out[t] += score * (down @ h + w.get("down_bias", np.zeros(shape.experts))[e])
    return out


def case(shape, format="bf16", tokens=5):
    weights = make_weights(shape, find_format(format), huge_pages=False)
    rng = np.random.default_rng(1)
    inputs = layer.make_inputs(shape, weights.format, tokens, rng)
    ids, scores = layer.route(shape, inputs.logits)
    where = (np.arange(tokens), np.arange(shape.hidden))
    return weights, inputs.x, ids, scores, where


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_reference_is_the_layer_in_float64(shape):
    weights, x, ids, scores, where = case(shape)
    reference = check.reference(shape, weights.arrays, x, ids, scores, where)
    expected = plain(shape, weights.arrays, x, ids, scores)
    # Both are float64: what separates them is the order of at most 80 additions.
    assert np.abs(reference.values - expected).max() <= 1e-12 * np.abs(expected).max()
    assert (reference.bounds > 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_our_operator_passes(shape, format):
    weights, *_ = case(shape, format)
    op = layer.Op(weights, 5, cpumoe.Executor(threads=2), seed=0)
    assert layer.verify(op, np.random.default_rng(0)) <= 1


def swapped_experts(x, experts, ids, scores, *, out, executor):
    cpumoe.moe(x, experts, ids[:, ::-1].copy(), scores, out=out, executor=executor)


def lost_token(x, experts, ids, scores, *, out, executor):
    cpumoe.moe(x, experts, ids, scores, out=out, executor=executor)
    out[-1] = out[0]


def small_error(x, experts, ids, scores, *, out, executor):
    cpumoe.moe(x, experts, ids, scores, out=out, executor=executor)
    out[0] = (out[0].astype(np.float32) * (1 + 2**-6)).astype(out.dtype)


def not_a_number(x, experts, ids, scores, *, out, executor):
    cpumoe.moe(x, experts, ids, scores, out=out, executor=executor)
    out[0, 0] = np.nan


@pytest.mark.parametrize("wrong", [swapped_experts, lost_token, small_error, not_a_number])
@pytest.mark.parametrize("shape", [ROWS, COLUMNS], ids=lambda s: s.name)
def test_a_wrong_operator_is_refused(monkeypatch, shape, wrong):
    weights, *_ = case(shape)
    op = layer.Op(weights, 5, cpumoe.Executor(threads=2), seed=0, activations="fp32")

    def call(x, ids, scores, out):
        wrong(x, weights.experts, ids, scores, out=out, executor=op.executor)

    monkeypatch.setattr(op, "call", call)
    with pytest.raises(Error, match="must stay within its bound"):
        layer.verify(op, np.random.default_rng(0))


def test_the_bound_scales_with_the_roundoff_of_what_is_stored():
    weights, x, ids, scores, where = case(ROWS)
    fine = check.reference(ROWS, weights.arrays, x, ids, scores, where)
    coarse = check.reference(ROWS, weights.arrays, x, ids, scores, where, store=2.0**-8)
    assert (coarse.values == fine.values).all()
    assert (coarse.bounds > 100 * fine.bounds).all()
    rounded = fine.values.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert check.error_over_bound(fine, rounded, 2.0**-8) <= 1
    assert check.error_over_bound(fine, rounded, 2.0**-24) > 1


def test_the_sample_holds_the_edges_and_respects_the_budget():
    ids = np.arange(64 * 2).reshape(64, 2) % 6
    rng = np.random.default_rng(0)
    tokens, columns = check.sample(ROWS, ids, rng, budget=10**9)
    assert {0, 63} <= set(tokens.tolist())
    assert columns.tolist() == list(range(ROWS.hidden))
    tokens, _ = check.sample(ROWS, ids, rng, budget=1)
    assert tokens.tolist() == [0]  # one token is always taken
    wide = replace(ROWS, hidden=4096)
    _, columns = check.sample(wide, ids, rng, budget=1)
    assert {0, 4095} <= set(columns.tolist())
    assert len(columns) < 100

"""moe, linear and route against float64, in every way that weights may lie in memory."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import moe_reference as reference
import numpy as np
import pytest

import cpumoe
from cpumoe import _core

E, H, N = 5, 24, 20
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _random(rng: Any, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    return (rng.standard_normal(shape) * scale).astype(dtype)


class Case:
    """Random experts in one dtype with their decoded float64 form."""

    def __init__(self, dtype: str, seed: int = 0, bias: bool = False, gated: bool = True) -> None:
        rng = np.random.default_rng(seed)
        d = DTYPES[dtype]
        self.rng, self.dtype = rng, dtype
        self.gate = _random(rng, (E, N, H), d, 0.3) if gated else None
        self.up = _random(rng, (E, N, H), d, 0.3)
        self.down = _random(rng, (E, H, N), d, 0.3)
        self.gate_bias = _random(rng, (E, N), d) if bias and gated else None
        self.up_bias = _random(rng, (E, N), d) if bias else None
        self.down_bias = _random(rng, (E, H), d) if bias else None

    def routing(self, tokens: int, k: int = 3) -> tuple[Any, Any]:
        ids = self.rng.integers(0, E, (tokens, k))
        return ids, self.rng.random((tokens, k)).astype(np.float32)

    def check(
        self, experts: cpumoe.Experts, tokens: int = 7, x_dtype: str = "float32", **act: Any
    ) -> None:
        x = _random(self.rng, (tokens, H), DTYPES[x_dtype])
        ids, weights = self.routing(tokens)
        wide = [
            None if a is None else a.astype(np.float64)
            for a in (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        ]
        for activations in ("auto", "fp32"):
            got = cpumoe.moe(x, experts, ids, weights, activations=activations)
            want, bound = reference.moe(
                reference.Weights(*wide),
                x.astype(np.float64),
                ids,
                weights.astype(np.float64),
                dtype=x_dtype,
                act_class=_core.class_for(FORMATS[self.dtype], experts._native.layout, activations),
                **act,
            )
            assert got.dtype == x.dtype
            assert got.shape == x.shape
            assert (np.abs(got.astype(np.float64) - want) <= bound).all()


def _fused(gate: Any, up: Any, interleaved: bool) -> Any:
    if gate is None:
        return None
    if interleaved:
        return np.ascontiguousarray(np.stack([gate, up], axis=2).reshape(E, -1, *gate.shape[2:]))
    return np.concatenate([gate, up], axis=1)


def _columns(a: Any) -> Any:
    return np.ascontiguousarray(np.swapaxes(a, 1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("form", ["fused", "interleaved", "separate", "list", "slice"])
@pytest.mark.parametrize("bias", [False, True])
def test_forms(dtype: str, layout: str, form: str, bias: bool) -> None:
    c = Case(dtype, bias=bias)
    to = _columns if layout == "columns" else lambda a: a
    options: dict[str, Any] = {"layout": layout, "down": to(c.down), "down_bias": c.down_bias}
    if form in ("fused", "interleaved"):
        mixed = form == "interleaved"
        options["gate_up"] = to(_fused(c.gate, c.up, mixed))
        options["interleaved"] = mixed
        options["gate_up_bias"] = _fused(c.gate_bias, c.up_bias, mixed)
    elif form == "slice":  # halves of a wider tensor, sliced along the features and the experts
        both = to(np.concatenate([c.gate, c.up, c.up], axis=1))
        both = np.concatenate([both, both])[:E]
        cut = (slice(None), slice(0, N)), (slice(None), slice(N, 2 * N))
        if layout == "columns":
            cut = (
                (slice(None), slice(None), slice(0, N)),
                (slice(None), slice(None), slice(N, 2 * N)),
            )
        options |= {"gate": both[cut[0]], "up": both[cut[1]]}
        options |= {"gate_bias": c.gate_bias, "up_bias": c.up_bias}
    else:
        options |= {"gate": to(c.gate), "up": to(c.up)}
        options |= {"gate_bias": c.gate_bias, "up_bias": c.up_bias}
    if form == "list":
        options = {k: [*v] if isinstance(v, np.ndarray) else v for k, v in options.items()}
    c.check(cpumoe.Experts(**options))


@pytest.mark.parametrize(
    ("activation", "limit"),
    [(a, lim) for a in [*reference.FUNCTIONS, "swiglu_oai"] for lim in (None, 0.7)],
)
def test_activations(activation: Any, limit: float | None) -> None:
    c = Case("float32", bias=True)
    experts = cpumoe.Experts(
        gate=c.gate,
        up=c.up,
        down=c.down,
        gate_bias=c.gate_bias,
        up_bias=c.up_bias,
        down_bias=c.down_bias,
        activation=activation,
        alpha=1.3,
        limit=limit,
    )
    c.check(experts, activation=activation, alpha=1.3, limit=math.inf if limit is None else limit)


@pytest.mark.parametrize("activation", reference.FUNCTIONS)
def test_no_gate(activation: Any) -> None:
    c = Case("bfloat16", bias=True, gated=False)
    experts = cpumoe.Experts(
        up=c.up, down=c.down, up_bias=c.up_bias, down_bias=c.down_bias, activation=activation
    )
    assert "no gate" in repr(experts)
    c.check(experts, activation=activation)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 17, 70])
def test_tokens_and_dtypes_of_x(x_dtype: str, tokens: int) -> None:
    c = Case("bfloat16")
    c.check(cpumoe.Experts(gate=c.gate, up=c.up, down=c.down), tokens, x_dtype)


def test_no_tokens() -> None:
    c = Case("float32")
    experts = cpumoe.Experts(gate=c.gate, up=c.up, down=c.down)
    x = np.empty((0, H), np.float32)
    got = cpumoe.moe(x, experts, np.empty((0, 2), np.int64), np.empty((0, 2), np.float32))
    assert got.shape == (0, H)


def test_leading_dimensions_and_out() -> None:
    c = Case("float32")
    experts = cpumoe.Experts(gate=c.gate, up=c.up, down=c.down)
    x = _random(c.rng, (2, 3, H), np.float32)
    ids, weights = c.routing(6)
    flat = cpumoe.moe(x.reshape(6, H), experts, ids, weights)
    got = cpumoe.moe(x, experts, ids.reshape(2, 3, -1), weights.reshape(2, 3, -1))
    assert (got.reshape(6, H) == flat).all()
    out = np.full((6, 2 * H), np.nan, np.float32)
    view = out[:, :H]
    assert cpumoe.moe(x.reshape(6, H), experts, ids, weights, out=view) is view
    assert (view == flat).all()
    assert np.isnan(out[:, H:]).all()


def test_sentinel_is_skipped() -> None:
    c = Case("float32")
    experts = cpumoe.Experts(gate=c.gate, up=c.up, down=c.down)
    x = _random(c.rng, (3, H), np.float32)
    ids = np.array([[1, E], [E, E], [2, 0]], np.int32)
    weights = np.array([[0.5, np.nan], [0, 0], [1, 1]], np.float32)
    got = cpumoe.moe(x, experts, ids, weights, skip_sentinel=True)
    want = cpumoe.moe(x[:1], experts, ids[:1, :1], weights[:1, :1])
    assert (got[0] == want[0]).all()
    assert (got[1] == 0).all()
    with pytest.raises(cpumoe.Error, match=r"ids must be in \[0, 5\); got 5 for token 0, slot 1"):
        cpumoe.moe(x, experts, ids, weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_linear(dtype: str, layout: Any, x_dtype: str) -> None:
    rng = np.random.default_rng(3)
    w, bias = _random(rng, (N, H), DTYPES[dtype]), _random(rng, (N,), DTYPES[dtype])
    x = _random(rng, (9, H), DTYPES[x_dtype])
    stored = np.ascontiguousarray(w.T) if layout == "columns" else w
    for activations in ("auto", "fp32"):
        act_class = _core.class_for(FORMATS[dtype], layout, activations)
        got = cpumoe.linear(x, stored, bias, layout=layout, activations=activations)
        want, bound = reference.linear(
            w.astype(np.float64), x.astype(np.float64), bias.astype(np.float64), x_dtype, act_class
        )
        assert got.dtype == x.dtype
        assert (np.abs(got.astype(np.float64) - want) <= bound).all()


def test_class_bf16_where_there_are_kernels_for_it() -> None:
    """By default and on request; x that is in bf16 is multiplied exactly. An error elsewhere."""
    rng = np.random.default_rng(4)
    w, x = _random(rng, (N, H), ml_dtypes.bfloat16), _random(rng, (9, H), np.float32)
    exact = cpumoe.linear(x, w, activations="fp32")
    if "avx512_bf16" not in cpumoe.machine().isa:
        assert (cpumoe.linear(x, w) == exact).all()
        with pytest.raises(cpumoe.Error, match="must have the instruction set avx512_bf16"):
            cpumoe.linear(x, w, activations="bf16")
        return
    rounded = cpumoe.linear(x, w, activations="bf16")
    assert (rounded == cpumoe.linear(x, w)).all()
    assert (rounded != exact).any()
    in_bf16 = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (rounded == cpumoe.linear(in_bf16, w)).all()
    want, bound = reference.linear(w.astype(np.float64), in_bf16.astype(np.float64), None)
    assert (np.abs(rounded - want) <= bound).all()
    wide = w.astype(np.float32)  # fp32 weights have no products of class bf16
    assert (cpumoe.linear(x, wide, activations="bf16") == cpumoe.linear(x, wide)).all()


def _route(logits: Any, k: int, kind: str, renormalize: bool, correction: Any, scale: float) -> Any:
    x = logits.astype(np.float64)
    soft = np.exp(x - x.max(-1, keepdims=True))
    soft /= soft.sum(-1, keepdims=True)
    score = {"softmax_topk": soft, "topk_softmax": x, "sigmoid": 1 / (1 + np.exp(-x))}[kind]
    ids = np.argsort(
        -(score if correction is None else score + correction), axis=-1, kind="stable"
    )[:, :k]
    w = np.take_along_axis(score, ids, -1)
    if kind == "topk_softmax":
        w = np.exp(w - w.max(-1, keepdims=True))
        w /= w.sum(-1, keepdims=True)
    elif renormalize:
        w = w / w.sum(-1, keepdims=True)
    return ids, w * scale


@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(kind: Any, renormalize: bool) -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((11, 16)).astype(np.float32)
    correction = rng.standard_normal(16).astype(np.float32) if kind == "sigmoid" else None
    ids, weights = cpumoe.route(
        logits, 4, kind=kind, renormalize=renormalize, correction=correction, scale=2.5
    )
    want_ids, want = _route(logits, 4, kind, renormalize, correction, 2.5)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    assert (ids == want_ids).all()
    # exp, a sum of 16 terms, a division and a scaling: under 64 roundings.
    assert (np.abs(weights - want) <= 64 * reference.EPS * want).all()


def test_route_weights_that_all_underflow_are_equal() -> None:
    logits = np.full((2, 8), -1e4, np.float32)
    _, weights = cpumoe.route(logits, 4, kind="sigmoid", renormalize=True)
    assert (weights == 0.25).all()


def test_route_groups() -> None:
    logits = np.array([[9, 0, 5, 5, 1, 1, 4, 4]], np.float32)
    ids, _ = cpumoe.route(logits, 2, kind="sigmoid", groups=4, top_groups=1)
    assert ids.tolist() == [[2, 3]]  # two good ones beat one best
    ids, _ = cpumoe.route(logits, 2, kind="softmax_topk", groups=4, top_groups=1, group_score="max")
    assert ids.tolist() == [[0, 1]]

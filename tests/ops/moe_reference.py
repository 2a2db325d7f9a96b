"""The operator in float64 on the decoded weights, with the error that its arithmetic may make.

Every function returns (value, bound): the bound follows each product and sum with half a unit in
the last place of fp32, first order in epsilon, sums taken in any order; and, in class bf16, each
activation with half a place of bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

EPS = 2.0**-24
F64 = np.ndarray[Any, np.dtype[np.float64]]
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
CLASS_ROUNDING = {"fp32": 0.0, "bf16": 2.0**-8}


def gelu(x: F64) -> F64:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


# name: (function, slope's bound as a function of |x|)
FUNCTIONS: dict[str, Any] = {
    "identity": (lambda x: x, lambda x: np.ones_like(x)),
    "silu": (silu, lambda x: 1.1 * np.ones_like(x)),
    "gelu": (gelu, lambda x: 1.13 * np.ones_like(x)),
    "gelu_tanh": (gelu_tanh, lambda x: 1.13 * np.ones_like(x)),
    "relu": (lambda x: np.maximum(x, 0), lambda x: np.ones_like(x)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.abs(x) + 1e-3),
}


@dataclass
class Weights:
    """Experts in one form: gate and up [E, I, H] (gate None: not gated), down [E, H, I]."""

    gate: F64 | None
    up: F64
    down: F64
    gate_bias: F64 | None = None
    up_bias: F64 | None = None
    down_bias: F64 | None = None


def _product(w: F64, x: F64, x_error: F64, bias: F64 | None) -> tuple[F64, F64]:
    value, magnitude = w @ x, np.abs(w) @ np.abs(x)
    error = EPS * (len(x) + 1) * magnitude + np.abs(w) @ x_error
    if bias is not None:
        value, error = value + bias, error + EPS * (np.abs(value) + np.abs(bias))
    return value, error


def expert(
    w: Weights, e: int, x: F64, activation: str, alpha: float, limit: float, act_class: str
) -> tuple[F64, F64]:
    def bias(b: F64 | None) -> F64 | None:
        return None if b is None else b[e]

    half = CLASS_ROUNDING[act_class]
    dx = half * np.abs(x)
    u, du = _product(w.up[e], x, dx, bias(w.up_bias))
    if w.gate is None:
        f, slope = FUNCTIONS[activation]
        mid = f(u)
        dmid = slope(u) * du + 8 * EPS * np.abs(mid)
    else:
        g, dg = _product(w.gate[e], x, dx, bias(w.gate_bias))
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        if activation == "swiglu_oai":
            s = g / (1 + np.exp(-alpha * g))
            ds = 1.1 * dg + 8 * EPS * np.abs(s)
            mid = (u + 1) * s
            dmid = np.abs(s) * (du + EPS * (np.abs(u) + 1)) + (np.abs(u) + 1) * ds
        else:
            f, slope = FUNCTIONS[activation]
            a = f(g)
            mid = a * u
            dmid = np.abs(a) * du + np.abs(u) * (slope(g) * dg + 8 * EPS * np.abs(a))
        dmid = dmid + EPS * np.abs(mid)
    dmid = dmid + half * (np.abs(mid) + dmid)
    return _product(w.down[e], mid, dmid, bias(w.down_bias))


def moe(
    w: Weights,
    x: F64,
    ids: Any,
    weights: F64,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = math.inf,
    dtype: str = "float32",
    act_class: str = "fp32",
) -> tuple[F64, F64]:
    value, bound = np.zeros_like(x), np.zeros_like(x)
    experts = w.down.shape[0]
    for t in range(x.shape[0]):
        magnitude = np.zeros(x.shape[1])
        for e, weight in zip(ids[t], weights[t], strict=True):
            if e == experts:
                continue
            y, dy = expert(w, int(e), x[t], activation, alpha, limit, act_class)
            value[t] += weight * y
            bound[t] += abs(weight) * dy
            magnitude += np.abs(weight * y)
        bound[t] += EPS * (ids.shape[1] + 2) * magnitude
    bound += ROUNDING[dtype] * np.abs(value) + 1e-37
    return value, bound


def linear(
    w: F64, x: F64, bias: F64 | None, dtype: str = "float32", act_class: str = "fp32"
) -> tuple[F64, F64]:
    value, bound = np.empty((x.shape[0], w.shape[0])), np.empty((x.shape[0], w.shape[0]))
    for t in range(x.shape[0]):
        value[t], bound[t] = _product(w, x[t], CLASS_ROUNDING[act_class] * np.abs(x[t]), bias)
    return value, bound + ROUNDING[dtype] * np.abs(value) + 1e-37

"""The correctness gate: one layer of experts against float64, with a derived error bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpumoe import Error
from cpumoe.bench.formats import Array, decode
from cpumoe.bench.shapes import Shape

_U = 2.0**-24  # unit roundoff of fp32
_TINY = float(np.finfo(np.float32).tiny)  # absolute error of a result that underflows
_CHUNK = 1 << 23  # weight elements decoded at a time (64 MiB of float64)

LAMBDA = 8.0
"""Hoeffding: a sum of independent errors |e_i| <= c_i exceeds LAMBDA * sqrt(sum c_i^2) with a
probability of at most 2 exp(-LAMBDA^2 / 2) = 3e-14."""


def _erf(x: Array) -> Array:
    from math import erf

    values: Array = np.vectorize(erf, otypes=[np.float64])(x)
    return values


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


# name -> (f, upper bound of |f'|). Reference formulas in float64.
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "identity": (lambda x: x, 1.0),
    "relu": (lambda x: np.maximum(x, 0), 1.0),
    "silu": (lambda x: x * _sigmoid(x), 1.1),
    "gelu": (lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))), 1.13),
    "gelu_tanh": (
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        1.13,
    ),
}


@dataclass
class Reference:
    """float64 results of a sample of one output.

    Args:
        tokens: [S] sampled rows of the output.
        columns: [C] sampled columns.
        values: [S, C] float64 results.
        bounds: [S, C] largest error that an implementation of the given precision may show before
        it
            rounds the result to its output format.
    """

    tokens: Array
    columns: Array
    values: Array
    bounds: Array


def error_over_bound(reference: Reference, output: Array, roundoff: float) -> float:
    """Largest error of `output` [T, H] over its bound; infinity when a value is not a number.

    Args:
        roundoff: unit roundoff of the output's format (or of what the implementation rounded to).
    """
    got = decode(output[np.ix_(reference.tokens, reference.columns)])
    bounds = reference.bounds + roundoff * (np.abs(reference.values) + reference.bounds) + _TINY
    ratio = np.abs(got - reference.values) / bounds
    return float(ratio.max()) if np.isfinite(ratio).all() else float("inf")


def require_correct(where: str, ratio: float) -> None:
    """Raises Error when an error exceeds its bound: wrong results are not timed."""
    if not ratio <= 1:
        raise Error(
            f"{where}: the error against float64 must stay within its bound; got {ratio:.3g} "
            "times the bound. The result is wrong: report it with this command"
        )


def sample(shape: Shape, ids: Array, rng: np.random.Generator, budget: int) -> tuple[Array, Array]:
    """Chooses tokens (first, last, then random ones) and output columns to recompute.

    Args:
        ids: [T, k] chosen experts.
        budget: weight elements that may be decoded; one token is always taken.
    """
    tokens = ids.shape[0]
    order = dict.fromkeys([0, tokens - 1, *map(int, rng.permutation(tokens)[:14])])
    chosen: list[int] = []
    experts: set[int] = set()
    for token in order:
        union = experts | set(ids[token].tolist())
        if chosen and len(union) * shape.expert_elements() > budget:
            continue
        chosen.append(token)
        experts = union
    room = max(64, budget // (len(experts) * shape.inter))
    columns = np.arange(shape.hidden)
    if room < shape.hidden:
        columns = np.union1d(rng.choice(shape.hidden, room, replace=False), [0, shape.hidden - 1])
    return np.array(sorted(chosen)), columns


@dataclass
class _Errors:
    """Values with what is known of their errors: fixed + LAMBDA * sqrt(square) bounds them.

    Args:
        value: float64 results.
        fixed: sum of the errors that may all have one sign.
        square: sum of the squares of the independent ones.
    """

    value: Array
    fixed: Array
    square: Array

    def bound(self) -> Array:
        return self.fixed + LAMBDA * np.sqrt(self.square)


def _product(weight: Array, x: _Errors, bias: Array | None, store: float) -> _Errors:
    """W x + bias for weight [N, K] of any format and x [K, M]: results [N, M].

    A sum of K products has K roundings, each at most u times a partial sum, which is at most sum
    |w||x|; errors of x pass through |w| (fixed) and w^2 (square).
    """
    n, k = weight.shape
    value, size, fixed, square = (np.empty((n, x.value.shape[1])) for _ in range(4))
    step = max(1, _CHUNK // k)
    exact = not x.fixed.any() and not x.square.any()
    for start in range(0, n, step):
        rows = slice(start, start + step)
        block = decode(weight[rows])
        value[rows] = block @ x.value
        fixed[rows] = 0
        square[rows] = 0
        if not exact:
            square[rows] = (block * block) @ x.square
        np.abs(block, out=block)
        size[rows] = block @ np.abs(x.value)
        if not exact:
            fixed[rows] = block @ x.fixed
    if bias is not None:
        value, size = value + bias, size + np.abs(bias)
    square += (k + 1) * (_U * size) ** 2 + (store * value) ** 2
    return _Errors(value, fixed, square)


def _gate(shape: Shape, gate: _Errors, up: _Errors, store: float) -> _Errors:
    """Activation of gate and up values [I, M]; clamping and the slope pass their errors on."""
    g, u, u_square = gate.value, up.value, up.square
    if shape.limit is not None:
        g, u = np.minimum(g, shape.limit), np.clip(u, -shape.limit, shape.limit)
    if shape.activation == "swiglu_oai":
        f, slope = g * _sigmoid(shape.alpha * g), 1.1
        u, u_square = u + 1, u_square + (_U**2 + store**2) * (np.abs(u) + 1) ** 2
    else:
        function, slope = ACTIVATIONS[shape.activation]
        f = function(g)
    # The activation kernels promise 4 ulp, 8 roundoffs, of f; two more roundings for the product.
    h = f * u
    f_square = slope**2 * gate.square + (store * f) ** 2
    square = f_square * u**2 + f**2 * u_square + ((2 * _U) ** 2 + store**2) * h**2
    return _Errors(h, 8 * _U * np.abs(h) + _TINY, square)


def _round(x: _Errors, rounding: Callable[[Array], tuple[Array, Array]] | None) -> _Errors:
    """Activations [K, M] with the errors of the rounding in front of a product added."""
    if rounding is None:
        return x
    independent, fixed = rounding(x.value)
    return _Errors(x.value, x.fixed + fixed, x.square + independent**2)


def reference(
    shape: Shape,
    weights: Mapping[str, Any],
    x: Array,
    ids: Array,
    scores: Array,
    where: tuple[Array, Array],
    *,
    store: float = 0.0,
    rounding: Callable[[Array], tuple[Array, Array]] | None = None,
) -> Reference:
    """Recomputes a sample of one output in float64, with the error bound of each value.

    Bound: to first order the error is a sum of roundings, each of at most the unit roundoff times
    the value it rounds, passed on through the products behind it and the slope of the activation.
    Taken as independent they are bounded by Hoeffding's inequality (LAMBDA times the root of the
    sum of their squares); the error of the activation kernel and of the k additions of a token,
    which need not be, are added up. (N. Higham and T. Mary, A new approach to probabilistic
    rounding error analysis, 2019.)

    Args:
        weights: ``gate_up``, ``down`` and, with biases, ``gate_up_bias`` and ``down_bias``, all
        experts.
        x: [T, H] hidden states as the operator read them.
        ids, scores: [T, k] experts and their weights.
        where: tokens and columns, as `sample` returns them.
        store: unit roundoff of intermediates that an implementation rounds beyond fp32 (a peer that
            computes in bf16); 0 for ours.
        rounding: for activations [K, M] in front of a product, bounds of the rounding of each (a
            peer that takes them to 8 bits): (independent errors, errors that may have one sign).

    Example:
        >>> import numpy as np
        >>> s = Shape("one", hidden=2, inter=1, experts=1, top_k=1, activation="identity")
        >>> w = {"gate_up": np.ones((1, 2, 2), "f4"), "down": np.ones((1, 2, 1), "f4")}
        >>> r = reference(s, w, np.ones((1, 2), "f4"), np.zeros((1, 1), int), np.ones((1, 1)),
        ...               (np.array([0]), np.array([0, 1])))
        >>> r.values.tolist()
        [[4.0, 4.0]]
    """
    tokens, columns = where
    total = _Errors(*(np.zeros((len(tokens), len(columns))) for _ in range(3)))
    size = np.zeros_like(total.value)
    chosen = ids[tokens]
    for expert in _distinct(chosen):
        rows, slots = np.nonzero(chosen == expert)
        inputs = decode(x[tokens[rows]]).T
        gate_up, down = weights["gate_up"][expert], weights["down"][expert]
        gate_up_bias = down_bias = None
        if shape.layout == "columns":
            gate_up, down = gate_up.T, down.T
        if shape.bias:
            gate_up_bias = decode(weights["gate_up_bias"][expert])[:, None]
            down_bias = decode(weights["down_bias"][expert])[columns][:, None]
        nothing = np.zeros_like(inputs)
        inputs_rounded = _round(_Errors(inputs, nothing, nothing), rounding)
        both = _product(gate_up, inputs_rounded, gate_up_bias, store)
        h = _round(_gate(shape, *_split(shape, both), store), rounding)
        y = _product(down[columns], h, down_bias, store)
        score = scores[tokens[rows], slots].astype(np.float64)[:, None]
        term = np.abs(score * y.value.T)
        np.add.at(total.value, rows, score * y.value.T)
        np.add.at(total.fixed, rows, np.abs(score) * y.fixed.T)
        np.add.at(total.square, rows, score**2 * y.square.T + ((2 * store) * term) ** 2)
        np.add.at(size, rows, term)
    total.fixed += (shape.top_k + 1) * (_U + store) * size + _TINY
    return Reference(tokens, columns, total.value, total.bound())


def _distinct(ids: Array) -> Iterable[int]:
    return map(int, np.unique(ids))


def _split(shape: Shape, both: _Errors) -> tuple[_Errors, _Errors]:
    """Gate and up rows of a fused [2I, M] block."""
    if shape.interleaved:
        gate, up = slice(0, None, 2), slice(1, None, 2)
    else:
        gate, up = slice(0, shape.inter), slice(shape.inter, None)
    parts = [_Errors(both.value[p], both.fixed[p], both.square[p]) for p in (gate, up)]
    return parts[0], parts[1]

"""The correctness gate: one layer of experts against float64, with a derived error bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cpumoe import Error
from cpumoe.bench.formats import Array, decode
from cpumoe.bench.shapes import Shape

_U = 2.0**-24  # unit roundoff of fp32
_TINY = float(np.finfo(np.float32).tiny)  # absolute error of a result that underflows
_CHUNK = 1 << 23  # weight elements decoded at a time (64 MiB of float64)


def gamma(n: int, u: float = _U) -> float:
    """Relative error bound n*u / (1 - n*u) of a chain of n roundings, in whatever order."""
    return n * u / (1 - n * u)


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


def _products(weight: Array, x: Array) -> tuple[Array, Array]:
    """(W x^T, |W| |x|^T) in float64; weight [N, K] of any format, x [M, K]. Results [N, M]."""
    n, k = weight.shape
    step = max(1, _CHUNK // k)
    value = np.empty((n, x.shape[0]))
    size = np.empty_like(value)
    for start in range(0, n, step):
        block = decode(weight[start : start + step])
        value[start : start + step] = block @ x.T
        size[start : start + step] = np.abs(block) @ np.abs(x).T
    return value, size


def _gate(
    shape: Shape, g: Array, u: Array, dg: Array, du: Array, store: float
) -> tuple[Array, Array]:
    """Activation of [I, M] gate and up values and how their errors dg and du pass through it."""
    if shape.limit is not None:  # clamping never enlarges an error
        g, u = np.minimum(g, shape.limit), np.clip(u, -shape.limit, shape.limit)
    if shape.activation == "swiglu_oai":
        f, slope = g * _sigmoid(shape.alpha * g), 1.1
        u, du = u + 1, du + (_U + store) * (np.abs(u) + 1)
    else:
        function, slope = ACTIVATIONS[shape.activation]
        f = function(g)
    # The activation kernels promise 4 ulp (8 roundoffs) of f; two more roundings for the product.
    df = slope * dg + (8 * _U + 2 * store) * (np.abs(f) + slope * dg) + _TINY
    h = f * u
    dh = df * (np.abs(u) + du) + np.abs(f) * du
    return h, dh + (2 * _U + store) * (np.abs(h) + dh)


def reference(
    shape: Shape,
    weights: dict[str, Array],
    x: Array,
    ids: Array,
    scores: Array,
    where: tuple[Array, Array],
    *,
    store: float = 0.0,
) -> Reference:
    """Recomputes a sample of one output in float64, with the error bound of each value.

    Bound: every product of K terms is within gamma(K + 1) of sum |w||x| in fp32, whatever its
    order; the errors of gate and up pass through the activation by its largest slope, those of the
    intermediate through |W_down|; a token's sum adds gamma(k + 2). `store` counts once for each
    value that is rounded to it on the way.

    Args:
        weights: ``gate_up``, ``down`` and, with biases, ``gate_up_bias`` and ``down_bias``, all
        experts.
        x: [T, H] hidden states as the operator read them.
        ids, scores: [T, k] experts and their weights.
        where: tokens and columns, as `sample` returns them.
        store: unit roundoff of intermediates that an implementation rounds beyond fp32 (a peer that
            computes in bf16); 0 for ours.

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
    value = np.zeros((len(tokens), len(columns)))
    error, size = np.zeros_like(value), np.zeros_like(value)
    by_columns = shape.layout == "columns"
    chosen = ids[tokens]
    for expert in _distinct(chosen):
        rows, slots = np.nonzero(chosen == expert)
        inputs = decode(x[tokens[rows]])
        gate_up = weights["gate_up"][expert]
        down = weights["down"][expert]
        gate_up, down = (gate_up.T, down.T) if by_columns else (gate_up, down)
        gu, gu_size = _products(gate_up, inputs)
        if shape.bias:
            bias = decode(weights["gate_up_bias"][expert])[:, None]
            gu, gu_size = gu + bias, gu_size + np.abs(bias)
        gu_error = gamma(shape.hidden + 1) * gu_size + store * np.abs(gu)
        (g, u), (dg, du) = _split(shape, gu), _split(shape, gu_error)
        h, dh = _gate(shape, g, u, dg, du, store)
        both, both_size = _products(down[columns], np.concatenate([h.T, dh.T]))
        y, dy = both[:, : len(rows)], both_size[:, len(rows) :]
        y_size = both_size[:, : len(rows)] + dy
        if shape.bias:
            bias = decode(weights["down_bias"][expert])[columns][:, None]
            y, y_size = y + bias, y_size + np.abs(bias)
        dy = dy + gamma(shape.inter + 1) * y_size + store * np.abs(y)
        score = scores[tokens[rows], slots].astype(np.float64)[:, None]
        np.add.at(value, rows, score * y.T)
        np.add.at(error, rows, np.abs(score) * dy.T)
        np.add.at(size, rows, np.abs(score) * (np.abs(y) + dy).T)
    error += (gamma(shape.top_k + 2) + (shape.top_k + 2) * store) * size
    return Reference(tokens, columns, value, error)


def _distinct(ids: Array) -> Iterable[int]:
    return map(int, np.unique(ids))


def _split(shape: Shape, rows: Array) -> tuple[Array, Array]:
    """Gate and up rows of a fused [2I, M] block."""
    if shape.interleaved:
        return rows[0::2], rows[1::2]
    return rows[: shape.inter], rows[shape.inter :]

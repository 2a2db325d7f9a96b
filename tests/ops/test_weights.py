"""cpumoe.Weight in the operators: in place, in every layout and class, and what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cpumoe
from cpumoe import Error

RNG = np.random.default_rng(1)
E, H, INTER = 3, 256, 128


def int4(n: int, k: int, group: int = 32, experts: int | None = E) -> cpumoe.Weight:
    lead = () if experts is None else (experts,)
    return cpumoe.Weight(
        RNG.integers(0, 256, (*lead, n, k // 2), dtype=np.uint8),
        format=f"int4_g{group}",
        shape=(*lead, n, k),
        scales=RNG.uniform(0.005, 0.02, (*lead, n, k // group)).astype(ml_dtypes.bfloat16),
    )


def gptq4(n: int, k: int) -> cpumoe.Weight:
    return cpumoe.Weight(
        RNG.integers(-(2**31), 2**31, (E, k // 8, n), dtype=np.int32),
        format="gptq4_g128",
        shape=(E, n, k),
        scales=RNG.uniform(0.005, 0.02, (E, k // 128, n)).astype(np.float16),
        zeros=RNG.integers(-(2**31), 2**31, (E, k // 128, n // 8), dtype=np.int32),
        layout="columns",
    )


def routed(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = RNG.standard_normal((tokens, H), dtype=np.float32)
    return x, RNG.integers(0, E, (tokens, 2)), RNG.random((tokens, 2), dtype=np.float32)


def quantised(x: np.ndarray) -> np.ndarray:
    """Class int8's rounding of activations, from core/kernels/dot/quantize.h."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / amax))
    return (codes * (amax / np.float32(127))).reshape(x.shape)


def bound(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of |x W^T| in fp32 against exact: K + 9 roundings of the parts.

    The parts |scale code| + |scale zero| of int4 are at most 23 scales, W at least 0 of them; here
    every weight counts as the largest one of its row.
    """
    size = np.abs(x).sum(-1, keepdims=True) * 3 * np.abs(w).max(-1)[None]
    return (w.shape[1] + 9) * 2.0**-24 * size


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("act_class", ["fp32", "int8", "auto"])
def test_linear_equals_float64(tokens: int, act_class: str) -> None:
    w = int4(48, H, experts=None)
    x = RNG.standard_normal((tokens, H), dtype=np.float32)
    got = cpumoe.linear(x, w, activations=act_class)  # type: ignore[arg-type]
    values = w.decode().astype(np.float64)
    exact = (x if act_class == "fp32" else quantised(x)).astype(np.float64) @ values.T
    assert (np.abs(got - exact) <= bound(values, x)).all()


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("make", [int4, gptq4])
def test_experts_equal_those_of_decoded_arrays(tokens: int, make: object) -> None:
    gate_up, down = make(2 * INTER, H), make(H, INTER)  # type: ignore[operator]
    packed = cpumoe.Experts(gate_up=gate_up, down=down, layout=gate_up.layout)
    plain = cpumoe.Experts(gate_up=gate_up.decode(), down=down.decode())
    x, ids, weights = routed(tokens)
    want = cpumoe.moe(x, plain, ids, weights)
    got = cpumoe.moe(x, packed, ids, weights, activations="fp32")
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    # int8 rounds x and the intermediate to within 1/254 of a group's largest value
    near = cpumoe.moe(x, packed, ids, weights, activations="int8")
    assert not np.array_equal(near, got)
    assert np.abs(near - want).max() <= 0.03 * np.abs(want).max()


def test_forms_agree_bit_for_bit() -> None:
    gate_up, down = int4(2 * INTER, H), int4(H, INTER)
    x, ids, weights = routed(7)
    fused = cpumoe.moe(x, cpumoe.Experts(gate_up=gate_up, down=down), ids, weights)
    gate, up = gate_up.features(0, INTER), gate_up.features(INTER, INTER)
    assert (gate.shape, up.format) == ((E, INTER, H), "int4_g32")
    parts = cpumoe.Experts(gate=gate, up=up, down=down)
    assert np.array_equal(cpumoe.moe(x, parts, ids, weights), fused)
    assert parts.weight_bytes == gate_up.nbytes + down.nbytes


def test_one_weight_per_expert() -> None:
    parts = {n: [int4(INTER, H, experts=None) for _ in range(E)] for n in ("gate", "up")}
    down = [int4(H, INTER, experts=None) for _ in range(E)]
    experts = cpumoe.Experts(gate=parts["gate"], up=parts["up"], down=down)
    plain = cpumoe.Experts(
        gate=np.stack([w.decode() for w in parts["gate"]]),
        up=np.stack([w.decode() for w in parts["up"]]),
        down=np.stack([w.decode() for w in down]),
    )
    x, ids, weights = routed(4)
    want = cpumoe.moe(x, plain, ids, weights)
    got = cpumoe.moe(x, experts, ids, weights, activations="fp32")
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_arrays_stay_alive() -> None:
    data = RNG.integers(0, 256, (4, 16), dtype=np.uint8)
    w = cpumoe.Weight(data, format="int4_row", shape=(4, 32), scales=np.ones((4, 1), np.float32))
    before = w.decode()
    del data
    np.random.default_rng(2).integers(0, 256, 100_000)  # whatever may reuse the memory
    assert np.array_equal(w.decode(), before)


def test_eight_bit_floats_of_numpy() -> None:
    values = RNG.standard_normal((130, 200)).astype(ml_dtypes.float8_e4m3fn)
    w = cpumoe.Weight(
        values, format="fp8_block", shape=(130, 200), scales=np.full((2, 2), 0.5, np.float32)
    )
    assert np.array_equal(w.decode(), values.astype(np.float32) * np.float32(0.5))


BYTES, SCALES = np.zeros((4, 16), np.uint8), np.ones((4, 1), np.float32)
GOOD = {"data": BYTES, "format": "int4_row", "shape": (4, 32), "scales": SCALES}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int5"}, "format must be a known one"),
        ({"shape": (4,)}, r"shape must be \[N, K\] or \[E, N, K\]"),
        ({"shape": (4, 0)}, "extents must be from 1"),
        ({"shape": (5, 32)}, "data must hold"),
        ({"shape": (2**31 - 1, 2**31 - 1)}, "data must hold|fit in memory"),
        ({"data": BYTES[:, ::2]}, "data must be contiguous"),
        ({"data": "text"}, "data must be an array"),
        ({"scales": None}, "scales must be given"),
        ({"scales": np.ones((4, 2), np.float32)}, r"scales must be \[..., 4, 1\]"),
        ({"scales": np.ones(8, np.float32)}, "scales must hold"),
        ({"scales": np.ones((4, 1), np.int32)}, "scales must be fp32"),
        ({"zeros": np.zeros((4, 1), np.uint8)}, "zeros must not be given"),
        ({"format": "u4_zp_row"}, "zeros must be given"),
        ({"layout": "rowwise"}, 'layout must be "rows" or "columns"'),
        ({"format": "q4_0", "scales": None}, "data must hold"),
        ({"global_scale": [1.0, 2.0]}, "global_scale must be one number"),
        ({"global_scale": float("nan")}, "global_scale must be finite"),
        ({"global_scale": None}, "global_scale must be finite"),
        ({"shape": (4.5, 32)}, "shape must be sizes"),
        ({"format": None}, "format must be a string"),
        ({"data": None}, "data and zeros must be arrays"),
        ({"scales": np.ones((1, 4), np.float32)}, "scales must be .* groups of features"),
        ({"format": "u4_zp_row", "zeros": np.ones(1, np.float32)}, "zeros must be integers"),
        ({"format": "gptq4_row"}, "must be in columns layout"),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Error, match=message):
        cpumoe.Weight(**{**GOOD, **changes})  # type: ignore[arg-type]


def test_packed_zero_points_of_one_group_a_line() -> None:
    """One nibble to a byte: the rest of the byte is padding."""
    zeros = np.full((4, 1), 0xF8, np.uint8)
    w = cpumoe.Weight(BYTES, format="u4_zp_row", shape=(4, 32), scales=SCALES, zeros=zeros)
    assert (w.decode() == -8).all()
    one = cpumoe.Weight(BYTES, format="u4_zp_row", shape=(4, 32), scales=SCALES, zeros=zeros & 15)
    assert (one.decode() == -8).all()


def test_refused_in_operators() -> None:
    w = cpumoe.Weight(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(Error, match="For one Weight per expert pass a list"):
        cpumoe.Experts(up=w, down=int4(32, 4 * 32, experts=None))
    with pytest.raises(Error, match="w must have shape"):
        cpumoe.linear(np.zeros((1, H), np.float32), int4(8, H))
    with pytest.raises(Error, match='the activation class must be "auto", "fp32"'):
        cpumoe.linear(np.zeros((1, 32), np.float32), w, activations="int4")  # type: ignore[arg-type]
    block = cpumoe.Weight(
        np.zeros((64, 128), np.uint8), format="fp8_block", shape=(64, 128), scales=SCALES[:1]
    )
    with pytest.raises(Error, match="begin at a multiple of 128"):
        block.features(32, 32)

"""Random weights of every format of the table: valid, of the spread asked for, checked by bench."""

from __future__ import annotations

import numpy as np
import pytest

import cpumoe
from cpumoe import Error
from cpumoe.bench.formats import ROWS, find_format
from cpumoe.bench.layer import Op, verify
from cpumoe.bench.shapes import Shape
from cpumoe.bench.weights import make_weights

SHAPE = Shape("small", hidden=512, inter=256, experts=3, top_k=2, bias=True)
PACKED = [name for name, row in ROWS.items() if row.code not in ("fp32", "fp16", "bf16")]
ONE_PER_CODE = list({(ROWS[n].code, ROWS[n].zeros): n for n in PACKED}.values())


@pytest.mark.parametrize("name", PACKED)
def test_values_have_unit_variance_in_a_product(name: str) -> None:
    weights = make_weights(SHAPE, find_format(name), huge_pages=False)
    gate_up = weights.arrays["gate_up"][1]
    assert gate_up.shape == (512, 512)
    assert np.isfinite(gate_up).all()
    # mxfp4 rounds its scales to powers of two; nvfp4's are drawn from 0.5 .. 1.9
    low, high = (0.7, 1.5) if "fp4" in name else (0.9, 1.1)
    assert low <= gate_up.std() * SHAPE.hidden**0.5 <= high
    bits = 8 * ROWS[name].block_bytes / (ROWS[name].block_elements * ROWS[name].block_lines)
    per_element = 8 * weights.expert_bytes / SHAPE.expert_elements()
    assert bits <= per_element <= bits + 2.1  # scales and zero points of groups of 16, biases


@pytest.mark.parametrize("name", ONE_PER_CODE)
@pytest.mark.parametrize("activations", ["fp32", "int8"])
def test_the_operator_is_within_its_bound(name: str, activations: str) -> None:
    weights = make_weights(SHAPE, find_format(name), huge_pages=False)
    for tokens in (1, 5):
        op = Op(weights, tokens, cpumoe.Executor(1), tokens, None, activations)
        assert 0 < verify(op, np.random.default_rng(0)) <= 1


def test_a_wrong_result_is_refused() -> None:
    weights = make_weights(SHAPE, find_format("int4_g32"), huge_pages=False)
    op = Op(weights, 3, cpumoe.Executor(1), 3)
    weights.arrays["down"].scales[:] = 0x4040  # what the reference decodes is another matrix
    weights.experts = make_weights(SHAPE, find_format("int4_g32"), huge_pages=False).experts
    with pytest.raises(Error, match="the error against float64 must stay within its bound"):
        verify(op, np.random.default_rng(0))


def test_shapes_that_cannot_hold_blocks_are_refused() -> None:
    odd = Shape("odd", hidden=96, inter=64, experts=1, top_k=1)
    with pytest.raises(Error, match="q4_k must have whole blocks of 256"):
        make_weights(odd, find_format("q4_k"), huge_pages=False)

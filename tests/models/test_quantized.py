"""Quantised safetensors: logits against Transformers, values against the writers' own decoders."""

import numpy as np
import pytest

import cpumoe
from cpumoe.checkpoint import Quantized, open_checkpoint
from quantized_models import METHODS, gpt_oss, quantised
from tiny_models import prompt, relative_error

# As in test_logits: fp32 arithmetic in another order on weights that are equal.
BOUND = 1e-4
# Class int8 rounds an input to 2^-8 of the largest of its 32; two layers, each adding its own
# rounding and passing the earlier ones on, as for a half-precision cache in test_logits. Of a dense
# model: where a router's scores lie close, another expert is another result.
INT8_BOUND = 16 * 2.0**-8


@pytest.mark.parametrize("method", METHODS)
def test_logits_equal_transformers_on_the_decoded_weights(method):
    case, ids = quantised(method), prompt(21)
    model = cpumoe.load(case.path, kv="fp32", activations="fp32")
    assert relative_error(model.logits(ids), case.logits(ids)) < BOUND


@pytest.mark.parametrize("method", ["fp8-block", "ct-int8-channel", "ct-nvfp4", "gptq8", "awq"])
def test_int8_activations_differ_by_their_rounding(method):
    case, ids = quantised(method, "llama"), prompt(21)
    exact = cpumoe.load(case.path, kv="fp32", activations="fp32").logits(ids)
    error = relative_error(cpumoe.load(case.path, kv="fp32", activations="int8").logits(ids), exact)
    print(f"{method}: int8 activations change the logits by {error:.1e}")
    if method == "fp8-block":
        assert error == 0  # FP8 weights have no integer products
    else:
        assert 0 < error < INT8_BOUND


@pytest.mark.parametrize("method", METHODS)
def test_values_equal_the_tools_decoder(method):
    case = quantised(method)
    weights = Quantized(open_checkpoint(case.path))
    for module, want in case.values.items():
        got = weights.linear(module, *want.shape, ("fp32",)).decode()
        if METHODS[method].same:
            assert np.array_equal(got, want.numpy()), module
        else:  # scale / global scale and scale * (1 / global scale): three roundings apart
            assert np.abs(got - want.numpy()).max() <= 3 * 2.0**-24 * np.abs(want.numpy()).max()


@pytest.mark.parametrize("method", ["fp8-block", "ct-int4-g32", "gptq4", "awq"])
@pytest.mark.parametrize("family", ["mixtral", "llama", "deepseek_v3"])
def test_other_families(method, family):
    case, ids = quantised(method, family), prompt(9)
    model = cpumoe.load(case.path, kv="fp32", activations="fp32")
    assert relative_error(model.logits(ids), case.logits(ids)) < BOUND


def test_mxfp4_experts_of_gpt_oss():
    case, ids = gpt_oss(), prompt(17)
    model = cpumoe.load(case.path, kv="fp32", activations="fp32")
    assert relative_error(model.logits(ids), case.logits(ids)) < BOUND
    stacks = Quantized(open_checkpoint(case.path))
    for name, want in case.values.items():
        e, k, n = want.shape
        got = stacks.stack(name, e, n, k).weight().decode()
        assert np.array_equal(got, want.numpy().transpose(0, 2, 1))

"""Quantised safetensors: logits against Transformers, values against the writers' own decoders."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cpumoe
from cpumoe.checkpoint import Quantized, open_checkpoint
from quantized_gpt_oss import gpt_oss
from quantized_models import METHODS, quantised, write
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
    got = cpumoe.load(case.path, kv="fp32", activations="int8").logits(ids)
    error = relative_error(got, exact)
    print(f"{method}: int8 activations change the logits by {error:.1e}")
    if method == "fp8-block":  # no integer products: the default class of this CPU
        assert np.array_equal(got, cpumoe.load(case.path, kv="fp32").logits(ids))
        assert error < INT8_BOUND
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


def restacked(method, path, inter=128):
    """The checkpoint with all experts of a layer in one tensor, as Transformers holds them."""
    case = quantised(method)
    held = load_file(case.path / "model.safetensors")
    for layer in range(2):
        p = f"model.layers.{layer}.mlp.experts"
        for end, new in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):

            def take(name, p=p, end=end):
                return [held.pop(f"{p}.{e}.{name}{end}").view(torch.uint8) for e in range(3)]

            dtype = torch.float8_e4m3fn if not new else torch.float32
            gate_up = zip(take("gate_proj"), take("up_proj"), strict=True)
            both = torch.stack([torch.cat(pair) for pair in gate_up])
            held[f"{p}.gate_up_proj{new}"] = both.view(dtype)
            held[f"{p}.down_proj{new}"] = torch.stack(take("down_proj")).view(dtype)
    return write(path, "qwen2_moe", METHODS[method].config, held)


def test_fp8_experts_in_one_tensor(tmp_path):
    case, ids = quantised("fp8-block"), prompt(21)
    model = cpumoe.load(restacked("fp8-block", tmp_path), kv="fp32", activations="fp32")
    apart = cpumoe.load(case.path, kv="fp32", activations="fp32")
    assert np.array_equal(model.logits(ids), apart.logits(ids))


@pytest.mark.parametrize("method", ["fp8-block", "ct-int4-asym", "ct-nvfp4", "gptq4", "awq"])
def test_unaligned_quantised_files(tmp_path, method):
    """A header of odd length puts codes, scales and zero points at odd addresses."""
    case, ids = quantised(method), prompt(7)
    data = (case.path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    header += b" " * (1 - len(header) % 2)
    moved = len(header).to_bytes(8, "little") + header + data[8 + length :]
    (tmp_path / "model.safetensors").write_bytes(moved)
    (tmp_path / "config.json").write_bytes((case.path / "config.json").read_bytes())
    for activations in ("fp32", "int8"):
        odd = cpumoe.load(tmp_path, activations=activations).logits(ids)
        assert np.array_equal(odd, cpumoe.load(case.path, activations=activations).logits(ids))


def test_gptq_settings_of_single_modules(tmp_path):
    """gptqmodel's `dynamic`: experts in 8 bits, one layer's attention left as it is."""
    four, eight = quantised("gptq4"), quantised("gptq8")
    plain = load_file(four.path.with_name(f"{four.path.name}-decoded") / "model.safetensors")
    held = {}
    for name, t in load_file(four.path / "model.safetensors").items():
        if "experts" not in name and "0.self_attn" not in name:
            held[name] = t
    for name, t in load_file(eight.path / "model.safetensors").items():
        if "experts" in name:
            held[name] = t
    held |= {n: t for n, t in plain.items() if "layers.0.self_attn" in n}
    config = METHODS["gptq4"].config | {
        "dynamic": {"+:.*experts": {"bits": 8, "group_size": 64}, r"-:.*\.0\.self_attn": {}}
    }
    model = cpumoe.load(write(tmp_path, "qwen2_moe", config, held))
    summary = model.checkpoint.summary()
    assert {f: n for f, (n, _) in summary.items() if "gptq" in f} == {
        "gptq8_g64": 2 * 3 * 3,
        "gptq4_g128": 4 + 2 * 3,
    }


@pytest.mark.parametrize(
    ("method", "name"),
    [("fp8-block", "fp8_block"), ("ct-int4-g32", "int4_g32"), ("gptq4", "gptq4_g128")],
)
def test_summary_counts_every_byte_once(method, name):
    checkpoint = open_checkpoint(quantised(method).path)
    summary = checkpoint.summary()
    assert sum(size for _, size in summary.values()) == checkpoint.nbytes
    count, size = summary[name]
    values = quantised(method).values
    assert count == len(values)
    bits = 8 if method == "fp8-block" else 4
    assert size > sum(v.numel() for v in values.values()) * bits / 8


def test_modelopt_config_in_a_file_of_its_own(tmp_path):
    case, ids = quantised("modelopt-fp4"), prompt(7)
    config = json.loads((case.path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": settings["ignore"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": old}))
    (tmp_path / "model.safetensors").symlink_to(case.path / "model.safetensors")
    model = cpumoe.load(tmp_path)
    assert np.array_equal(model.logits(ids), cpumoe.load(case.path).logits(ids))

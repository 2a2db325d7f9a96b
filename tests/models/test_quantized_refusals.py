"""Quantised checkpoints whose config or tensors are wrong, each refused by name."""

import functools
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import cpumoe
from cpumoe import Error
from cpumoe.checkpoint import open_checkpoint, quantized
from quantized_gpt_oss import gpt_oss
from quantized_models import quantised, write
from tiny_models import prompt

FAMILY = "llama"
MODULE = "model.layers.1.mlp.up_proj"


@functools.cache
def tensors_of(method):
    return load_file(quantised(method, FAMILY).path / "model.safetensors")


def open_changed(path, method, config=None, *, drop=False, **tensors):
    """Load the tiny checkpoint with entries of its quantization_config and tensors replaced.

    Tensors by their ending behind MODULE, None removes one. drop: no quantization_config at all.
    """
    source = quantised(method, FAMILY).path
    values = json.loads((source / "config.json").read_text())["quantization_config"]
    changed = {k: v for k, v in {**values, **(config or {})}.items() if v is not ...}
    held = dict(tensors_of(method))
    for end, value in tensors.items():
        name = f"{MODULE}.{end}"
        if value is None:
            del held[name]
        else:
            held[name] = value(held[name]) if callable(value) else value
    return cpumoe.load(write(path, FAMILY, None if drop else changed, held))


def weights(**changes):
    """config_groups of 4-bit groups of 32, with entries of their weights replaced."""
    base = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": base | changes}}}


def at(index, value):
    """A change of one element."""

    def change(t):
        flat = t.clone().flatten()
        flat[index] = torch.tensor(value, dtype=torch.float32).to(t.dtype)
        return flat.reshape(t.shape)

    return change


INT4, ASYM, FP8, FP4, MX = "ct-int4-g32", "ct-int4-asym", "fp8-block", "ct-nvfp4", "ct-mxfp4"
GPTQ, AWQ = "gptq4-v2", "awq"
BAD_TENSORS = {
    "no scales": (INT4, {"weight_scale": None}, "weight_scale is missing.*4 bits, groups of 32"),
    "no codes": (INT4, {"weight_packed": None}, "weight_packed is missing"),
    "no zero points": (ASYM, {"weight_zero_point": None}, "weight_zero_point is missing"),
    "no global scale": (FP4, {"weight_global_scale": None}, "weight_global_scale is missing"),
    "no blocks": (FP8, {"weight_scale_inv": None}, "weight_scale_inv is missing"),
    "no qzeros": (GPTQ, {"qzeros": None}, "qzeros is missing"),
    "no awq scales": (AWQ, {"scales": None}, "scales is missing"),
    "codes cut": (
        INT4,
        {"weight_packed": lambda t: t[:, :-1].contiguous()},
        r"weight_packed: shape must be \[384, 32\] .*; got \[384, 31\]",
    ),
    "codes of another type": (
        INT4,
        {"weight_packed": lambda t: t.short()},
        "weight_packed: format must be int32 .*; got int16",
    ),
    "scales of other groups": (
        INT4,
        {"weight_scale": lambda t: t[:, ::2].contiguous()},
        r"weight_scale: shape must be \[384, 8\] .*; got \[384, 4\]",
    ),
    "scales transposed": (
        GPTQ,
        {"scales": lambda t: t.T.contiguous()},
        r"scales: shape must be \[8, 384\] .*; got \[384, 8\]",
    ),
    "scales that are integers": (
        INT4,
        {"weight_scale": lambda t: t.to(torch.int16)},
        "weight_scale: format must be fp32 or fp16 or bf16 .*; got int16",
    ),
    "blocks counted down": (
        FP8,
        {"weight_scale_inv": torch.ones(2, 2)},
        r"weight_scale_inv: shape must be \[3, 2\] .*; got \[2, 2\]",
    ),
    "blocks of another FP8": (
        FP8,
        {"weight": lambda t: t.float().to(torch.float8_e5m2)},
        "weight: format must be e4m3 .*; got e5m2",
    ),
    "zero points transposed": (
        GPTQ,
        {"qzeros": lambda t: t.T.contiguous()},
        r"qzeros: shape must be \[8, 48\]",
    ),
    "packed zero points cut": (
        ASYM,
        {"weight_zero_point": lambda t: t[1:].contiguous()},
        r"weight_zero_point: shape must be \[48, 4\]",
    ),
    "another weight_shape": (
        INT4,
        {"weight_shape": torch.tensor([384, 255])},
        r"weight_shape: must say \[384, 256\] by config.json; got \[384, 255\]",
    ),
    "NaN scale": (
        INT4,
        {"weight_scale": at(9, float("nan"))},
        r"weight_scale: scales must be finite numbers other than 0; got nan at \[1, 1\]",
    ),
    "infinite scale": (GPTQ, {"scales": at(385, float("inf"))}, r"got inf at \[1, 1\]"),
    "zero scale": (INT4, {"weight_scale": at(8, 0.0)}, r"got 0.0 at \[1, 0\]"),
    "negative zero scale": (FP8, {"weight_scale_inv": at(5, -0.0)}, r"got -0.0 at \[2, 1\]"),
    "NaN exponent": (
        MX,
        {"weight_scale": lambda t: torch.full_like(t, 255)},
        r"got nan at \[0, 0\]",
    ),
    "NaN of 8 bits": (FP4, {"weight_scale": at(17, float("nan"))}, r"got nan at \[1, 1\]"),
    "zero global scale": (FP4, {"weight_global_scale": torch.zeros(1)}, "a finite number above 0"),
    "NaN global scale": (
        FP4,
        {"weight_global_scale": torch.full((1,), float("nan"))},
        "weight_global_scale: value must be a finite number above 0 .*; got nan",
    ),
    "act-order": (
        GPTQ,
        {"g_idx": lambda t: t.flip(0).contiguous()},
        "g_idx: inputs must be in their own order.*desc_act",
    ),
    "short order": (
        GPTQ,
        {"g_idx": lambda t: t[:-1].contiguous()},
        r"g_idx: shape must be \[256\]",
    ),
    "a bias that is not zero": (GPTQ, {"bias": torch.ones(384)}, "1 tensors are not part of"),
    "FP8 beside int4": (
        INT4,
        {"weight": torch.zeros(384, 256).to(torch.float8_e4m3fn)},
        "1 tensors are not part of llama",
    ),
    "floats where int4 is due": (
        INT4,
        {"weight_packed": None, "weight_scale": None, "weight_shape": None}
        | {"weight": torch.zeros(384, 256)},
        "up_proj.weight: must be stored as packed integers of 4 bits.*got fp32",
    ),
    "floats where FP8 is due": (
        FP8,
        {"weight_scale_inv": None, "weight": torch.zeros(384, 256, dtype=torch.bfloat16)},
        "up_proj.weight: must be stored as FP8, blocks of 128 x 128.*got bf16",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_refused(tmp_path, name):
    method, changes, message = BAD_TENSORS[name]
    if "bias" in changes or name == "FP8 beside int4":
        held = dict(tensors_of(method))
        ((end, value),) = changes.items()
        held[f"{MODULE}.{end}"] = value
        config = json.loads((quantised(method, FAMILY).path / "config.json").read_text())
        write(tmp_path, FAMILY, config["quantization_config"], held)
        with pytest.raises(Error, match=message):
            cpumoe.load(tmp_path)
        return
    with pytest.raises(Error, match=message):
        open_changed(tmp_path, method, **changes)


def other(method):
    """A config that names this quant_method only."""
    return {"quant_method": method, "config_groups": ..., "format": ..., "ignore": ...}


SPARSE = {"sparsity_config": {"format": "sparse-24-bitmask"}}
BAD_CONFIGS = {
    "bitsandbytes": (INT4, other("bitsandbytes"), "quant_method must be one of fp8.*bitsandbytes"),
    "hqq": (INT4, other("hqq"), "quant_method must be one of .*got 'hqq'. Use this model in FP8"),
    "aqlm": (INT4, other("aqlm"), "got 'aqlm'"),
    "quanto": (INT4, other("quanto"), "got 'quanto'"),
    "torchao": (INT4, other("torchao"), "got 'torchao'"),
    "no method": (INT4, {"quant_method": ...}, "quant_method must be .*; it is missing"),
    "method that is no text": (INT4, {"quant_method": 4}, "quant_method must be"),
    "no groups": (INT4, {"config_groups": ...}, "config_groups must be an object; got None"),
    "empty groups": (INT4, {"config_groups": {}}, "config_groups must be an object that names"),
    "groups that are a list": (INT4, {"config_groups": [1]}, "config_groups must be an object"),
    "a preset": (INT4, {"config_groups": {"W4A16": ["Linear"]}}, "W4A16 must be an object"),
    "weights that are text": (
        INT4,
        {"config_groups": {"g": {"targets": ["Linear"], "weights": "int4"}}},
        "weights must be an object; got 'int4'",
    ),
    "bits": (INT4, weights(num_bits=5), "num_bits must be one of 2, 3, 4, 8; got 5"),
    "bits that are true": (INT4, weights(num_bits=True), "num_bits must be one of"),
    "group of 48": (INT4, weights(group_size=48), "group_size must be -1 or one of 16, 32"),
    "group of 0": (INT4, weights(group_size=0), "group_size must be -1 or a number"),
    "group that is text": (INT4, weights(group_size="32"), "group_size must be -1 or a number"),
    "group at odds": (INT4, weights(group_size=64), r"shape must be \[\d+, 4\]"),
    "strategy": (INT4, weights(strategy="token"), "strategy must be group or channel"),
    "act-order": (INT4, weights(actorder="group"), "actorder must be null, weight or static"),
    "dynamic": (INT4, weights(dynamic=True), "dynamic must be absent"),
    "symmetric": (INT4, weights(symmetric=0), "symmetric must be one of True, False"),
    "asymmetric int8": (
        "ct-int8-channel",
        {"format": "int-quantized"} | weights(num_bits=8, strategy="channel", symmetric=False),
        "symmetric must be true in int-quantized",
    ),
    "format": (INT4, {"format": "marlin-24"}, "in format 'marlin-24' are not supported"),
    "FP8 in packed words": (INT4, weights(type="float"), "type 'float' in format 'pack-quantized'"),
    "FP8 groups": (
        "ct-fp8-channel",
        weights(type="float", num_bits=8),
        "strategy must be one of tensor, channel, block",
    ),
    "FP8 blocks": (
        "ct-fp8-block",
        weights(type="float", num_bits=8, strategy="block", block_structure=[64, 64]),
        r"block_structure must be \[128, 128\]; got \[64, 64\]",
    ),
    "NVFP4 groups": (FP4, weights(type="float", group_size=32), "group_size must be one of 16"),
    "rotations": (INT4, {"transform_config": {"a": 1}}, "transform_config must be absent"),
    "pruned": (INT4, {"moe_sparsity_config": {"a": 1}}, "moe_sparsity_config must be absent"),
    "sparse": (INT4, SPARSE, "format must be one of 'dense'; got 'sparse-24-bitmask'"),
    "no expression": (INT4, {"ignore": ["re:("]}, "ignore must hold regular expressions"),
    "an endless expression": (INT4, {"ignore": ["re:(a+)+$"]}, "must hold patterns of at most"),
    "too many repeats": (INT4, {"ignore": ["re:" + ".*" * 7]}, "must hold patterns of at most"),
    "ignore that is text": (INT4, {"ignore": "lm_head"}, "ignore must be a list of module names"),
    "ignored but packed": (
        INT4,
        {"ignore": ["lm_head", MODULE]},
        f"{re.escape(MODULE)}.weight_packed: must not be there.*leaves {re.escape(MODULE)}",
    ),
    "nothing targeted": (
        INT4,
        {"config_groups": {"g": {"targets": ["Other"], "weights": {"num_bits": 4}}}}
        | {"format": "pack-quantized"},
        "strategy must be group or channel|must not be there",
    ),
    "FP8 block size": (FP8, {"weight_block_size": [64, 64]}, r"weight_block_size must be \[128"),
    "FP8 kind": (FP8, {"fmt": "e5m2"}, "fmt must be one of 'e4m3'"),
    "FP8 but not these": (FP8, {"modules_to_not_convert": ["up_proj"]}, "must not be there"),
    "FP8 list": (FP8, {"modules_to_not_convert": [3]}, "must be a list of module names"),
    "FP8 per tensor at odds": (FP8, {"weight_block_size": ...}, "weight_scale_inv: shape must be"),
    "GPTQ bits": (GPTQ, {"bits": 3}, "bits must be one of 4, 8; got 3"),
    "GPTQ group": (GPTQ, {"group_size": 100}, "group_size must be -1 or one of 16"),
    "GPTQ revision": (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format must be one of"),
    "GPTQ act-order": (GPTQ, {"desc_act": "yes"}, "desc_act must be one of False, True"),
    "GPTQ bits at odds": (GPTQ, {"bits": 8}, "qweight: shape must be"),
    "GPTQ dynamic": (GPTQ, {"dynamic": {"+:.*up_proj": {"bits": 3}}}, "dynamic.*bits must be one"),
    "AWQ version": (AWQ, {"version": "gemv"}, "version must be one of 'gemm'"),
    "AWQ bits": (AWQ, {"bits": 8}, "bits must be one of 4"),
    "AWQ without zeros": (AWQ, {"zero_point": False}, "zero_point must be one of True"),
    "ModelOpt": ("modelopt-fp8", {"quant_algo": "W4A16_AWQ"}, "quant_algo must be one of 'NVFP4'"),
    "auto-round": ("auto-round", {"packing_format": "auto_round:awq"}, "packing_format must be"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs_are_refused(tmp_path, name):
    method, changes, message = BAD_CONFIGS[name]
    with pytest.raises(Error, match=message):
        open_changed(tmp_path, method, changes)


def changed_gpt_oss(path, change):
    """The MXFP4 checkpoint with `change` made to its tensors."""
    case = gpt_oss()
    held = load_file(case.path / "model.safetensors")
    change(held, "model.layers.1.mlp.experts.down_proj", case)
    (path / "config.json").write_bytes((case.path / "config.json").read_bytes())
    save_file(held, path / "model.safetensors")
    return path


def as_floats(held, name, case):
    del held[f"{name}_blocks"], held[f"{name}_scales"]
    held[name] = case.values[name].contiguous()


MXFP4_CHANGES = {
    "no scales": (
        lambda held, name, case: held.pop(f"{name}_scales"),
        "down_proj_scales is missing, though quantization_config says MXFP4",
    ),
    "fewer blocks": (
        lambda held, name, case: held.update(
            {f"{name}_blocks": held[f"{name}_blocks"][:, :, :-1].contiguous()}
        ),
        r"down_proj_blocks: shape must be \[4, 64, 3, 16\] .*; got \[4, 64, 2, 16\]",
    ),
    "NaN": (
        lambda held, name, case: held[f"{name}_scales"].view(-1)[5:6].fill_(255),
        r"down_proj_scales: scales must be finite .*; got nan at \[0, 1, 2\]",
    ),
    "floats": (as_floats, "down_proj: must be stored as MXFP4, blocks of 32.*; got fp32"),
}


@pytest.mark.parametrize("name", MXFP4_CHANGES)
def test_bad_mxfp4_experts_are_refused(tmp_path, name):
    change, message = MXFP4_CHANGES[name]
    with pytest.raises(Error, match=message):
        cpumoe.load(changed_gpt_oss(tmp_path, change))


@pytest.mark.parametrize("config", ["gptq", ["gptq"], 4])
def test_a_config_that_is_no_object(tmp_path, config):
    held = dict(tensors_of(GPTQ))
    with pytest.raises(Error, match="quantization_config must be an object"):
        cpumoe.load(write(tmp_path, FAMILY, config, held))


@pytest.mark.parametrize("method", [INT4, FP8, GPTQ, AWQ])
def test_quantised_tensors_without_a_config(tmp_path, method):
    with pytest.raises(Error, match=r"must not be there.*has no quantization_config"):
        open_changed(tmp_path, method, drop=True)


@pytest.mark.parametrize("method", [INT4, FP8, GPTQ, AWQ])
def test_a_config_without_quantised_tensors(tmp_path, method):
    source = quantised(method, FAMILY).path
    held = load_file(source.with_name(f"{source.name}-decoded") / "model.safetensors")
    config = json.loads((source / "config.json").read_text())["quantization_config"]
    with pytest.raises(Error, match=r"must be stored as|no tensor is stored so"):
        cpumoe.load(write(tmp_path, FAMILY, config, held))


def test_a_bias_of_zeros_is_ignored(tmp_path):
    held = dict(tensors_of(GPTQ))
    held[f"{MODULE}.bias"] = torch.zeros(384, dtype=torch.float16)
    config = json.loads((quantised(GPTQ, FAMILY).path / "config.json").read_text())
    assert cpumoe.load(write(tmp_path, FAMILY, config["quantization_config"], held))


def test_scales_that_were_not_looked_at_do_no_silent_harm(tmp_path, monkeypatch):
    """Opening reads a bounded part of the scales; a NaN elsewhere reaches the logits and verify."""
    monkeypatch.setattr(quantized, "CHECKED_BYTES", 1)
    model = open_changed(tmp_path, INT4, weight_scale=at(3, float("nan")))
    with pytest.raises(Error, match="logits: must be finite"):
        model.generate(prompt(5), max_tokens=2, temperature=0)
    with pytest.raises(Error, match=r"weight_scale: scales must be finite.*got nan at \[0, 3\]"):
        list(model.checkpoint.verify())


@pytest.mark.parametrize("method", [INT4, FP8, FP4, GPTQ, AWQ])
def test_verify_reads_every_scale(method):
    checkpoint = open_checkpoint(quantised(method, FAMILY).path)
    ends = (".weight_scale", ".weight_scale_inv", ".scales", ".g_idx")
    size = sum(ref.nbytes for name, ref in checkpoint.tensors.items() if name.endswith(ends))
    assert list(checkpoint.verify())[-1] == (size, size)


def test_verify_finds_inputs_out_of_order(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "CHECKED_BYTES", 1)
    model = open_changed(tmp_path, GPTQ, g_idx=lambda t: t.flip(0).contiguous())
    with pytest.raises(Error, match="g_idx: inputs must be in their own order"):
        list(model.checkpoint.verify())


def test_act_order_is_looked_at_everywhere(tmp_path, monkeypatch):
    """desc_act true: in order it is harmless; out of order no matrix is left unread."""
    monkeypatch.setattr(quantized, "CHECKED_BYTES", 1)
    assert open_changed(tmp_path / "in order", GPTQ, {"desc_act": True})
    with pytest.raises(Error, match="g_idx: inputs must be in their own order"):
        open_changed(
            tmp_path / "not", GPTQ, {"desc_act": True}, g_idx=lambda t: t.flip(0).contiguous()
        )

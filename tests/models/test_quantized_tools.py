"""Whole quantised checkpoints that other tools write, against the logits those tools give."""

import json

import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

import cpumoe
from quantized_models import base, quantised, reference
from tiny_models import prompt, relative_error

BOUND = 1e-4  # as in test_logits: fp32 arithmetic in another order on equal weights
FP8_ATTENTION = {
    "targets": ["re:.*self_attn.*"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
INT4_MLP = {
    "targets": ["re:.*mlp.*"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
}
INT8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
# config_groups -> the formats that must come of them.
GROUPS = {
    "mixed": ({"attention": FP8_ATTENTION, "mlp": INT4_MLP}, {"fp8_row", "int4_g32"}),
    "a name goes before an expression": (
        {"mlp": INT4_MLP, "x": INT8 | {"targets": ["Linear", "model.layers.1.mlp.down_proj"]}},
        {"u8_row", "int4_g32"},
    ),
    "expressions go by their text": (
        {
            "z": INT4_MLP | {"targets": ["re:.*proj"]},
            "a": FP8_ATTENTION | {"targets": ["re:.*_proj"]},
        },
        {"fp8_row"},
    ),
}


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


@pytest.mark.parametrize("groups", GROUPS)
def test_compressed_tensors_writes_a_model(tmp_path, groups):
    model = transformers.AutoModelForCausalLM.from_pretrained(base("llama"), dtype=torch.float32)
    config_groups, formats = GROUPS[groups]
    config = QuantizationConfig(config_groups=config_groups, ignore=["lm_head"])
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            n, k = module.weight.shape
            groups_of = scheme.weights.group_size or k
            peak = module.weight.data.reshape(n, k // groups_of, groups_of).abs().amax(2)
            top = 448.0 if scheme.weights.type == "float" else 2 ** (scheme.weights.num_bits - 1)
            module.weight_scale.data = peak / (top - 0.5)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    ids = prompt(15)
    ours = cpumoe.load(tmp_path, kv="fp32", activations="fp32")
    assert {f for f in ours.checkpoint.summary() if f not in ("fp32", "int64")} == formats
    # Transformers rounds inputs to FP8 where the config asks for it; we never do.
    stored = json.loads((tmp_path / "config.json").read_text())
    for group in stored["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (tmp_path / "config.json").write_text(json.dumps(stored))
    theirs = reference(tmp_path)
    assert relative_error(ours.logits(ids), logits(theirs, ids)) < BOUND


@pytest.mark.parametrize("method", ["fp8-block", "ct-fp8-channel"])
def test_transformers_reads_the_same(method):
    """The checkpoint itself, not the decoded weights, through Transformers' own loader."""
    case, ids = quantised(method), prompt(15)
    ours = cpumoe.load(case.path, kv="fp32", activations="fp32").logits(ids)
    assert relative_error(ours, logits(reference(case.path), ids)) < BOUND

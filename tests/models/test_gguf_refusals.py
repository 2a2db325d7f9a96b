"""GGUF metadata and tensors that a family must refuse, each by its name in the file."""

import numpy as np
import pytest

import cpumoe
from cpumoe import Error
from cpumoe.checkpoint import open_checkpoint
from cpumoe.models.gguf import translate
from gguf_tiny import FIELDS, TENSORS, model


def test_the_model_itself_runs(tmp_path):
    loaded = cpumoe.load(model(tmp_path / "m.gguf"))
    assert loaded.spec.family == "qwen3_moe"
    assert len(loaded.generate([3, 4], max_tokens=3, ignore_eos=True).ids) == 3


def key(name: str, value: object) -> dict:
    return {f"qwen3moe.{name}": value}


BAD_FIELDS = {
    "no architecture": ({"general.architecture": None}, "general.architecture must be a string"),
    "architecture": ({"general.architecture": "mamba"}, "one of llama.*got 'mamba'.*not supported"),
    "no layers": (key("block_count", None), "block_count must be an integer from 1.*missing"),
    "layers zero": (key("block_count", 0), "block_count must be an integer from 1"),
    "layers absurd": (key("block_count", 2**40), "block_count must be an integer from 1"),
    "layers negative": (key("block_count", -1), "block_count must be"),
    "layers text": (key("block_count", "1"), "block_count must be an integer.*got '1'"),
    "layers number": (key("block_count", 1.0), "block_count must be an integer"),
    "layers flag": (key("block_count", True), "block_count must be an integer"),
    "more layers": (
        key("block_count", 2),
        r"model\.layers\.1\.self_attn\.q_proj\.weight is missing",
    ),
    "extra layers": (
        key("nextn_predict_layers", 1),
        "nextn_predict_layers must be below block_cou",
    ),
    "hidden": (key("embedding_length", 17), "shape must be .* by the metadata"),
    "heads by layer": (key("attention.head_count", [4, 4]), "head_count must be an integer"),
    "no heads": (key("attention.head_count", None), "attention.head_count must be"),
    "kv heads": (key("attention.head_count_kv", 3), "num_key_value_heads must be a divisor"),
    "value width": (
        key("attention.value_length", 8),
        "value_length must be attention.key_length 4",
    ),
    "no eps": (key("attention.layer_norm_rms_epsilon", None), "layer_norm_rms_epsilon must be"),
    "eps nan": (key("attention.layer_norm_rms_epsilon", float("nan")), "layer_norm_rms_epsilon"),
    "no context": (key("context_length", None), "context_length must be"),
    "no experts": (key("expert_count", None), "expert_count must be"),
    "more experts": (key("expert_count", 4), r"experts\.3\.gate_proj\.weight is missing"),
    "used": (
        key("expert_used_count", 4),
        "expert_used_count must be an integer from 1 to 3; got 4",
    ),
    "gating": (key("expert_gating_func", 2), "expert_gating_func must be 1 in this archi"),
    "scaled": (key("expert_weights_scale", 2.5), "expert_weights_scale must be 1"),
    "normalised": (key("expert_weights_norm", 1), "expert_weights_norm must be true or false"),
    "rope base": (key("rope.freq_base", -1.0), "rope.freq_base must be a finite number above 0"),
    "rope dims": (key("rope.dimension_count", 2), "partial_rotary_factor must be 1"),
    "rope dims above": (
        key("rope.dimension_count", 6),
        "dimension_count must be an integer from 2",
    ),
    "rope kind": (key("rope.scaling.type", "longrope"), "scaling.type must be one of none, linear"),
    "rope factor": (key("rope.scaling.type", "yarn"), "rope.scaling.factor must be .*missing"),
    "window": (key("attention.sliding_window", 8), "sliding_window must be 0 in this architecture"),
    "capped": (key("final_logit_softcapping", 30.0), "final_logit_softcapping must be 0 in this"),
    "scaled logits": (key("logit_scale", 0.5), "logit_scale must be 1 in this architecture"),
    "clamped": (key("swiglu_clamp_exp", [7]), "swiglu_clamp_exp must be 0"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_metadata_are_refused(tmp_path, name):
    changes, message = BAD_FIELDS[name]
    path = model(tmp_path / "m.gguf", changes)
    with pytest.raises(Error, match=message) as caught:
        cpumoe.load(path)
    assert str(path) in str(caught.value)
    assert "config.json" not in str(caught.value)


BAD_TENSORS = {
    "no embedding": ({"token_embd.weight": None}, "token_embd.weight must be there"),
    "missing": ({"blk.0.attn_q_norm.weight": None}, r"self_attn\.q_norm\.weight is missing"),
    "missing experts": (
        {"blk.0.ffn_up_exps.weight": None},
        r"experts\.0\.up_proj\.weight is missi",
    ),
    "shape": ({"blk.0.attn_k.weight": [16, 8]}, r"attn_k.*|k_proj.*shape must be \[8, 16\]"),
    "fewer experts": ({"blk.0.ffn_up_exps.weight": [2, 8, 16]}, r"experts\.2\.up_proj\.weight is"),
    "more experts": (
        {"blk.0.ffn_up_exps.weight": [4, 8, 16]},
        "1 tensors are not part of qwen3_moe",
    ),
    "flat experts": ({"blk.0.ffn_up_exps.weight": [3]}, "must stack one part per expert"),
    "turned experts": ({"blk.0.ffn_up_exps.weight": [3, 16, 8]}, r"shape must be \[8, 16\]"),
    "foreign": ({"blk.0.ssm_in.weight": [4]}, r"not part of qwen3_moe.*: blk\.0\.ssm_in\.weight"),
    "bias ignored": ({"blk.0.attn_output.bias": [16]}, "not part of qwen3_moe.*o_proj.bias"),
    "twice": ({"blk.0.post_attention_norm.weight": [16]}, "mean the same part of the model"),
    "twice by zeros": ({"blk.00.attn_q.weight": [16, 16]}, "mean the same part of the model"),
    "rope factors": ({"rope_freqs.weight": [3]}, "factors must be 2 finite numbers above 0"),
    "rope factors flat": ({"rope_freqs.weight": [1, 2]}, "must be fp32 of one dimension"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_refused(tmp_path, name):
    changes, message = BAD_TENSORS[name]
    with pytest.raises(Error, match=message):
        cpumoe.load(model(tmp_path / "m.gguf", tensors=changes))


def test_what_may_be_there_besides(tmp_path):
    """Layers that predict further tokens, and fields that change nothing."""
    fields = key("block_count", 2) | key("nextn_predict_layers", 1) | key("logit_scale", 1.0)
    fields |= key("attention.sliding_window", 64) | key("expert_weights_scale", 0.0)
    extra = {"blk.1.nextn.eh_proj.weight": [16, 32], "blk.1.attn_q.weight": [16, 16]}
    extra |= {"blk.0.attn_rot_embd.weight": [2]}
    assert cpumoe.load(model(tmp_path / "m.gguf", fields, extra)).spec.layers[1:] == ()


def test_tied_head_and_widths_from_the_tensors(tmp_path):
    absent = key("expert_feed_forward_length", None) | key("attention.key_length", None)
    path = model(tmp_path / "m.gguf", absent, {"output.weight": None})
    loaded = cpumoe.load(path)
    assert loaded.spec.head.w is loaded.spec.embed
    assert loaded.spec.layers[0].ffn.expert_gate[2].shape == (8, 16)


def test_experts_of_early_files(tmp_path):
    """Mixtral files of early 2024 hold each expert by itself: the same model."""
    llama = {k.replace("qwen3moe", "llama"): v for k, v in FIELDS.items()}
    llama |= {"general.architecture": "llama", "llama.feed_forward_length": 8}
    norms = {"blk.0.attn_q_norm.weight": None, "blk.0.attn_k_norm.weight": None}
    stacked = cpumoe.load(model(tmp_path / "a.gguf", llama, norms, arch="llama"))
    apart: dict = dict(norms)
    for part in ("gate", "up", "down"):
        name = f"blk.0.ffn_{part}_exps.weight"
        apart[name] = None
        apart |= {f"blk.0.ffn_{part}.{e}.weight": TENSORS[name][1:] for e in range(3)}
    early = cpumoe.load(model(tmp_path / "b.gguf", llama, apart, arch="llama"))
    assert np.allclose(stacked.logits([1, 2, 3]), early.logits([1, 2, 3]))


def test_mixtral_refuses_what_it_has_not(tmp_path):
    fields = {"llama.feed_forward_length": 8, "llama.expert_weights_norm": False}
    with pytest.raises(Error, match="expert weights add to 1"):
        cpumoe.load(model(tmp_path / "m.gguf", fields, arch="llama"))


ROPE = {
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, {"factor": 4.0}),
    "linear of 2023": ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 16},
        {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16},
    ),
    "yarn scaled": (
        {"scaling.type": "yarn", "scaling.factor": float(np.exp(1)), "scaling.attn_factor": 2.0},
        {"attention_factor": 2.2},
    ),
    "yarn deep": (
        {"scaling.type": "yarn", "scaling.factor": 40.0, "scaling.yarn_log_multiplier": 0.0707},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_rope_fields(tmp_path, name):
    fields, expected = ROPE[name]
    fields = {f"qwen3moe.rope.{k}": v for k, v in fields.items()}
    config = translate(open_checkpoint(model(tmp_path / "m.gguf", fields))).config
    got = {k: config["rope_parameters"][k] for k in expected}
    assert got == pytest.approx(expected)

"""config.json and tensors that a family must refuse, each with the field or tensor by name."""

import json

import pytest

import cpumoe
from cpumoe import Error
from hostile import QWEN3, checkpoint

BAD_CONFIGS = {
    "no model_type": ({"model_type": None}, "model_type must be one of deepseek_v2, .*olmoe"),
    "unknown model_type": ({"model_type": "bert"}, "model_type must be one of.*got 'bert'"),
    "model_type no text": ({"model_type": 3}, "model_type"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config: bits must be one of 4, 8; it is missing",
    ),
    "no experts": ({"num_experts": 0}, "num_experts must be an integer from 1"),
    "experts missing": ({"num_experts": None}, "num_experts must be .* it is missing"),
    "experts at odds": ({"num_local_experts": 4}, "num_local_experts must be equal"),
    "k of zero": ({"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer from 1"),
    "k above experts": ({"num_experts_per_tok": 4}, "num_experts_per_tok must be at most"),
    "hidden missing": ({"hidden_size": None}, "hidden_size must be .* it is missing"),
    "hidden negative": ({"hidden_size": -16}, "hidden_size"),
    "hidden absurd": ({"hidden_size": 2**62}, "hidden_size"),
    "hidden text": ({"hidden_size": "16"}, "hidden_size"),
    "hidden fraction": ({"hidden_size": 16.0}, "hidden_size"),
    "hidden boolean": ({"hidden_size": True}, "hidden_size"),
    "layers zero": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "layers absurd": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "vocab zero": ({"vocab_size": 0}, "vocab_size"),
    "heads zero": ({"num_attention_heads": 0}, "num_attention_heads"),
    "kv heads do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor"),
    "heads do not divide": (
        {"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 2},
        "num_attention_heads must be a divisor of hidden_size",
    ),
    "head_dim odd": ({"head_dim": 5}, "head_dim must be even"),
    "eps zero": ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    "eps text": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    "positions missing": ({"max_position_embeddings": None}, "max_position_embeddings"),
    "activation": ({"hidden_act": "mish"}, "hidden_act must be one of silu"),
    "flag": ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    "tied text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    "rope kind": ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be one of"),
    "rope old kind": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type must be one of"),
    "rope no object": ({"rope_scaling": 4}, "rope_scaling must be an object"),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, "factor must be .* it is missing"),
    "rope factor zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be"),
    "rope factor tiny": ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, "frequencies"),
    "rope theta": ({"rope_theta": -1.0}, "rope_theta must be"),
    "partial rope": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "window": ({"use_sliding_window": True, "sliding_window": -4}, "sliding_window"),
    "dense layers": ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list"),
    "sparse step": ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "intermediate": ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    # At odds with the tensors:
    "other width": ({"moe_intermediate_size": 9}, "shape must be .* got"),
    "other vocab": ({"vocab_size": 33}, "shape must be"),
    "more layers": ({"num_hidden_layers": 2}, r"model\.layers\.1.* is missing"),
    "more experts": ({"num_experts": 4}, r"experts\.3.* is missing"),
    "fewer experts": ({"num_experts": 2, "num_experts_per_tok": 1}, "shape|not part of"),
    "another family": ({"model_type": "olmoe", "intermediate_size": 8}, "shape must be"),
    "mixtral": ({"model_type": "mixtral", "intermediate_size": 8}, "is missing"),
    "biases expected": ({"attention_bias": True}, r"q_proj\.bias is missing"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_config_is_refused(tmp_path, name):
    changes, message = BAD_CONFIGS[name]
    with pytest.raises(Error, match=message):
        cpumoe.load(checkpoint(tmp_path, changes))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(tmp_path, constant):
    checkpoint(tmp_path)
    text = json.dumps(QWEN3 | {"rms_norm_eps": "?"}).replace('"?"', constant)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Error, match="rms_norm_eps must be a finite number"):
        cpumoe.load(tmp_path)


MLA = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "num_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
}
V2 = MLA | {"model_type": "deepseek_v2", "norm_topk_prob": False}
GLM = MLA | {"model_type": "glm4_moe"}
GPT_OSS = {
    "model_type": "gpt_oss",
    "intermediate_size": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"],
}
BAD_FAMILY_CONFIGS = {
    "latent heads": (MLA, {"num_key_value_heads": 2}, "num_key_value_heads must be num_attention"),
    "no rank": (MLA, {"kv_lora_rank": None}, "kv_lora_rank must be .* it is missing"),
    "rank of zero": (MLA, {"q_lora_rank": 0}, "q_lora_rank must be an integer from 1"),
    "odd rope": (MLA, {"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even"),
    "no value width": (MLA, {"v_head_dim": None}, "v_head_dim must be"),
    "groups do not divide": (MLA, {"n_group": 4}, "n_group must be a divisor of .* experts 6"),
    "no groups": (MLA, {"n_group": None}, "n_group must be .* it is missing"),
    "no chosen groups": (MLA, {"topk_group": None}, "topk_group must be .* it is missing"),
    "many chosen groups": (MLA, {"topk_group": 4}, "topk_group must be an integer from 1 to 3"),
    "few chosen groups": (
        MLA,
        {"topk_group": 1, "num_experts_per_tok": 3},
        "topk_group must be so many that they hold num_experts_per_tok 3",
    ),
    "groups of one": (
        MLA,
        {"n_group": 6, "topk_group": 4},
        "n_group must be such that a group holds two",
    ),
    "softmax in V3": (MLA, {"scoring_func": "softmax"}, "scoring_func must be one of sigmoid"),
    "greedy in V3": (MLA, {"topk_method": "greedy"}, "topk_method must be one of noaux_tc"),
    "no scaling": (MLA, {"routed_scaling_factor": None}, "routed_scaling_factor must be"),
    "no normalising": (MLA, {"norm_topk_prob": None}, "norm_topk_prob must be true or false"),
    "every other layer": (MLA, {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
    "interleave": (MLA, {"rope_interleave": "yes"}, "rope_interleave must be true or false"),
    "mscale": (
        MLA,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": "one"}},
        "mscale_all_dim must be",
    ),
    "sigmoid in V2": (V2, {"scoring_func": "sigmoid"}, "scoring_func must be one of softmax"),
    "noaux_tc in V2": (V2, {"topk_method": "noaux_tc"}, "topk_method must be one of greedy"),
    "normalised in V2": (V2, {"norm_topk_prob": True}, "norm_topk_prob must be false"),
    "odd part rotates": (GLM, {"partial_rotary_factor": 0.3}, "so that an even part of head_dim 4"),
    "nothing rotates": (GLM, {"partial_rotary_factor": 0.0}, "partial_rotary_factor must be"),
    "no window": (GPT_OSS, {"sliding_window": None}, "sliding_window must be"),
    "few layer types": (GPT_OSS, {"layer_types": []}, "layer_types must be 1 strings"),
    "other layer type": (GPT_OSS, {"layer_types": ["chunked_attention"]}, "layer_types must be"),
    "layer type no text": (GPT_OSS, {"layer_types": [[1]]}, "layer_types must be"),
    "limit of zero": (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit must be a finite number above 0"),
    "alpha": (GPT_OSS, {"swiglu_alpha": "big"}, "swiglu_alpha must be"),
    "dense biases": (
        {"model_type": "llama", "intermediate_size": 8},
        {"mlp_bias": 1},
        "mlp_bias must be true or false",
    ),
    # At odds with the tensors:
    "no latents": (MLA, {}, r"self_attn\.q_proj.*shape must be"),
    "no sinks": (GPT_OSS, {"attention_bias": False}, r"self_attn\.sinks is missing"),
    "dense": ({"model_type": "llama", "intermediate_size": 8}, {}, r"mlp\.gate_proj.* is missing"),
}


@pytest.mark.parametrize("name", BAD_FAMILY_CONFIGS)
def test_bad_config_of_a_family_is_refused(tmp_path, name):
    family, changes, message = BAD_FAMILY_CONFIGS[name]
    with pytest.raises(Error, match=message):
        cpumoe.load(checkpoint(tmp_path, family | changes))


NORM = "model.layers.0.self_attn.q_norm.weight"
BAD_TENSORS = {
    "missing": ({NORM: None}, "q_norm.weight is missing"),
    "shape": ({NORM: ("F32", [5])}, r"shape must be \[4\] by config.json; got \[5\]"),
    "rank": ({NORM: ("F32", [4, 1])}, "shape must be"),
    "dtype": ({NORM: ("I32", [4])}, "format must be one of fp32, fp16, bf16; got int32"),
    "transposed": (
        {"model.layers.0.mlp.gate.weight": ("F32", [16, 3])},
        r"shape must be \[3, 16\]",
    ),
    "foreign": ({"model.layers.0.mlp.extra": ("F32", [1])}, "1 tensors are not part of qwen3_moe"),
    "bias ignored": (
        {"model.layers.0.self_attn.q_proj.bias": ("F32", [16])},
        "not part of qwen3_moe",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensor_is_refused(tmp_path, name):
    changes, message = BAD_TENSORS[name]
    with pytest.raises(Error, match=message):
        cpumoe.load(checkpoint(tmp_path, **changes))


def test_what_may_be_left_over(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [2])}
    assert cpumoe.load(checkpoint(tmp_path, {"tie_word_embeddings": True}, **extra))


def test_layers_that_predict_further_tokens_are_left_over(tmp_path):
    extra = {"model.layers.1.eh_proj.weight": ("F32", [16, 32])}
    assert cpumoe.load(checkpoint(tmp_path, {"num_nextn_predict_layers": 1}, **extra))
    with pytest.raises(Error, match="not part of qwen3_moe"):
        cpumoe.load(checkpoint(tmp_path, **extra))
    beyond = {"model.layers.2.eh_proj.weight": ("F32", [16, 32])}
    with pytest.raises(Error, match="not part of qwen3_moe"):
        cpumoe.load(checkpoint(tmp_path, {"num_nextn_predict_layers": 1}, **beyond))


def test_published_and_v5_rope_fields_agree(tmp_path):
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}
    a = cpumoe.load(checkpoint(tmp_path / "old", old)).spec.layers[0].attn
    b = cpumoe.load(checkpoint(tmp_path / "new", new)).spec.layers[0].attn
    assert (a.inv_freq, a.rope_scale) == (b.inv_freq, b.rope_scale)


@pytest.mark.parametrize(("option", "value"), [("kv", "int8"), ("context", 65), ("context", 0)])
def test_bad_options(tmp_path, option, value):
    with pytest.raises(Error, match=option):
        cpumoe.load(checkpoint(tmp_path), **{option: value})

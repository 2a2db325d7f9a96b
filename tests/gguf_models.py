"""Tiny models of tests/tiny_models.py as GGUF files, by the gguf package's writer and name map.

The conversions of values are those that published files have: rows of Llama's q and k in pairs,
experts stacked, gpt-oss's gate and up apart, DeepSeek's kv_b in two parts.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch

from tiny_models import Tiny

Tensors = dict[str, np.ndarray]
Convert = Callable[[np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType | None]]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
}


def read(path: Path) -> Tensors:
    """All tensors of a checkpoint directory, in float32."""
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {k: v.float().numpy() for k, v in safetensors.torch.load_file(file).items()}
    return found


def paired(w: np.ndarray, heads: int, rotated: int) -> np.ndarray:
    """Rows (or elements) of each head from halves [a..., b...] to pairs [a0, b0, a1, b1, ...]."""
    split = w.reshape(heads, 2, rotated // 2, -1)
    return split.swapaxes(1, 2).reshape(w.shape)


def stacked(tensors: Tensors) -> Tensors:
    """One tensor per projection instead of one per expert."""
    groups: dict[str, dict[int, np.ndarray]] = {}
    rest = {}
    for name, value in tensors.items():
        if match := _EXPERT.fullmatch(name):
            groups.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = value
        else:
            rest[name] = value
    return rest | {n: np.stack([g[i] for i in sorted(g)]) for n, g in groups.items()}


def split_gpt_oss(tensors: Tensors) -> Tensors:
    """gate_up_proj [E, H, 2I], gate in even columns, as [E, I, H] each; down_proj [E, H, I]."""
    result = {}
    for name, value in tensors.items():
        if name.endswith("gate_up_proj"):
            turned = value.swapaxes(1, 2)
            result[name.replace("gate_up_proj", "gate_proj.weight")] = turned[:, 0::2]
            result[name.replace("gate_up_proj", "up_proj.weight")] = turned[:, 1::2]
        elif name.endswith("gate_up_proj_bias"):
            result[name.replace("gate_up_proj_bias", "gate_proj.bias")] = value[:, 0::2]
            result[name.replace("gate_up_proj_bias", "up_proj.bias")] = value[:, 1::2]
        elif name.endswith("down_proj"):
            result[name + ".weight"] = value.swapaxes(1, 2)
        elif name.endswith("down_proj_bias"):
            result[name.removesuffix("_bias") + ".bias"] = value
        else:
            result[name] = value
    return result


def split_kv_b(tensors: Tensors, c: Any) -> Tensors:
    """kv_b as k_b [heads, rank, nope] and v_b [heads, value, rank]."""
    result = {}
    for name, value in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            heads = value.reshape(c.num_attention_heads, -1, value.shape[1])
            k, v = heads[:, : c.qk_nope_head_dim], heads[:, c.qk_nope_head_dim :]
            result[name.replace("kv_b_proj", "k_b_proj")] = k.swapaxes(1, 2)
            result[name.replace("kv_b_proj", "v_b_proj")] = v
        else:
            result[name] = value
    return result


def _values(case: Tiny, absorbed: bool) -> Tensors:
    c, tensors = case.hf.config, read(case.path)
    if c.model_type in ("llama", "mixtral"):
        for name, value in tensors.items():
            for part, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads)):
                if f".{part}_proj." in name:
                    tensors[name] = paired(value, heads, len(value) // heads)
    if c.model_type == "gpt_oss":
        tensors = split_gpt_oss(tensors)
    if absorbed:
        tensors = split_kv_b(tensors, c)
    return stacked(tensors)


def _add_attention(w: gguf.GGUFWriter, c: Any, absorbed: bool) -> None:
    w.add_head_count(c.num_attention_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    if c.model_type.startswith("deepseek"):
        rope, nope = c.qk_rope_head_dim, c.qk_nope_head_dim
        w.add_head_count_kv(1 if absorbed else c.num_attention_heads)
        if c.q_lora_rank:
            w.add_q_lora_rank(c.q_lora_rank)
        w.add_kv_lora_rank(c.kv_lora_rank)
        w.add_rope_dimension_count(rope)
        w.add_key_length(c.kv_lora_rank + rope if absorbed else nope + rope)
        w.add_value_length(c.kv_lora_rank if absorbed else c.v_head_dim)
        if absorbed:
            w.add_key_length_mla(nope + rope)
            w.add_value_length_mla(c.v_head_dim)
        return
    w.add_head_count_kv(c.num_key_value_heads)
    dims = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_key_length(dims)
    w.add_value_length(dims)
    share = (c.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    w.add_rope_dimension_count(int(dims * share))
    if getattr(c, "sliding_window", None) and getattr(c, "use_sliding_window", True):
        w.add_sliding_window(c.sliding_window)
    if getattr(c, "clip_qkv", None):
        w.add_clamp_kqv(c.clip_qkv)


def _add_rope(w: gguf.GGUFWriter, case: Tiny) -> None:
    c = case.hf.config
    rope = dict(c.rope_parameters)
    w.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "llama3":  # worked out, as the published files have it
        dims = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        plain = rope["rope_theta"] ** -(np.arange(0, dims, 2) / dims)
        scaled = case.hf.model.rotary_emb.inv_freq.double().numpy()
        w.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    elif kind != "default":
        w.add_rope_scaling_type(gguf.RopeScalingType(kind))
        w.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_experts(w: gguf.GGUFWriter, c: Any) -> None:
    counts = [getattr(c, n, None) for n in ("num_local_experts", "num_experts", "n_routed_experts")]
    experts = next((n for n in counts if n), None)
    if experts is None:
        return
    w.add_expert_count(experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    inter = getattr(c, "moe_intermediate_size", None)
    if inter or c.model_type == "gpt_oss":
        w.add_expert_feed_forward_length(inter or c.intermediate_size)
    if c.model_type == "qwen2_moe":
        w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if c.model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        sigmoid = c.model_type != "deepseek_v2"
        w.add_expert_shared_count(c.n_shared_experts)
        w.add_leading_dense_block_count(c.first_k_dense_replace)
        w.add_expert_weights_scale(c.routed_scaling_factor)
        w.add_expert_weights_norm(bool(c.norm_topk_prob))
        kinds = gguf.ExpertGatingFuncType
        w.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
        if (c.n_group or 1) > 1:
            w.add_expert_group_count(c.n_group)
            w.add_expert_group_used_count(c.topk_group)
    elif getattr(c, "norm_topk_prob", None) not in (None, c.model_type == "qwen3_moe"):
        w.add_expert_weights_norm(c.norm_topk_prob)  # left out where it is as usual


def write_gguf(
    path: Path,
    case: Tiny,
    convert: Convert | None = None,
    *,
    absorbed: bool = False,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    apart: Mapping[str, Convert] | None = None,
) -> None:
    """Write `case` to `path`.

    convert: values of a matrix -> (what to store, its type); absorbed: DeepSeek's newer form;
    more: adds other metadata. apart: part of a tensor's name -> what converts it instead.
    """
    c = case.hf.config
    arch = ARCHITECTURES[c.model_type]
    number = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch)
    names = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_vocab_size(c.vocab_size)
    _add_attention(w, c, absorbed)
    _add_experts(w, c)
    _add_rope(w, case)
    if more is not None:
        more(w)
    for name, value in _values(case, absorbed).items():
        if c.tie_word_embeddings and name == "lm_head.weight":
            continue
        key = name.replace("e_score_correction_bias", "e_score_correction.bias")
        new = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if new is None:  # the map knows it by its stem only
            new = names.get_name(f"{name}.weight", try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        new += ".weight" if new.endswith("sinks") else ""
        if new.endswith("gate_inp_shexp.weight"):
            value = value[0]  # published files drop the extent of one
        value = np.ascontiguousarray(value)
        of_name = next((c for part, c in (apart or {}).items() if part in new), convert)
        if of_name is not None and value.ndim > 1 and "gate_inp" not in new:
            stored, kind = of_name(value)
            w.add_tensor(new, stored, raw_dtype=kind)
        else:
            w.add_tensor(new, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()

"""Metadata of GGUF -> the config.json that the model had before it was converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cpumoe._core import Error
from cpumoe.checkpoint import TensorRef
from cpumoe.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Config
from cpumoe.models.gguf_names import Naming

_UNSET, _SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 0, 1, 2, 3  # expert_gating_func
# Fields that would change what these architectures compute -> the value that does not.
_NEUTRAL: Mapping[str, float] = {
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "attention.scale": 0,
    "attention.output_scale": 1,
    "attention.temperature_scale": 0,
    "attention.max_alibi_bias": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "router_logit_softcapping": 0,
    "swiglu_clamp_exp": 0,
    "swiglu_clamp_shexp": 0,
    "use_parallel_residual": False,
}


class Source:
    """Metadata of one architecture, read under its prefix, and the tensors it describes."""

    def __init__(self, metadata: Config, arch: str, tensors: Mapping[str, TensorRef]) -> None:
        self.metadata = metadata
        self.arch = arch
        self.tensors = tensors

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return self.metadata.has(f"{self.arch}.{key}")

    def integer(self, key: str, low: int, high: int, **default: int) -> int:
        """An integer in [low, high]."""
        return self.metadata.integer(f"{self.arch}.{key}", low, high, **default)

    def number(self, key: str, low: float, **default: float) -> float:
        """A number above `low`."""
        return self.metadata.number(f"{self.arch}.{key}", low, **default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self.metadata.flag(f"{self.arch}.{key}", default)

    def fail(self, key: str, must: str) -> Error:
        """The error of `key`, to be raised."""
        return self.metadata.fail(f"{self.arch}.{key}", must)

    def width(self, key: str, tensor: str = "", axis: int = 0) -> int:
        """A width; where the key is absent, the extent of the first `tensor` that is there."""
        if not self.has(key) and tensor:
            found = [t for n, t in self.tensors.items() if n.endswith(f".{tensor}")]
            if found and len(found[0].shape) > axis:
                return found[0].shape[axis]
        return self.integer(key, 1, MAX_WIDTH)

    def in_layer(self, layer: int, name: str) -> bool:
        """Whether the layer has the tensor `name`."""
        return f"blk.{layer}.{name}" in self.tensors

    def refuse_others(self) -> None:
        """Refuse fields of other architectures that would be ignored here."""
        for key, neutral in _NEUTRAL.items():
            value = self.metadata.values.get(f"{self.arch}.{key}") if self.has(key) else neutral
            if not isinstance(value, str | int | float) or value != neutral:
                raise self.fail(key, f"{neutral} in this architecture")

    @property
    def layers(self) -> int:
        """Layers of the model itself, without those that predict further tokens."""
        blocks = self.integer("block_count", 1, MAX_LAYERS)
        extra = self.integer("nextn_predict_layers", 0, MAX_LAYERS, default=0)
        if extra >= blocks:
            raise self.fail("nextn_predict_layers", f"below block_count {blocks}")
        return blocks - extra


def _factors(s: Source) -> list[float]:
    """rope_freqs.weight: what each frequency is divided by (llama3 scaling, worked out)."""
    ref = s.tensors["rope_freqs.weight"]
    if ref.format != "fp32" or len(ref.shape) != 1:
        raise Error(
            f"{ref.file}: tensor {ref.name}: must be fp32 of one dimension; "
            f"got {ref.format} {list(ref.shape)}"
        )
    return [float(v) for v in ref.array()]


def _rope(s: Source, dims: int, rotated: int) -> dict[str, Any]:
    """rope_parameters for heads of `dims`, of which `rotated` leading ones turn."""
    rope: dict[str, Any] = {
        "rope_theta": s.number("rope.freq_base", 0.0, default=10000.0),
        "partial_rotary_factor": rotated / dims,
    }
    key = f"{s.arch}.rope.scaling.type"
    kind = s.metadata.choice(key, ("none", "linear", "yarn"), default="none")
    if kind == "none" and s.has("rope.scale_linear"):  # files of 2023
        return rope | {"rope_type": "linear", "factor": s.number("rope.scale_linear", 0.0)}
    if "rope_freqs.weight" in s.tensors:
        if kind != "none":
            raise s.fail("rope.scaling.type", "none beside the tensor rope_freqs.weight")
        return rope | {"rope_type": "factors", "factors": _factors(s)}
    if kind == "none":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": s.number("rope.scaling.factor", 0.0)}
    return rope if kind == "linear" else rope | _yarn(s, rope["factor"])


def _yarn(s: Source, factor: float) -> dict[str, Any]:
    key = "rope.scaling."
    if s.number(f"{key}yarn_ext_factor", -math.inf, default=1.0) not in (1.0, -1.0):
        raise s.fail(f"{key}yarn_ext_factor", "1")
    yarn: dict[str, Any] = {
        "beta_fast": s.number(f"{key}yarn_beta_fast", 0.0, default=32.0),
        "beta_slow": s.number(f"{key}yarn_beta_slow", 0.0, default=1.0),
    }
    if s.has(f"{key}original_context_length"):
        trained = s.integer(f"{key}original_context_length", 1, MAX_POSITIONS)
        yarn["original_max_position_embeddings"] = trained
    for name in (f"{key}attn_factor", f"{key}yarn_attn_factor"):
        scale = s.number(name, 0.0, default=1.0)
        if scale != 1.0:  # on top of yarn's own
            yarn["attention_factor"] = scale * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    if s.has(f"{key}yarn_log_multiplier"):
        # A tenth of mscale_all_dim, to which mscale is equal in every published model.
        scale = 10.0 * s.number(f"{key}yarn_log_multiplier", -math.inf)
        yarn |= {"mscale": scale, "mscale_all_dim": scale}
    return yarn


def _common(s: Source, windowed: bool) -> dict[str, Any]:
    """Fields that every architecture has. windowed: whether attention may have a window."""
    embed = s.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise Error(f"{s.metadata.where}: tensor token_embd.weight must be there, [vocab, hidden]")
    s.refuse_others()
    hidden = s.integer("embedding_length", 1, MAX_WIDTH)
    heads = s.integer("attention.head_count", 1, MAX_WIDTH)
    longest = s.integer("context_length", 1, MAX_POSITIONS)
    window = s.integer("attention.sliding_window", 0, MAX_POSITIONS, default=0)
    if 0 < window < longest and not windowed:
        raise s.fail("attention.sliding_window", "0 in this architecture")
    return {
        "vocab_size": embed.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": s.integer("attention.head_count_kv", 1, MAX_WIDTH, default=heads),
        "max_position_embeddings": longest,
        "rms_norm_eps": s.number("attention.layer_norm_rms_epsilon", 0.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in s.tensors,
    }


def _plain(s: Source, windowed: bool = False) -> dict[str, Any]:
    """_common, and heads of one width."""
    config = _common(s, windowed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dims = s.integer("attention.key_length", 2, MAX_WIDTH, default=max(hidden // heads, 2))
    if s.integer("attention.value_length", 2, MAX_WIDTH, default=dims) != dims:
        raise s.fail("attention.value_length", f"attention.key_length {dims}")
    rotated = s.integer("rope.dimension_count", 2, dims, default=dims)
    return config | {"head_dim": dims, "rope_parameters": _rope(s, dims, rotated)}


def _routing(s: Source, normalised: bool, gating: int = _SOFTMAX) -> dict[str, Any]:
    """Softmax routing over all experts. gating: what expert_gating_func may say."""
    if s.integer("expert_gating_func", 0, 255, default=_UNSET) not in (_UNSET, gating):
        raise s.fail("expert_gating_func", f"{gating} in this architecture")
    if s.number("expert_weights_scale", -1.0, default=1.0) not in (0.0, 1.0):  # 0: not set
        raise s.fail("expert_weights_scale", "1")
    experts = s.integer("expert_count", 1, MAX_EXPERTS)
    return {
        "num_experts": experts,
        "num_experts_per_tok": s.integer("expert_used_count", 1, experts),
        "norm_topk_prob": s.flag("expert_weights_norm", default=normalised),
    }


def _llama(s: Source) -> dict[str, Any]:
    """Llama, or Mixtral when there are experts: q and k rows lie in pairs, as they rotate."""
    routed = s.integer("expert_count", 0, MAX_EXPERTS, default=0) > 0
    config = _plain(s, windowed=routed) | {
        "rope_interleave": True,
        "intermediate_size": s.width("feed_forward_length"),
        "attention_bias": s.in_layer(0, "attn_q.bias"),
        "mlp_bias": s.in_layer(0, "ffn_up.bias"),
    }
    if not routed:
        return config | {"model_type": "llama"}
    if config["attention_bias"] or not s.flag("expert_weights_norm", default=True):
        raise Error(f"{s.metadata.where}: Mixtral has no biases, and its expert weights add to 1")
    routing = _routing(s, normalised=True)
    routing["num_local_experts"] = routing.pop("num_experts")
    del config["attention_bias"], config["mlp_bias"], routing["norm_topk_prob"]
    if s.has("attention.sliding_window"):
        routing["sliding_window"] = s.integer("attention.sliding_window", 0, MAX_POSITIONS) or None
    return config | routing | {"model_type": "mixtral"}


def _qwen_experts(s: Source, config: dict[str, Any], normalised: bool) -> dict[str, Any]:
    dense = [i for i in range(s.layers) if not s.in_layer(i, "ffn_gate_inp.weight")]
    inter = s.width("expert_feed_forward_length", "ffn_gate_exps.weight", axis=1)
    if dense or s.has("feed_forward_length"):
        config["intermediate_size"] = s.width("feed_forward_length")
    experts = {"moe_intermediate_size": inter, "mlp_only_layers": dense}
    return config | _routing(s, normalised) | experts


def _qwen2moe(s: Source) -> dict[str, Any]:
    config = _qwen_experts(s, _plain(s), normalised=False)
    shared = s.width("expert_shared_feed_forward_length", "ffn_gate_shexp.weight")
    return config | {
        "model_type": "qwen2_moe",
        "qkv_bias": s.in_layer(0, "attn_q.bias"),
        "shared_expert_intermediate_size": shared,
    }


def _qwen3moe(s: Source) -> dict[str, Any]:
    config = _qwen_experts(s, _plain(s), normalised=True)
    return config | {"model_type": "qwen3_moe", "attention_bias": s.in_layer(0, "attn_q.bias")}


def _qwen2(s: Source) -> dict[str, Any]:
    inter = s.width("feed_forward_length")
    return _plain(s) | {"model_type": "qwen2", "intermediate_size": inter}


def _qwen3(s: Source) -> dict[str, Any]:
    bias = s.in_layer(0, "attn_q.bias")
    return _qwen2(s) | {"model_type": "qwen3", "attention_bias": bias}


def _olmoe(s: Source) -> dict[str, Any]:
    config = _plain(s) | _routing(s, normalised=False) | {"model_type": "olmoe"}
    config["intermediate_size"] = s.width("feed_forward_length", "ffn_gate_exps.weight", axis=1)
    config["attention_bias"] = s.in_layer(0, "attn_q.bias")
    if s.has("attention.clamp_kqv"):
        config["clip_qkv"] = s.number("attention.clamp_kqv", 0.0)
    return config


def _gpt_oss(s: Source) -> dict[str, Any]:
    routing = _routing(s, normalised=True, gating=_SOFTMAX_OF_CHOSEN)
    config = _plain(s, windowed=True) | routing
    config["rope_parameters"]["truncate"] = False  # as published; the file has no field for it
    config["num_local_experts"] = config.pop("num_experts")
    inter = s.width("expert_feed_forward_length", "ffn_gate_exps.weight", axis=1)
    kinds = ("sliding_attention", "full_attention")
    return config | {
        "model_type": "gpt_oss",
        "intermediate_size": inter,
        "attention_bias": s.in_layer(0, "attn_q.bias"),
        "sliding_window": s.integer("attention.sliding_window", 1, MAX_POSITIONS),
        "layer_types": [kinds[i % 2] for i in range(s.layers)],
    }


def _deep_experts(s: Source, sigmoid: bool) -> dict[str, Any]:
    """Experts of DeepSeek and GLM: dense layers first, shared experts, scaled weights.

    A file without expert groups is read as one group, which is what those who made it compute.
    """
    gating = _SIGMOID if sigmoid else _SOFTMAX
    if s.integer("expert_gating_func", 0, 255, default=_UNSET) not in (_UNSET, gating):
        raise s.fail("expert_gating_func", f"{gating} in this architecture")
    experts = s.integer("expert_count", 1, MAX_EXPERTS)
    scale = s.number("expert_weights_scale", -1.0, default=1.0)
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": s.integer("expert_used_count", 1, experts),
        "n_shared_experts": s.integer("expert_shared_count", 0, MAX_EXPERTS, default=0),
        "moe_intermediate_size": s.width("expert_feed_forward_length", "ffn_gate_exps.weight", 1),
        "intermediate_size": s.width("feed_forward_length"),
        "first_k_dense_replace": s.integer("leading_dense_block_count", 0, MAX_LAYERS, default=0),
        "moe_layer_freq": 1,
        "routed_scaling_factor": scale if scale > 0 else 1.0,
        "norm_topk_prob": s.flag("expert_weights_norm", default=sigmoid),
        "n_group": s.integer("expert_group_count", 1, experts, default=1),
        "topk_group": s.integer("expert_group_used_count", 1, experts, default=1),
    }


def _deepseek2(s: Source) -> dict[str, Any]:
    """DeepSeek V2 and V3, which have one name here: V3 routes by sigmoid."""
    gating = s.integer("expert_gating_func", 0, 255, default=_UNSET)
    corrected = any(n.endswith(".exp_probs_b.bias") for n in s.tensors)
    v3 = gating == _SIGMOID or (gating == _UNSET and corrected)
    config = _common(s, windowed=False) | _deep_experts(s, sigmoid=v3)
    rotated = s.integer("rope.dimension_count", 2, MAX_WIDTH)
    absorbed = s.has("attention.key_length_mla")  # then key_length is that of the cache
    key = "attention.key_length_mla" if absorbed else "attention.key_length"
    value = "attention.value_length_mla" if absorbed else "attention.value_length"
    dims = s.integer(key, rotated + 1, MAX_WIDTH)
    grouped = config["n_group"] > 1
    return config | {
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": s.integer("attention.q_lora_rank", 0, MAX_WIDTH, default=0) or None,
        "kv_lora_rank": s.integer("attention.kv_lora_rank", 1, MAX_WIDTH),
        "qk_nope_head_dim": dims - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": s.integer(value, 1, MAX_WIDTH),
        "attention_bias": s.in_layer(0, "attn_output.bias"),
        "mlp_bias": s.in_layer(0, "ffn_gate.bias"),
        "rope_interleave": True,
        "rope_parameters": _rope(s, rotated, rotated),
        "scoring_func": "sigmoid" if v3 else "softmax",
        "topk_method": "noaux_tc" if v3 else "group_limited_greedy" if grouped else "greedy",
    }


def _glm4moe(s: Source) -> dict[str, Any]:
    return (
        _plain(s)
        | _deep_experts(s, sigmoid=True)
        | {
            "model_type": "glm4_moe",
            "use_qk_norm": s.in_layer(0, "attn_q_norm.weight"),
            "attention_bias": s.in_layer(0, "attn_q.bias"),
        }
    )


_MIXTRAL = Naming(
    experts=("block_sparse_moe.experts", "w1", "w3", "w2"), router="block_sparse_moe.gate"
)
ARCHITECTURES: Mapping[str, tuple[Callable[[Source], dict[str, Any]], Naming]] = {
    "llama": (_llama, _MIXTRAL),
    "qwen2": (_qwen2, Naming()),
    "qwen3": (_qwen3, Naming()),
    "qwen2moe": (_qwen2moe, Naming(shared="mlp.shared_expert")),
    "qwen3moe": (_qwen3moe, Naming()),
    "olmoe": (_olmoe, Naming()),
    "gpt-oss": (_gpt_oss, Naming(router="mlp.router")),
    "deepseek2": (_deepseek2, Naming()),
    "glm4moe": (_glm4moe, Naming()),
}

"""Tiny random models of every family, saved by Transformers, and its float32 eager as reference."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()

COMMON = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
QWEN = {"num_experts": 7, "moe_intermediate_size": 20, "intermediate_size": 40}
MIXTRAL = {"num_local_experts": 5, "intermediate_size": 28}
OLMOE = {"num_experts": 7, "intermediate_size": 20}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0}
DENSE = {"intermediate_size": 40}
GLM = {
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_mtp_layers": 0,
}
MLA = {
    "num_key_value_heads": 6,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
DEEP_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32.0} | {
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {"num_local_experts": 6, "intermediate_size": 24, "head_dim": 8, "sliding_window": 6}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}

# name -> (model_type, config). Each variant turns on what its family's published configs may.
VARIANTS: dict[str, tuple[str, dict]] = {
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-window": ("mixtral", MIXTRAL | {"sliding_window": 5, "tie_word_embeddings": True}),
    "mixtral-yarn": (
        "mixtral",
        MIXTRAL
        | {"head_dim": 8, "rope_parameters": YARN | {"original_max_position_embeddings": 64}},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 36}),
    "qwen2_moe-mixed": (
        "qwen2_moe",
        QWEN
        | {"shared_expert_intermediate_size": 36, "norm_topk_prob": True, "qkv_bias": False}
        | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN | {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        QWEN
        | {"attention_bias": True, "decoder_sparse_step": 2, "head_dim": 8, "hidden_act": "gelu"}
        | {"use_sliding_window": True, "sliding_window": 7},
    ),
    "qwen3_moe-linear": (
        "qwen3_moe",
        QWEN
        | {"head_dim": 8, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "olmoe": ("olmoe", OLMOE),
    "olmoe-clip": (
        "olmoe",
        OLMOE
        | {"clip_qkv": 0.5, "norm_topk_prob": True, "attention_bias": True}
        | {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}
            | {"original_max_position_embeddings": 32}
        },
    ),
    "llama": ("llama", DENSE),
    "llama-biased": (
        "llama",
        DENSE
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 12}
        | {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}
            | {"original_max_position_embeddings": 32}
        },
    ),
    "qwen2": ("qwen2", DENSE),
    "qwen2-window": (
        "qwen2",
        DENSE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", DENSE | {"head_dim": 16}),
    "qwen3-biased": (
        "qwen3",
        DENSE | {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8},
    ),
    "glm4_moe": (
        "glm4_moe",
        GLM | {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
    ),
    "glm4_moe-groups": (
        "glm4_moe",
        GLM
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 2}
        | {"norm_topk_prob": False, "head_dim": 24, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss-short": (  # no yarn, no biases on attention, other layers have the window
        "gpt_oss",
        GPT_OSS
        | {"attention_bias": False, "swiglu_limit": 0.3, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "deepseek_v2": ("deepseek_v2", MLA),
    "deepseek_v2-groups": (
        "deepseek_v2",
        MLA
        | {"q_lora_rank": 18, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 16.0, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": DEEP_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        MLA
        | {"q_lora_rank": 18, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
        | {"rope_parameters": DEEP_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        MLA
        | {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
        | {"attention_bias": True, "tie_word_embeddings": True, "num_mtp_layers": 0}
        | {"rope_parameters": DEEP_YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}},
    ),
}
FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "llama",
    "qwen2",
    "qwen3",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
)


# Matrices with whole blocks of 256 inputs, as GGUF's larger types want; not among VARIANTS.
_WIDE = {"hidden_size": 256, "vocab_size": 40, "num_attention_heads": 8, "num_hidden_layers": 2}
WIDE_VARIANTS: dict[str, tuple[str, dict]] = {
    "llama-wide": ("llama", _WIDE | {"intermediate_size": 256}),
    "qwen3_moe-wide": (
        "qwen3_moe",
        _WIDE
        | {"num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True, "head_dim": 32},
    ),
    "deepseek_v2-wide": (  # early files hold kv_b whole
        "deepseek_v2",
        _WIDE
        | {
            "num_key_value_heads": 8,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
        }
        | {"kv_lora_rank": 64, "q_lora_rank": None, "intermediate_size": 64, "n_routed_experts": 8}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
}


@dataclass(frozen=True)
class Tiny:
    """A saved checkpoint and the Transformers model that reads it back."""

    path: Path
    hf: transformers.PreTrainedModel

    def logits(self, ids) -> np.ndarray:
        """fp32 [tokens, vocab] of Transformers' eager code."""
        with torch.no_grad():
            return self.hf(torch.tensor([list(ids)])).logits[0].float().numpy()


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cpumoe-tiny-")


@functools.cache
def tiny(variant: str, *, published: bool = True, dtype: str = "float32", shards: int = 1) -> Tiny:
    """The variant with random weights. published: one tensor per expert, else fused 3-D tensors."""
    model_type, config = (VARIANTS | WIDE_VARIANTS)[variant]
    torch.manual_seed(17)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **(COMMON | config))
    )
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.15)
        for name, b in made.named_buffers():
            if "correction" in name:
                b.normal_(0.0, 0.15)
    path = Path(_root().name) / f"{variant}-{published}-{dtype}-{shards}"
    made = made.to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in made.parameters())
    made.save_pretrained(
        path, save_original_format=published, max_shard_size=f"{size // shards // 1000 + 1}KB"
    )
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return Tiny(path, hf.eval())


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], length).tolist()


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """max |got - want| / max |want|."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())

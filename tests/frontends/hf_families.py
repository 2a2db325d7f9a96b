"""Every family of Transformers whose experts go through its registry, as a tiny model.

Data only: a row is a model class, its config class where it differs, and the config values that the
common ones of SIZES do not fit. `build` makes the model.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "sliding_window": 8,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}


@dataclass(frozen=True)
class Family:
    model: str  # "<module>.<class>"
    values: dict[str, Any] = field(default_factory=dict)
    config: str = ""  # "<module>.<class>"; default: the model's own
    mode: str = "fused"  # what plan_of must say
    embeds: bool = False  # the model takes embeddings, not token ids


FAMILIES: dict[str, Family] = {
    "afmoe": Family("afmoe.AfmoeForCausalLM"),
    "aria": Family("aria.AriaTextForCausalLM"),
    "axk1": Family("axk1.AXK1ForCausalLM"),
    "axk2": Family("axk2.AXK2ForCausalLM", INDEXER),
    "bailing_hybrid": Family(
        "bailing_hybrid.BailingHybridForCausalLM", {"layer_types": LINEAR["layer_types"]}
    ),
    "beam": Family("beam.BeamForCausalLM", {"mlp_layer_types": ["dense", "sparse"]}),
    "cohere2_moe": Family("cohere2_moe.Cohere2MoeForCausalLM"),
    "deepseek_ocr2": Family(
        "deepseek_ocr2.DeepseekOcr2TextModel", {"mlp_layer_types": ["dense", "sparse"]}
    ),
    "deepseek_v2": Family("deepseek_v2.DeepseekV2ForCausalLM"),
    "deepseek_v3": Family("deepseek_v3.DeepseekV3ForCausalLM"),
    "deepseek_v32": Family("deepseek_v32.DeepseekV32ForCausalLM", INDEXER),
    "deepseek_v4": Family("deepseek_v4.DeepseekV4ForCausalLM", INDEXER),
    "diffusion_gemma": Family("diffusion_gemma.DiffusionGemmaEncoderTextModel"),
    "dots1": Family("dots1.Dots1ForCausalLM"),
    "dots3_note": Family("dots3_note.Dots3NoteForCausalLM", INDEXER),
    "ernie4_5_moe": Family("ernie4_5_moe.Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": Family(
        "ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel",
        {
            "moe_intermediate_size": [24, 24],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
    ),
    "exaone_moe": Family("exaone_moe.ExaoneMoeForCausalLM"),
    "flex_olmo": Family("flex_olmo.FlexOlmoForCausalLM"),
    "flint": Family("flint.FlintForCausalLM", {"mlp_only_layers": []}),
    "gemma4": Family(
        "gemma4.Gemma4ForCausalLM",
        {
            "enable_moe_block": True,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "glm4_moe": Family("glm4_moe.Glm4MoeForCausalLM"),
    "glm4_moe_lite": Family("glm4_moe_lite.Glm4MoeLiteForCausalLM"),
    "glm4v_moe": Family(
        "glm4v_moe.Glm4vMoeTextModel",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "mrope_section": [1, 1, 2],
            }
        },
    ),
    "glm5_next": Family(
        "glm5_next.Glm5NextTextModel",
        {
            **INDEXER,
            "index_kpool": 4,
            "qk_rope_head_dim": 0,
            "layer_types": LINEAR["layer_types"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "glm_moe_dsa": Family("glm_moe_dsa.GlmMoeDsaForCausalLM", INDEXER),
    "gpt_oss": Family("gpt_oss.GptOssForCausalLM"),
    "granitemoe": Family("granitemoe.GraniteMoeForCausalLM"),
    "granitemoe_swa": Family("granitemoe_swa.GraniteMoeSWAForCausalLM"),
    "granitemoehybrid": Family(
        "granitemoehybrid.GraniteMoeHybridForCausalLM",
        {
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "layer_types": LINEAR["layer_types"],
            "shared_intermediate_size": 24,
        },
    ),
    "granitemoeshared": Family("granitemoeshared.GraniteMoeSharedForCausalLM"),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe.HunYuanMoEV1ForCausalLM"),
    "hy_v3": Family("hy_v3.HYV3ForCausalLM"),
    "hy_v4": Family("hy_v4.HYV4ForCausalLM", INDEXER),
    "hy_v4_vl": Family(
        "hy_v4_vl.HYV4VLTextModel",
        {
            **INDEXER,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
    ),
    "inkling": Family("inkling.InklingForCausalLM"),
    "inkling2": Family("inkling2.Inkling2ForCausalLM", mode="split"),
    "inkling2_loop": Family("inkling2_loop.Inkling2LoopForCausalLM", mode="split"),
    "jamba": Family("jamba.JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": Family(
        "kimi_linear.KimiLinearForCausalLM",
        {
            "layer_types": LINEAR["layer_types"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "kolibri1": Family("kolibri1.Kolibri1ForCausalLM"),
    "laguna": Family("laguna.LagunaForCausalLM"),
    "lara_mini": Family("lara_mini.LaraMiniForCausalLM"),
    "lfm2_moe": Family(
        "lfm2_moe.Lfm2MoeForCausalLM",
        {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "mellum": Family("mellum.MellumForCausalLM"),
    "mimo_v2_flash": Family("mimo_v2_flash.MiMoV2FlashForCausalLM"),
    "minimax": Family("minimax.MiniMaxForCausalLM"),
    "minimax_m2": Family("minimax_m2.MiniMaxM2ForCausalLM"),
    "minimax_m3_vl": Family("minimax_m3_vl.MiniMaxM3VLForCausalLM"),
    "mistral4": Family("mistral4.Mistral4ForCausalLM"),
    "mistral_large4": Family("mistral_large4.MistralLarge4TextModel", INDEXER),
    "mixtral": Family("mixtral.MixtralForCausalLM"),
    "muse_spark": Family("muse_spark.MuseSparkTextModel", {"moe_hidden_size": 16}, mode="split"),
    "nemotron_h": Family("nemotron_h.NemotronHForCausalLM"),
    "olmoe": Family("olmoe.OlmoeForCausalLM"),
    "openai_privacy_filter": Family(
        "openai_privacy_filter.OpenAIPrivacyFilterForTokenClassification"
    ),
    "phimoe": Family("phimoe.PhimoeForCausalLM"),
    "qwen2_moe": Family("qwen2_moe.Qwen2MoeForCausalLM"),
    "qwen3_5_moe": Family("qwen3_5_moe.Qwen3_5MoeForCausalLM", LINEAR),
    "qwen3_moe": Family("qwen3_moe.Qwen3MoeForCausalLM"),
    "qwen3_next": Family("qwen3_next.Qwen3NextForCausalLM", LINEAR),
    "qwen3_omni_moe": Family("qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel"),
    "qwen3_omni_moe (talker)": Family(
        "qwen3_omni_moe.Qwen3OmniMoeTalkerModel",
        {"shared_expert_intermediate_size": 24},
        embeds=True,
    ),
    "qwen3_vl_moe": Family("qwen3_vl_moe.Qwen3VLMoeTextModel"),
    "qwen4_exp": Family(
        "qwen4_exp.Qwen4ExpForCausalLM",
        {
            **LINEAR,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    "sarvam_mla": Family("deepseek_v3.DeepseekV3ForCausalLM", config="sarvam_mla.SarvamMLAConfig"),
    "sarvam_moe": Family("glm4_moe.Glm4MoeForCausalLM", config="sarvam_moe.SarvamMoEConfig"),
    "solar_open": Family("solar_open.SolarOpenForCausalLM"),
    "unlimited_ocr": Family(
        "unlimited_ocr.UnlimitedOcrTextModel", {"mlp_layer_types": ["dense", "sparse"]}
    ),
    "zaya": Family("zaya.ZayaForCausalLM", {"num_experts_per_tok": 1}),
}


# Families with experts that bypass the registry: nothing can be registered for them.
NOT_HOOKABLE: dict[str, str] = {
    "dbrx": "experts are flat matrices [E * I, H] without a registry hook",
    "doge": "experts are rows of embedding tables",
    "jetmoe": "experts are two stacked matrices in a module of their own, in attention too",
    "llama4": "all experts run as one dense product and the router scales their input",
    "longcat_flash": "some experts are the identity",
    "nllb_moe": "encoder-decoder experts in module lists",
    "step3p7": "experts class without the registry's decorator (it clamps after the activation)",
    "switch_transformers": "encoder-decoder experts in module lists",
}
# Families that reuse another one's experts and are covered by its row.
COVERED: dict[str, str] = {"kimi_k25": "deepseek_v3"}


def _class(name: str, kind: str) -> Any:
    module, _, cls = name.partition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}.{kind}_{module}"), cls)


def config_of(family: Family) -> Any:
    model = _class(family.model, "modeling")
    cls = _class(family.config, "configuration") if family.config else model.config_class
    known = set(getattr(cls, "__dataclass_fields__", {})) | set(cls.attribute_map)
    values = {k: v for k, v in SIZES.items() if k in known}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        values["num_key_value_heads"] = SIZES["num_attention_heads"]  # latent attention: all heads
    return cls(**{**values, **family.values})


def build(family: Family, limit: int = 20_000_000) -> torch.nn.Module:
    """Return the tiny model in fp32 and eval mode, with weights under which the experts matter."""
    config = config_of(family)
    cls = _class(family.model, "modeling")
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    assert size < limit, f"{size} parameters: a config value is missing"
    torch.manual_seed(0)
    model: torch.nn.Module = cls(config).eval()
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        spread = 1.0 if ".experts." in name else 0.5
        if ".experts." in name or not p.any():
            torch.nn.init.normal_(p, std=spread * p.shape[-1] ** -0.5)
    return model


def inputs_of(family: Family, model: torch.nn.Module, batch: int, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if family.embeds:
        width = config_of(family).hidden_size
        return {"inputs_embeds": torch.randn(batch, tokens, width, generator=generator)}
    return {
        "input_ids": torch.randint(3, SIZES["vocab_size"], (batch, tokens), generator=generator)
    }


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, "has_post_expert_norm")]

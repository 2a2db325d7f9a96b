"""A tiny gpt-oss with experts in MXFP4, as published, and Transformers' decoder of them."""

import functools
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantized_models import Quantised, reference, root
from tiny_models import COMMON

GPT_OSS = COMMON | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "sliding_window": 8,
}


@functools.cache
def gpt_oss() -> Quantised:
    """Experts in random MXFP4 blocks, decoded by Transformers, which also reads the checkpoint."""
    torch.manual_seed(29)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("gpt_oss", **GPT_OSS)
    )
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.1)
    path = Path(root().name) / "gpt_oss-mxfp4"
    made.save_pretrained(path)
    tensors, values = {}, {}
    for name, w in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = w
            continue
        e, k, n = w.shape
        blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 125, (e, n, k // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    config = json.loads((path / "config.json").read_text())
    plain = path.with_name("gpt_oss-decoded")
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    decoded = {n: t for n, t in tensors.items() if "_blocks" not in n and "_scales" not in n}
    save_file(decoded | {n: v.contiguous() for n, v in values.items()}, plain / "model.safetensors")
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return Quantised(path, reference(plain), values)

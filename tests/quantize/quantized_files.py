"""Small models to quantise, and an independent reader of what was written."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import transformers

transformers.logging.set_verbosity_error()

COMMON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 96}
FAMILIES: dict[str, dict] = {
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 96},
    "olmoe": {"num_experts": 4, "intermediate_size": 32},
    "llama": {"intermediate_size": 96},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "head_dim": 16,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 16,
        "v_head_dim": 128,
    },
}
VALUES_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cpumoe-quantize-")


@functools.cache
def model(family: str, *, dtype: str = "bfloat16", published: bool = True) -> Path:
    """A random model of the family, saved by Transformers. published: one tensor per expert."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(family, **(COMMON | FAMILIES[family]))
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.15)
    path = Path(_root().name) / f"{family}-{dtype}-{published}"
    made.to(getattr(torch, dtype)).save_pretrained(path, save_original_format=published)
    return path


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by name."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= safetensors.numpy.load_file(file)
    return found


def codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes [n, k] of packed words or bytes, the first in the lowest bits."""
    stream = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=1, bitorder="little")
    numbers = stream.reshape(packed.shape[0], -1, bits).astype(np.int64)
    return (numbers << np.arange(bits)).sum(axis=2)


def decode(path: Path) -> dict[str, np.ndarray]:
    """The checkpoint's weights as float64 under their names in an unquantised one."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = config["config_groups"]["group_0"]["weights"]
    bits, found = scheme["num_bits"], {}
    stored = tensors(path)
    for name, array in stored.items():
        module, _, ending = name.rpartition(".")
        if ending == "weight_packed":
            scales = stored[f"{module}.weight_scale"]
            q = codes(array, bits)
            if scheme["type"] == "float":
                values = VALUES_E2M1[q & 7] * np.where(q & 8, -1, 1)
                scales = 2.0 ** (scales.astype(np.int64) - 127)
            else:
                values = q - 2.0 ** (bits - 1)
                assert stored[f"{module}.weight_shape"].tolist() == list(q.shape)
            grouped = values.reshape(*scales.shape, -1) * scales.astype(np.float64)[:, :, None]
            found[f"{module}.weight"] = grouped.reshape(q.shape)
        elif ending not in ("weight_scale", "weight_shape"):
            found[name] = array.astype(np.float64)
    return found


def write_decoded(path: Path, to: Path) -> Path:
    """The quantised checkpoint `path` as an unquantised one in fp32."""
    to.mkdir()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    config["dtype"] = "float32"
    (to / "config.json").write_text(json.dumps(config))
    floats = {n: np.ascontiguousarray(a, np.float32) for n, a in decode(path).items()}
    safetensors.numpy.save_file(floats, to / "model.safetensors", {"format": "pt"})
    return to

"""Builders of safetensors bytes and checkpoint directories, whole and damaged."""

import json
from pathlib import Path

import numpy as np

DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "U8": 1}


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> dict:
    """A well-formed header: tensors in order, back to back."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


def pack(header: object, data: bytes, *, length: int | None = None) -> bytes:
    """The file: length, header, data. header: JSON value, or text taken as it is."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def write(path: Path, content: bytes) -> Path:
    """Write `content` and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}


def qwen3_tensors() -> dict[str, tuple[str, list[int]]]:
    """Names and shapes that QWEN3 asks for."""
    p = "model.layers.0"
    names = {
        "model.embed_tokens.weight": [32, 16],
        "lm_head.weight": [32, 16],
        "model.norm.weight": [16],
        f"{p}.input_layernorm.weight": [16],
        f"{p}.post_attention_layernorm.weight": [16],
        f"{p}.self_attn.q_proj.weight": [16, 16],
        f"{p}.self_attn.k_proj.weight": [8, 16],
        f"{p}.self_attn.v_proj.weight": [8, 16],
        f"{p}.self_attn.o_proj.weight": [16, 16],
        f"{p}.self_attn.q_norm.weight": [4],
        f"{p}.self_attn.k_norm.weight": [4],
        f"{p}.mlp.gate.weight": [3, 16],
    }
    for e in range(3):
        names[f"{p}.mlp.experts.{e}.gate_proj.weight"] = [8, 16]
        names[f"{p}.mlp.experts.{e}.up_proj.weight"] = [8, 16]
        names[f"{p}.mlp.experts.{e}.down_proj.weight"] = [16, 8]
    return {name: ("F32", shape) for name, shape in names.items()}


def values(tensors: dict[str, tuple[str, list[int]]], seed: int = 0) -> bytes:
    """Random fp32 data for `header_of(tensors)`; norms near one."""
    rng = np.random.default_rng(seed)
    parts = []
    for name, (_, shape) in tensors.items():
        mean = 1.0 if "norm" in name else 0.0
        parts.append(rng.normal(mean, 0.2, shape).astype(np.float32).tobytes())
    return b"".join(parts)


def checkpoint(path: Path, config: dict | None = None, **tensors: tuple[str, list[int]]) -> Path:
    """A tiny qwen3_moe checkpoint; `config` and `tensors` replace entries, None removes one."""
    path.mkdir(parents=True, exist_ok=True)
    merged = {k: v for k, v in {**QWEN3, **(config or {})}.items() if v is not None}
    (path / "config.json").write_text(json.dumps(merged))
    named = {k: v for k, v in {**qwen3_tensors(), **tensors}.items() if v is not None}
    content = pack(header_of(named), values({k: ("F32", s) for k, (_, s) in named.items()}))
    size = len(pack(header_of(named), b"")) + sum(
        e["data_offsets"][1] - e["data_offsets"][0] for e in header_of(named).values()
    )
    write(path / "model.safetensors", content[:size])
    return path

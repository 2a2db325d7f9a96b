"""A tiny Qwen3-MoE as a GGUF file built by hand, with fields and tensors to replace."""

import struct
from pathlib import Path

import numpy as np

import gguf_bytes as raw

FIELDS: dict[str, object] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 1,
    "qwen3moe.context_length": 64,
    "qwen3moe.embedding_length": 16,
    "qwen3moe.feed_forward_length": 24,
    "qwen3moe.attention.head_count": 4,
    "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.attention.key_length": 4,
    "qwen3moe.attention.value_length": 4,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.rope.freq_base": 1e6,
    "qwen3moe.expert_count": 3,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.expert_feed_forward_length": 8,
}
# Extents in numpy's order.
TENSORS = {
    "token_embd.weight": [32, 16],
    "output.weight": [32, 16],
    "output_norm.weight": [16],
    "blk.0.attn_norm.weight": [16],
    "blk.0.ffn_norm.weight": [16],
    "blk.0.attn_q.weight": [16, 16],
    "blk.0.attn_k.weight": [8, 16],
    "blk.0.attn_v.weight": [8, 16],
    "blk.0.attn_output.weight": [16, 16],
    "blk.0.attn_q_norm.weight": [4],
    "blk.0.attn_k_norm.weight": [4],
    "blk.0.ffn_gate_inp.weight": [3, 16],
    "blk.0.ffn_gate_exps.weight": [3, 8, 16],
    "blk.0.ffn_up_exps.weight": [3, 8, 16],
    "blk.0.ffn_down_exps.weight": [3, 16, 8],
}


def entry(key: str, value: object) -> bytes:
    if isinstance(value, bool):
        return raw.entry(key, raw.BOOL, bytes([value]))
    if isinstance(value, int):
        return raw.entry(key, raw.INT64, struct.pack("<q", value))
    if isinstance(value, float):
        return raw.entry(key, raw.FLOAT64, struct.pack("<d", value))
    if isinstance(value, str):
        return raw.entry(key, raw.STRING, raw.text(value))
    assert isinstance(value, list)
    return raw.array(key, raw.INT32, len(value), struct.pack(f"<{len(value)}i", *value))


def model(
    path: Path, fields: dict | None = None, tensors: dict | None = None, arch: str = "qwen3moe"
) -> Path:
    """The tiny model with changes; None takes an entry away."""
    named = {k.replace("qwen3moe", arch): v for k, v in FIELDS.items()}
    named |= {"general.architecture": arch} | (fields or {})
    shapes = {k: v for k, v in {**TENSORS, **(tensors or {})}.items() if v is not None}
    infos, data, rng = [], b"", np.random.default_rng(0)
    for name, shape in shapes.items():
        infos.append(raw.info(name, shape[::-1], raw.F32, len(data)))
        values = rng.normal(1.0 if "norm" in name else 0.0, 0.2, shape).astype(np.float32).tobytes()
        data += values + b"\0" * (-len(values) % 32)
    content = [entry(k, v) for k, v in named.items() if v is not None]
    path.write_bytes(raw.pack(content, infos, data))
    return path

"""Qwen3-MoE (30B-A3B, 235B-A22B): q and k normalised per head, no shared expert."""

from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `qwen3_moe` checkpoint."""
    c = r.config
    router = r.router(c.flag("norm_topk_prob", default=False))
    inter = r.width("moe_intermediate_size")
    bias = c.flag("attention_bias", default=False)
    window = r.window() if c.flag("use_sliding_window", default=False) else 0
    layers = [
        r.layer(
            i,
            r.attention(
                i, theta=1e4, qkv_bias=bias, o_bias=bias, qk_norm="per_head", window=window
            ),
            r.sparse(i, router, inter) if r.is_sparse(i) else r.dense(i),
        )
        for i in range(r.layers)
    ]
    return r.model(layers)

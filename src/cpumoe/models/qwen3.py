"""Qwen3, dense (0.6B to 32B): q and k normalised per head."""

from cpumoe.models.qwen2 import dense_windows
from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `qwen3` checkpoint."""
    bias = r.config.flag("attention_bias", default=False)
    layers = [
        r.layer(
            i,
            r.attention(
                i, theta=1e4, qkv_bias=bias, o_bias=bias, qk_norm="per_head", window=window
            ),
            r.dense(i),
        )
        for i, window in enumerate(dense_windows(r))
    ]
    return r.model(layers)

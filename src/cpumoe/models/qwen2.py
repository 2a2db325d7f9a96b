"""Qwen2 and Qwen2.5, dense: biased q, k, v; late layers may have a window."""

from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def dense_windows(r: Reader) -> list[int]:
    """Window of each layer, where use_sliding_window: by layer_types, or from max_window_layers."""
    c = r.config
    if not c.flag("use_sliding_window", default=False):
        return [0] * r.layers
    window = c.integer("sliding_window", 1, 1 << 27, default=4096)
    first = c.integer("max_window_layers", 0, 1 << 27, default=28)
    return r.windows(window, [i >= first for i in range(r.layers)])


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `qwen2` checkpoint."""
    layers = [
        r.layer(i, r.attention(i, theta=1e4, qkv_bias=True, window=window), r.dense(i))
        for i, window in enumerate(dense_windows(r))
    ]
    return r.model(layers)

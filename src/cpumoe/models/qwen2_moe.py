"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biased q, k, v; a shared expert behind a gate."""

from dataclasses import replace

from cpumoe.models.reader import Reader
from cpumoe.models.spec import FfnSpec, ModelSpec, RouterSpec


def _windows(r: Reader) -> list[int]:
    """Window of each layer: by layer_types, or every other layer below max_window_layers."""
    c = r.config
    if not c.flag("use_sliding_window", default=False):
        return [0] * r.layers
    window = c.integer("sliding_window", 1, 1 << 27, default=4096)
    last = c.integer("max_window_layers", 0, 1 << 27, default=28)
    return r.windows(window, [i % 2 == 0 and i < last for i in range(r.layers)])


def _shared(r: Reader, layer: int, router: RouterSpec) -> FfnSpec:
    routed = r.sparse(layer, router, r.width("moe_intermediate_size"))
    p = f"model.layers.{layer}.mlp.shared_expert"
    gate, up, down = r.gated(p, r.width("shared_expert_intermediate_size"))
    score = r.linear(f"{p}_gate", 1, r.hidden, stored="either")
    return replace(routed, shared_gate=gate, shared_up=up, shared_down=down, shared_score=score)


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `qwen2_moe` checkpoint."""
    router = r.router(r.config.flag("norm_topk_prob", default=False))
    bias = r.config.flag("qkv_bias", default=True)
    layers = [
        r.layer(
            i,
            r.attention(i, theta=1e4, qkv_bias=bias, window=window),
            _shared(r, i, router) if r.is_sparse(i) else r.dense(i),
        )
        for i, window in enumerate(_windows(r))
    ]
    return r.model(layers)

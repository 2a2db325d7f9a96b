"""gpt-oss (20b, 120b): attention sinks, every other layer with a window, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from cpumoe.models.reader import FLOAT_FORMATS, Reader
from cpumoe.models.spec import FfnSpec, ModelSpec, RouterSpec
from cpumoe.weight import Weight


def _experts(r: Reader, layer: int, base: FfnSpec, router: RouterSpec, inter: int) -> FfnSpec:
    """Experts with biases: gate and up interleaved in one tensor, or (GGUF) a tensor for each."""
    p, e, h = f"model.layers.{layer}.mlp", router.experts, r.hidden
    router_w = r.linear(f"{p}.router", e, h, bias=True, stored="plain")
    ffn = replace(base, router=router, router_w=router_w)
    if f"{p}.experts.gate_up_proj_bias" not in r.checkpoint:
        return _separate(r, f"{p}.experts", ffn, inter)
    gate_up_bias = r.checkpoint.tensor(
        f"{p}.experts.gate_up_proj_bias", (e, 2 * inter), FLOAT_FORMATS
    )
    down_bias = r.checkpoint.tensor(f"{p}.experts.down_proj_bias", (e, h), FLOAT_FORMATS)
    return replace(
        ffn,
        expert_gate=(_stack(r, f"{p}.experts.gate_up_proj", e, 2 * inter, h),),
        expert_down=(_stack(r, f"{p}.experts.down_proj", e, h, inter),),
        interleaved=True,
        expert_gate_bias=tuple(gate_up_bias.part(i) for i in range(e)),
        expert_down_bias=tuple(down_bias.part(i) for i in range(e)),
    )


def _stack(r: Reader, name: str, experts: int, n: int, k: int) -> Weight:
    """Experts [E, N, K]: MXFP4 in rows, or Transformers' [E, K, N], read as columns."""
    stored = r.weights.stack(name, experts, n, k)
    if stored is not None:
        return stored.weight()
    ref = r.checkpoint.tensor(name, (experts, k, n), FLOAT_FORMATS)
    return Weight(ref.data, format=ref.format, shape=(experts, n, k), layout="columns")


def _separate(r: Reader, prefix: str, ffn: FfnSpec, inter: int) -> FfnSpec:
    assert ffn.router is not None
    every = range(ffn.router.experts)
    gate = [r.linear(f"{prefix}.{i}.gate_proj", inter, r.hidden, bias=True) for i in every]
    up = [r.linear(f"{prefix}.{i}.up_proj", inter, r.hidden, bias=True) for i in every]
    down = [r.linear(f"{prefix}.{i}.down_proj", r.hidden, inter, bias=True) for i in every]
    return replace(
        ffn,
        expert_gate=tuple(x.w for x in gate),
        expert_up=tuple(x.w for x in up),
        expert_down=tuple(x.w for x in down),
        expert_gate_bias=tuple(x.bias for x in gate if x.bias is not None),
        expert_up_bias=tuple(x.bias for x in up if x.bias is not None),
        expert_down_bias=tuple(x.bias for x in down if x.bias is not None),
    )


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `gpt_oss` checkpoint."""
    c = r.config
    router = replace(r.router(renormalize=True), kind="topk_softmax")
    inter, bias = r.width("intermediate_size"), c.flag("attention_bias", default=True)
    window = c.integer("sliding_window", 1, 1 << 27)
    base = FfnSpec(
        activation="swiglu_oai",
        alpha=c.number("swiglu_alpha", 0.0, default=1.702),
        limit=c.number("swiglu_limit", 0.0, default=7.0),
    )
    layers = [
        r.layer(
            i,
            r.attention(i, theta=1.5e5, qkv_bias=bias, o_bias=bias, window=w, sinks=True),
            _experts(r, i, base, router, inter),
        )
        for i, w in enumerate(r.windows(window, [i % 2 == 0 for i in range(r.layers)]))
    ]
    return r.model(layers)

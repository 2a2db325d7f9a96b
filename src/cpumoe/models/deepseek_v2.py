"""DeepSeek-V2 (V2, V2-Lite, Coder-V2): latent attention, softmax routing by the best of a group."""

from dataclasses import replace

from cpumoe.models.grouped import feed_forward, grouped
from cpumoe.models.latent import latent_attention
from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec, RouterSpec

_METHODS = ("greedy", "group_limited_greedy")


def _router(r: Reader) -> RouterSpec:
    c = r.config
    c.choice("scoring_func", ("softmax",), default="softmax")
    if c.flag("norm_topk_prob", default=False):
        must = "false: no published model sets it, and implementations differ in what it does"
        raise c.fail("norm_topk_prob", must)
    router = grouped(r, replace(r.router(renormalize=False), group_max=True))
    if c.choice("topk_method", _METHODS, default="greedy") == "greedy":
        return replace(router, groups=1, top_groups=1)
    return router


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `deepseek_v2` checkpoint."""
    router, bias = _router(r), r.config.flag("mlp_bias", default=False)
    layers = [
        r.layer(i, latent_attention(r, i, interleaved=True), feed_forward(r, i, router, bias))
        for i in range(r.layers)
    ]
    return r.model(layers)

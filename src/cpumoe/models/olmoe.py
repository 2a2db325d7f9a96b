"""OLMoE (1B-7B): q and k normalised as a whole, optionally clipped; weights not renormalised."""

from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def build(r: Reader) -> ModelSpec:
    """ModelSpec of an `olmoe` checkpoint."""
    c = r.config
    router = r.router(c.flag("norm_topk_prob", default=False))
    inter, bias = r.width("intermediate_size"), c.flag("attention_bias", default=False)
    clip = c.number("clip_qkv", 0.0) if c.has("clip_qkv") else 0.0
    if c.has("sliding_window"):
        raise c.fail("sliding_window", "null in this family")
    layers = [
        r.layer(
            i,
            r.attention(i, theta=1e4, qkv_bias=bias, o_bias=bias, qk_norm="whole", clip_qkv=clip),
            r.sparse(i, router, inter),
        )
        for i in range(r.layers)
    ]
    return r.model(layers)

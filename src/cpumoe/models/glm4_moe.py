"""GLM-4.5 and 4.6: half of each head rotates; grouped sigmoid routing, a shared expert."""

from cpumoe.models.grouped import feed_forward, sigmoid_router
from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `glm4_moe` checkpoint."""
    c, router = r.config, sigmoid_router(r)
    bias = c.flag("attention_bias", default=False)
    normed = c.flag("use_qk_norm", default=False)
    layers = [
        r.layer(
            i,
            r.attention(
                i,
                theta=1e4,
                qkv_bias=bias,
                qk_norm="per_head" if normed else "none",
                partial=0.5,
            ),
            feed_forward(r, i, router),
        )
        for i in range(r.layers)
    ]
    return r.model(layers)

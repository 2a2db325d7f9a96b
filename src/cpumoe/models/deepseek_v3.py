"""DeepSeek-V3, R1 and V3.1, Kimi-K2: latent attention, grouped sigmoid routing."""

from cpumoe.models.grouped import feed_forward, sigmoid_router
from cpumoe.models.latent import latent_attention
from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `deepseek_v3` checkpoint."""
    router, pairs = sigmoid_router(r), r.config.flag("rope_interleave", default=True)
    layers = [
        r.layer(i, latent_attention(r, i, interleaved=pairs), feed_forward(r, i, router))
        for i in range(r.layers)
    ]
    return r.model(layers)

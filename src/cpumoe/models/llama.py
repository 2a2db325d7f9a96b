"""Llama (and SmolLM2, Mistral-shaped Llamas): dense layers, the case of no experts at all."""

from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `llama` checkpoint."""
    bias = r.config.flag("attention_bias", default=False)
    mlp_bias = r.config.flag("mlp_bias", default=False)
    layers = [
        r.layer(i, r.attention(i, theta=1e4, qkv_bias=bias, o_bias=bias), r.dense(i, mlp_bias))
        for i in range(r.layers)
    ]
    return r.model(layers)

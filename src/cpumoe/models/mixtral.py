"""Mixtral (8x7B, 8x22B): grouped-query attention, softmax top-k renormalised, no shared expert."""

from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec


def build(r: Reader) -> ModelSpec:
    """ModelSpec of a `mixtral` checkpoint."""
    router = r.router(renormalize=True)
    inter, window = r.width("intermediate_size"), r.window()
    layers = [
        r.layer(
            i,
            r.attention(i, theta=1e6, window=window),
            r.sparse(i, router, inter, ("block_sparse_moe", "w1", "w3", "w2")),
        )
        for i in range(r.layers)
    ]
    return r.model(layers)

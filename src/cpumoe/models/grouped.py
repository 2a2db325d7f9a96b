"""Experts of DeepSeek and GLM: dense layers first, shared experts, groups, scaled weights."""

from __future__ import annotations

from dataclasses import replace

from cpumoe.models.config import MAX_EXPERTS, MAX_LAYERS
from cpumoe.models.reader import Reader
from cpumoe.models.spec import FfnSpec, RouterSpec


def grouped(r: Reader, router: RouterSpec) -> RouterSpec:
    """The router with the config's n_group, topk_group and routed_scaling_factor."""
    c = r.config
    if c.integer("moe_layer_freq", 1, MAX_LAYERS, default=1) != 1:
        raise c.fail("moe_layer_freq", "1")
    groups = c.integer("n_group", 1, router.experts) if c.has("n_group") else 1
    if router.experts % groups:
        raise c.fail("n_group", f"a divisor of the number of experts {router.experts}")
    given = groups > 1 or c.has("topk_group")
    top = c.integer("topk_group", 1, groups) if given else 1
    size = router.experts // groups
    if top * size < router.top_k:
        raise c.fail("topk_group", f"so many that they hold num_experts_per_tok {router.top_k}")
    if groups > 1 and size < 2 and not router.group_max:
        raise c.fail("n_group", "such that a group holds two experts or more")
    scale = c.number("routed_scaling_factor", 0.0)
    return replace(router, groups=groups, top_groups=top, scale=scale)


def sigmoid_router(r: Reader) -> RouterSpec:
    """Router of DeepSeek-V3 and GLM-4: sigmoid, corrected and grouped when choosing."""
    c = r.config
    c.choice("scoring_func", ("sigmoid",), default="sigmoid")
    c.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    router = r.router(renormalize=c.flag("norm_topk_prob"))
    if not c.has("n_group"):
        raise c.fail("n_group", "an integer from 1")
    return grouped(r, replace(router, kind="sigmoid", norm_eps=1e-20))


def feed_forward(r: Reader, layer: int, router: RouterSpec, bias: bool = False) -> FfnSpec:
    """Dense below first_k_dense_replace, else experts with the shared ones as one wider block.

    bias: of the dense and the shared projections.
    """
    c = r.config
    if layer < c.integer("first_k_dense_replace", 0, MAX_LAYERS):
        return r.dense(layer, bias)
    inter, prefix = r.width("moe_intermediate_size"), f"model.layers.{layer}.mlp"
    ffn = r.sparse(layer, router, inter)
    if router.kind == "sigmoid":
        name = f"{prefix}.gate.e_score_correction_bias"
        ffn = replace(ffn, correction=r.vector(name, router.experts))
    shared = c.integer("n_shared_experts", 0, MAX_EXPERTS)
    if shared == 0:
        return ffn
    gate, up, down = r.gated(f"{prefix}.shared_experts", shared * inter, bias)
    return replace(ffn, shared_gate=gate, shared_up=up, shared_down=down)

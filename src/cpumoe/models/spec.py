"""LayerSpec and its parts as Python data: field for field what core/decoder/spec.h declares.

Made by the family files, read by the native part; no forward pass in Python. Weights are TensorRef
views, so a spec keeps the mapped files alive and copies nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from cpumoe.checkpoint import TensorRef
from cpumoe.weight import Weight


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias; w [N, K], bias [N] or None."""

    w: TensorRef | Weight
    bias: TensorRef | None = None


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek): a token caches rank + rotated elements.

    norm [rank], of the latent. Per head: k_up [rank, unrotated], which turns queries into latents,
    and v_up [value_dim, rank]. q_a [q rank, H] and q_norm [q rank]: what q is applied to, or None.
    norm_eps: of both norms.
    """

    rank: int
    value_dim: int
    norm: TensorRef
    k_up: tuple[TensorRef | Weight, ...]
    v_up: tuple[TensorRef | Weight, ...]
    q_a: Linear | None = None
    q_norm: TensorRef | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention. window: tokens a query sees, 0 = all. scale: of the scores.

    inv_freq: one per rotated pair, of the first elements of a head. rope_interleaved: pairs are
    neighbours, not half the rotated part apart. sinks [heads]: logits that join each softmax.
    latent: see core's spec.h for what the other fields then mean.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q: Linear
    k: Linear
    v: Linear | None
    o: Linear
    scale: float
    inv_freq: tuple[float, ...]
    rope_scale: float = 1.0
    rope_interleaved: bool = False
    qk_norm: Literal["none", "per_head", "whole"] = "none"
    q_norm: TensorRef | None = None
    k_norm: TensorRef | None = None
    clip_qkv: float = 0.0
    window: int = 0
    sinks: TensorRef | None = None
    latent: LatentSpec | None = None


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Fields of core's Router; `kind` as in topk.h."""

    experts: int
    top_k: int
    kind: Literal["softmax_topk", "topk_softmax", "sigmoid"] = "softmax_topk"
    renormalize: bool = False
    norm_eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_max: bool = False


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """A dense gated layer (gate, up, down) or, with a router, experts and maybe a shared one.

    expert_gate, expert_up [I, H] and expert_down [H, I]: one view per expert, or one stack.
    interleaved: expert_gate is [2I, H], rows alternating gate and up; expert_up is empty.
    Biases follow: [I] and [H], or [2I]. alpha, limit: of the experts' activation (act.h).
    correction [E]: added to the router's scores when choosing.
    shared_score [1, H]: its sigmoid weighs the shared expert.
    """

    activation: str
    gate: Linear | None = None
    up: Linear | None = None
    down: Linear | None = None
    router: RouterSpec | None = None
    router_w: Linear | None = None
    correction: TensorRef | None = None
    expert_gate: tuple[TensorRef | Weight, ...] = ()
    expert_up: tuple[TensorRef | Weight, ...] = ()
    expert_down: tuple[TensorRef | Weight, ...] = ()
    interleaved: bool = False
    expert_gate_bias: tuple[TensorRef, ...] = ()
    expert_up_bias: tuple[TensorRef, ...] = ()
    expert_down_bias: tuple[TensorRef, ...] = ()
    alpha: float = 1.702
    limit: float = math.inf
    shared_gate: Linear | None = None
    shared_up: Linear | None = None
    shared_down: Linear | None = None
    shared_score: Linear | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer, pre-norm."""

    attn_norm: TensorRef
    ffn_norm: TensorRef
    attn: AttentionSpec
    ffn: FfnSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model. max_tokens: positions it was made for."""

    family: str
    vocab: int
    hidden: int
    max_tokens: int
    norm_eps: float
    embed: TensorRef
    final_norm: TensorRef
    head: Linear
    layers: tuple[LayerSpec, ...] = field(repr=False)
    act_class: Literal["auto", "fp32", "bf16", "int8"] = "auto"

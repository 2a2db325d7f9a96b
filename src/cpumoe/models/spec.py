"""LayerSpec and its parts as Python data: field for field what core/decoder/spec.h declares.

Made by the family files, read by the native part; no forward pass in Python. Weights are TensorRef
views, so a spec keeps the mapped files alive and copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cpumoe.checkpoint import TensorRef


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias; w [N, K], bias [N] or None."""

    w: TensorRef
    bias: TensorRef | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention. window: tokens a query sees, 0 = all. scale: of the scores."""

    heads: int
    kv_heads: int
    head_dim: int
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    inv_freq: tuple[float, ...]
    rope_scale: float = 1.0
    qk_norm: Literal["none", "per_head", "whole"] = "none"
    q_norm: TensorRef | None = None
    k_norm: TensorRef | None = None
    clip_qkv: float = 0.0
    window: int = 0

    @property
    def scale(self) -> float:
        """head_dim^-0.5, which every family here uses."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Fields of core's Router; `kind` as in topk.h."""

    experts: int
    top_k: int
    kind: Literal["softmax_topk", "topk_softmax", "sigmoid"] = "softmax_topk"
    renormalize: bool = False
    norm_eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """A dense gated layer (gate, up, down) or, with a router, experts and maybe a shared one.

    expert_gate, expert_up [I, H] and expert_down [H, I]: one view per expert.
    shared_score [1, H]: its sigmoid weighs the shared expert.
    """

    activation: str
    gate: Linear | None = None
    up: Linear | None = None
    down: Linear | None = None
    router: RouterSpec | None = None
    router_w: Linear | None = None
    expert_gate: tuple[TensorRef, ...] = ()
    expert_up: tuple[TensorRef, ...] = ()
    expert_down: tuple[TensorRef, ...] = ()
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

"""What the families share: names and sizes -> checked views, grouped as the spec wants them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from cpumoe._core import Error
from cpumoe.checkpoint import Checkpoint, Quantized, TensorRef
from cpumoe.checkpoint.gguf_types import BLOCK_FORMATS
from cpumoe.models.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Config,
)
from cpumoe.models.rope import rope
from cpumoe.models.spec import AttentionSpec, FfnSpec, LayerSpec, Linear, ModelSpec, RouterSpec
from cpumoe.weight import Weight

FLOAT_FORMATS = ("fp32", "fp16", "bf16")
MATRIX_FORMATS = (*FLOAT_FORMATS, *BLOCK_FORMATS)
_EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
_EXPERT_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class Reader:
    """A checkpoint being read as one family: sizes common to all, and views by name."""

    def __init__(self, checkpoint: Checkpoint, family: str) -> None:
        self.checkpoint = checkpoint
        self.weights = Quantized(checkpoint)
        self.family = family
        self.config = c = Config(checkpoint.config, checkpoint.where)
        self.vocab = c.integer("vocab_size", 1, MAX_VOCAB)
        self.hidden = c.integer("hidden_size", 1, MAX_WIDTH)
        self.layers = c.integer("num_hidden_layers", 1, MAX_LAYERS)
        self.heads = c.integer("num_attention_heads", 1, MAX_WIDTH)
        self.kv_heads = c.integer("num_key_value_heads", 1, MAX_WIDTH, default=self.heads)
        if self.heads % self.kv_heads:
            raise c.fail("num_key_value_heads", f"a divisor of num_attention_heads {self.heads}")
        self.norm_eps = c.number("rms_norm_eps", 0.0, 1.0, default=1e-6)
        self.max_tokens = c.integer("max_position_embeddings", 1, MAX_POSITIONS)
        self.activation = _ACTIVATIONS[c.choice("hidden_act", list(_ACTIVATIONS), default="silu")]

    @cached_property
    def head_dim(self) -> int:
        """Elements of a head."""
        c = self.config
        if not c.has("head_dim") and self.hidden % self.heads:
            raise c.fail("num_attention_heads", f"a divisor of hidden_size {self.hidden}")
        head_dim = c.integer("head_dim", 2, 1 << 14, default=self.hidden // self.heads)
        if head_dim % 2:
            raise c.fail("head_dim", f"even (hidden_size / heads gives {head_dim})")
        return head_dim

    def vector(self, name: str, size: int) -> TensorRef:
        """A norm weight or a bias."""
        return self.checkpoint.tensor(name, (size,), FLOAT_FORMATS)

    def linear(
        self,
        prefix: str,
        n: int,
        k: int,
        bias: bool = False,
        stored: Literal["as configured", "either", "plain"] = "as configured",
    ) -> Linear:
        """prefix.weight [n, k] as it is or as quantization_config says; on request prefix.bias [n].

        stored: "plain" is never quantised (a router); "either" may be, whatever the config says.
        """
        w: TensorRef | Weight
        if stored == "plain":
            w = self.weights.plain(prefix, n, k, MATRIX_FORMATS)
        else:
            w = self.weights.linear(prefix, n, k, MATRIX_FORMATS, either=stored == "either")
        return Linear(w, self.vector(f"{prefix}.bias", n) if bias else None)

    def window(self, name: str = "sliding_window") -> int:
        """Sliding window in tokens, 0 when the field is absent or null."""
        return self.config.integer(name, 1, MAX_POSITIONS, default=0)

    def windows(self, window: int, sliding: Sequence[bool]) -> list[int]:
        """Window of each layer: by layer_types or, where the config has none, as `sliding` says."""
        c = self.config
        if c.has("layer_types"):
            types = c.values["layer_types"]
            good = isinstance(types, list) and len(types) == self.layers
            if not good or not all(t in _LAYER_TYPES for t in types):
                must = f"{self.layers} strings, each one of {', '.join(_LAYER_TYPES)}"
                raise c.fail("layer_types", must)
            sliding = [t == "sliding_attention" for t in types]
        return [window if s else 0 for s in sliding]

    def attention(
        self,
        layer: int,
        *,
        theta: float,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: Literal["none", "per_head", "whole"] = "none",
        clip_qkv: float = 0.0,
        window: int = 0,
        partial: float | None = None,
        sinks: bool = False,
    ) -> AttentionSpec:
        """Layer `layer`'s attention under its usual names, self_attn.{q,k,v,o}_proj.

        partial: default of partial_rotary_factor where a part of a head may rotate.
        """
        p = f"model.layers.{layer}.self_attn"
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inv_freq, rope_scale = rope(self.config, self.head_dim, theta, partial)
        norm_sizes = (q, kv) if qk_norm == "whole" else (self.head_dim, self.head_dim)
        normed = qk_norm != "none"
        return AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            q=self.linear(f"{p}.q_proj", q, self.hidden, qkv_bias),
            k=self.linear(f"{p}.k_proj", kv, self.hidden, qkv_bias),
            v=self.linear(f"{p}.v_proj", kv, self.hidden, qkv_bias),
            o=self.linear(f"{p}.o_proj", self.hidden, q, o_bias),
            scale=self.head_dim**-0.5,
            inv_freq=inv_freq,
            rope_scale=rope_scale,
            rope_interleaved=self.config.flag("rope_interleave", default=False),
            qk_norm=qk_norm,
            q_norm=self.vector(f"{p}.q_norm.weight", norm_sizes[0]) if normed else None,
            k_norm=self.vector(f"{p}.k_norm.weight", norm_sizes[1]) if normed else None,
            clip_qkv=clip_qkv,
            window=window,
            sinks=self.vector(f"{p}.sinks", self.heads) if sinks else None,
        )

    def router(self, renormalize: bool) -> RouterSpec:
        """Softmax router over num_experts, which some configs call otherwise."""
        c = self.config
        names = [n for n in _EXPERT_COUNTS if c.has(n)] or ["num_experts"]
        counts = {c.integer(n, 1, MAX_EXPERTS) for n in names}
        if len(counts) > 1:
            raise c.fail(names[0], f"equal to {names[1]} {c.values[names[1]]}")
        experts = counts.pop()
        top_k = c.integer("num_experts_per_tok", 1, MAX_EXPERTS)
        if top_k > experts:
            raise c.fail("num_experts_per_tok", f"at most {names[0]} {experts}")
        return RouterSpec(experts=experts, top_k=top_k, renormalize=renormalize)

    def sparse(
        self,
        layer: int,
        router: RouterSpec,
        inter: int,
        published: tuple[str, str, str, str] = _EXPERT_NAMES,
    ) -> FfnSpec:
        """Experts of one layer, as published (one tensor per expert) or fused by Transformers.

        published: folder under the layer, then the names of an expert's gate, up and down.
        Fused: mlp.experts.gate_up_proj [E, 2I, H], gate rows first, and down_proj [E, H, I].
        """
        folder, gate, up, down = published
        h, e = self.hidden, router.experts
        base, fused = f"model.layers.{layer}.{folder}", f"model.layers.{layer}.mlp.experts"
        gates: list[TensorRef | Weight] = []
        ups: list[TensorRef | Weight] = []
        downs: list[TensorRef | Weight] = []
        both_stored = self.weights.stack(f"{fused}.gate_up_proj", e, 2 * inter, h)
        down_stored = self.weights.stack(f"{fused}.down_proj", e, h, inter)
        if both_stored is not None and down_stored is not None:
            for i in range(e):
                gates.append(both_stored.expert(i, 0, inter).weight())
                ups.append(both_stored.expert(i, inter, inter).weight())
                downs.append(down_stored.expert(i, 0, h).weight())
            base = f"model.layers.{layer}.mlp"
        elif f"{fused}.gate_up_proj" in self.checkpoint:
            both = self.checkpoint.tensor(f"{fused}.gate_up_proj", (e, 2 * inter, h), FLOAT_FORMATS)
            out = self.checkpoint.tensor(f"{fused}.down_proj", (e, h, inter), FLOAT_FORMATS)
            for i in range(e):
                gates.append(both.part(i, slice(0, inter)))
                ups.append(both.part(i, slice(inter, 2 * inter)))
                downs.append(out.part(i))
            base = f"model.layers.{layer}.mlp"
        else:
            for i in range(e):
                gates.append(self.linear(f"{base}.experts.{i}.{gate}", inter, h).w)
                ups.append(self.linear(f"{base}.experts.{i}.{up}", inter, h).w)
                downs.append(self.linear(f"{base}.experts.{i}.{down}", h, inter).w)
        return FfnSpec(
            activation=self.activation,
            router=router,
            router_w=self.linear(f"{base}.gate", e, h, stored="plain"),
            expert_gate=tuple(gates),
            expert_up=tuple(ups),
            expert_down=tuple(downs),
        )

    def gated(self, prefix: str, inter: int, bias: bool = False) -> tuple[Linear, Linear, Linear]:
        """prefix.{gate,up,down}_proj of a dense gated layer."""
        return (
            self.linear(f"{prefix}.gate_proj", inter, self.hidden, bias),
            self.linear(f"{prefix}.up_proj", inter, self.hidden, bias),
            self.linear(f"{prefix}.down_proj", self.hidden, inter, bias),
        )

    def width(self, name: str) -> int:
        """A feed-forward width."""
        return self.config.integer(name, 1, MAX_WIDTH)

    def dense(self, layer: int, bias: bool = False) -> FfnSpec:
        """A dense layer of width intermediate_size."""
        inter = self.width("intermediate_size")
        gate, up, down = self.gated(f"model.layers.{layer}.mlp", inter, bias)
        return FfnSpec(activation=self.activation, gate=gate, up=up, down=down)

    def is_sparse(self, layer: int) -> bool:
        """Qwen's rule: every decoder_sparse_step-th layer, except those in mlp_only_layers."""
        step = self.config.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
        dense = self.config.integers("mlp_only_layers", 0, MAX_LAYERS)
        return layer not in dense and (layer + 1) % step == 0

    def layer(self, layer: int, attn: AttentionSpec, ffn: FfnSpec) -> LayerSpec:
        """The layer with its two norms."""
        p = f"model.layers.{layer}"
        return LayerSpec(
            attn_norm=self.vector(f"{p}.input_layernorm.weight", self.hidden),
            ffn_norm=self.vector(f"{p}.post_attention_layernorm.weight", self.hidden),
            attn=attn,
            ffn=ffn,
        )

    def model(self, layers: list[LayerSpec]) -> ModelSpec:
        """The model around its layers; the head is the embedding when they are tied."""
        shape = (self.vocab, self.hidden)
        embed = self.checkpoint.tensor("model.embed_tokens.weight", shape, MATRIX_FORMATS)
        tied = self.config.flag("tie_word_embeddings", default=False)
        return ModelSpec(
            family=self.family,
            vocab=self.vocab,
            hidden=self.hidden,
            max_tokens=self.max_tokens,
            norm_eps=self.norm_eps,
            embed=embed,
            final_norm=self.vector("model.norm.weight", self.hidden),
            head=Linear(embed) if tied else self.linear("lm_head", *shape, stored="either"),
            layers=tuple(layers),
        )

    def require_all_used(self) -> None:
        """Refuse tensors that the model would silently ignore: they change what it computes."""
        extra = self.config.integer("num_nextn_predict_layers", 0, MAX_LAYERS, default=0)
        # Of multi-token prediction: they guess further tokens and change no logits of this model.
        unused = tuple(f"model.layers.{self.layers + i}." for i in range(extra))
        rest = sorted(
            name
            for name in self.checkpoint.tensors
            if name not in self.checkpoint.used
            and not name.startswith(unused)
            and not self.weights.unread(name)
            and name != "lm_head.weight"  # a saved copy of a tied head
            and not name.endswith("rotary_emb.inv_freq")  # derived from the config
        )
        if rest:
            raise Error(
                f"{self.checkpoint.path}: {len(rest)} tensors are not part of {self.family} as "
                f"{self.checkpoint.describer} describes it: "
                f"{', '.join(rest[:4])}{', ...' if rest[4:] else ''}. "
                f"Is {self.checkpoint.describer} that of another model?"
            )

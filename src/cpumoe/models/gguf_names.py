"""Tensor names of GGUF -> those of Hugging Face checkpoints, which the family files ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cpumoe._core import Error
from cpumoe.checkpoint import TensorRef

# Names outside the layers, without their .weight.
_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Names within a layer, without .weight or .bias, that mean the same in every architecture.
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Whole names within a layer whose counterpart has no suffix.
_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_PROJECTIONS = ("gate", "up", "down")
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)", re.DOTALL)
_STACKED = re.compile(r"ffn_(gate|up|down)_exps\.(weight|bias)")
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d{1,6})\.weight")  # files of early 2024


@dataclass(frozen=True, slots=True)
class Naming:
    """Where an architecture's routed and shared experts have their Hugging Face names.

    experts: folder and the names of an expert's gate, up and down. router, shared: names.
    layers: those from here on are extra (multi-token prediction) and take no part.
    """

    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate"
    shared: str = "mlp.shared_experts"
    layers: int = 1 << 20


def _experts(naming: Naming, name: str, ref: TensorRef) -> Iterator[tuple[str, TensorRef]]:
    """(name behind the layer's, part of one expert) of an expert tensor; nothing for others."""
    folder, *projections = naming.experts
    names = dict(zip(_PROJECTIONS, projections, strict=True))
    if match := _STACKED.fullmatch(name):
        if len(ref.shape) < 2:
            raise Error(
                f"{ref.file}: tensor {ref.name}: must stack one part per expert; "
                f"got the shape {list(ref.shape)}"
            )
        for e in range(ref.shape[0]):
            yield f"{folder}.{e}.{names[match[1]]}.{match[2]}", ref.part(e)
    elif match := _ONE_EXPERT.fullmatch(name):
        yield f"{folder}.{match[2]}.{names[match[1]]}.weight", ref


def _in_layer(naming: Naming, name: str, ref: TensorRef) -> Iterator[tuple[str, TensorRef]]:
    """The Hugging Face names, behind the layer's, of the layer's tensor `name`."""
    stem, _, suffix = name.rpartition(".")
    if name in _WHOLE:
        yield _WHOLE[name], ref
    elif stem in _LAYER:
        yield f"{_LAYER[stem]}.{suffix}", ref
    elif stem == "ffn_gate_inp":
        yield f"{naming.router}.{suffix}", ref
    elif stem == "ffn_gate_inp_shexp":  # a row that some files store without its first extent
        row = ref if len(ref.shape) > 1 else replace(ref, shape=(1, *ref.shape))
        yield f"mlp.shared_expert_gate.{suffix}", row
    elif stem.endswith("_shexp") and stem[4:-6] in _PROJECTIONS:
        yield f"{naming.shared}.{stem[4:-6]}_proj.{suffix}", ref
    else:
        yield from _experts(naming, name, ref)


def rename(tensors: Mapping[str, TensorRef], naming: Naming) -> dict[str, TensorRef]:
    """The tensors under their Hugging Face names, stacked experts as one view each.

    A name that is not known stays as it is, so that the family refuses it by its own name.
    """
    renamed: dict[str, TensorRef] = {}
    for name, ref in tensors.items():
        match = _IN_LAYER.fullmatch(name)
        stem, _, suffix = name.rpartition(".")
        if match is None:
            found = [(f"{_GLOBAL[stem]}.{suffix}", ref)] if stem in _GLOBAL else []
        elif int(match[1]) >= naming.layers or match[2] == "attn_rot_embd.weight":
            continue  # the latter is derived from the metadata
        else:
            prefix = f"model.layers.{int(match[1])}"
            found = [(f"{prefix}.{n}", part) for n, part in _in_layer(naming, match[2], ref)]
        for new, part in found or [(name, ref)]:
            if new in renamed:
                raise Error(
                    f"{ref.file}: tensors {renamed[new].name[:200]!r} and {name[:200]!r} mean the "
                    "same part of the model. The file is damaged"
                )
            renamed[new] = part
    renamed.pop("rope_freqs.weight", None)  # in the config
    return renamed

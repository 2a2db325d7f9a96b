"""A model as the list of what its quantised copy holds, under the names that publishers use.

The family files say which matrices a model has: they are built with a Reader that notes the names
they ask for. Fused experts ([E, 2I, H] in one tensor) become one module each, as published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cpumoe._core import Error
from cpumoe.checkpoint import Checkpoint, Quantized, TensorRef
from cpumoe.checkpoint.quantized_storage import (
    AWQ,
    FP4_PACKED,
    FP8,
    GPTQ,
    INT8,
    MODELOPT_FP4,
    PACKED_ZEROS,
    Stored,
)
from cpumoe.models import build_spec
from cpumoe.models.gguf import translate
from cpumoe.models.reader import Reader
from cpumoe.models.spec import FfnSpec, Linear, ModelSpec, RouterSpec
from cpumoe.quantize.shards import OutTensor
from cpumoe.quantize.source import KeysAndValues, Matrix
from cpumoe.quantize.target import Target
from cpumoe.weight import Weight

Role = Literal["experts", "shared", "dense", "attention", "head", "other"]
ScaleDtype = Literal["BF16", "F16", "F32"]

# Behind a module's name: the tensors of its weight. Others, biases for example, are copied.
_STORAGES = (FP8, INT8, PACKED_ZEROS, FP4_PACKED, MODELOPT_FP4, GPTQ, AWQ)
_ENDINGS = frozenset({".weight"}.union(*(s.endings for s in _STORAGES)))
# Families whose published q and k rows pair with those half a head on.
_HALVES = ("llama", "mixtral")
_PAIRED = re.compile(r"\.self_attn\.[qk]_proj(\.weight|\.bias)?$")
_DROPPED = ("quantization_config", "compression_config")
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_FLOATS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
# The first that matches a module's name is its role; others (routers, scores) stay as they are.
_ROLES: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("other", re.compile(r"\.kv_b_proj$")),
    ("experts", re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w[123])$")),
    ("shared", re.compile(r"\.shared_experts?\.(gate|up|down)_proj$")),
    ("dense", re.compile(r"\.mlp\.(gate|up|down)_proj$")),
    ("attention", re.compile(r"\.self_attn\.\w+_proj(_with_mqa)?$")),
    ("head", re.compile(r"^lm_head$")),
)


def role_of(module: str) -> Role:
    """What a module is by its name."""
    return next((role for role, pattern in _ROLES if pattern.search(module)), "other")


class _NotingWeights(Quantized):
    """Weights that note the quantised matrices which are not read as linear maps (kv_b_proj)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.others: dict[str, Weight] = {}

    def matrix(self, module: str, n: int, k: int, *, either: bool = False) -> Stored | None:
        """Of the base class; noted."""
        stored = super().matrix(module, n, k, either=either)
        if stored is not None:
            self.others[module] = stored.weight()
        return stored


class NamingReader(Reader):
    """A Reader that notes every matrix it gives out: `modules`, name -> view."""

    def __init__(self, checkpoint: Checkpoint, family: str) -> None:
        super().__init__(checkpoint, family)
        self.weights = self._noted = _NotingWeights(checkpoint)
        self.modules: dict[str, TensorRef | Weight] = {}
        self.stacks: list[str] = []
        self.renamed: dict[str, str] = {}

    def note_others(self) -> None:
        """Adds the quantised matrices that were read in another way to the modules."""
        for module, weight in self._noted.others.items():
            self.modules.setdefault(module, weight)

    def linear(
        self,
        prefix: str,
        n: int,
        k: int,
        bias: bool = False,
        stored: Literal["as configured", "either", "plain"] = "as configured",
    ) -> Linear:
        """Of the base class; noted."""
        made = super().linear(prefix, n, k, bias, stored)
        self.modules[prefix] = made.w
        return made

    def sparse(
        self,
        layer: int,
        router: RouterSpec,
        inter: int,
        published: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj"),
    ) -> FfnSpec:
        """Of the base class; experts of a fused tensor are noted one by one."""
        ffn = super().sparse(layer, router, inter, published)
        folder, *names = published
        base, fused = f"model.layers.{layer}.{folder}", f"model.layers.{layer}.mlp"
        if f"{base}.experts.0.{names[0]}" in self.modules:
            return ffn
        self.stacks.append(f"{fused}.experts.")
        if base != fused:
            self.renamed[f"{fused}.gate"] = f"{base}.gate"
        parts = (ffn.expert_gate, ffn.expert_up, ffn.expert_down)
        for name, views in zip(names, parts, strict=True):
            for i, view in enumerate(views):
                self.modules[f"{base}.experts.{i}.{name}"] = view
        return ffn


@dataclass(frozen=True, slots=True)
class Piece:
    """One module or tensor of the output.

    name: of the module (without .weight), or of the tensor that is copied.
    target: what its matrix becomes, or None for a copy of type `dtype`, which is also that of
    scales. pairs: rows per head whose rotated pairs are neighbours (GGUF) and shall be half a head
    apart (Hugging Face); 0: rows stay where they are.
    """

    name: str
    role: Role
    weight: Matrix
    target: Target | None
    dtype: str
    pairs: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in elements."""
        return self.weight.shape

    def tensors(self) -> list[OutTensor]:
        """What the output holds of it."""
        if self.target is None:
            return [OutTensor(self.name, self.dtype, self.shape, 1)]
        n, k = self.shape
        t, groups = self.target, k // (self.target.group or k)
        if t.floating:
            return [
                OutTensor(f"{self.name}.weight_packed", "U8", (n, k // 2)),
                OutTensor(f"{self.name}.weight_scale", "U8", (n, groups), 2),
            ]
        return [
            OutTensor(f"{self.name}.weight_packed", "I32", (n, k * t.bits // 32)),
            OutTensor(f"{self.name}.weight_scale", self.dtype, (n, groups), 2),
            OutTensor(f"{self.name}.weight_shape", "I64", (2,), 3),
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the output will be. checkpoint: the source, under Hugging Face's names.

    config: the output's config.json, without quantization_config. ignore: linear modules that stay
    floats.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    pieces: tuple[Piece, ...]
    ignore: tuple[str, ...]


def natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that takes numbers in a name as numbers."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p)) if p.isdigit() else (1, p) for p in parts if p]


def _require_fit(name: str, shape: Sequence[int], target: Target) -> None:
    """Raises Error unless the matrix divides into groups and words."""
    if len(shape) != 2:
        raise Error(
            f"quantize: {name} must be one matrix [N, K] to be written as {target.name}; it is "
            f"{list(shape)}. Experts that are stacked in this way have no such layout"
        )
    step = target.group or 32 // target.bits
    if shape[1] % step:
        raise Error(
            f"quantize: the inputs of {name} must be a multiple of {step} for {target.name}; it is "
            f"{list(shape)}. Choose smaller groups, or the _row format"
        )


def _float_dtype(weight: Matrix, default: str) -> str:
    """How a copy is stored: as it is when it is a float tensor, else decoded to the default."""
    return default if isinstance(weight, Weight) else _FLOATS.get(weight.format, default)


def _pairs(config: Mapping[str, Any], spec: ModelSpec) -> int:
    """Rows of a head whose pairs a GGUF file has side by side, though the family has them apart."""
    moved = spec.family in _HALVES and config.get("rope_interleave") is True
    return spec.layers[0].attn.head_dim if moved and spec.layers else 0


def _require_a_layout(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raises Error for what no Hugging Face checkpoint in compressed-tensors can hold."""
    if spec.family == "gpt_oss":
        raise Error(
            f"quantize: {checkpoint.path} must be of another family than gpt_oss; the biases of "
            "its experts have no place in compressed-tensors. Use it as published: it is in MXFP4"
        )
    if (checkpoint.config.get("rope_parameters") or {}).get("rope_type") == "factors":
        raise Error(
            f"quantize: {checkpoint.path} must have rotations that a config.json can name; its "
            "rope_freqs.weight holds plain factors. Quantise the Hugging Face checkpoint instead"
        )


def read_names(checkpoint: Checkpoint) -> tuple[NamingReader, ModelSpec]:
    """The model as its family reads it, and the notes taken on the way."""
    readers: list[NamingReader] = []

    def make(source: Checkpoint, family: str) -> Reader:
        readers.append(NamingReader(source, family))
        return readers[-1]

    spec = build_spec(replace(translate(checkpoint), metadata=None, used=set()), make)
    readers[0].note_others()
    return readers[0], spec


def make_plan(
    checkpoint: Checkpoint, target: Target, roles: frozenset[Role], dtype: ScaleDtype
) -> Plan:
    """What a copy of `checkpoint` holds whose modules of `roles` are written as `target`.

    dtype: of scales, and of copies whose source is no float tensor. Raises Error for a model that
    is not supported, or whose matrices do not divide into the target's groups.
    """
    metadata = checkpoint.metadata
    reader, spec = read_names(checkpoint)
    checkpoint = reader.checkpoint
    _require_a_layout(checkpoint, spec)
    pairs = _pairs(checkpoint.config, spec)
    pieces: list[Piece] = []
    ignore: list[str] = []
    for name, weight in reader.modules.items():
        name, role = reader.renamed.get(name, name), role_of(name)
        if role in roles:
            _require_fit(name, weight.shape, target)
            pieces.append(Piece(name, role, weight, target, dtype))
        else:
            ignore.append(name)
            kept = _float_dtype(weight, dtype)
            pieces.append(Piece(f"{name}.weight", role, weight, None, kept))
    stacks = tuple(reader.stacks)
    for name in reader.checkpoint.used:
        module, _, ending = name.rpartition(".")
        known = module in reader.modules and f".{ending}" in _ENDINGS
        if name.startswith(stacks) or known or name not in reader.checkpoint:
            continue
        tensors = reader.checkpoint.tensors
        view: Matrix = tensors[name]
        layer, _, last = module.rpartition(".")
        if last == "v_b_proj":
            continue  # goes with k_b_proj
        if last == "k_b_proj":
            view = KeysAndValues(tensors[name], tensors[f"{layer}.v_b_proj.weight"])
            module = f"{layer}.kv_b_proj"
        module = reader.renamed.get(module, module)
        if ending == "weight" and len(view.shape) == 2 and not module.endswith("embed_tokens"):
            ignore.append(module)  # read in another way than as one matrix: kv_b_proj
        kept = _float_dtype(view, dtype)
        pieces.append(Piece(f"{module}.{ending}" if module else name, "other", view, None, kept))
    if "lm_head" not in reader.modules:
        ignore.append("lm_head")
    if not any(p.target for p in pieces):
        raise Error(
            f"quantize: {checkpoint.path} must have a matrix to quantise; with these options it "
            "has none. Choose others"
        )
    if pairs:
        pieces = [replace(p, pairs=pairs) if _PAIRED.search(p.name) else p for p in pieces]
    config = {k: v for k, v in checkpoint.config.items() if k not in _DROPPED}
    if pairs:
        del config["rope_interleave"]
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = _NAMES[dtype]
    return Plan(
        replace(checkpoint, metadata=metadata),
        config,
        tuple(sorted(pieces, key=lambda p: natural(p.name))),
        tuple(sorted(ignore, key=natural)),
    )

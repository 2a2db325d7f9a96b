"""A published checkpoint -> ModelSpec. One file per Hugging Face model_type; data, no forward pass.

A family is a module of this folder with the name of its model_type (and nothing else by that name)
that defines `build(reader: Reader) -> ModelSpec`; add its name to FAMILIES.
"""

from __future__ import annotations

import importlib

from cpumoe._core import Error
from cpumoe.checkpoint import Checkpoint
from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec

__all__ = ["FAMILIES", "ModelSpec", "build_spec"]

FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def build_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The model in `checkpoint` as data: every size checked, every weight a view of the files.

    Raises Error when the model_type is unknown, a config field or a tensor is missing or at odds,
    the weights are quantised, or the checkpoint holds tensors that the family does not use.
    """
    where = str(checkpoint.path / "config.json")
    family = checkpoint.config.get("model_type")
    if family not in FAMILIES:
        raise Error(
            f"{where}: model_type must be one of {', '.join(FAMILIES)}; got {family!r:.100}. "
            "Other families are not supported yet"
        )
    quantised = checkpoint.config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise Error(
            f"{where}: weights must be fp32, fp16 or bf16; quantization_config says "
            f"{method!r:.100}. Use the unquantised checkpoint of this model"
        )
    reader = Reader(checkpoint, str(family))
    spec: ModelSpec = importlib.import_module(f"cpumoe.models.{family}").build(reader)
    reader.require_all_used()
    return spec

"""A published checkpoint -> ModelSpec. One file per Hugging Face model_type; data, no forward pass.

A family is a module of this folder with the name of its model_type (and nothing else by that name)
that defines `build(reader: Reader) -> ModelSpec`; add its name to FAMILIES.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from cpumoe._core import Error
from cpumoe.checkpoint import Checkpoint
from cpumoe.models.gguf import translate
from cpumoe.models.reader import Reader
from cpumoe.models.spec import ModelSpec

__all__ = ["FAMILIES", "ModelSpec", "build_spec"]

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mixtral",
    "olmoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)


def build_spec(
    checkpoint: Checkpoint, make_reader: Callable[[Checkpoint, str], Reader] = Reader
) -> ModelSpec:
    """The model in `checkpoint` as data: every size checked, every weight a view of the files.

    make_reader(checkpoint, family): what the family file reads with; another one may take notes.

    Raises Error when the model_type is unknown, a config field or a tensor is missing or at odds,
    the weights are stored in a way that is not supported, or the checkpoint holds tensors that the
    family does not use.
    """
    checkpoint = translate(checkpoint)
    where = checkpoint.where
    family = checkpoint.config.get("model_type")
    if family not in FAMILIES:
        raise Error(
            f"{where}: model_type must be one of {', '.join(FAMILIES)}; got {family!r:.100}. "
            "Other families are not supported yet"
        )
    reader = make_reader(checkpoint, str(family))
    spec: ModelSpec = importlib.import_module(f"cpumoe.models.{family}").build(reader)
    reader.require_all_used()
    return spec

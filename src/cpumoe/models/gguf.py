"""A GGUF file as a Hugging Face checkpoint: its metadata as config, its tensors by those names."""

from __future__ import annotations

from dataclasses import replace

from cpumoe.checkpoint import Checkpoint
from cpumoe.models.config import Config
from cpumoe.models.gguf_config import ARCHITECTURES, Source
from cpumoe.models.gguf_names import rename


def translate(checkpoint: Checkpoint) -> Checkpoint:
    """The GGUF `checkpoint` as the families read one: config and names of Hugging Face.

    The tensors are the same views; stacked experts come as one view each. A checkpoint that is a
    directory is returned as it is. Raises Error for an architecture that is not supported and for
    metadata that are missing or out of range.
    """
    if checkpoint.metadata is None:
        return checkpoint
    metadata = Config(checkpoint.metadata, checkpoint.where)
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise metadata.fail(
            "general.architecture",
            f"one of {', '.join(ARCHITECTURES)}",
            "Other architectures are not supported yet",
        )
    configure, naming = ARCHITECTURES[arch]
    source = Source(metadata, arch, checkpoint.tensors)
    config = configure(source)
    tensors = rename(checkpoint.tensors, replace(naming, layers=source.layers))
    return replace(checkpoint, config=config, tensors=tensors, used=set())

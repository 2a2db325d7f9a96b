"""Checkpoint bytes -> TensorRef: published files, mapped read-only, checked before use."""

from cpumoe.checkpoint.directory import Checkpoint, open_checkpoint
from cpumoe.checkpoint.gguf import Gguf, open_gguf
from cpumoe.checkpoint.mapping import Memory
from cpumoe.checkpoint.quantized import Quantized
from cpumoe.checkpoint.safetensors import TensorFile, TensorRef, open_safetensors

__all__ = [
    "Checkpoint",
    "Gguf",
    "Memory",
    "Quantized",
    "TensorFile",
    "TensorRef",
    "open_checkpoint",
    "open_gguf",
    "open_safetensors",
]

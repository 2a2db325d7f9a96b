"""Checkpoint bytes -> TensorRef: published files, mapped read-only, checked before use."""

from cpumoe.checkpoint.directory import Checkpoint, open_checkpoint
from cpumoe.checkpoint.safetensors import TensorFile, TensorRef, open_safetensors

__all__ = ["Checkpoint", "TensorFile", "TensorRef", "open_checkpoint", "open_safetensors"]

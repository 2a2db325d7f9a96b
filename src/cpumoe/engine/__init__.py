"""The engine: a checkpoint directory -> generated text. Needs no framework."""

from cpumoe.engine.conversation import Conversation
from cpumoe.engine.model import Completion, Model, Stream, load, weight_file_bytes
from cpumoe.engine.run import Stats
from cpumoe.engine.sampling import SamplingParams
from cpumoe.engine.session import Session
from cpumoe.engine.tokenizer import Tokenizer

__all__ = [
    "Completion",
    "Conversation",
    "Model",
    "SamplingParams",
    "Session",
    "Stats",
    "Stream",
    "Tokenizer",
    "load",
    "weight_file_bytes",
]

"""What a checkpoint asks of generation -> sampling defaults and the ids that end a text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpumoe.checkpoint.json_file import read_json_object
from cpumoe.engine.sampling import SamplingParams
from cpumoe.models.config import MAX_VOCAB, Config


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a checkpoint asks for: sampling parameters and the ids that end a text."""

    params: SamplingParams
    eos_ids: frozenset[int]


def _eos_ids(config: Config) -> frozenset[int]:
    value = config.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and -1 <= i < MAX_VOCAB for i in ids):
        raise config.fail("eos_token_id", "a token id or a list of token ids")
    return frozenset(i for i in ids if i >= 0)


# general.sampling.* of GGUF -> fields of generation_config.json
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def gguf_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF file says of sampling, as generation_config.json has it."""
    given = {
        field: value
        for name, field in _GGUF_SAMPLING.items()
        if (value := metadata.get(f"general.sampling.{name}")) is not None
    }
    return given | {"do_sample": given.get("temperature", 0) != 0}


def _published(path: Path, metadata: Mapping[str, Any] | None) -> Config:
    """generation_config.json, or what a GGUF file has of it."""
    if metadata is None:
        file = path / "generation_config.json"
        return Config(read_json_object(file) if file.exists() else {}, str(file))
    return Config(gguf_sampling(metadata), f"{path}: metadata: general.sampling")


def read_defaults(
    path: Path,
    config: Mapping[str, Any],
    tokenizer_ends: Collection[int],
    metadata: Mapping[str, Any] | None = None,
) -> Defaults:
    """Defaults of the checkpoint `path`; `config` is its config.json, `metadata` a GGUF file's.

    Without generation_config.json generation is greedy, as Transformers has it. The ids that end a
    text come from there, else from config.json, else from the tokenizer.
    """
    g = _published(path, metadata)
    eos = _eos_ids(g) or _eos_ids(Config(config, str(path / "config.json")))
    if not eos:
        eos = frozenset(tokenizer_ends)
    penalty = g.number("repetition_penalty", 0.0, 1e6, default=1.0)
    limit = g.integer("max_new_tokens", 1, 1 << 31, default=0) or None
    if not g.flag("do_sample", default=False):
        params = SamplingParams(temperature=0.0, repetition_penalty=penalty, max_tokens=limit)
        return Defaults(params, eos)
    params = SamplingParams(
        temperature=g.number("temperature", 0.0, 1e6, default=1.0),
        top_k=g.integer("top_k", 0, MAX_VOCAB, default=50),
        top_p=g.number("top_p", 0.0, 1.0, default=1.0),
        min_p=g.number("min_p", -1e-9, 1.0, default=0.0),
        repetition_penalty=penalty,
        max_tokens=limit,
    )
    return Defaults(params, eos)

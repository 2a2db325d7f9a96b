"""What makes a directory of shards a model: tokenizer and other files, index, config last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpumoe._core import Error
from cpumoe.checkpoint.json_file import MAX_JSON_BYTES
from cpumoe.engine.defaults import gguf_sampling
from cpumoe.engine.gguf_tokenizer import has_tokenizer, read_tokenizer
from cpumoe.quantize.journal import write_file
from cpumoe.quantize.plan import Plan
from cpumoe.quantize.shards import Shard, index_json
from cpumoe.quantize.target import Target

# Files beside the weights that belong to a model whatever its weights are stored as.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)


def require_apart(source: Path, out: Path) -> None:
    """Raises Error when the output is a file, would be the source, or lie in it."""
    if out.exists() and not out.is_dir():
        raise Error(
            f"quantize: the output must be a new directory; {out} is a file. Choose another name"
        )
    a, b = source.resolve(), out.resolve()
    if b == a or (a.is_dir() and a in b.parents):
        raise Error(
            f"quantize: the output must be a directory apart from the model; got {out} for "
            f"{source}. Choose another one"
        )


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _copies(source: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of the companions that the directory `source` has."""
    for name in COMPANIONS:
        file = source / name
        if file.is_file() and file.stat().st_size <= MAX_JSON_BYTES:
            yield name, file.read_bytes()


def _from_gguf(plan: Plan, metadata: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """The tokenizer's files, the ids that end a text and the sampling, of a GGUF file."""
    if not has_tokenizer(metadata):
        return
    parts = read_tokenizer(metadata, plan.checkpoint.where)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.config}
    if parts.template is not None:
        config["chat_template"] = parts.template
    yield "tokenizer.json", parts.raw.to_str().encode()
    yield "tokenizer_config.json", _json(config)
    ends = {"eos_token_id": sorted(parts.end_ids)}
    yield "generation_config.json", _json(ends | gguf_sampling(metadata))


def finish(plan: Plan, target: Target, shards: Sequence[Shard], out: Path) -> None:
    """Writes everything but the weights; config.json, without which nothing is a model, last."""
    metadata = plan.checkpoint.metadata
    companions = _copies(plan.checkpoint.path) if metadata is None else _from_gguf(plan, metadata)
    for name, data in companions:
        write_file(out / name, data)
    if len(shards) > 1:
        total = sum(s.size - len(s.header) for s in shards)
        write_file(out / "model.safetensors.index.json", _json(index_json(shards, total)))
    quantised = {"quantization_config": target.quantization_config(list(plan.ignore))}
    write_file(out / "config.json", _json({**plan.config, **quantised}))

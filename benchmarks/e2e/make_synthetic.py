#!/usr/bin/env python3
"""Writes a Qwen3-MoE checkpoint with random bf16 weights: real geometry, real names, no meaning.

    python benchmarks/e2e/make_synthetic.py DIR [--layers 8]

With the default geometry (Qwen3-30B-A3B: hidden 2048, 128 experts of 768, top-8, vocabulary 151936)
a layer takes 1.3 GB and embedding plus output matrix 1.2 GB. Figures made with it are speeds, never
quality. Needs numpy only; nothing is held in memory but one block of random numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

PERIOD = 4_194_301  # prime, so that no two rows start alike
SHARD_BYTES = 2 << 30

Tensor = tuple[str, tuple[int, ...], float]
"""Name, shape and standard deviation; 0 stands for a norm weight, all ones."""


def config(a: argparse.Namespace) -> dict[str, object]:
    """config.json of the checkpoint."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": a.vocab,
        "hidden_size": a.hidden,
        "intermediate_size": 3 * a.hidden,
        "moe_intermediate_size": a.inter,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "num_experts": a.experts,
        "num_experts_per_tok": a.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": a.vocab - 1,
        "eos_token_id": a.vocab - 1,
        "torch_dtype": "bfloat16",
    }


def tensors(a: argparse.Namespace) -> Iterator[Tensor]:
    """All tensors under their published names, one per expert and projection."""
    query, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    yield "model.embed_tokens.weight", (a.vocab, a.hidden), 1.0
    for layer in range(a.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (a.hidden,), 0
        yield f"{at}.self_attn.q_proj.weight", (query, a.hidden), a.hidden**-0.5
        yield f"{at}.self_attn.k_proj.weight", (kv, a.hidden), a.hidden**-0.5
        yield f"{at}.self_attn.v_proj.weight", (kv, a.hidden), a.hidden**-0.5
        yield f"{at}.self_attn.o_proj.weight", (a.hidden, query), query**-0.5
        yield f"{at}.self_attn.q_norm.weight", (a.head_dim,), 0
        yield f"{at}.self_attn.k_norm.weight", (a.head_dim,), 0
        yield f"{at}.post_attention_layernorm.weight", (a.hidden,), 0
        yield f"{at}.mlp.gate.weight", (a.experts, a.hidden), a.hidden**-0.5
        for expert in range(a.experts):
            e = f"{at}.mlp.experts.{expert}"
            yield f"{e}.gate_proj.weight", (a.inter, a.hidden), a.hidden**-0.5
            yield f"{e}.up_proj.weight", (a.inter, a.hidden), a.hidden**-0.5
            yield f"{e}.down_proj.weight", (a.hidden, a.inter), a.inter**-0.5
    yield "model.norm.weight", (a.hidden,), 0
    yield "lm_head.weight", (a.vocab, a.hidden), a.hidden**-0.5


def shards(all_tensors: list[Tensor]) -> list[list[Tensor]]:
    """Splits the tensors, in order, into files of at most SHARD_BYTES (or one tensor)."""
    result: list[list[Tensor]] = [[]]
    size = 0
    for tensor in all_tensors:
        bytes_ = 2 * math.prod(tensor[1])
        if result[-1] and size + bytes_ > SHARD_BYTES:
            result.append([])
            size = 0
        result[-1].append(tensor)
        size += bytes_
    return result


def places(all_tensors: Iterable[Tensor]) -> dict[str, int]:
    """Where in the pattern each tensor begins: behind the one before it."""
    found, at = {}, 0
    for name, shape, deviation in all_tensors:
        found[name] = at
        at += math.prod(shape) if deviation else 0
    return found


class Pattern:
    """Random bf16 numbers: one block, scaled, read from another place by every tensor."""

    def __init__(self, seed: int) -> None:
        """Draws the block."""
        self._block = np.random.default_rng(seed).standard_normal(PERIOD, dtype=np.float32)
        self._scaled: dict[float, memoryview] = {}

    def pieces(self, place: int, elements: int, deviation: float) -> Iterator[memoryview]:
        """`elements` bf16 numbers from `place` on, as byte pieces."""
        if deviation == 0:
            yield memoryview(np.full(elements, 0x3F80, np.uint16)).cast("B")
            return
        if deviation not in self._scaled:
            bits = (self._block * np.float32(deviation)).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            self._scaled[deviation] = memoryview(rounded.astype(np.uint16)).cast("B")
        block, at = self._scaled[deviation], place % PERIOD
        while elements > 0:
            count = min(elements, PERIOD - at)
            yield block[2 * at : 2 * (at + count)]
            at = (at + count) % PERIOD
            elements -= count


class Progress:
    """Bytes, rate and time left on standard error, after the first two seconds."""

    def __init__(self, total: int) -> None:
        """Starts the clock; `total` bytes are to come."""
        self._total, self._done, self._start, self._shown = total, 0, time.monotonic(), 0.0

    def add(self, count: int) -> None:
        """Counts `count` more bytes."""
        self._done += count
        now = time.monotonic()
        if now - self._start < 2 or (now - self._shown < 0.5 and self._done < self._total):
            return
        self._shown = now
        left = (now - self._start) * (self._total - self._done) / self._done
        end = "\n" if self._done == self._total else ""
        print(
            f"\r{self._done / 1e9:6.2f} of {self._total / 1e9:.2f} GB, {left:4.0f} s left",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def forget(path: Path) -> None:
    """Takes the file out of the page cache, so that it is read anew.

    What was written just now lies in small pages; what is read may come in huge ones.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_shard(
    path: Path,
    part: list[Tensor],
    pattern: Pattern,
    place: dict[str, int],
    progress: Progress,
) -> None:
    """Writes one safetensors file: length of the header, header, bytes in the header's order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, _ in part:
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # the data starts on a cache line
    with path.open("wb", buffering=1 << 20) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, deviation in part:
            for piece in pattern.pieces(place[name], math.prod(shape), deviation):
                file.write(piece)
                progress.add(len(piece))
    forget(path)


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level tokenizers write for the bytes 0..255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    names = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [names[b] for b in range(256)]


def tokenizer(vocab: int) -> dict[str, object]:
    """A byte-level tokenizer: one token a byte, the rest of the vocabulary filled with names."""
    end = "<|endoftext|>"
    words = byte_alphabet()
    words += [f"<t{i}>" for i in range(256, vocab - 1)]
    words = [*words[: vocab - 1], end]
    special = {
        "id": vocab - 1,
        "content": end,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [],
        },
    }


def require_space(folder: Path, total: int) -> None:
    """Ends the program unless `total` bytes fit into the folder."""
    free = shutil.disk_usage(folder).free
    if total * 1.02 > free:
        sys.exit(
            f"make_synthetic: {folder} must have {total / 1e9:.1f} GB free; it has "
            f"{free / 1e9:.1f} GB. Choose another directory or fewer --layers"
        )


def make(a: argparse.Namespace) -> None:
    """Writes the checkpoint into a.dir."""
    all_tensors = list(tensors(a))
    total = sum(2 * math.prod(shape) for _, shape, _ in all_tensors)
    a.dir.mkdir(parents=True, exist_ok=True)
    require_space(a.dir, total)
    parts = shards(all_tensors)
    pattern, place, progress = Pattern(a.seed), places(all_tensors), Progress(total)
    index: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05}-of-{len(parts):05}.safetensors"
        write_shard(a.dir / name, part, pattern, place, progress)
        index |= {tensor[0]: name for tensor in part}
    files = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": index},
        "config.json": config(a),
        "generation_config.json": {
            "bos_token_id": a.vocab - 1,
            "eos_token_id": a.vocab - 1,
            "do_sample": False,
        },
        "tokenizer.json": tokenizer(a.vocab),
        "tokenizer_config.json": {
            "eos_token": "<|endoftext|>",
            "model_max_length": 32768,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for file, value in files.items():
        (a.dir / file).write_text(json.dumps(value), encoding="utf-8")
    print(f"{a.dir}: {total / 1e9:.2f} GB in {len(parts)} files")


def main(argv: list[str] | None = None) -> None:
    """Reads the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("dir", type=Path)
    add_geometry(p)
    make(p.parse_args(argv))


def add_geometry(p: argparse.ArgumentParser) -> None:
    """The options of the geometry; their defaults are Qwen3-30B-A3B's, with 8 layers."""
    defaults = {
        "layers": 8,
        "hidden": 2048,
        "inter": 768,
        "experts": 128,
        "top-k": 8,
        "heads": 32,
        "kv-heads": 4,
        "head-dim": 128,
        "vocab": 151936,
        "seed": 0,
    }
    for name, value in defaults.items():
        p.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes the model of make_synthetic.py as a GGUF file: the same numbers, quantised by ggml.

    python benchmarks/e2e/make_synthetic_gguf.py FILE.gguf --type q4_0 [--layers 8]

The type is used for every matrix, embedding and output included; router and norms are fp32, as in
published files. Needs the package gguf and llama-cpp-python (see CPUMOE_PEER_PYTHON in
docs/benchmarks.md). One tensor is held in memory.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import make_synthetic as synthetic
import numpy as np

from cpumoe.bench.peers import load_file

_ROWS = 4096  # rows quantised at a time and thread

# GGUF's file types by our names of the tensor types (llama.cpp's enum llama_ftype).
_FILE_TYPES = {"fp32": 0, "fp16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32, "mxfp4": 38}
_FILE_TYPES |= {"q4_k": 14, "q6_k": 18}

Plan = tuple[str, list[str], tuple[int, ...], bool]
"""GGUF name, names of the parts below each other, shape, and whether it is stored as fp32."""


def plan(a: argparse.Namespace) -> list[Plan]:
    """All tensors of the file."""
    shapes = {name: shape for name, shape, _ in synthetic.tensors(a)}

    def one(target: str, source: str, exact: bool = False) -> Plan:
        return target, [source], shapes[source], exact

    result = [
        one("token_embd.weight", "model.embed_tokens.weight"),
        one("output.weight", "lm_head.weight"),
        one("output_norm.weight", "model.norm.weight", True),
    ]
    for layer in range(a.layers):
        to, source = f"blk.{layer}", f"model.layers.{layer}"
        result += [
            one(f"{to}.attn_norm.weight", f"{source}.input_layernorm.weight", True),
            one(f"{to}.attn_q.weight", f"{source}.self_attn.q_proj.weight"),
            one(f"{to}.attn_k.weight", f"{source}.self_attn.k_proj.weight"),
            one(f"{to}.attn_v.weight", f"{source}.self_attn.v_proj.weight"),
            one(f"{to}.attn_output.weight", f"{source}.self_attn.o_proj.weight"),
            one(f"{to}.attn_q_norm.weight", f"{source}.self_attn.q_norm.weight", True),
            one(f"{to}.attn_k_norm.weight", f"{source}.self_attn.k_norm.weight", True),
            one(f"{to}.ffn_norm.weight", f"{source}.post_attention_layernorm.weight", True),
            one(f"{to}.ffn_gate_inp.weight", f"{source}.mlp.gate.weight", True),
        ]
        for part in ("gate", "up", "down"):
            names = [f"{source}.mlp.experts.{e}.{part}_proj.weight" for e in range(a.experts)]
            shape = (a.experts, *shapes[names[0]])
            result.append((f"{to}.ffn_{part}_exps.weight", names, shape, False))
    return result


class Numbers:
    """The values of make_synthetic.py's tensors, as fp32 rows."""

    def __init__(self, a: argparse.Namespace) -> None:
        """Draws the pattern."""
        tensors = list(synthetic.tensors(a))
        self._pattern = synthetic.Pattern(a.seed)
        self._places = synthetic.places(tensors)
        self._tensors = {name: (shape, deviation) for name, shape, deviation in tensors}

    def rows(self, names: list[str]) -> Iterator[Any]:
        """At most _ROWS rows [n, K] at a time, fp32, of the tensors below each other."""
        for name in names:
            shape, deviation = self._tensors[name]
            count, k = math.prod(shape[:-1]), shape[-1]
            for first in range(0, count, _ROWS):
                part = min(_ROWS, count - first)
                place = self._places[name] + first * k
                raw = b"".join(self._pattern.pieces(place, part * k, deviation))
                bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
                yield bits.view(np.float32).reshape(part, k)


def metadata(writer: Any, a: argparse.Namespace, type_: str) -> None:
    """The keys that llama.cpp and cpumoe read."""
    config = synthetic.config(a)
    writer.add_name("synthetic")
    writer.add_file_type(_FILE_TYPES[type_])
    writer.add_quantization_version(2)
    writer.add_block_count(a.layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(a.hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(a.inter)
    writer.add_head_count(a.heads)
    writer.add_head_count_kv(a.kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(a.experts)
    writer.add_expert_used_count(a.top_k)
    writer.add_vocab_size(a.vocab)
    words = list(synthetic.tokenizer(a.vocab)["model"]["vocab"])  # type: ignore[index]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([1] * (a.vocab - 1) + [3])
    writer.add_token_merges(["a b"])  # llama.cpp asks for one; "ab" is no token
    writer.add_eos_token_id(a.vocab - 1)
    writer.add_bos_token_id(a.vocab - 1)
    writer.add_add_bos_token(False)


def make(a: argparse.Namespace) -> None:
    """Writes the file a.file."""
    import gguf

    ggml = load_file("_ggml")
    folder = ggml.package_folder()
    if folder is None:
        sys.exit("make_synthetic_gguf: llama-cpp-python is missing; see CPUMOE_PEER_PYTHON")
    library, type_ = ggml.Library(folder), ggml.TYPES[a.type]
    block = library.block(type_)
    widths = (a.hidden, a.inter, a.heads * a.head_dim)
    if any(width % block for width in widths):
        sys.exit(f"make_synthetic_gguf: {a.type} has blocks of {block}; got rows of {widths}")
    tensors = plan(a)
    sizes = [
        4 * math.prod(s) if exact else math.prod(s[:-1]) * library.row_size(type_, s[-1])
        for _, _, s, exact in tensors
    ]
    a.file.parent.mkdir(parents=True, exist_ok=True)
    synthetic.require_space(a.file.parent, sum(sizes))
    writer = gguf.GGUFWriter(str(a.file), "qwen3moe")
    metadata(writer, a, a.type)
    for (name, _, shape, exact), size in zip(tensors, sizes, strict=True):
        if exact or a.type == "fp32":
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size)
        else:
            stored = (*shape[:-1], library.row_size(type_, shape[-1]))
            raw = gguf.GGMLQuantizationType(type_)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    numbers, progress = Numbers(a), synthetic.Progress(sum(sizes))
    with ThreadPoolExecutor() as pool:
        for (_, names, shape, exact), size in zip(tensors, sizes, strict=True):
            kind = ggml.F32 if exact else type_
            parts = pool.map(lambda rows, t=kind: library.quantize(t, rows), numbers.rows(names))
            data = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
            assert data.nbytes == size, shape
            writer.write_tensor_data(data)
            progress.add(size)
    writer.close()
    synthetic.forget(a.file)
    print(f"{a.file}: {sum(sizes) / 1e9:.2f} GB")


def main(argv: list[str] | None = None) -> None:
    """Reads the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("file", type=Path)
    p.add_argument("--type", choices=sorted(_FILE_TYPES), default="q4_0", help="default q4_0")
    synthetic.add_geometry(p)
    make(p.parse_args(argv))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What each weight format and activation class costs a model in quality, on one text.

python benchmarks/quality.py models/tiny-stories-moe --text models/tiny-stories-moe/heldout.txt \
    --window 256 --json quality.json

Each cell compares the checkpoint as published with a copy in one format, run in one activation
class: perplexities, KL divergence and agreement as `cpumoe eval` defines them. Copies in formats of
`cpumoe quantize` are written to a temporary directory. Those in GGUF types are made in memory by
ggml's own quantiser, from a libggml-base.so (--ggml; part of the package llama-cpp-python);
without one they are left out, and the output says so. As in llama.cpp, matrices whose inputs are no
multiple of 256 take a type with smaller blocks instead of a K type.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cpumoe
from cpumoe import _core, quantize
from cpumoe.bench.result import commit, machine_facts, write_json
from cpumoe.checkpoint import TensorRef
from cpumoe.engine.evaluate import Evaluator
from cpumoe.models.spec import Linear, ModelSpec
from cpumoe.quantize.source import read_rows

WRITTEN = (
    "int8_g128",
    "int8_row",
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_row",
    "mxfp4",
    "u2_g64",
)
# name -> (ggml's number, inputs and bytes of a block, type of matrices that have no whole blocks)
GGML = {
    "q8_0": (8, 32, 34, ""),
    "q4_0": (2, 32, 18, ""),
    "q5_0": (6, 32, 22, ""),
    "q4_k": (12, 256, 144, "q5_0"),
    "q6_k": (14, 256, 210, "q8_0"),
}
CLASSES = ("fp32", "int8")
_LINEARS = (
    "q",
    "k",
    "v",
    "o",
    "q_a",
    "gate",
    "up",
    "down",
    "shared_gate",
    "shared_up",
    "shared_down",
)
_EXPERTS = ("expert_gate", "expert_up", "expert_down")


class Ggml:
    """ggml's own quantiser, by name of the type; sums up squared errors as it goes."""

    def __init__(self, library: Path, name: str) -> None:
        self.name, self.error, self.power, self.bytes, self.elements = name, 0.0, 0.0, 0, 0
        self.run = ctypes.CDLL(str(library)).ggml_quantize_chunk
        self.run.restype = ctypes.c_size_t
        self.run.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
        self.run.argtypes += [ctypes.c_void_p]

    def __call__(self, w: Any) -> cpumoe.Weight:
        """The matrix in the type, or in the one that stands in for it."""
        n, k = w.shape
        name = self.name if k % GGML[self.name][1] == 0 else GGML[self.name][3]
        number, inputs, size, _ = GGML[name]
        x = np.ascontiguousarray(read_rows(w, 0, n))
        out = np.empty((n, k // inputs * size), np.uint8)
        done = self.run(number, x.ctypes.data, out.ctypes.data, 0, n, k, None)
        assert done == out.nbytes, f"ggml wrote {done} bytes, not {out.nbytes}"
        made = cpumoe.Weight(out, format=name, shape=(n, k))
        self.error += float(np.square(made.decode() - x, dtype=np.float64).sum())
        self.power += float(np.square(x, dtype=np.float64).sum())
        self.bytes, self.elements = self.bytes + out.nbytes, self.elements + n * k
        return made


def replaced(part: Any, make: Ggml) -> Any:
    """A spec's dataclass with its projections' weights replaced."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name in _LINEARS and isinstance(value, Linear):
            changes[field.name] = dataclasses.replace(value, w=make(value.w))
        elif field.name in _EXPERTS:
            changes[field.name] = tuple(make(w) for w in value)
        elif field.name in ("attn", "ffn", "latent") and value is not None:
            changes[field.name] = replaced(value, make)
        elif field.name == "layers":
            changes[field.name] = tuple(replaced(layer, make) for layer in value)
    return dataclasses.replace(part, **changes)


def with_spec(path: Path, spec: ModelSpec, executor: _core.Executor) -> cpumoe.Model:
    """The model at `path` with other weights."""
    model = cpumoe.load(path, executor=executor)
    model.spec, model.decoder = spec, _core.Decoder(spec, executor)
    return model


def score(
    base: cpumoe.Model, other: cpumoe.Model, text: str, window: int, tokens: int | None
) -> Any:
    """Figures of the comparison."""
    evaluator = Evaluator(base, text, other=other, window=window, tokens=tokens)
    for _ in evaluator.run():
        pass
    return evaluator.result.figures()


def variants(
    path: Path, base: cpumoe.Model, names: list[str], library: Path | None, work: Path
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(format, facts, function of the class that gives the model) of each format."""

    def loaded(where: Path) -> Any:
        return lambda c: cpumoe.load(where, activations=c, executor=base.executor)

    for name in names:
        if name in GGML:
            if library is None:
                print(f"{name}: left out, for want of --ggml", file=sys.stderr)
                continue
            make = Ggml(library, name)
            spec = replaced(base.spec, make)
            facts = {
                "weight_error": (make.error / make.power) ** 0.5,
                "bits": 8 * make.bytes / make.elements,
            }

            def in_memory(c: str, spec: ModelSpec = spec) -> cpumoe.Model:
                return with_spec(path, dataclasses.replace(spec, act_class=c), base.executor)  # type: ignore[arg-type]

            yield name, facts, in_memory
            continue
        made = quantize.quantize_model(path, work / name, format=name)
        all_ = made.classes["all"]
        facts = {"weight_error": all_.error, "bits": 8 * all_.bytes / all_.elements}
        yield name, facts, loaded(work / name)


def published_format(spec: ModelSpec) -> str:
    """Format of the weights as they come."""
    o = spec.layers[0].attn.o.w
    return o.format if isinstance(o, TensorRef) else str(o.format)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One cell for each format and class."""
    text = arguments.text.read_text(encoding="utf-8")
    base = cpumoe.load(arguments.model, activations="fp32")
    cells: list[dict[str, Any]] = []
    names = arguments.formats.split(",") if arguments.formats else [*WRITTEN, *GGML]
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        for name, facts, load in variants(arguments.model, base, names, arguments.ggml, Path(work)):
            for activation in CLASSES:
                found = score(base, load(activation), text, arguments.window, arguments.tokens)
                cell = {"format": name, "activation": activation, **facts, **found}
                cells.append(cell)
                print(line(cell), flush=True)
    return cells


def line(cell: dict[str, Any]) -> str:
    """A cell as a row of a table."""
    change, error = 100 * cell["change"], 100 * (cell["change_se"] or 0)
    return (
        f"| {cell['format']} | {cell['bits']:.2f} | {100 * cell['weight_error']:.2f} % | "
        f"{cell['activation']} | {cell['other_perplexity']:.4f} | {change:+.3f} ± {error:.3f} % | "
        f"{cell['kl']:.2e} | {100 * cell['agreement']:.2f} % |"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--formats", help="names with commas; default: all")
    parser.add_argument("--ggml", type=Path, help="libggml-base.so")
    parser.add_argument("--work", type=Path, help="where temporary copies go")
    parser.add_argument("--json", default="", help="file to write; - is standard output")
    arguments = parser.parse_args()
    cells = measure(arguments)
    if arguments.json:
        words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
        command = shlex.join(["python", "benchmarks/quality.py", *words])
        head = {"kind": "quality", "commit": commit(), "command": command}
        model = {
            "model": arguments.model.resolve().name,
            "text": arguments.text.name,
            "window": arguments.window,
            "published": published_format(cpumoe.load(arguments.model).spec),
        }
        write_json({**head, "machine": machine_facts(), **model, "cells": cells}, arguments.json)


if __name__ == "__main__":
    main()

"""Peer: llama.cpp's CPU back end (ggml), from the shared libraries that llama-cpp-python ships.

`--peer llama_cpp` runs the type that is, or is nearest to, our format; `--peer llama_cpp:q4_k` any
other. Weights are random, quantised by ggml itself, so its result is compared with float64 on its
own decoded weights. Both ways that llama.cpp stores weights are tried, `plain` and `repack` (rows
interleaved for this CPU, its default where a type has it), and the faster one for the number of
tokens is timed. The router is not timed. CPUMOE_PEER_PYTHON names the interpreter that has
llama-cpp-python, where this one lacks it.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import numpy as np

from cpumoe import Error
from cpumoe.bench.peers import Stored, load_file

ggml = load_file("_ggml")

_POOL = 1 << 22  # elements quantised per matrix; their rows are repeated
_WARM_TOKENS = 4  # of the calls before a timed one, as many as ours get
_WARM_INTER = 256  # intermediate features of that small layer: one block of the widest type
_PAUSE = 0.03  # seconds until the OpenMP threads have stopped spinning for work
_TRIALS = 7

# Our format -> the type that llama.cpp's users would choose for it, where the names differ.
_NEAREST = {
    r"gguf_mxfp4": "mxfp4",
    r"(int4|u4|u4_zp|gptq4|gptq4_v2|awq4)_\w+": "q4_0",
    r"(int8|u8|u8_zp|gptq8|gptq8_v2)_\w+": "q8_0",
    r"fp8_\w+": "q8_0",
    r"(u3|u3_zp)_\w+": "q3_k",
    r"(u2|u2_zp)_\w+": "q2_k",
}


def type_name(format: str) -> str | None:
    """ggml's type for our format, by our names; None where there is none.

    Example:
        >>> type_name("q4_k"), type_name("int4_g128"), type_name("nothing")
        ('q4_k', 'q4_0', None)
    """
    if format in ggml.TYPES:
        return format
    found = (name for pattern, name in _NEAREST.items() if re.fullmatch(pattern, format))
    return next(found, None)


class Matrices:
    """One of a layer's fused matrices, decoded expert by expert: matrices[e] is fp32 [N, K]."""

    def __init__(self, layer: Any, *names: str) -> None:
        """The matrices `names` of a plain layer, one below the other."""
        self._layer, self._names = layer, names

    def __getitem__(self, expert: int) -> Any:
        return np.concatenate([self._layer.expert(name, expert) for name in self._names])


class Peer:
    """One layer of experts run by ggml. See `cpumoe.bench.peers.Peer` for the interface."""

    name = "llama_cpp"

    def __init__(self, option: str = "") -> None:
        """option: one of ggml's types instead of the one that suits our format."""
        self._option = option
        self._library: Any = None
        self._layers: dict[str, Any] = {}
        self._small: dict[str, Any] = {}
        self._graphs: dict[tuple[str, int, bool], Any] = {}
        self._best: dict[int, str] = {}

    def available(self) -> str | None:
        """Why it cannot run here, or None."""
        if self._option and self._option not in ggml.TYPES:
            return f"no type {self._option!r}. Write one of {', '.join(ggml.TYPES)}"
        folder = ggml.package_folder()
        if folder is None:
            return (
                "no llama-cpp-python. Install it, or name an interpreter that has it in "
                "CPUMOE_PEER_PYTHON"
            )
        try:
            self._library = ggml.Library(folder)
        except (OSError, AttributeError) as error:
            return f"{error}. Install llama-cpp-python 0.3.36 or newer, built with shared libraries"
        version = re.search(
            r"__version__ = .([^'\"]*)", (folder / "__init__.py").read_text(encoding="utf-8")
        )
        self._version = version[1] if version else "unknown"
        return None

    def prepare(self, weights: Any, small: Any, threads: int, memory: int) -> None:
        """Makes the layer in ggml's type, plain and, if `memory` bytes allow, repacked.

        Raises cpumoe.Error where ggml has no such type or cannot cut this shape into its blocks.
        """
        self.release()
        shape = weights.shape
        name = self._option or type_name(weights.format.name)
        if name is None:
            raise Error(f"bench: llama_cpp has no type for {weights.format.name}: name one (:q4_0)")
        self._type_name, self._type = name, ggml.TYPES[name]
        block = self._library.block(self._type)
        if shape.hidden % block or shape.inter % block:
            raise Error(
                f"bench: llama_cpp cuts rows into blocks of {block} for {name}; {shape.name} has "
                f"{shape.hidden} and {shape.inter} features. Choose another type"
            )
        if shape.activation not in ("silu", "swiglu_oai"):
            raise Error(f"bench: llama_cpp builds no MoE block with {shape.activation}")
        self._shape = replace(shape, layout="rows", interleaved=False)
        self._library.backend_cpu_set_n_threads(self._library.backend, threads)
        small_shape = replace(self._shape, inter=min(_WARM_INTER, shape.inter))
        wanted = 3 * shape.experts * self._library.row_size(self._type, shape.hidden) * shape.inter
        for variant in ("plain", "repack"):
            if variant == "repack" and wanted > memory:
                continue
            layer = self._layer(self._shape, variant)
            if layer is not None:
                self._layers[variant] = layer
                self._small[variant] = self._layer(small_shape, variant)

    def _layer(self, shape: Any, variant: str) -> Any:
        """A filled layer, or None where the type has no such variant on this CPU."""
        repacked = variant == "repack"
        layer = ggml.Layer(self._library, shape, self._type, repacked=repacked, huge_pages=True)
        if not layer.usable:
            layer.release()
            return None
        rng = np.random.default_rng(0)
        for name, (n, k) in {
            "up": (shape.inter, shape.hidden),
            "gate": (shape.inter, shape.hidden),
            "down": (shape.hidden, shape.inter),
        }.items():
            rows = max(1, min(_POOL // k, n * shape.experts)) | 1  # odd: experts are not alike
            pool = rng.standard_normal((rows, k), dtype=np.float32) * np.float32(k**-0.5)
            layer.set(name, _repeat(self._library.quantize(self._type, pool), n * shape.experts))
            if shape.bias:
                bias = rng.standard_normal((shape.experts, n), dtype=np.float32) * np.float32(0.1)
                layer.set(f"{name}_bias", bias)
                layer.biases[name] = bias
        return layer

    def stored(self) -> Stored:
        """Its own weights, for the check."""
        layer, lib = self._layers["plain"], self._library
        shape = self._shape
        size = lib.row_size(self._type, shape.hidden) * 2 * shape.inter
        size += lib.row_size(self._type, shape.inter) * shape.hidden
        arrays: dict[str, Any] = {
            "gate_up": Matrices(layer, "gate", "up"),
            "down": Matrices(layer, "down"),
        }
        if shape.bias:
            both = [layer.biases["gate"], layer.biases["up"]]
            arrays["gate_up_bias"] = np.concatenate(both, axis=1)
            arrays["down_bias"] = layer.biases["down"]
            size += 4 * (2 * shape.inter + shape.hidden)
        return Stored(shape, arrays, size, ggml.rounding(lib.activation_type(self._type)))

    def settle(self, x: Any, ids: Any, scores: Any) -> dict[str, Any]:
        """Chooses the faster variant for this number of tokens, by runs on other experts each."""
        times: dict[str, float] = {}
        for variant in self._layers:
            seconds: list[float] = []
            while len(seconds) < _TRIALS and sum(seconds) < 2:
                moved = (ids + len(seconds) * self._shape.top_k) % self._shape.experts
                seconds.append(self._timed(variant, x, moved, scores)[0])
            times[variant] = min(seconds)
        best = min(times, key=lambda variant: times[variant])
        self._best[ids.shape[0]] = best
        for other in [key for key in self._graphs if key[0] != best]:
            self._graphs.pop(other).release()
        return {
            "version": self._version,
            "format": self._type_name,
            "variant": best,
            "repack": "repack" in self._layers,
            "cpu": self._library.features,
            "pages": "huge",
            "trials_s": times,
        }

    def _graph(self, variant: str, tokens: int, small: bool = False) -> Any:
        """The graph, made once; those for other numbers of tokens are freed."""
        key = (variant, tokens, small)
        if key not in self._graphs:
            for old in [k for k in self._graphs if k[2] == small and k[1] != tokens]:
                self._graphs.pop(old).release()
            layer = (self._small if small else self._layers)[variant]
            self._graphs[key] = ggml.Graph(layer, tokens)
        return self._graphs[key]

    def _timed(self, variant: str, x: Any, ids: Any, scores: Any) -> tuple[float, Any]:
        x = np.asarray(x, np.float32)
        few = min(_WARM_TOKENS, len(x))
        graph = self._graph(variant, len(x))
        warm = self._graph(variant, few, small=True)
        warm.load(x[:few], ids[:few], scores[:few])
        graph.load(x, ids, scores)
        for _ in range(2):
            warm.compute()
        start = time.perf_counter()
        graph.compute()
        seconds = time.perf_counter() - start
        time.sleep(_PAUSE)
        return seconds, graph.result()

    def run(self, x: Any, ids: Any, scores: Any) -> tuple[float, Any]:
        """(seconds, output [T, H] in float32) of one call; copying inputs is not timed."""
        return self._timed(self._best[ids.shape[0]], x, ids, scores)

    def release(self) -> None:
        """Lets go of the weights and graphs."""
        for held in (*self._graphs.values(), *self._layers.values(), *self._small.values()):
            held.release()
        self._graphs, self._layers, self._small, self._best = {}, {}, {}, {}

    def roundoff(self, tokens: int) -> float:
        """Intermediates are fp32."""
        return 2.0**-24


def _repeat(rows: Any, count: int) -> Any:
    """The rows [n, bytes] over and over, `count` of them."""
    out = np.empty((count, rows.shape[1]), np.uint8)
    for at in range(0, count, len(rows)):
        part = out[at : at + len(rows)]
        part[:] = rows[: len(part)]
    return out

"""ggml, the tensor library of llama.cpp, through ctypes: one layer of experts as a graph.

Only the library's public C functions are called. It aborts the process on arguments it does not
like, so whatever is passed here has been checked before.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

F32, I32 = 0, 26
TYPES = {
    "fp32": F32,
    "fp16": 1,
    "q4_0": 2,
    "q5_0": 6,
    "q8_0": 8,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "iq4_nl": 20,
    "iq4_xs": 23,
    "bf16": 30,
    "mxfp4": 39,
    "nvfp4": 40,
}
"""Our names of ggml's types. q4_1 and q5_1 are left out: ggml keeps sums of activations in fp16 for
them, which the error bound does not model."""

_P, _I, _N, _F, _B = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_bool
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_free": (None, [_P]),
    "ggml_tensor_overhead": (ctypes.c_size_t, []),
    "ggml_graph_overhead": (ctypes.c_size_t, []),
    "ggml_nbytes": (ctypes.c_size_t, [_P]),
    "ggml_row_size": (ctypes.c_size_t, [_I, _N]),
    "ggml_new_tensor_2d": (_P, [_P, _I, _N, _N]),
    "ggml_new_tensor_3d": (_P, [_P, _I, _N, _N, _N]),
    "ggml_set_input": (None, [_P]),
    "ggml_set_output": (None, [_P]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_add_id": (_P, [_P, _P, _P, _P]),
    "ggml_swiglu_split": (_P, [_P, _P, _P]),
    "ggml_swiglu_oai": (_P, [_P, _P, _P, _F, _F]),
    "ggml_mul": (_P, [_P, _P, _P]),
    "ggml_add": (_P, [_P, _P, _P]),
    "ggml_view_2d": (_P, [_P, _P, _N, _N, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_quantize_chunk": (ctypes.c_size_t, [_I, _P, _P, _N, _N, _N, _P]),
    "ggml_gallocr_new": (_P, [_P]),
    "ggml_gallocr_alloc_graph": (_B, [_P, _P]),
    "ggml_gallocr_free": (None, [_P]),
    "ggml_backend_free": (None, [_P]),
    "ggml_backend_graph_compute": (_I, [_P, _P]),
    "ggml_backend_get_device": (_P, [_P]),
    "ggml_backend_dev_backend_reg": (_P, [_P]),
    "ggml_backend_dev_supports_op": (_B, [_P, _P]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
    "ggml_backend_cpu_buffer_type": (_P, []),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_set_usage": (None, [_P, _I]),
    "ggml_backend_buffer_get_base": (_P, [_P]),
    "ggml_backend_buffer_get_size": (ctypes.c_size_t, [_P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_tensor_get": (None, [_P, _P, ctypes.c_size_t, ctypes.c_size_t]),
}
_CPU_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, _I]),
}
_CPU_FEATURES = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "sve")
_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
_MADV_HUGEPAGE = 14


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", _P), ("no_alloc", _B)]


class _TypeTraits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", _N),
        ("interleave", _N),
        ("size", ctypes.c_size_t),
        ("quantized", _B),
        ("to_float", _P),
        ("from_float", _P),
    ]


class _CpuTypeTraits(ctypes.Structure):
    _fields_ = [("from_float", _P), ("vec_dot", _P), ("vec_dot_type", _I), ("rows", _N)]


def package_folder() -> Path | None:
    """Folder of the package llama_cpp, or None.

    CPUMOE_PEER_PYTHON names the interpreter that has it; without it, this one is asked. Only its
    shared libraries are used: they are loaded here, whichever interpreter they were installed for.
    """
    python = os.environ.get("CPUMOE_PEER_PYTHON")
    if not python:
        found = importlib.util.find_spec("llama_cpp")
        return Path(found.origin).parent if found and found.origin else None
    code = "import importlib.util as u; s = u.find_spec('llama_cpp'); print(s.origin if s else '')"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return Path(done.stdout.strip()).parent if done.stdout.strip() else None


class Library:
    """The loaded library; every function of its public interface that is used is an attribute."""

    def __init__(self, folder: Path) -> None:
        """Loads from the folder of the package llama_cpp. Raises OSError or AttributeError."""
        base = ctypes.CDLL(str(folder / "lib/libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "lib/libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        for library, signatures in ((base, _SIGNATURES), (cpu, _CPU_SIGNATURES)):
            for name, (result, arguments) in signatures.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)
        base.ggml_init.restype, base.ggml_init.argtypes = _P, [_InitParams]
        base.ggml_log_set.argtypes = [_P, _P]
        base.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
        cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTypeTraits)
        self._base, self._cpu = base, cpu
        self._quiet = ctypes.CFUNCTYPE(None, _I, ctypes.c_char_p, _P)(lambda *_: None)
        base.ggml_log_set(self._quiet, None)
        self.backend: int = self.backend_cpu_init()
        self.features = [
            name for name in _CPU_FEATURES if getattr(cpu, f"ggml_cpu_has_{name}", lambda: 0)()
        ]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self, tensors: int) -> int:
        """A ggml context for so many tensors and two graphs, without data."""
        size = tensors * self.tensor_overhead() + 2 * self.graph_overhead()
        made: int = self._base.ggml_init(_InitParams(size, None, True))
        return made

    def block(self, type_: int) -> int:
        """Elements of a block of the type."""
        return int(self._base.ggml_get_type_traits(type_).contents.block)

    def activation_type(self, type_: int) -> int:
        """What the CPU back end rounds activations to before a product with the type."""
        return int(self._cpu.ggml_get_type_traits_cpu(type_).contents.vec_dot_type)

    def quantize(self, type_: int, rows: Any) -> Any:
        """Bytes [n, row size] of fp32 rows [n, K], by ggml's own quantiser."""
        n, k = rows.shape
        out = np.zeros((n, self.row_size(type_, k)), np.uint8)
        rows = np.ascontiguousarray(rows, np.float32)
        if type_ == F32:
            return rows.view(np.uint8)
        self.quantize_chunk(type_, rows.ctypes.data, out.ctypes.data, 0, n, k, None)
        return out

    def decode(self, type_: int, data: Any, elements: int) -> Any:
        """fp32 values [elements] of bytes, by ggml's own decoder."""
        if type_ == F32:
            return data.view(np.float32)
        out = np.empty(elements, np.float32)
        pointer = self._base.ggml_get_type_traits(type_).contents.to_float
        to_float = ctypes.CFUNCTYPE(None, _P, _P, _N)(pointer)
        to_float(data.ctypes.data, out.ctypes.data, elements)
        return out

    def repack_buffer_type(self) -> int | None:
        """The CPU back end's buffer type that reorders weights, as llama.cpp uses by default."""
        device = self.backend_get_device(self.backend)
        registry = self.backend_dev_backend_reg(device)
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        found = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device)
        at = 0
        while found and found[at]:
            if b"REPACK" in self.backend_buft_name(found[at]):
                return int(found[at])
            at += 1
        return None


class Layer:
    """Weights of one layer in one buffer, and graphs over them."""

    def __init__(
        self, library: Library, shape: Any, type_: int, *, repacked: bool, huge_pages: bool
    ) -> None:
        """Allocates; `usable` says whether the back end runs this type in this buffer."""
        self.library, self.shape, self.type = library, shape, type_
        lib, h, i, e = library, shape.hidden, shape.inter, shape.experts
        self.biases: dict[str, Any] = {}
        self._context: Any = lib.context(16)
        sizes = {"up": (h, i), "gate": (h, i), "down": (i, h)}
        self.tensors = {
            name: lib.new_tensor_3d(self._context, type_, k, n, e) for name, (k, n) in sizes.items()
        }
        kind = lib.repack_buffer_type() if repacked else lib.backend_cpu_buffer_type()
        self._buffer, self._biases, self._bias_context = None, None, None
        self.usable = kind is not None
        if not self.usable:
            return
        self._buffer = lib.backend_alloc_ctx_tensors_from_buft(self._context, kind)
        if not self._buffer:
            raise MemoryError(f"ggml: no memory for a layer of {shape.name}")
        lib.backend_buffer_set_usage(self._buffer, _WEIGHTS)
        if huge_pages:
            self._advise()
        if shape.bias:
            self._bias_context = lib.context(8)
            for name, (_, n) in sizes.items():
                tensor = lib.new_tensor_2d(self._bias_context, F32, n, e)
                self.tensors[f"{name}_bias"] = tensor
            self._biases = lib.backend_alloc_ctx_tensors_from_buft(
                self._bias_context, lib.backend_cpu_buffer_type()
            )
        probe = Graph(self, 1, allocate=False)
        device = lib.backend_get_device(lib.backend)
        self.usable = all(lib.backend_dev_supports_op(device, p) for p in probe.products)
        probe.release()

    def _advise(self) -> None:
        """Huge pages, as our weights have; before anything is written."""
        start = self.library.backend_buffer_get_base(self._buffer)
        end = start + self.library.backend_buffer_get_size(self._buffer)
        page = os.sysconf("SC_PAGE_SIZE")
        start = -(-start // page) * page
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = [_P, ctypes.c_size_t, _I]
        libc.madvise(start, (end - start) // page * page, _MADV_HUGEPAGE)

    def set(self, name: str, data: Any) -> None:
        """Copies the whole tensor `name` from contiguous bytes; a repacking buffer reorders it."""
        assert data.nbytes == self.library.nbytes(self.tensors[name])
        self.library.backend_tensor_set(self.tensors[name], data.ctypes.data, 0, data.nbytes)

    def expert(self, name: str, index: int) -> Any:
        """fp32 [N, K] of one expert's matrix. Not from a repacking buffer."""
        h, i = self.shape.hidden, self.shape.inter
        n, k = (h, i) if name == "down" else (i, h)
        data = np.empty(n * self.library.row_size(self.type, k), np.uint8)
        self.library.backend_tensor_get(
            self.tensors[name], data.ctypes.data, index * data.nbytes, data.nbytes
        )
        return self.library.decode(self.type, data, n * k).reshape(n, k)

    def release(self) -> None:
        """Frees the weights."""
        for buffer in (self._buffer, self._biases):
            if buffer:
                self.library.backend_buffer_free(buffer)
        for context in (self._context, self._bias_context):
            if context:
                self.library.free(context)
        self._buffer = self._biases = self._context = self._bias_context = None


class Graph:
    """gate, up, activation, down, weighting and k additions, as llama.cpp builds a MoE block."""

    def __init__(self, layer: Layer, tokens: int, *, allocate: bool = True) -> None:
        """A graph for so many tokens."""
        lib, shape, t = layer.library, layer.shape, layer.tensors
        h, k = shape.hidden, shape.top_k
        self._library, self._tokens, self._hidden = lib, tokens, h
        c = lib.context(64 + 2 * k)
        self._context: Any = c
        self._x = lib.new_tensor_3d(c, F32, h, 1, tokens)
        self._ids = lib.new_tensor_2d(c, I32, k, tokens)
        self._scores = lib.new_tensor_3d(c, F32, 1, k, tokens)
        for tensor in (self._x, self._ids, self._scores):
            lib.set_input(tensor)

        def product(name: str, x: int) -> int:
            made: int = lib.mul_mat_id(c, t[name], x, self._ids)
            self.products.append(made)
            if shape.bias:
                made = lib.add_id(c, made, t[f"{name}_bias"], self._ids)
            return made

        self.products: list[int] = []
        up, gate = product("up", self._x), product("gate", self._x)
        if shape.activation == "swiglu_oai":
            limit = 3e38 if shape.limit is None else shape.limit
            h_act = lib.swiglu_oai(c, gate, up, shape.alpha, limit)
        else:
            h_act = lib.swiglu_split(c, gate, up)
        down = lib.mul(c, product("down", h_act), self._scores)
        out = lib.view_2d(c, down, h, tokens, 4 * h * k, 0)
        for slot in range(1, k):
            out = lib.add(c, out, lib.view_2d(c, down, h, tokens, 4 * h * k, 4 * h * slot))
        lib.set_output(out)
        self._out, self._allocator, self._graph = out, None, None
        if not allocate:
            return
        self._graph = lib.new_graph(c)
        lib.build_forward_expand(self._graph, out)
        self._allocator = lib.gallocr_new(lib.backend_cpu_buffer_type())
        if not lib.gallocr_alloc_graph(self._allocator, self._graph):
            raise MemoryError("ggml: no memory for the graph")

    def load(self, x: Any, ids: Any, scores: Any) -> None:
        """Copies fp32 x [T, H], int32 ids [T, k] and fp32 scores [T, k] in."""
        for tensor, array, dtype in (
            (self._x, x, np.float32),
            (self._ids, ids, np.int32),
            (self._scores, scores, np.float32),
        ):
            data = np.ascontiguousarray(array, dtype)
            self._library.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def compute(self) -> None:
        """Runs it; what is timed."""
        if self._library.backend_graph_compute(self._library.backend, self._graph) != 0:
            raise RuntimeError("ggml: the graph could not be computed")

    def result(self) -> Any:
        """fp32 [T, H]."""
        out = np.empty((self._tokens, self._hidden), np.float32)
        self._library.backend_tensor_get(self._out, out.ctypes.data, 0, out.nbytes)
        return out

    def release(self) -> None:
        """Frees the graph and its buffers."""
        if self._allocator:
            self._library.gallocr_free(self._allocator)
        if self._context:
            self._library.free(self._context)
        self._allocator = self._context = None


def rounding(activation_type: int) -> Callable[[Any], tuple[Any, Any]]:
    """Error bounds of ggml's rounding of activations [K, M] before a product: (independent, fixed).

    q8_0: blocks of 32 along K, d = amax / 127, codes rounded to nearest (half a step), d kept in
    fp16 (one relative error for a block; below fp16's normal numbers an absolute one).
    q8_K: blocks of 256, d in fp32. bf16, fp16: rounded to nearest. A tie that fp32 arithmetic
    decides the other way adds 127 roundings, 2^-17, to half a step.
    """
    relative = {F32: 0.0, 1: 2.0**-11, 30: 2.0**-8}
    if activation_type in relative:
        unit = relative[activation_type]
        return lambda v: (unit * np.abs(v), np.zeros_like(v))
    block = {8: 32, 15: 256}[activation_type]

    def bounds(v: Any) -> tuple[Any, Any]:
        k, m = v.shape
        top = np.abs(v).reshape(k // block, block, m).max(axis=1, keepdims=True)
        half = np.broadcast_to(top * (0.5 + 2.0**-16) / 127, (k // block, block, m)).reshape(k, m)
        if block == 256:
            return half, np.zeros_like(v)
        return half, 2.0**-11 * (np.abs(v) + half) + 127 * 2.0**-25

    return bounds

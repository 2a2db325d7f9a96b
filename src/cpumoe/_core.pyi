"""Native part of cpumoe: operators, executor and decoder."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import numpy.typing


class Error(ValueError):
    """
    An input that cpumoe refuses: `<where>: <what must hold>; got <values>. <what to do>`.
    """

class Machine:
    """What this computer is. Read-only."""

    @staticmethod
    def probe() -> Machine:
        """Reads CPUID, /proc, /sys and the cgroup; honours CPUMOE_ISA."""

    @staticmethod
    def probe_root(root: str, isa: str = '') -> Machine:
        """The same from another file-system root."""

    @property
    def cpu_name(self) -> str: ...

    @property
    def isa(self) -> list[str]: ...

    @property
    def isa_reason(self) -> str: ...

    @property
    def cores(self) -> list[tuple[int, list[int]]]:
        """[(NUMA node, [logical CPU, ...]), ...], one per physical core."""

    @property
    def nodes(self) -> int: ...

    @property
    def cgroup_cpus(self) -> float: ...

    @property
    def cgroup_memory(self) -> int: ...

    @property
    def memory(self) -> int: ...

    @property
    def memory_available(self) -> int: ...

    @property
    def l1d(self) -> int: ...

    @property
    def l2(self) -> int: ...

    @property
    def l3(self) -> int: ...

    @property
    def page(self) -> int: ...

    @property
    def default_threads(self) -> int: ...

    def as_dict(self) -> dict[str, object]:
        """Every attribute by name; sizes in bytes."""

    def __repr__(self) -> str: ...

class Executor:
    """Worker threads that run the operators. Idle workers sleep."""

    def __init__(self, threads: int | None = None, pin: bool = True, spin_us: int = -1) -> None:
        """
        threads: 1..1024; default CPUMOE_THREADS, else physical cores within affinity mask and
        cgroup quota. pin: bind workers to NUMA nodes. spin_us: microseconds that an idle worker spins
        before it sleeps, -1 for the default. Raises Error.
        """

    @property
    def threads(self) -> int: ...

    @property
    def wakes(self) -> int:
        """Times that a sleeping worker was woken so far."""

    def __repr__(self) -> str: ...

class Probe:
    """Short measurements of this machine's limits."""

    def __init__(self, bytes: int = 0) -> None:
        """
        bytes: size of the buffer that is read; 0: 1 GiB, or a quarter of the available memory
        where that is less. The first measurement allocates it. Raises Error below 1 MiB.
        """

    @property
    def bytes(self) -> int: ...

    def read_gb_per_s(self, executor: Executor) -> float:
        """
        Read bandwidth in GB/s with the executor's threads: one pass, tens of milliseconds.
        """

    def fma_gflop_per_s(self, executor: Executor) -> float:
        """
        Peak of fp32 multiplies and adds in GFLOP/s with the executor's threads, over 20 ms.
        """

class Weight:
    def __init__(self, format: str, shape: Sequence[int], data: object, scales: object | None, zeros: object | None, layout: str, global_scale: Sequence[float]) -> None: ...

    def features(self, first: int, count: int) -> Weight: ...

    def decode(self) -> numpy.typing.NDArray[numpy.float32]: ...

    @property
    def format(self) -> str: ...

    @property
    def layout(self) -> str: ...

    @property
    def shape(self) -> list[int]: ...

    @property
    def nbytes(self) -> int: ...

class Experts:
    @property
    def experts(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def inter(self) -> int: ...

    @property
    def gated(self) -> bool: ...

    @property
    def interleaved(self) -> bool: ...

    @property
    def layout(self) -> str: ...

    @property
    def format(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

def make_experts(*, gate_up: object | None, gate: object | None, up: object | None, down: object | None, gate_up_bias: object | None, gate_bias: object | None, up_bias: object | None, down_bias: object | None, activation: str, alpha: float, limit: float, layout: str, interleaved: bool) -> Experts: ...

def empty_like(x: object, shape: Sequence[int]) -> Any: ...

def moe(x: object, experts: Experts, ids: object, weights: object, out: object, executor: Executor, skip_sentinel: bool, act_class: str) -> None: ...

def linear(x: object, w: object, bias: object | None, layout: str, out: object, executor: Executor, act_class: str) -> None: ...

def route(logits: object, k: int, kind: str, renormalize: bool, norm_eps: float, scale: float, correction: object | None, groups: int, top_groups: int, group_max: bool, ids: object, weights: object) -> None: ...

class Decoder:
    """The whole forward pass of a model, weights in place."""

    def __init__(self, spec: object, executor: object) -> None:
        """
        spec: a cpumoe.models.ModelSpec, kept alive. Raises Error when shapes do not fit.
        """

    def forward(self, segments: Sequence[tuple[KvCache, numpy.typing.NDArray[numpy.int32]]], all: bool = False, tap: Callable[[int, str, numpy.typing.NDArray[numpy.float32]], None] | None = None) -> numpy.typing.NDArray[numpy.float32]:
        """
        segments: [(KvCache, int32 ids [n]), ...]. Appends the tokens to the caches and gives
        fp32 logits [segments, vocab], or [tokens, vocab] with `all`. Releases the GIL.
        tap(layer, site, x): sees a copy of what linear maps are applied to, fp32
        [tokens, width]: site "attention" (q, k, v), "output" (o), "feed_forward"; it must
        not use this decoder. What it raises ends the call.
        Raises Error, with the caches as they were, also when another call uses one of them.
        """

    @property
    def last_weight_bytes(self) -> int:
        """
        Bytes of weights that the last forward() read, each weight counted once.
        """

class KvCache:
    """Keys and values of one sequence; memory grows with use."""

    def __init__(self, decoder: Decoder, capacity: int, kv: str = 'fp16') -> None:
        """capacity: tokens. kv: fp16, bf16 or fp32. Raises Error."""

    @property
    def length(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def bytes_per_token(self) -> int: ...

    def truncate(self, length: int) -> None:
        """
        Forget the tokens from `length` on. Raises Error while a forward() uses the cache.
        """

def kernels() -> list:
    """
    All compiled-in kernels, best first within a room: dicts with room, name, isa; dot also with
    code, layout, act_layout and the tokens per expert it is for (m_min..m_max).
    """

def formats() -> list:
    """
    The table of weight formats: dicts with name, code, the code's block (block_elements of a
    line, block_lines, block_bytes), scale_rows and scale_cols (features and inputs that share a
    scale; 0: no scales, -1: all), zeros (rule of the zero point) and act_class (default,
    where this CPU has kernels for it).
    """

def class_for(format: str, layout: str, activations: str = 'auto') -> str:
    """
    The class of activations that products of this format and layout run in.
    """

def select_dot(format: str, layout: str, tokens: int, activations: str = 'auto') -> tuple:
    """
    (name, why): the dot kernel for an expert with `tokens` tokens, None when there is none; why
    names the candidates before it and what refused them.
    """

def selected() -> dict:
    """Chosen kernel of every other room, by name."""

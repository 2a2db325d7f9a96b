"""The operators: `moe`, `route`, `linear`, and `Experts` built from arrays.

They take any CPU array that speaks DLPack or the buffer protocol (numpy with ml_dtypes bfloat16,
torch, jax, memoryview), read weights where they lie, and release the interpreter lock while they
compute. Letters in shapes: T tokens, H hidden features, I intermediate features, E experts,
k experts per token; `...` stands for any leading dimensions.
"""

from __future__ import annotations

import atexit
import math
import operator
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np

from cpumoe import _core
from cpumoe._arrays import SupportsDLPack, convert_like, empty_like, native, natives, plain
from cpumoe.weight import Weight

A = TypeVar("A", bound=SupportsDLPack)
Weights = SupportsDLPack | Weight | Sequence[SupportsDLPack] | Sequence[Weight]
ActivationClass = Literal["auto", "fp32", "bf16", "int8"]
Activation = Literal["identity", "silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"]
Layout = Literal["rows", "columns"]
RouterKind = Literal["softmax_topk", "topk_softmax", "sigmoid"]

_lock = threading.Lock()
_default: list[_core.Executor] = []


def default_executor() -> _core.Executor:
    """Return the executor that the operators use when none is given, made at its first use.

    Its number of threads is CPUMOE_THREADS, else the physical cores within the affinity mask and
    the cgroup quota.
    """
    if not _default:
        with _lock:
            if not _default:
                _default.append(_core.Executor())
                atexit.register(_default.clear)  # workers end before the interpreter does
    return _default[0]


@lru_cache(maxsize=1)
def machine() -> _core.Machine:
    """Return what this computer is: cores, NUMA nodes, caches (bytes), memory, instruction sets.

    Read once per process from CPUID, /proc, /sys and the cgroup; CPUMOE_ISA limits the instruction
    sets. Raises Error when CPUMOE_ISA names none that this CPU has.

    >>> import cpumoe
    >>> cpumoe.machine().default_threads >= 1
    True
    """
    return _core.Machine.probe()


class Experts:
    """The weights of E experts as views of your arrays: nothing is copied, arrays are kept alive.

    An expert computes `down @ (act(gate @ x + gate_bias) * (up @ x + up_bias)) + down_bias`.
    Without a gate (`up` alone) it computes `down @ act(up @ x + up_bias) + down_bias`.

    Args:
        gate_up: gate and up in one array: [E, 2I, H] (rows) or [E, H, 2I] (columns); gate first,
            then up, unless `interleaved`.
        gate, up: separate arrays [E, I, H] (rows) or [E, H, I] (columns). `up` alone: no gate.
        down: [E, H, I] (rows) or [E, I, H] (columns).
        gate_up_bias, gate_bias, up_bias, down_bias: [E, 2I], [E, I], [E, I], [E, H].
        activation: "silu", "gelu" (erf), "gelu_tanh", "relu", "relu2" (square of relu), "identity"
            or "swiglu_oai": `(u + 1) * g * sigmoid(alpha * g)` as in gpt-oss.
        alpha: slope of swiglu_oai.
        limit: clamps before the activation: gate to at most `limit`, up to +-`limit`.
            None: no clamp. Only with a gate.
        layout: "rows" where the inputs of one output feature are contiguous (torch.nn.Linear),
            "columns" where the features of one input are (gpt-oss and Llama 4 in Transformers).
        interleaved: feature 2i of gate_up is gate i, feature 2i + 1 is up i.

    Every array is fp32, fp16 or bf16 (not necessarily the same one) in CPU memory; weights of other
    formats are passed as `Weight`. In place of a leading expert dimension a list or tuple with one
    array or Weight per expert is fine. Slices are fine as
    long as the last dimension is contiguous. Tensors that require gradients are used detached.

    Raises Error for anything else, with what to change.

    Source: the experts of Mixtral and its successors; clamped form: OpenAI gpt-oss.

    >>> import numpy as np, cpumoe
    >>> gate_up = np.zeros((4, 2 * 16, 8), np.float16)
    >>> cpumoe.Experts(gate_up=gate_up, down=np.zeros((4, 8, 16), np.float16))
    Experts(4 experts, hidden 8, inter 16, fp16, rows)
    """

    __slots__ = ("_native",)

    def __init__(
        self,
        *,
        down: Weights,
        gate_up: Weights | None = None,
        gate: Weights | None = None,
        up: Weights | None = None,
        gate_up_bias: Weights | None = None,
        gate_bias: Weights | None = None,
        up_bias: Weights | None = None,
        down_bias: Weights | None = None,
        activation: Activation = "silu",
        alpha: float = 1.702,
        limit: float | None = None,
        layout: Layout = "rows",
        interleaved: bool = False,
    ) -> None:
        """See the class."""
        self._native = _core.make_experts(
            gate_up=_weights(gate_up),
            gate=_weights(gate),
            up=_weights(up),
            down=_weights(down),
            gate_up_bias=_weights(gate_up_bias),
            gate_bias=_weights(gate_bias),
            up_bias=_weights(up_bias),
            down_bias=_weights(down_bias),
            activation=activation,
            alpha=alpha,
            limit=math.inf if limit is None else limit,
            layout=layout,
            interleaved=interleaved,
        )

    @property
    def experts(self) -> int:
        """Number of experts, E."""
        return self._native.experts

    @property
    def hidden(self) -> int:
        """Hidden features, H."""
        return self._native.hidden

    @property
    def inter(self) -> int:
        """Intermediate features, I."""
        return self._native.inter

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights without biases."""
        return self._native.weight_bytes

    def __repr__(self) -> str:
        """Show the sizes, the format and the layout."""
        n = self._native
        return (
            f"Experts({n.experts} experts, hidden {n.hidden}, inter {n.inter}, {n.format}, "
            f"{n.layout}{', interleaved' if n.interleaved else ''}{'' if n.gated else ', no gate'})"
        )


def moe(
    x: A,
    experts: Experts,
    ids: SupportsDLPack,
    weights: SupportsDLPack,
    *,
    out: A | None = None,
    executor: _core.Executor | None = None,
    skip_sentinel: bool = False,
    activations: ActivationClass = "auto",
) -> A:
    """Return each token's weighted experts: `sum_j weights[t, j] * expert[ids[t, j]](x[t])`.

    Args:
        x: hidden states [..., H]; fp32, fp16 or bf16. T = 0 is fine.
        experts: the experts. Weights are read in place, products and sums are fp32.
        ids: [..., k] int32 or int64, each in [0, E); neither sorted nor distinct.
        weights: [..., k] routing weights; fp32, fp16 or bf16.
        out: where to write, shaped like x (fp32, fp16 or bf16), overlapping neither x nor the
            experts' arrays. Default: a new array of x's library and dtype.
        executor: the threads. Default: one per process. The result does not depend on their number.
        skip_sentinel: the id E is allowed and skipped (expert parallelism: "not on this rank").
        activations: what x and the intermediate are rounded to inside a product. "fp32": not at
            all. "bf16": to bf16, where weights are bf16 or FP8; needs a CPU with avx512_bf16.
            "int8": per token and 32 inputs, where the weights' format has integer products. "auto",
            and weights without such products: each format's default on this CPU, see
            docs/formats.md.

    Returns `out`. Raises Error when shapes, dtypes, devices or ids do not fit, or when this CPU has
    no kernels for the activations asked for.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; experts as in `Experts`.

    >>> import numpy as np, cpumoe
    >>> experts = cpumoe.Experts(up=np.ones((2, 4, 3), np.float32),
    ...                          down=np.ones((2, 3, 4), np.float32), activation="relu")
    >>> x = np.array([[1, 2, 3]], np.float32)
    >>> cpumoe.moe(x, experts, np.array([[0, 1]]), np.array([[0.25, 0.25]], np.float32))
    array([[12., 12., 12.]], dtype=float32)
    """
    if not isinstance(experts, Experts):
        raise _core.Error(
            f"moe: experts must be a cpumoe.Experts; got {type(experts).__name__}. "
            "Build one from your weights"
        )
    workers = _workers(executor, "moe")
    x = _constant(plain(x), "moe", "x")
    target, finish = _target(x, "moe", out, None)
    _core.moe(
        native(x),
        experts._native,
        native(plain(ids)),
        native(_constant(plain(weights), "moe", "weights")),
        target,
        workers,
        skip_sentinel,
        activations,
    )
    result: A = finish()
    return result


def linear(
    x: A,
    w: SupportsDLPack | Weight,
    bias: SupportsDLPack | None = None,
    *,
    layout: Layout = "rows",
    out: A | None = None,
    executor: _core.Executor | None = None,
    activations: ActivationClass = "auto",
) -> A:
    """Return `x @ W.T + bias` with the weight read in place.

    Args:
        x: [..., K]; fp32, fp16 or bf16.
        w: [N, K] (rows) or [K, N] (columns), fp32, fp16 or bf16, used detached; or a `Weight`,
            which knows its layout.
        bias: [N] or None.
        layout: how `w` lies in memory, see `Experts`.
        out: [..., N], apart from the others. Default: a new array of x's library and dtype.
        executor: the threads. Default: one per process.
        activations: as in `moe`.

    Returns `out`. Products and sums are fp32, rounded once to the output's dtype. Raises Error when
    shapes, dtypes or devices do not fit.

    >>> import numpy as np, cpumoe
    >>> cpumoe.linear(np.array([[1, 2]], np.float32), np.array([[3, 4], [5, 6]], np.float32))
    array([[11., 17.]], dtype=float32)
    """
    workers = _workers(executor, "linear")
    x = _constant(plain(x), "linear", "x")
    own = isinstance(w, Weight)
    w = w if isinstance(w, Weight) else _detached(plain(w))
    shape = getattr(w, "shape", ())
    if len(shape) != 2:
        raise _core.Error(
            f"linear: w must have shape [N, K] (rows) or [K, N] (columns); got {tuple(shape)}. "
            "Pass one weight matrix"
        )
    target, finish = _target(x, "linear", out, int(shape[0 if own or layout == "rows" else 1]))
    _core.linear(
        native(x),
        w if own else native(w),
        None if bias is None else native(_detached(plain(bias))),
        layout,
        target,
        workers,
        activations,
    )
    result: A = finish()
    return result


def route(
    logits: A,
    k: int,
    *,
    kind: RouterKind = "softmax_topk",
    renormalize: bool = False,
    norm_eps: float = 0.0,
    scale: float = 1.0,
    correction: SupportsDLPack | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: Literal["top2", "max"] = "top2",
) -> tuple[A, A]:
    """Choose k experts for each token and their weights.

    Args:
        logits: the router's output [..., E]; fp32, fp16 or bf16, finite.
        k: experts per token, at most E.
        kind: "softmax_topk": softmax over all experts, the k largest (Mixtral, Qwen, OLMoE).
            "topk_softmax": the k largest logits, softmax over those (gpt-oss).
            "sigmoid": s = sigmoid(logits), chosen by s + correction, weighted by s (DeepSeek-V3).
        renormalize: divide a token's weights by (their sum + norm_eps); where that is 0 because
            every chosen value underflowed, they are 1 / k each.
        norm_eps: see renormalize; DeepSeek-V3 uses 1e-20.
        scale: multiplies the weights at the end (routed_scaling_factor).
        correction: [E], added when choosing only; with "sigmoid".
        groups, top_groups: experts lie in `groups` equal groups, only the best `top_groups` of them
            are chosen from.
        group_score: what ranks a group: the sum of its two best scores (DeepSeek-V3) or its best
            one (DeepSeek-V2).

    Returns ids [..., k] int32 and weights [..., k] float32 in logits' library, ordered by falling
    score; of equal scores the lower id comes first. Raises Error for NaN or infinite logits and for
    settings that do not fit together.

    Source: DeepSeek-V3 technical report, section 2.1.2; Mixtral of Experts, section 2.1.

    >>> import numpy as np, cpumoe
    >>> ids, weights = cpumoe.route(np.log(np.array([[1, 5, 4]], np.float32)), 2)
    >>> ids, weights.round(3)
    (array([[1, 2]], dtype=int32), array([[0.5, 0.4]], dtype=float32))
    """
    if group_score not in ("top2", "max"):
        raise _core.Error(
            f'route: group_score must be "top2" or "max"; got {group_score!r}. '
            "DeepSeek-V3 uses top2, DeepSeek-V2 max"
        )
    logits = _constant(plain(logits), "route", "logits")
    shape = tuple(getattr(logits, "shape", ()))
    if not shape:
        raise _core.Error(
            f"route: logits must be an array of shape [..., E]; got {type(logits).__name__}. "
            "Pass one logit per expert"
        )
    k = _top_k(k, int(shape[-1]))
    kept = (*(int(n) for n in shape[:-1]), k)
    ids, weights = np.empty(kept, np.int32), np.empty(kept, np.float32)
    _core.route(
        native(logits),
        k,
        kind,
        renormalize,
        norm_eps,
        scale,
        None if correction is None else native(_detached(plain(correction))),
        groups,
        top_groups,
        group_score == "max",
        ids,
        weights,
    )
    return convert_like(logits, ids), convert_like(logits, weights)


def _top_k(k: Any, experts: int) -> int:
    """Check the number of experts per token before anything of that size is allocated."""
    try:
        if isinstance(k, bool):
            raise TypeError
        number = operator.index(k)
    except TypeError:
        raise _core.Error(
            f"route: k must be an integer; got {type(k).__name__}. Pass the experts per token"
        ) from None
    if not 1 <= number <= experts:
        must = f"k must be in [1, {experts}], the number of experts; got {number}"
        raise _core.Error(f"route: {must}. Choose another number")
    return number


def _workers(executor: Any, where: str) -> _core.Executor:
    """Return the executor of a call, the default one for None."""
    if executor is None:
        return default_executor()
    if not isinstance(executor, _core.Executor):
        raise _core.Error(
            f"{where}: executor must be a cpumoe.Executor; got {type(executor).__name__}. "
            "Leave it out for the default one"
        )
    return executor


def _constant(array: Any, where: str, name: str) -> Any:
    """Refuse an input whose gradient somebody may expect."""
    if getattr(array, "requires_grad", False):
        raise _core.Error(
            f"{where}: {name} must not require gradients; got a {type(array).__name__} that does. "
            f"Pass {name}.detach(): no gradients are computed here"
        )
    return array


def _detached(array: Any) -> Any:
    """Weights are constants here: drop a torch tensor's gradient record (same memory)."""
    return array.detach() if getattr(array, "requires_grad", False) else array


def _weights(array: Any) -> Any:
    if array is None or isinstance(array, Weight):
        return array
    if isinstance(array, list | tuple):
        return natives([a if isinstance(a, Weight) else _detached(plain(a)) for a in array])
    return native(_detached(plain(array)))


def _target(x: Any, where: str, out: Any, last: int | None) -> tuple[Any, Any]:
    """Return what the native module writes into, and a function giving it as the caller's array."""
    if out is not None:
        return native(plain(out)), lambda: out
    shape = getattr(x, "shape", None)
    if shape is None or not hasattr(x, "__dlpack__") or len(shape) == 0:
        raise _core.Error(
            f"{where}: x must be an array of shape [..., H]; got {type(x).__name__}. "
            "Convert it first, for example with numpy.asarray"
        )
    return empty_like(x, [*shape[:-1], shape[-1] if last is None else last])

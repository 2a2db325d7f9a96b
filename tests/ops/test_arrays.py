"""Arrays of every library, in place, kept alive; and every input that is refused."""

from __future__ import annotations

import array
import gc
import subprocess
import sys
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cpumoe

E, H, N = 3, 8, 12
RNG = np.random.default_rng(0)


def _experts(**changes: Any) -> cpumoe.Experts:
    values: dict[str, Any] = {
        "gate_up": RNG.standard_normal((E, 2 * N, H)).astype(np.float32),
        "down": RNG.standard_normal((E, H, N)).astype(np.float32),
    }
    return cpumoe.Experts(**{**values, **changes})


X = RNG.standard_normal((4, H)).astype(np.float32)
IDS = RNG.integers(0, E, (4, 2))
WEIGHTS = RNG.random((4, 2)).astype(np.float32)


def test_import_loads_no_framework() -> None:
    code = (
        "import sys, cpumoe; heavy = {'torch', 'jax', 'transformers', 'safetensors', 'tokenizers', "
        "'jinja2', 'typer', 'rich', 'cpumoe.engine', 'cpumoe.frontends'} & set(sys.modules); "
        "assert not heavy, heavy; assert 'numpy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_read_in_place() -> None:
    """A later write to the caller's array is seen: nothing was copied."""
    down = np.zeros((E, H, N), np.float32)
    experts = _experts(down=down)
    assert (cpumoe.moe(X, experts, IDS, WEIGHTS) == 0).all()
    down[:] = 1
    assert (cpumoe.moe(X, experts, IDS, WEIGHTS) != 0).any()
    parts = [torch.zeros(H, N) for _ in range(E)]
    experts = _experts(down=parts)
    assert (cpumoe.moe(X, experts, IDS, WEIGHTS) == 0).all()
    parts[IDS[0, 0]][:] = 1
    assert (cpumoe.moe(X, experts, IDS, WEIGHTS)[0] != 0).any()
    w = np.zeros((N, H), ml_dtypes.bfloat16)
    assert (cpumoe.linear(X, w) == 0).all()


def test_owners_stay_alive() -> None:
    gate_up = RNG.standard_normal((E, 2 * N, H)).astype(ml_dtypes.bfloat16)
    down = [torch.randn(H, N, dtype=torch.bfloat16) for _ in range(E)]
    experts = cpumoe.Experts(gate_up=gate_up.copy(), down=[d.clone() for d in down])
    gc.collect()
    rubbish = [np.full((E, 2 * N, H), 7, np.uint16) for _ in range(50)]
    kept = cpumoe.Experts(gate_up=gate_up, down=down)
    got = cpumoe.moe(X, experts, IDS, WEIGHTS)
    assert (got == cpumoe.moe(X, kept, IDS, WEIGHTS)).all()
    assert len(rubbish) == 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch(dtype: torch.dtype) -> None:
    gate_up, down = torch.randn(E, 2 * N, H).to(dtype), torch.randn(E, H, N).to(dtype)
    x, ids, weights = (
        torch.from_numpy(X).to(dtype),
        torch.from_numpy(IDS),
        torch.from_numpy(WEIGHTS),
    )
    got = cpumoe.moe(x, cpumoe.Experts(gate_up=gate_up, down=down), ids, weights)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == dtype
    numpy_dtype: Any = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else got.float().numpy().dtype

    def as_numpy(t: torch.Tensor) -> Any:
        wide = t.float().numpy()
        return wide.astype(numpy_dtype if dtype == torch.bfloat16 else str(dtype)[6:])

    same = cpumoe.moe(
        as_numpy(x), cpumoe.Experts(gate_up=as_numpy(gate_up), down=as_numpy(down)), IDS, WEIGHTS
    )
    assert (got.float().numpy() == same.astype(np.float32)).all()
    chosen, share = cpumoe.route(x, 2)
    assert isinstance(chosen, torch.Tensor)
    assert chosen.dtype == torch.int32
    assert share.dtype == torch.float32
    out = torch.empty_like(x)
    assert cpumoe.linear(x, gate_up[0], out=torch.empty(4, 2 * N, dtype=dtype)).dtype == dtype
    assert cpumoe.moe(x, cpumoe.Experts(gate_up=gate_up, down=down), ids, weights, out=out) is out


def test_parameters_are_used_detached_and_inputs_must_be() -> None:
    down = torch.nn.Parameter(torch.randn(E, H, N))
    experts = _experts(down=down)
    x = torch.from_numpy(X).requires_grad_()
    with pytest.raises(cpumoe.Error, match="x must not require gradients"):
        cpumoe.moe(x, experts, IDS, WEIGHTS)
    assert not cpumoe.moe(x.detach(), experts, IDS, WEIGHTS).requires_grad


class Foreign:
    """An array of a library that offers nothing but the standard's two protocols."""

    def __init__(self, data: Any, device: int = 1) -> None:
        self.data, self.device, self.shape = data, device, data.shape

    def __dlpack__(self, **options: Any) -> Any:
        if self.device != 1:
            raise BufferError("not here")
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __array_namespace__(self) -> Any:
        return Foreign

    @staticmethod
    def from_dlpack(source: Any) -> Foreign:
        return Foreign(torch.from_dlpack(source))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_library_with_dlpack(dtype: torch.dtype) -> None:
    gate_up, down = torch.randn(E, 2 * N, H, dtype=dtype), torch.randn(E, H, N, dtype=dtype)
    x = torch.from_numpy(X).to(dtype)
    plain: Any = cpumoe.moe(x, cpumoe.Experts(gate_up=gate_up, down=down), IDS, WEIGHTS)
    foreign = cpumoe.Experts(gate_up=Foreign(gate_up), down=Foreign(down))
    got: Any = cpumoe.moe(Foreign(x), foreign, IDS, WEIGHTS)
    assert isinstance(got, Foreign)
    assert got.data.dtype == dtype
    assert torch.equal(got.data, plain)
    ids, _ = cpumoe.route(Foreign(x), 2)
    assert isinstance(ids, Foreign)


def test_buffers() -> None:
    x = memoryview(array.array("f", X[0].tolist()))
    got = cpumoe.moe(x, _experts(), memoryview(IDS[0]), memoryview(WEIGHTS[0]))
    assert isinstance(got, np.ndarray)
    assert got.shape == (H,)
    frozen = np.frombuffer(X.tobytes(), np.float32).reshape(X.shape)
    assert not frozen.flags.writeable
    assert (cpumoe.linear(frozen, frozen) == cpumoe.linear(X, X)).all()


def test_lock_is_released() -> None:
    """Another Python thread goes on while a long product runs."""
    w, x = np.zeros((1536, 2048), np.float32), np.zeros((512, 2048), np.float32)
    ticks, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0002)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = ticks[0]
        end = time.monotonic() + 30
        while ticks[0] < before + 3 and time.monotonic() < end:
            cpumoe.linear(x, w)
        assert ticks[0] >= before + 3
        seen = ticks[0]
        cpumoe._core.linear(
            x,
            w,
            None,
            "rows",
            np.empty((512, 1536), np.float32),
            cpumoe.Executor(1),
        )
        assert ticks[0] > seen
    finally:
        stop.set()
        thread.join()


def test_concurrent_calls() -> None:
    experts = _experts()
    want = cpumoe.moe(X, experts, IDS, WEIGHTS)
    wrong: list[int] = []

    def run() -> None:
        for i in range(50):
            if not (cpumoe.moe(X, experts, IDS, WEIGHTS) == want).all():
                wrong.append(i)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def _moe(**changes: Any) -> Any:
    values = {"x": X, "experts": _experts(), "ids": IDS, "weights": WEIGHTS, **changes}
    return cpumoe.moe(
        values.pop("x"), values.pop("experts"), values.pop("ids"), values.pop("weights"), **values
    )


FLOATS = np.zeros((E, H, N), np.float32)
REFUSED: dict[str, tuple[Any, str]] = {
    "x of a list": (lambda: _moe(x=[[1.0] * H]), r"moe: x must be an array .* got list"),
    "x of fp64": (
        lambda: _moe(x=X.astype(np.float64)),
        r"moe: x must be fp32, fp16 or bf16; got fp64\[4, 8\]",
    ),
    "x too narrow": (
        lambda: _moe(x=X[:, :7].copy()),
        r"x must have 8 features, as the experts do; got 7",
    ),
    "x not contiguous": (
        lambda: _moe(x=np.asfortranarray(X)),
        r"x must be contiguous along its last dimension",
    ),
    "x overlapping rows": (
        lambda: _moe(x=np.lib.stride_tricks.as_strided(X, (4, H), (4, 4))),
        r"x must have rows that do not overlap",
    ),
    "x on another device": (
        lambda: _moe(x=Foreign(X, device=2), out=X.copy()),
        r"x must be in CPU memory; got DLPack device type 2",
    ),
    "x on meta": (lambda: _moe(x=torch.zeros(4, H, device="meta")), r"moe: (x|out) must be"),
    "x without dimensions": (lambda: _moe(x=np.float32(1)), r"x must be an array of shape"),
    "experts of arrays": (
        lambda: _moe(experts=X),
        r"experts must be a cpumoe.Experts; got ndarray",
    ),
    "ids of floats": (lambda: _moe(ids=WEIGHTS), r"ids must be int32 or int64; got fp32"),
    "ids negative": (lambda: _moe(ids=IDS - 5), r"ids must be in \[0, 3\); got -"),
    "ids too large": (
        lambda: _moe(ids=np.full_like(IDS, 1 << 40)),
        r"ids must be in \[0, 3\); got 1099511627776 for token 0, slot 0",
    ),
    "ids of fewer tokens": (
        lambda: _moe(ids=IDS[:3]),
        r"ids must have shape \[..., k\] = \[4, 2\]; got int64\[3, 2\]",
    ),
    "ids flat": (lambda: _moe(ids=IDS.ravel()), r"ids must have shape \[..., k\] with k >= 1"),
    "ids none": (lambda: _moe(ids=IDS[:, :0]), r"ids must have shape \[..., k\] with k >= 1"),
    "weights of another k": (lambda: _moe(weights=WEIGHTS[:, :1]), r"weights must have shape"),
    "weights of ints": (
        lambda: _moe(weights=IDS),
        r"weights must be fp32, fp16 or bf16; got int64",
    ),
    "out is x": (lambda: _moe(x=(x := X.copy()), out=x), r"out must not share memory with x"),
    "out overlaps x": (
        lambda: _moe(x=(b := np.zeros((5, H), np.float32))[:4], out=b[1:]),
        r"out must not share memory with x",
    ),
    "out read-only": (
        lambda: _moe(out=np.broadcast_to(np.float32(0), (4, H))),
        r"out must be a writable",
    ),
    "out of another shape": (
        lambda: _moe(out=np.empty((3, H), np.float32)),
        r"out must have shape",
    ),
    "out of ints": (
        lambda: _moe(out=np.empty((4, H), np.int32)),
        r"out must be fp32, fp16 or bf16",
    ),
    "no down": (lambda: _experts(down=None), r"Experts: down must be given"),
    "no first": (
        lambda: cpumoe.Experts(down=FLOATS),
        r"first product must be gate_up, or gate and up, or up alone",
    ),
    "gate alone": (lambda: _experts(gate_up=None, gate=FLOATS), r"first product must be"),
    "gate_up and up": (lambda: _experts(up=FLOATS), r"first product must be"),
    "gate_up and gate": (
        lambda: _experts(gate=FLOATS),
        r"gate must come with up, not with gate_up",
    ),
    "interleaved apart": (
        lambda: _experts(gate_up=None, up=FLOATS, interleaved=True),
        r"interleaved must go with gate_up",
    ),
    "down of 2 dimensions": (
        lambda: _experts(down=FLOATS[0]),
        r"down must have 3 dimensions, experts first; got fp32\[8, 12\]",
    ),
    "down of fewer experts": (
        lambda: _experts(down=FLOATS[:2]),
        r"gate_up must hold as many experts as down; got 3 and 2",
    ),
    "empty list": (lambda: _experts(down=[]), r"down must hold one array per expert; got none"),
    "no experts": (lambda: _experts(down=FLOATS[:0]), r"down must hold at least one expert"),
    "unequal experts": (
        lambda: _experts(down=[FLOATS[0], FLOATS[1], FLOATS[2, :, :11].copy()]),
        r"down of expert 2 must have the size of expert 0, 8 by 12; got 8 by 11",
    ),
    "wrong layout": (lambda: _experts(layout="columns"), r"must map the 12 outputs"),
    "unknown layout": (
        lambda: _experts(layout="diagonal"),
        r'layout must be "rows" or "columns"; got "diagonal"',
    ),
    "odd gate_up": (
        lambda: _experts(gate_up=np.zeros((E, 2 * N + 1, H), np.float32)),
        r"gate_up must have an even number of features",
    ),
    "transposed view": (
        lambda: _experts(down=np.zeros((E, N, H), np.float32).transpose(0, 2, 1)),
        r"down must be contiguous along its last",
    ),
    "short bias": (
        lambda: _experts(gate_up_bias=np.zeros((E, N), np.float32)),
        r"gate_up_bias must hold 24 values per expert; got 12",
    ),
    "stray bias": (
        lambda: _experts(up_bias=np.zeros((E, N), np.float32)),
        r"up_bias must go with up",
    ),
    "weights of ints stacked": (
        lambda: _experts(down=FLOATS.astype(np.int8)),
        r"down must be fp32, fp16 or bf16; got int8",
    ),
    "unknown activation": (
        lambda: _experts(activation="mish"),
        r'activation must be a known function; got "mish"',
    ),
    "swiglu without gate": (
        lambda: cpumoe.Experts(
            up=np.zeros((E, N, H), np.float32), down=FLOATS, activation="swiglu_oai"
        ),
        r"swiglu_oai must have a gate",
    ),
    "limit without gate": (
        lambda: cpumoe.Experts(up=np.zeros((E, N, H), np.float32), down=FLOATS, limit=1.0),
        r"limit must go with a gate",
    ),
    "limit zero": (lambda: _experts(limit=0.0), r"limit must be positive"),
    "limit nan": (lambda: _experts(limit=float("nan")), r"limit must be positive"),
    "linear of 3 dimensions": (lambda: cpumoe.linear(X, FLOATS), r"linear: w must have shape"),
    "linear of another width": (
        lambda: cpumoe.linear(X, np.zeros((5, 7), np.float32)),
        r"x must have as many features as w has inputs, 7; got 8",
    ),
    "linear empty": (
        lambda: cpumoe.linear(X, np.zeros((0, H), np.float32)),
        r"w must not be empty",
    ),
    "linear bias": (
        lambda: cpumoe.linear(X, X, np.zeros(3, np.float32)),
        r"bias must have shape \[N\] = \[4\]",
    ),
    "route nan": (
        lambda: cpumoe.route(np.where(X > 9, X, np.nan).astype(np.float32), 2),
        r"logits must be finite; got a NaN or an infinity in token 0",
    ),
    "route inf": (
        lambda: cpumoe.route(np.array([[0, 1], [np.inf, 0]], np.float32), 1),
        r"in token 1",
    ),
    "route k large": (
        lambda: cpumoe.route(X, 9),
        r"k must be in \[1, 8\], the number of experts; got 9",
    ),
    "route k negative": (lambda: cpumoe.route(X, -1), r"k must be in"),
    "route groups": (lambda: cpumoe.route(X, 2, groups=3), r"route: .*groups=3"),
    "route few groups": (
        lambda: cpumoe.route(X, 5, kind="sigmoid", groups=4, top_groups=1),
        r"route: .*top_groups=1",
    ),
    "route kind": (lambda: cpumoe.route(X, 2, kind="sparsemixer"), r"kind must be"),
    "route correction": (
        lambda: cpumoe.route(X, 2, correction=X[0]),
        r"correction must go with kind",
    ),
    "route correction size": (
        lambda: cpumoe.route(X, 2, kind="sigmoid", correction=X[0, :3]),
        r"correction must have shape \[E\] = \[8\]",
    ),
    "route group score": (lambda: cpumoe.route(X, 2, group_score="mean"), r"group_score must be"),
    "route list": (lambda: cpumoe.route([[1.0, 2.0]], 1), r"logits must be an array"),
    "executor": (lambda: cpumoe.Executor(0), r"Executor: threads must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(cpumoe.Error, match=message) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert ": " in text
    assert "; got " in text
    assert ". " in text.partition("; got ")[2], "the message must end with what to do"


def test_public_names() -> None:
    for name in cpumoe.__all__:
        assert getattr(cpumoe, name) is not None
    with pytest.raises(AttributeError):
        _ = cpumoe.nonsense

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
            "auto",
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


def test_public_names() -> None:
    for name in cpumoe.__all__:
        assert getattr(cpumoe, name) is not None
    with pytest.raises(AttributeError):
        _ = cpumoe.nonsense

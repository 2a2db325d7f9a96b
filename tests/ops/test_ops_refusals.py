"""Every input of the operators that is refused, and the words it is refused with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_arrays import IDS, WEIGHTS, E, Foreign, H, N, X, _experts

import cpumoe


def _moe(**changes: Any) -> Any:
    values = {"x": X, "experts": _experts(), "ids": IDS, "weights": WEIGHTS, **changes}
    return cpumoe.moe(
        values.pop("x"), values.pop("experts"), values.pop("ids"), values.pop("weights"), **values
    )


FLOATS = np.zeros((E, H, N), np.float32)
BUFFER = np.zeros(E * 2 * N * H, np.float32)  # weights, and an output among them
AMONG = BUFFER[8 : 8 + 4 * H].reshape(4, H)
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
        r"x must be contiguous along its last dimension; got .*\. Make it contiguous, for example "
        r"with numpy.ascontiguousarray$",
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
    "out in gate_up": (
        lambda: _moe(experts=_experts(gate_up=BUFFER.reshape(E, 2 * N, H)), out=AMONG),
        r"moe: out must not share memory with the experts",
    ),
    "out in a listed down": (
        lambda: _moe(
            experts=_experts(down=[*FLOATS[:2], BUFFER[: H * N].reshape(H, N)]), out=AMONG
        ),
        r"moe: out must not share memory with the experts",
    ),
    "out in a bias": (
        lambda: _moe(experts=_experts(down_bias=BUFFER[: E * H].reshape(E, H)), out=AMONG),
        r"moe: out must not share memory with the experts",
    ),
    "out in w": (
        lambda: cpumoe.linear(X, BUFFER[: H * H].reshape(H, H), out=AMONG),
        r"linear: out must not share memory with w",
    ),
    "out in bias": (
        lambda: cpumoe.linear(X, X[[0] * H], BUFFER[8 : 8 + H], out=AMONG),
        r"linear: out must not share memory with bias",
    ),
    "x big-endian": (
        lambda: _moe(x=X.astype(">f4")),
        r"moe: x must have this machine's byte order, .* got ndarray of dtype >f4",
    ),
    "ids big-endian": (
        lambda: _moe(ids=IDS.astype(">i4")),
        r"moe: ids must have this machine's byte order",
    ),
    "x reversed": (
        lambda: _moe(x=X[::-1]),
        r"moe: x must not be reversed; got a negative stride in .* strides \[-8, 1\]",
    ),
    "x mirrored": (lambda: _moe(x=X[:, ::-1]), r"moe: x must not be reversed; got a negative"),
    "w mirrored": (lambda: cpumoe.linear(X, X[:, ::-1]), r"linear: w must not be reversed"),
    "executor of int": (
        lambda: _moe(executor=2),
        r"moe: executor must be a cpumoe.Executor; got int",
    ),
    "linear executor": (
        lambda: cpumoe.linear(X, X, executor="all"),
        r"linear: executor must be a cpumoe.Executor; got str",
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
    "route k huge": (lambda: cpumoe.route(X, 1 << 62), r"k must be in \[1, 8\]"),
    "route k of float": (lambda: cpumoe.route(X, 2.0), r"k must be an integer; got float"),
    "route k of bool": (lambda: cpumoe.route(X, True), r"k must be an integer; got bool"),
    "route k none": (lambda: cpumoe.route(X, None), r"k must be an integer; got NoneType"),
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
    "executor spin": (
        lambda: cpumoe.Executor(1, spin_us=-2),
        r"Executor: spin_us must be at least 0, or -1 for the default; got -2",
    ),
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

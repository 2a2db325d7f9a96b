"""How one experts module of Transformers is computed, read from its attributes, not its name."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from cpumoe import Error
from cpumoe.ops import Activation, Layout

# Large values find clamps and soft caps, dense small ones tell gelu from its tanh form.
_FAR = [8.0, 12.0, 30.0, 100.0, 1000.0, 10000.0]
_PROBE = torch.cat(
    [torch.linspace(-6, 6, 121), torch.tensor(_FAR), -torch.tensor(_FAR)],
).double()

_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Plan:
    """What the operator is told about one experts module.

    `mode` is "fused" (one call of `cpumoe.moe`) or "split" (`cpumoe.linear`, the module's own
    activation, `cpumoe.linear`, expert by expert), `reason` says why it is not fused.
    """

    mode: Literal["fused", "split"]
    reason: str
    activation: Activation
    alpha: float
    limit: float
    layout: Layout
    interleaved: bool
    gated: bool
    first: str
    biased: bool


def plan_of(module: torch.nn.Module) -> Plan:
    """Return the plan of an experts module, made at its first call and kept with it.

    Raises Error when the module lacks what the registry of Transformers promises.
    """
    plan = _plans.get(module)
    if plan is None:
        plan = _plans[module] = _make(module)
    return plan


_plans: weakref.WeakKeyDictionary[torch.nn.Module, Plan] = weakref.WeakKeyDictionary()


def _make(module: torch.nn.Module) -> Plan:
    m = cast(Any, module)
    name = type(module).__name__
    for attribute in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts"):
        if not hasattr(m, attribute):
            raise Error(
                f"{name}: an experts module must have the attribute {attribute}; got none. "
                "Use a class decorated with transformers' use_experts_implementation"
            )
    first = "gate_up_proj" if m.has_gate else "up_proj"
    wanted = [first, "down_proj"]
    if m.has_bias:
        wanted += [f"{w}_bias" for w in wanted]
    for attribute in wanted:
        if not isinstance(getattr(m, attribute, None), torch.Tensor):
            raise Error(
                f"{name}: {attribute} must be a tensor; got "
                f"{type(getattr(m, attribute, None)).__name__}. Modules that pack or name their "
                'weights otherwise need experts_implementation="eager"'
            )
    found = _recognise(m)
    reason = ""
    if getattr(m, "has_post_expert_norm", False):
        reason = "a norm follows each expert"
    elif found is None:
        reason = "its activation is none of the known formulas"
    activation, alpha, limit = found if found is not None else ("identity", 0.0, math.inf)
    return Plan(
        mode="split" if reason else "fused",
        reason=reason,
        activation=activation,
        alpha=alpha,
        limit=limit,
        layout="columns" if m.is_transposed else "rows",
        interleaved=bool(m.has_gate and not m.is_concatenated),
        gated=bool(m.has_gate),
        first=first,
        biased=bool(m.has_bias),
    )


def _recognise(m: Any) -> tuple[Activation, float, float] | None:
    """Find the known formula that the module's own activation equals on the probe values."""
    act = getattr(m, "act_fn", None)
    if isinstance(act, torch.nn.Module) and next(act.parameters(), None) is not None:
        return None  # learned: it may change after this look
    try:
        with torch.no_grad():
            return _match(m)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None  # it wants other inputs than the default: the split way calls it as it is


def _match(m: Any) -> tuple[Activation, float, float] | None:
    if not m.has_gate:
        seen = m.act_fn(_PROBE.float()[None, :])[0].double()
        scale = 1 + _PROBE.abs()
        for name, f in _FUNCTIONS.items():
            if _equal(seen, f(_PROBE), scale if name != "relu2" else scale.square()):
                return name, 1.702, math.inf
        return None
    gate, up = (v.reshape(-1) for v in torch.meshgrid(_PROBE, _PROBE[::3], indexing="ij"))
    both = torch.cat([gate, up]) if m.is_concatenated else torch.stack([gate, up], 1).reshape(-1)
    seen = m._apply_gate(both.float()[None, :])[0].double()
    for name, alpha, limit, expected in _candidates(m, gate, up):
        scale = (1 + gate.abs()) * (1 + up.abs())
        if _equal(seen, expected, scale if name != "relu2" else scale * (1 + gate.abs())):
            return name, alpha, limit
    return None


def _candidates(
    m: Any, gate: torch.Tensor, up: torch.Tensor
) -> Iterator[tuple[Activation, float, float, torch.Tensor]]:
    limits = [math.inf, *_numbers(m, "limit", "swiglu_limit")]
    for limit in limits:
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        for name, f in _FUNCTIONS.items():
            yield name, 1.702, limit, f(g) * u
        for alpha in _numbers(m, "alpha", "swiglu_alpha"):
            yield "swiglu_oai", alpha, limit, (u + 1) * g * torch.sigmoid(alpha * g)


def _numbers(m: Any, *names: str) -> list[float]:
    values = [getattr(m, n, None) for n in names]
    return [
        float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0
    ]


def _equal(seen: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> bool:
    # fp32 evaluation of any of the formulas stays within 8 ulp of the magnitudes that went in.
    return bool(((seen - expected).abs() <= 2.0**-20 * scale).all())

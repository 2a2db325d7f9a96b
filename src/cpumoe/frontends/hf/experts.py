"""The function that Transformers' experts registry calls, and its registration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch

from cpumoe import Error
from cpumoe.frontends.hf.plan import Plan, plan_of
from cpumoe.ops import Activation, Experts, Layout, linear, moe

NAME = "cpumoe"


def register() -> None:
    """Make `experts_implementation="cpumoe"` known to Transformers in this process.

    Any number of calls is fine. Raises Error when this Transformers has no experts registry.

    >>> import cpumoe.frontends.hf
    >>> cpumoe.frontends.hf.register()
    >>> from transformers.integrations.moe import ExpertsInterface
    >>> "cpumoe" in ExpertsInterface()
    True
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise Error(
            "register: Transformers must have an experts registry (5.24 or newer has); "
            f"got {error}. Install transformers>=5.24"
        ) from error
    ExpertsInterface.register(NAME, experts_forward)


# The plan is a constant of a compiled graph: the compiler runs plan_of instead of looking into it.
_compiled_plan_of: Callable[[torch.nn.Module], Plan] = cast(
    Any, torch.compiler.assume_constant_result
)(plan_of)


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute one experts module, reading its parameters in place.

    Args:
        self: the experts module (see `plan_of` for what is read from it).
        hidden_states: [T, H]; fp32, fp16 or bf16, on the CPU. T = 0 is fine.
        top_k_index: [T, k] int64 or int32; under expert parallelism the id E means "elsewhere".
        top_k_weights: [T, k], any float dtype.

    Returns [T, H] in hidden_states' dtype. Raises Error for tensors outside the CPU, for
    unsupported dtypes, and in training: no gradients are computed here.

    Signature: transformers.integrations.moe.ExpertsInterface.
    """
    plan = _compiled_plan_of(self) if torch.compiler.is_compiling() else plan_of(self)
    m = cast(Any, self)
    skip = bool(getattr(m, "_is_expert_parallel", False))
    weights = [getattr(m, plan.first), m.down_proj]
    biases = [getattr(m, f"{plan.first}_bias"), m.down_proj_bias] if plan.biased else [None, None]
    wants_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden_states, top_k_weights, *weights, *biases)
    )
    if wants_gradient and self.training:
        raise Error(
            f"{type(self).__name__}: inference is all that is computed here; got a module in "
            "training that requires gradients. Call model.eval(), or train with "
            'model.set_experts_implementation("grouped_mm")'
        )
    if plan.mode == "split":
        return _split(self, plan, hidden_states, top_k_index, top_k_weights, skip)
    arguments = (
        hidden_states,
        top_k_index,
        top_k_weights,
        *weights,
        *biases,
        plan.activation,
        plan.alpha,
        plan.limit,
        plan.layout,
        plan.interleaved,
        plan.gated,
        skip,
    )
    if torch.compiler.is_compiling():
        return cast(torch.Tensor, torch.ops.cpumoe.experts(*arguments))
    if wants_gradient:
        return cast(torch.Tensor, _NoGradient.apply(*arguments))  # type: ignore[no-untyped-call]
    return _fused(*arguments)


def _fused(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    first: torch.Tensor,
    down: torch.Tensor,
    first_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    layout: str,
    interleaved: bool,
    gated: bool,
    skip: bool,
) -> torch.Tensor:
    # Views are made anew at each call: they cost microseconds, and weights that were moved,
    # reloaded or brought in by an offload hook just before the call are the ones that are read.
    experts = Experts(
        gate_up=first if gated else None,
        up=None if gated else first,
        down=down,
        gate_up_bias=first_bias if gated else None,
        up_bias=None if gated else first_bias,
        down_bias=down_bias,
        activation=cast(Activation, activation),
        alpha=alpha,
        limit=None if math.isinf(limit) else limit,
        layout=cast(Layout, layout),
        interleaved=interleaved,
    )
    return moe(
        hidden_states.detach().contiguous(),
        experts,
        top_k_index,
        top_k_weights.detach(),
        skip_sentinel=skip,
    )


class _NoGradient(torch.autograd.Function):
    """Forward without a way back: inference with gradients left on works, backward says why not."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Run the operator."""
        return _fused(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse."""
        _refuse_gradient()


def _refuse_gradient(*_: Any) -> Any:
    raise Error(
        "cpumoe experts: inference is all that is computed here; got a backward pass. Train with "
        'model.set_experts_implementation("grouped_mm")'
    )


_op = torch.library.custom_op(f"{NAME}::experts", _fused, mutates_args=(), device_types="cpu")


@_op.register_fake
def _fake(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


_op.register_autograd(_refuse_gradient)


def _split_eager(
    module: torch.nn.Module,
    plan: Plan,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    skip: bool,
) -> torch.Tensor:
    """Expert by expert: first product here, activation by the module, second product here."""
    m = cast(Any, module)
    first, down = getattr(m, plan.first), m.down_proj
    first_bias = getattr(m, f"{plan.first}_bias") if plan.biased else None
    down_bias = m.down_proj_bias if plan.biased else None
    x, weights = x.detach(), weights.detach()
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in torch.unique(ids).tolist():
        if e == m.num_experts and skip:
            continue
        if not 0 <= e < m.num_experts:
            raise Error(
                f"{type(module).__name__}: expert ids must be in [0, {m.num_experts}); got {e}. "
                "Look at what the router returned"
            )
        token, slot = torch.where(ids == e)
        mid = linear(
            x[token], first[e], None if first_bias is None else first_bias[e], layout=plan.layout
        )
        with torch.no_grad():
            mid = m._apply_gate(mid) if plan.gated else m.act_fn(mid)
        y = linear(
            mid.contiguous(),
            down[e],
            None if down_bias is None else down_bias[e],
            layout=plan.layout,
        )
        if getattr(m, "has_post_expert_norm", False):
            with torch.no_grad():
                y = m.post_expert_norm(y)
        out.index_add_(0, token, y.float() * weights[token, slot, None].float())
    return out.to(x.dtype)


# A loop over the experts that were hit: it breaks a compiled graph instead of entering it.
_split: Callable[..., torch.Tensor] = cast(Any, torch.compiler.disable)(_split_eager)

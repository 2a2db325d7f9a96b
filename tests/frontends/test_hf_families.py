"""Every family of the registry, as a tiny model: cpumoe against Transformers' own eager loop."""

from __future__ import annotations

import copy
import pathlib
import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from hf_families import COVERED, FAMILIES, NOT_HOOKABLE, build, experts_of, inputs_of

import cpumoe
from cpumoe.frontends import hf
from cpumoe.frontends.hf import experts as hf_experts

EPS_FP32 = 2.0**-24
EPS_BF16 = 2.0**-9
OPERATORS = ("moe", "linear")


def _output(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    out = model(**inputs)
    result: torch.Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return result


class _Recorder:
    """Keeps what every experts module is given and returns."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.calls: list[tuple[Any, tuple[torch.Tensor, ...], torch.Tensor]] = []
        self.hooks = [m.register_forward_hook(self._keep) for m in modules]

    def _keep(self, module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self.calls.append((module, tuple(a.clone() for a in args), out.clone()))

    def close(self) -> None:
        for h in self.hooks:
            h.remove()


def _bound(module: Any, x: torch.Tensor, weights: torch.Tensor, epsilon: float) -> float:
    """Error allowed to one output: every product and sum of both layers may be off by epsilon."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    inputs = first.shape[-2] if module.is_transposed else first.shape[-1]
    inner = module.down_proj.shape[-2] if module.is_transposed else module.down_proj.shape[-1]
    return epsilon * (2 * inputs + inner + 16) * _magnitude(module, x, weights)


def _magnitude(module: Any, x: torch.Tensor, weights: torch.Tensor) -> float:
    """Largest sum of magnitudes of the terms of one output.

    It is bounded by norms (Cauchy-Schwarz) of the largest rows; activations here have a
    slope of at most 1.13 (gelu; relu2: 2 max|g|) and gate * up multiplies two bounded values.
    """
    first = module.gate_up_proj if module.has_gate else module.up_proj
    inner = module.down_proj.shape[-2] if module.is_transposed else module.down_proj.shape[-1]
    rows = first.float().norm(dim=-2 if module.is_transposed else -1).max()
    columns = module.down_proj.float().norm(dim=-2 if module.is_transposed else -1).max()
    pre = float(rows * x.float().norm(dim=-1).max())
    if module.has_bias:
        pre += float(first_bias(module).float().abs().max()) + 1
    mid = (pre + 1) ** 2  # |act(g) * u|, or g^2 of relu2
    weight = float(weights.float().abs().sum(-1).max())
    return weight * float(columns) * mid * inner**0.5


def first_bias(module: Any) -> torch.Tensor:
    return module.gate_up_proj_bias if module.has_gate else module.up_proj_bias


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    hf.register()


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    family = FAMILIES[name]
    model: Any = build(family)
    modules = experts_of(model)
    assert modules, "the tiny config has no experts layer"
    assert {hf.plan_of(m).mode for m in modules} == {family.mode}
    inputs = inputs_of(family, model, 2, 9)
    with torch.no_grad():
        model.set_experts_implementation("eager")
        recorder = _Recorder(modules)
        eager = _output(model, inputs)
        recorder.close()
        assert recorder.calls, "the experts were not reached"
        model.set_experts_implementation("cpumoe")
        with (
            mock.patch.object(hf_experts, "moe", wraps=hf_experts.moe) as moe,
            mock.patch.object(hf_experts, "linear", wraps=hf_experts.linear) as linear,
        ):
            ours = _output(model, inputs)
        if family.mode == "fused":
            assert moe.call_count == len(recorder.calls)
            assert linear.call_count == 0
        else:
            assert moe.call_count == 0
            assert linear.call_count >= 2 * len(recorder.calls)
        assert eager.abs().max() > 0
        assert (ours - eager).abs().max() <= 1e-4 * eager.abs().max()

        for module, args, expected in recorder.calls:
            assert expected.abs().max() > 1e-3, "the experts' output does not matter"
            x, _, weights = args
            got = module(*args)
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            bound = _bound(module, x, weights, EPS_FP32)
            if module.has_post_expert_norm:
                bound *= max(1.0, _least_rms_gain(module, args))
            assert (got - expected).abs().max() <= bound


@pytest.mark.parametrize("name", FAMILIES)
def test_family_bf16(name: str) -> None:
    """From bf16 weights and inputs the result is the fp32 one, rounded once to bf16.

    Bound: half a unit in the last place of bf16 (2^-9 relative), plus the fp32 error. The split way
    rounds after each product and in the module's own activation: three more roundings of terms.
    Class bf16 rounds the intermediate, by up to 2^-8 of each term.
    """
    family = FAMILIES[name]
    model: Any = build(family)
    modules = experts_of(model)
    with torch.no_grad():
        model.set_experts_implementation("eager")
        recorder = _Recorder(modules[:1])
        _output(model, inputs_of(family, model, 1, 5))
        recorder.close()
        module, (x, ids, weights), _ = recorder.calls[0]
        half = copy.deepcopy(module).bfloat16()
        exact = copy.deepcopy(half).float()
        x = x.bfloat16()
        half.config._experts_implementation = "eager"
        expected = exact(x.float(), ids, weights)
        module.config._experts_implementation = "cpumoe"
        half.config = module.config
        assert hf.plan_of(half).mode == family.mode
        for activations in ("auto", "fp32"):
            asked = {n: partial(getattr(hf_experts, n), activations=activations) for n in OPERATORS}
            with mock.patch.multiple(hf_experts, **asked):
                got = half(x, ids, weights)
            assert got.dtype == torch.bfloat16
            error = (got.float() - expected).abs()
            bound = EPS_BF16 * expected.abs() + _bound(exact, x, weights, EPS_FP32)
            if family.mode == "split":
                bound = bound + 3 * EPS_BF16 * _spread(exact, x, ids, weights)
            elif activations == "auto" and "avx512_bf16" in cpumoe.machine().isa:
                bound = bound + 2 * EPS_BF16 * _magnitude(exact, x, weights)
            assert (error <= bound).all()


def _spread(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> float:
    """Largest sum of magnitudes of the terms that the second product adds up."""
    total = 0.0
    for e in torch.unique(ids).tolist():
        token, slot = torch.where(ids == e)
        mid = module._apply_gate(
            torch.nn.functional.linear(x[token].float(), module.gate_up_proj[e])
        )
        terms = mid.abs() @ module.down_proj[e].abs().T
        if module.has_post_expert_norm:
            terms = terms * _gain(module, mid @ module.down_proj[e].T)
        total += float((terms * weights[token, slot, None].float().abs()).max())
    return total


def _least_rms_gain(module: Any, args: tuple[torch.Tensor, ...]) -> float:
    x, ids, _ = args
    gains = []
    for e in torch.unique(ids).tolist():
        token, _slot = torch.where(ids == e)
        mid = module._apply_gate(torch.nn.functional.linear(x[token], module.gate_up_proj[e]))
        gains.append(_gain(module, mid @ module.down_proj[e].T))
    return max(gains)


def _gain(module: Any, y: torch.Tensor) -> float:
    """How much a norm after the expert multiplies an error of its input y."""
    weight = float(module.post_expert_norm.weight.abs().max()) + 1  # + 1: gain stored as an offset
    return 2 * weight / float(y.square().mean(-1).sqrt().min())


def _decorated() -> set[str]:
    root = pathlib.Path(transformers.__file__).parent / "models"
    return {
        p.parent.name
        for p in root.glob("*/modeling_*.py")
        if re.search(r"^@use_experts_implementation", p.read_text(), re.M)
    }


def test_table_is_complete() -> None:
    """A family that a new Transformers adds, or that leaves the registry, must change the table."""
    covered = {f.model.partition(".")[0] for f in FAMILIES.values()}
    assert covered == _decorated()


def test_refusals_stay_true() -> None:
    assert not set(NOT_HOOKABLE) & _decorated()
    root = pathlib.Path(transformers.__file__).parent / "models"
    for name in [*NOT_HOOKABLE, *COVERED]:
        assert (root / name).is_dir(), f"{name} is gone: drop its row"
    for name, by in COVERED.items():
        assert by in FAMILIES
        assert f'"{by}"' in (root / name / f"configuration_{name}.py").read_text()

"""The Transformers frontend beyond equal logits: generation, changes of weights, refusals."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from hf_families import FAMILIES, build, experts_of, inputs_of

import cpumoe
from cpumoe.frontends import hf
from cpumoe.frontends.hf import experts as hf_experts


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    hf.register()


def _model(name: str = "mixtral", implementation: str = "cpumoe") -> Any:
    model: Any = build(FAMILIES[name])
    model.set_experts_implementation(implementation)
    return model


def _arguments(module: Any, tokens: int = 6, k: int = 2) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 32, generator=generator)
    ids = torch.randint(0, module.num_experts, (tokens, k), generator=generator)
    return x, ids, torch.rand(tokens, k, generator=generator)


def _eager(module: Any, *arguments: Any) -> torch.Tensor:
    config, module.config = module.config, copy.deepcopy(module.config)
    module.config._experts_implementation = "eager"
    try:
        with torch.no_grad():
            result: torch.Tensor = module(*arguments)
        return result
    finally:
        module.config = config


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_greedy_tokens_are_equal(name: str) -> None:
    model = _model(name, "eager")
    inputs = inputs_of(FAMILIES[name], model, 2, 5)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    eager = model.generate(**inputs, **options)
    model.set_experts_implementation("cpumoe")
    with mock.patch.object(hf_experts, "moe", wraps=hf_experts.moe) as moe:
        ours = model.generate(**inputs, **options)
    assert moe.call_count == 12 * len(experts_of(model))
    assert torch.equal(eager, ours)


def test_from_pretrained_and_config(tmp_path: Any) -> None:
    model = _model()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="cpumoe").eval()
    assert experts_of(loaded)[0].config._experts_implementation == "cpumoe"
    inputs = inputs_of(FAMILIES["mixtral"], model, 1, 4)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, loaded(**inputs).logits)


def test_weights_are_used_in_place_and_changes_are_seen() -> None:
    module: Any = experts_of(_model())[0]
    arguments = _arguments(module)
    with torch.no_grad():
        assert _close(module(*arguments), _eager(module, *arguments))
        module.down_proj.mul_(3)  # in place: same memory
        assert _close(module(*arguments), _eager(module, *arguments))
        module.down_proj = torch.nn.Parameter(torch.randn_like(module.down_proj))  # new memory
        assert _close(module(*arguments), _eager(module, *arguments))
        module.bfloat16()
        assert module(arguments[0].bfloat16(), *arguments[1:]).dtype == torch.bfloat16


def test_offload_hooks() -> None:
    """Weights that exist only during the call, as accelerate's disk offload brings them."""
    module: Any = experts_of(_model())[0]
    arguments = _arguments(module)
    want = _eager(module, *arguments)
    store = {n: p.detach().clone() for n, p in module.named_parameters()}

    def bring(m: Any, _: Any) -> None:
        for n, p in store.items():
            setattr(m, n, torch.nn.Parameter(p.clone()))

    def take(m: Any, *_: Any) -> None:
        for n, p in store.items():
            setattr(m, n, torch.nn.Parameter(torch.empty_like(p, device="meta")))

    module.register_forward_pre_hook(bring)
    module.register_forward_hook(take)
    take(module)
    with torch.no_grad():
        for _ in range(3):
            assert _close(module(*arguments), want)


def test_repeated_ids_no_tokens_and_weight_dtypes() -> None:
    module: Any = experts_of(_model())[0]
    x, _, weights = _arguments(module)
    same = torch.full((6, 2), 3)
    with torch.no_grad():
        assert _close(module(x, same, weights), _eager(module, x, same, weights))
        assert module(x[:0], same[:0], weights[:0]).shape == (0, 32)
        half = module(x, same.int(), weights.bfloat16())
        assert _close(half, _eager(module, x, same, weights.bfloat16().float()))
        ids = torch.tensor([[1]] * 6)  # all-to-all expert parallelism: one id per row
        assert _close(module(x, ids, weights[:, :1]), _eager(module, x, ids, weights[:, :1]))
        turned = x.T.contiguous().T
        assert _close(module(turned, same, weights), _eager(module, x, same, weights))


@pytest.mark.parametrize("name", ["mixtral", "inkling2"])
def test_expert_parallel_sentinel(name: str) -> None:
    module: Any = experts_of(_model(name))[0]
    x, ids, weights = _arguments(module)
    ids[0] = module.num_experts
    ids[2, 1] = module.num_experts
    with torch.no_grad():
        with pytest.raises(cpumoe.Error, match="ids must be in"):
            module(x, ids, weights)
        module._is_expert_parallel = True
        weights[0], weights[2, 1] = 0, 0
        got = module(x, ids, weights)
    assert (got[0] == 0).all()
    assert _close(got, _eager(module, x, ids, weights))


def test_gradients_are_refused() -> None:
    model = _model()
    inputs = inputs_of(FAMILIES["mixtral"], model, 1, 4)
    logits = model(**inputs).logits  # gradients on, but only inference: fine
    with pytest.raises(cpumoe.Error, match="got a backward pass"):
        logits.sum().backward()
    model.train()
    with pytest.raises(cpumoe.Error, match="MixtralExperts: inference is all"):
        model(**inputs)
    with torch.no_grad():
        model(**inputs)


def test_other_devices_and_dtypes_are_refused() -> None:
    module: Any = experts_of(_model())[0]
    x, ids, weights = _arguments(module)
    with torch.no_grad():
        with pytest.raises(cpumoe.Error, match="must be"):
            module(x.to("meta"), ids, weights)
        with pytest.raises(cpumoe.Error, match="x must be fp32, fp16 or bf16; got fp64"):
            module(x.double(), ids, weights)
        module.double()
        with pytest.raises(cpumoe.Error, match="gate_up must be fp32, fp16 or bf16; got fp64"):
            module(x, ids, weights)


def test_modules_without_the_registry_attributes_are_refused() -> None:
    with pytest.raises(cpumoe.Error, match="Linear: an experts module must have the attribute"):
        hf.plan_of(torch.nn.Linear(2, 2))
    module: Any = copy.deepcopy(experts_of(_model())[0])
    module.gate_up_proj = None
    with pytest.raises(
        cpumoe.Error, match="MixtralExperts: gate_up_proj must be a tensor; got NoneType"
    ):
        hf.plan_of(module)


def _gated(act: Any) -> Any:
    module: Any = copy.deepcopy(experts_of(_model())[0])
    module.act_fn = act if isinstance(act, torch.nn.Module) else _Function(act)
    return module


class _Function(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x)
        return result


class _Learned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) + self.slope * x


@pytest.mark.parametrize(
    ("act", "want"),
    [
        (torch.nn.SiLU(), "silu"),
        (torch.nn.GELU(), "gelu"),
        (torch.nn.GELU(approximate="tanh"), "gelu_tanh"),
        (torch.nn.ReLU(), "relu"),
        (lambda x: torch.relu(x) ** 2, "relu2"),
        (torch.nn.Identity(), "identity"),
        (lambda x: x * torch.sigmoid(1.702 * x), None),  # quick gelu
        (lambda x: torch.nn.functional.silu(x.clamp(max=5000)), None),
        (_Learned(), None),
        (torch.nn.Tanh(), None),
    ],
)
def test_activations_are_recognised_by_what_they_compute(act: Any, want: str | None) -> None:
    module = _gated(act)
    plan = hf.plan_of(module)
    assert (plan.mode, plan.activation) == (("fused", want) if want else ("split", "identity"))
    arguments = _arguments(module)
    with torch.no_grad():
        assert _close(module(*arguments), _eager(module, *arguments))


def test_split_says_why() -> None:
    assert (
        hf.plan_of(_gated(torch.nn.Tanh())).reason == "its activation is none of the known formulas"
    )
    assert hf.plan_of(experts_of(_model("muse_spark"))[0]).reason == "a norm follows each expert"


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_compiled_without_graph_breaks(name: str) -> None:
    """From the first call on: nothing has made a plan before the compiler looks."""
    torch._dynamo.reset()
    model = _model(name)
    inputs = inputs_of(FAMILIES[name], model, 1, 4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        with mock.patch.object(hf_experts, "moe", wraps=hf_experts.moe) as moe:
            got = compiled(**inputs).logits
        assert moe.call_count == len(experts_of(model))
        assert _close(got, model(**inputs).logits)


def test_registering_is_idempotent_and_imports_no_transformers_early() -> None:
    code = (
        "import sys, cpumoe.frontends; assert 'torch' not in sys.modules; "
        "from cpumoe.frontends import hf; hf.register(); hf.register()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_families_page_is_current() -> None:
    import write_families

    assert write_families.PAGE.read_text() == write_families.page(), "run write_families.py"

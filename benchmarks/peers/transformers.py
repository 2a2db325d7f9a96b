"""Peer: the experts modules of Hugging Face Transformers on torch's CPU back end.

The experts get their ids and weights ready made, so the peer's router is not timed. Of its
implementations (eager, grouped_mm, batched_mm) in the published format and in float32, the fastest
for the number of tokens is chosen by a trial and then timed.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

_IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
_GATHERED = 1 << 30  # bytes of weights that batched_mm may copy for a trial
_WARM_TOKENS = 4  # of the calls before a timed one, as many as ours get
_PAUSE = 0.03  # seconds until torch's OpenMP threads have stopped spinning for work


class Peer:
    """One layer of experts run by Transformers. See `cpumoe.bench.peers.Peer` for the interface."""

    name = "transformers"

    def available(self) -> str | None:
        """Why it cannot run here, or None."""
        try:
            importlib.import_module("torch")
            importlib.import_module("transformers")
        except ImportError as error:
            return f"{error}. Install torch and transformers beside cpumoe"
        return None

    def prepare(self, weights: Any, small: Any, threads: int, memory: int) -> None:
        """Wraps the same weight bytes in a module; a float32 copy if `memory` bytes allow."""
        import torch

        self.release()
        torch.set_num_threads(threads)
        self._torch = torch
        self._weights = weights
        kinds = [weights.format.name]
        wide = 2 * sum(a.nbytes for a in weights.arrays.values())
        if weights.format.name != "fp32" and wide < memory:
            kinds.append("fp32")
        self._modules = {kind: _experts_module(weights, kind) for kind in kinds}
        self._small = {kind: _experts_module(small, kind) for kind in kinds}
        self._best: dict[int, tuple[str, str]] = {}

    def stored(self) -> None:
        """It works on our weights."""

    def settle(self, x: Any, ids: Any, scores: Any) -> dict[str, Any]:
        """Warms up and chooses the fastest variant for this number of tokens.

        Returns:
            version, implementation, format of the variant and the trial times of all variants.
        """
        import transformers

        times: dict[str, float] = {}
        best: tuple[float, str, str] | None = None
        for kind in self._modules:
            for implementation in _IMPLEMENTATIONS:
                element = 4 if kind == "fp32" else 2
                gathered = ids.size * self._weights.shape.expert_elements() * element
                if implementation == "batched_mm" and gathered > _GATHERED:
                    continue  # it copies the weights of every (token, expert) pair
                try:
                    seconds = self._trial(x, ids, scores, kind, implementation)
                except (RuntimeError, NotImplementedError):
                    continue  # this variant does not exist for this type or layout
                times[f"{implementation} {kind}"] = seconds
                if best is None or seconds < best[0]:
                    best = (seconds, implementation, kind)
        if best is None:
            raise RuntimeError("no variant of Transformers' experts runs this shape")
        self._best[ids.shape[0]] = best[1:]
        return {
            "version": transformers.__version__,
            "torch": self._torch.__version__,
            "implementation": best[1],
            "format": best[2],
            "trials_s": times,
        }

    def _trial(self, x: Any, ids: Any, scores: Any, kind: str, implementation: str) -> float:
        times: list[float] = []
        while len(times) < 5 and sum(times) < 2:
            start = time.perf_counter()
            self._call(self._inputs(x, ids, scores, kind), kind, implementation)
            times.append(time.perf_counter() - start)
        return min(times)

    def _inputs(self, x: Any, ids: Any, scores: Any, kind: str) -> tuple[Any, Any, Any]:
        torch = self._torch
        dtype = next(iter(self._modules[kind].parameters())).dtype
        return (
            _tensor(x).to(dtype),
            torch.from_numpy(ids).long(),
            torch.from_numpy(scores).to(dtype),
        )

    def _call(
        self, inputs: tuple[Any, Any, Any], kind: str, implementation: str, small: bool = False
    ) -> Any:
        module = (self._small if small else self._modules)[kind]
        module.config._experts_implementation = implementation
        with self._torch.inference_mode():
            return module(*inputs)

    def run(self, x: Any, ids: Any, scores: Any) -> tuple[float, Any]:
        """(seconds, output [T, H] in float32) of one call; conversions are not timed."""
        implementation, kind = self._best[ids.shape[0]]
        inputs = self._inputs(x, ids, scores, kind)
        few = self._inputs(x[:_WARM_TOKENS], ids[:_WARM_TOKENS], scores[:_WARM_TOKENS], kind)
        for _ in range(2):
            self._call(few, kind, implementation, small=True)
        start = time.perf_counter()
        out = self._call(inputs, kind, implementation)
        seconds = time.perf_counter() - start
        time.sleep(_PAUSE)
        return seconds, out.float().numpy()

    def release(self) -> None:
        """Lets go of the weights and of the float32 copy."""
        self._modules = {}
        self._small = {}
        self._weights = None

    def roundoff(self, tokens: int) -> float:
        """Unit roundoff of the values that the chosen variant stores between its steps."""
        kind = self._best[tokens][1]
        return {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}[kind]


def _tensor(array: Any) -> Any:
    """The same memory as a torch tensor; bf16 goes through its bits."""
    import numpy as np
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _experts_module(weights: Any, kind: str) -> Any:
    """Transformers' module of the family around the weights, copied only for another kind."""
    import torch
    from transformers import AutoConfig

    shape = weights.shape
    config = AutoConfig.for_model(
        shape.model_type,
        hidden_size=shape.hidden,
        intermediate_size=shape.inter,
        moe_intermediate_size=shape.inter,
        num_experts=shape.experts,
        num_local_experts=shape.experts,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "eager"
    module_name = f"transformers.models.{shape.model_type}.modeling_{shape.model_type}"
    modeling = importlib.import_module(module_name)
    classes = [value for name, value in vars(modeling).items() if name.endswith("Experts")]
    (experts,) = [c for c in classes if c.__module__ == module_name]
    with torch.device("meta"):
        module = experts(config).eval()
    for name, array in weights.arrays.items():
        tensor = _tensor(array)
        if kind != weights.format.name:
            tensor = tensor.float()
        matrix, bias = name.removesuffix("_bias"), "_bias" if name.endswith("_bias") else ""
        parameter = getattr(module, f"{matrix}_proj{bias}")
        if tuple(parameter.shape) != tuple(tensor.shape):
            raise RuntimeError(
                f"{experts.__name__}.{matrix}_proj{bias} has shape {tuple(parameter.shape)},"
                f" the weights {tuple(tensor.shape)}"
            )
        setattr(module, f"{matrix}_proj{bias}", torch.nn.Parameter(tensor, requires_grad=False))
    return module

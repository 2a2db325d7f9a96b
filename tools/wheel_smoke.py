"""Run one MoE layer on an installed wheel and compare it with numpy (cibuildwheel runs this)."""

from __future__ import annotations

import sys

import numpy as np

import cpumoe


def main() -> int:
    """Raise if the wheel computes anything else than numpy; the exit code."""
    rng = np.random.default_rng(0)
    experts, hidden, inter, tokens, top_k = 8, 64, 96, 5, 2
    x = rng.standard_normal((tokens, hidden), np.float32)
    gate_up = rng.standard_normal((experts, 2 * inter, hidden), np.float32) / 8
    down = rng.standard_normal((experts, hidden, inter), np.float32) / 8
    logits = rng.standard_normal((tokens, experts), np.float32)
    ids, weights = cpumoe.route(logits, top_k, renormalize=True)
    out = cpumoe.moe(x, cpumoe.Experts(gate_up=gate_up, down=down), ids, weights)
    want = np.zeros((tokens, hidden))
    for t in range(tokens):
        for e, w in zip(ids[t], weights[t], strict=True):
            gate, up = np.split(gate_up[e].astype(np.float64) @ x[t].astype(np.float64), 2)
            want[t] += w * (down[e].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
    frameworks = {"torch", "jax", "transformers"} & set(sys.modules)
    assert not frameworks, f"importing cpumoe imported {frameworks}"
    print(f"wheel_smoke: {cpumoe.machine()!r}, largest output {np.abs(out).max():.3f}, as numpy")
    return 0


if __name__ == "__main__":
    sys.exit(main())

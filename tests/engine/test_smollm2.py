"""A real language model in Mixtral format: greedy text equals Transformers'.

The checkpoint is made from SmolLM2-135M-Instruct by `upcycle_smollm2.py --arch mixtral --mode
virtual`, which is not part of this repository; CPUMOE_SMOLLM2 names its directory.
"""

import os
from pathlib import Path

import numpy as np
import pytest

import cpumoe
from real_text import PROMPTS, TOKENS, greedy, require_same_text


@pytest.fixture(scope="module")
def path() -> Path:
    name = os.environ.get("CPUMOE_SMOLLM2")
    if not name or not Path(name, "config.json").exists():
        pytest.skip("CPUMOE_SMOLLM2 names no checkpoint of upcycle_smollm2.py")
    return Path(name)


@pytest.fixture(scope="module")
def exact(path: Path) -> cpumoe.Model:
    return cpumoe.load(path, kv="fp32", activations="fp32")


def test_greedy_text_equals_transformers(path: Path, exact: cpumoe.Model) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    require_same_text(exact, reference)


def test_fp16_cache_differs_at_ties_only(path: Path, exact: cpumoe.Model) -> None:
    """Where the text of the 16-bit cache leaves, both tokens' logits are within its rounding."""
    half = cpumoe.load(path, kv="fp16", activations="fp32")
    for prompt in PROMPTS:
        ids = exact.tokenizer.encode(prompt)
        a, b = greedy(exact, ids), greedy(half, ids)
        same = next((i for i in range(TOKENS) if a[i] != b[i]), None)
        if same is None:
            continue
        logits = exact.logits(ids + a[:same])[-1]
        gap = float(logits[a[same]] - logits[b[same]])
        assert gap <= 16 * 2.0**-11 * float(np.abs(logits).max()), (prompt, same, gap)
        print(f"{prompt!r}: token {same}, gap {gap:.4f} of {np.abs(logits).max():.1f}")

"""A real language model in Mixtral format: greedy text equals Transformers'.

The checkpoint is made from SmolLM2-135M-Instruct by `upcycle_smollm2.py --arch mixtral --mode
virtual`, which is not part of this repository; CPUMOE_SMOLLM2 names its directory.
"""

import os
from pathlib import Path

import pytest

import cpumoe

PROMPTS = [
    "The capital of France is",
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Question: What is 12 times 7?\nAnswer:",
]
TOKENS = 64


@pytest.fixture(scope="module")
def path() -> Path:
    name = os.environ.get("CPUMOE_SMOLLM2")
    if not name or not Path(name, "config.json").exists():
        pytest.skip("CPUMOE_SMOLLM2 names no checkpoint of upcycle_smollm2.py")
    return Path(name)


@pytest.mark.parametrize("kv", ["fp32", "fp16"])
def test_greedy_text_equals_transformers(path: Path, kv: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = cpumoe.load(path, kv=kv)
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        with torch.inference_mode():
            expected = reference.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS
            )[0, len(ids) :].tolist()
        got = model.generate(ids, temperature=0, max_tokens=TOKENS, ignore_eos=True)
        assert got.ids == expected, prompt

"""Greedy text of real language models, and what it is compared with."""

from typing import Any

import cpumoe

PROMPTS = [
    "The capital of France is",
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Question: What is 12 times 7?\nAnswer:",
]
TOKENS = 64


def greedy(model: cpumoe.Model, ids: list[int]) -> list[int]:
    return model.generate(ids, temperature=0, max_tokens=TOKENS, ignore_eos=True).ids


def require_same_text(model: cpumoe.Model, reference: Any) -> None:
    """The greedy text of every prompt equals that of the Transformers model."""
    import torch

    reference.generation_config.eos_token_id = None  # go on for all tokens, as ignore_eos does
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        with torch.inference_mode():
            want = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS)
        assert greedy(model, ids) == want[0, len(ids) :].tolist(), prompt

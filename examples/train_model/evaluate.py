"""Evaluate a model folder: perplexity per domain, fewer experts per token, expert load, samples.

    python evaluate.py models/tiny-stories-moe --corpus WORK/corpus --out models/tiny-stories-moe/eval.json

Without ``--corpus`` only the folder's own ``heldout.txt`` is scored.  The protocol is that of
``common.perplexity``: non-overlapping windows of 256 tokens, no start token, the first token of a
window not scored.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from common import DOMAINS, perplexity
from transformers import AutoModelForCausalLM, AutoTokenizer

PROTOCOL = (
    "The text is tokenised as a whole with tokenizer.json (<|endoftext|> in it is the special token), cut into "
    "non-overlapping windows of `context` tokens (the last one may be shorter), each run on its own without a start "
    "token; token 0 of a window is not scored. ppl = exp(nll / scored_tokens), nll in nats. "
    "bits_per_byte = nll / scored_tokens * tokens / ln 2 / bytes."
)
PROMPTS = [
    "Once upon a time, there was a little fox",
    "Lily had a red ball.",
    "It was a dark night, and Tom",
    "And it came to pass in those days,",
    "ROMEO:\n",
]
CHATS = [
    ["Hello!", "Tell me a story about a rabbit named Clover."],
    ["What is the opposite of hot?", "What color is the sky?", "What is two plus three?"],
    ["Tell me a story about a girl who found a treasure map.", "What can we learn from the story?"],
    ["My name is Ben.", "What is my name?"],
]


def set_top_k(model, k: int) -> None:
    """Use ``k`` experts per token in every layer."""
    for layer in model.model.layers:
        layer.mlp.gate.top_k = k


@torch.no_grad()
def expert_load(model, ids: np.ndarray, context: int = 256) -> list[dict[str, float]]:
    """Share of the routed tokens that each expert of each layer gets (an even share is 1/experts)."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    for i in range(0, len(ids) - context + 1, context):
        out = model(
            input_ids=torch.from_numpy(ids[None, i : i + context]),
            output_router_logits=True,
            use_cache=False,
        )
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    shares = counts / counts.sum(1, keepdim=True)
    return [
        {"layer": i, "min_share": round(s.min().item(), 4), "max_share": round(s.max().item(), 4)}
        for i, s in enumerate(shares)
    ]


def score(model, ids: np.ndarray, size: int, context: int = 256) -> dict[str, float]:
    """Perplexity with its parts, and bits per byte."""
    r = perplexity(model, ids, context)
    return {
        "ppl": round(r["ppl"], 5),
        "nll": round(r["nll"], 3),
        "scored_tokens": r["scored_tokens"],
        "bits_per_byte": round(r["nll"] / r["scored_tokens"] * len(ids) / math.log(2) / size, 4),
    }


@torch.no_grad()
def samples(model, tokenizer, seed: int = 0) -> list[dict[str, str]]:
    """Continuations of a few prompts, and a few conversations, with the folder's sampling defaults."""
    out = []

    def generate(text: str) -> str:
        torch.manual_seed(seed)
        ids = tokenizer(text, return_tensors="pt").input_ids
        full = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=260
        )
        return tokenizer.decode(full[0, ids.shape[1] :], skip_special_tokens=True)

    for prompt in PROMPTS:
        out.append({"prompt": prompt, "text": generate(prompt)})
    for chat in CHATS:
        messages: list[dict[str, str]] = []
        for user in chat:
            messages.append({"role": "user", "content": user})
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            messages.append({"role": "assistant", "content": generate(text)})
        out.append({"chat": "\n".join(f"[{m['role']}] {m['content']}" for m in messages)})
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--corpus", type=Path, help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    parser.add_argument("--samples", action="store_true", help="also print generated text")
    parser.add_argument(
        "--max-tokens", type=int, default=8192, help="of each domain; heldout.txt is scored whole"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = {"heldout.txt": args.model / "heldout.txt"}
    if args.corpus:
        texts |= {
            n: args.corpus / "heldout" / f"{n}.txt"
            for n in DOMAINS
            if (args.corpus / "heldout" / f"{n}.txt").exists()
        }
    raw = {n: p.read_text(encoding="utf-8") for n, p in texts.items()}
    ids = {n: np.array(tokenizer(t).input_ids, dtype=np.int64) for n, t in raw.items()}
    for n in raw:
        if n != "heldout.txt" and len(ids[n]) > args.max_tokens:
            ids[n] = ids[n][: args.max_tokens]
            raw[n] = tokenizer.decode(ids[n])
    sizes = {n: len(t.encode()) for n, t in raw.items()}
    result: dict = {
        "protocol": PROTOCOL,
        "context": 256,
        "texts": {n: {"bytes": sizes[n], "tokens": len(ids[n])} for n in raw},
    }
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        for n in raw:
            result["texts"][n][name] = score(model, ids[n], sizes[n])
        if name == "fp32":
            for n in raw:
                result["texts"][n]["fp32_context_512"] = score(model, ids[n], sizes[n], 512)
            result["fp32_ppl_by_experts_per_token"] = {}
            for n in raw:
                row = {"top4": round(result["texts"][n]["fp32"]["ppl"], 4)}
                for k in (3, 2, 1):
                    set_top_k(model, k)
                    row[f"top{k}"] = round(perplexity(model, ids[n])["ppl"], 4)
                result["fp32_ppl_by_experts_per_token"][n] = row
            set_top_k(model, model.config.num_experts_per_tok)
            everything = np.concatenate([v[:4096] for v in ids.values()])
            result["expert_load_all_texts"] = expert_load(model, everything)
            if args.samples:
                for sample in samples(model, tokenizer):
                    print("----\n" + "\n".join(f"{k}: {v}" for k, v in sample.items()), flush=True)
    text = json.dumps(result, indent=2) + "\n"
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

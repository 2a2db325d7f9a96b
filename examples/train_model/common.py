"""What training, export and evaluation share: the model's shape, its experts function, perplexity."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
EOT, IM_START, IM_END = range(3)
DOMAINS = ["stories", "dialogues", "shakespeare", "bible"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def unbind_experts(self, hidden_states, top_k_index, top_k_weights):
    """Experts for training: one ``unbind`` per weight, so that autograd does not build a full-size
    zero gradient for every expert slice (which indexing ``gate_up_proj[e]`` does)."""
    tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=self.num_experts).tolist()
    inputs = hidden_states.index_select(0, order // top_k).split(counts)
    outputs = []
    for x, w_up, w_down in zip(
        inputs, self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=False
    ):
        gate, value = (x @ w_up.t()).chunk(2, -1)
        outputs.append((self.act_fn(gate) * value) @ w_down.t())
    y = torch.cat(outputs) * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return y.index_select(0, back).view(tokens, top_k, -1).sum(1)


ExpertsInterface.register("unbind", unbind_experts)


def make_config(vocab: int) -> Qwen3MoeConfig:
    """6 layers, 16 experts of 128 with top-4: 11.7 M parameters, 4.6 M of them active per token."""
    return Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        bos_token_id=EOT,
        eos_token_id=EOT,
        pad_token_id=EOT,
        initializer_range=0.02,
    )


def make_model(vocab: int) -> Qwen3MoeForCausalLM:
    """A freshly initialised model in fp32."""
    return Qwen3MoeForCausalLM._from_config(
        make_config(vocab), attn_implementation="sdpa", experts_implementation="unbind"
    ).float()


def load_domain(corpus: Path, split: str, name: str) -> np.ndarray:
    """Token ids of one domain."""
    return np.load(corpus / split / f"{name}.npy").astype(np.int64)


@torch.no_grad()
def perplexity(
    model, ids: np.ndarray, context: int = 256, max_tokens: int = 10**9
) -> dict[str, float]:
    """Perplexity over non-overlapping windows.

    The ids are cut into windows of ``context`` tokens (the last one may be shorter, a window of one
    token is dropped).  Each window is run on its own, without a start token; token 0 of a window is
    not scored, tokens 1.. are.  Perplexity is exp(sum of -ln p / number of scored tokens).
    """
    was_training = model.training
    model.eval()
    nll, scored = 0.0, 0
    ids = ids[:max_tokens]
    windows = [ids[i : i + context] for i in range(0, len(ids), context)]
    full = [x for x in windows if len(x) == context]
    batches = [np.stack(full[i : i + 8]) for i in range(0, len(full), 8)]
    batches += [x[None] for x in windows if 1 < len(x) < context]
    for batch in batches:
        x = torch.from_numpy(batch)
        logits = (
            model(input_ids=x, output_router_logits=False, use_cache=False).logits[:, :-1].float()
        )
        target = x[:, 1:]
        nll += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction="sum"
        ).item()
        scored += target.numel()
    model.train(was_training)
    return {"ppl": math.exp(nll / scored), "nll": nll, "scored_tokens": scored}

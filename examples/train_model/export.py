"""Write a model folder in the Hugging Face format: weights, configuration, tokenizer, chat template.

The folder is written beside its final place and its files are then moved over one by one, so a reader
never sees half a file.  ``heldout.txt`` (self-made stories that no training text was made of) goes
along, for tests that recompute the perplexity.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path

import stories
import torch
from common import CHAT_TEMPLATE, EOT, IM_END, SPECIAL
from transformers import GenerationConfig

HELD_OUT_STORIES = 110


def write_json(path: Path, value: dict) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_config() -> dict:
    """Special tokens and the chat template (ChatML)."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[EOT],
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL)
        },
        "chat_template": CHAT_TEMPLATE,
    }


def held_out_text() -> str:
    """Held-out stories, each closed by the end-of-text token."""
    return "".join(
        stories.story("heldout", i, True).text + SPECIAL[EOT] for i in range(HELD_OUT_STORIES)
    )


def export(model, corpus: Path, target: Path, state: dict) -> None:
    """Write (or replace) the files of the model in ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".export-", dir=target.parent))
    try:
        saved = copy.deepcopy(model).eval().to(torch.bfloat16)
        saved.config.output_router_logits = False
        saved.generation_config = GenerationConfig(
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            max_new_tokens=400,
            eos_token_id=[IM_END, EOT],
            pad_token_id=EOT,
        )
        saved.save_pretrained(stage)
        config = json.loads((stage / "config.json").read_text(encoding="utf-8"))
        config["rope_theta"] = 10000.0  # also where readers older than transformers 5 look for it
        config["num_experts"] = config.pop("num_local_experts", None) or config["num_experts"]
        config["eos_token_id"] = [IM_END, EOT]
        config["bos_token_id"] = None
        write_json(stage / "config.json", config)
        shutil.copyfile(corpus / "tokenizer.json", stage / "tokenizer.json")
        write_json(stage / "tokenizer_config.json", tokenizer_config())
        (stage / "heldout.txt").write_text(held_out_text(), encoding="utf-8")
        for path in sorted(stage.iterdir()):
            os.chmod(path, 0o644)
            os.replace(path, target / path.name)
        write_json(
            target / "training.json",
            {
                "steps": state["step"],
                "tokens": state["tokens"],
                "wall_minutes": round(state["seconds"] / 60, 1),
                "cpu_minutes": round(state["cpu_seconds"] / 60, 1),
                "held_out_during_training": state["log"],
            },
        )
        size = sum(p.stat().st_size for p in target.iterdir() if p.is_file())
        print(f"{target}: {size / 1e6:.2f} MB after step {state['step']}", flush=True)
    finally:
        shutil.rmtree(stage, ignore_errors=True)

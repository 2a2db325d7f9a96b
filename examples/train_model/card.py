"""Write the model card (README.md) of a model folder from its eval.json and training.json.

python card.py models/tiny-stories-moe
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HEAD = """# tiny-stories-moe

A small Mixture-of-Experts language model that ships with cpumoe: it writes children's stories in plain
English. It exists so that the engine can be tried, tested and measured without a download; it knows nothing about
the world.

| | |
|---|---|
| architecture | Qwen3-MoE (`qwen3_moe`): 6 layers, hidden 256, 8 heads / 4 key-value heads of 32, tied embeddings |
| experts | 16 per layer, intermediate 128, top-4, normalised weights |
| parameters | 11.69 M, of which 4.62 M are used per token |
| weights | bf16 safetensors, {size:.1f} MB |
| tokenizer | byte-level BPE, 4096 tokens, split like Qwen's; `<\\|endoftext\\|>` 0, `<\\|im_start\\|>` 1, `<\\|im_end\\|>` 2 |
| chat | ChatML template in `tokenizer_config.json` |
| trained context | 512 tokens (positions up to 2048 are accepted, quality falls beyond 512) |
| training | {steps} steps, {tokens:.2f} M tokens, {wall:.0f} min wall time on 2 shared cores ({cpu:.0f} CPU-minutes) |

Trained by `examples/train_model` (its README has the commands).

## Data and licence

- Self-made stories and conversations, written by `examples/train_model/stories.py` and `dialogues.py` (75 % of the
  training windows). They are this project's own work.
- The works of Shakespeare (10 %) and the King James Bible (15 %): public domain. None of their text is in the repository.

No other data and no other model was used. The weights, the tokenizer and `heldout.txt` are under the licence of the
repository. `heldout.txt` holds self-made stories whose combinations of plot, hero and friend were not in training.

## Perplexity

"""

PROTOCOL = """
Protocol: {protocol}

"""

TAIL = """
## Limitations

{limits}
Text in the style of Shakespeare or the Bible is imitation without sense: for a model of this size and this little
training those texts are far harder, as the perplexities show. Do not use it for anything that matters.
"""

# What reading samples of the present weights showed; to be revised with every new training.
LIMITS = """The sentences are grammatical and the stories follow their plots, but the model hardly copies from its context:
names change from sentence to sentence, a request for a certain hero or plot is not followed, and a name or a thing
that the user mentions is not remembered. Answers to questions have the right form and mostly the wrong content
("The opposite of hot" gets a wrong word). It was trained on little text; longer training is the remedy."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    result = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    run = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    text = HEAD.format(
        size=(folder / "model.safetensors").stat().st_size / 1e6,
        steps=run["steps"],
        tokens=run["tokens"] / 1e6,
        wall=run["wall_minutes"],
        cpu=run["cpu_minutes"],
    )
    text += "| held-out text | tokens | fp32 | bf16 | bits per byte (fp32) | fp32, context 512 |\n|---|---|---|---|---|---|\n"
    for name, row in result["texts"].items():
        text += (
            f"| {name} | {row['tokens']} | {row['fp32']['ppl']:.3f} | {row['bf16']['ppl']:.3f} "
            f"| {row['fp32']['bits_per_byte']:.3f} | {row['fp32_context_512']['ppl']:.3f} |\n"
        )
    text += PROTOCOL.format(protocol=result["protocol"].replace("<|endoftext|>", "`<|endoftext|>`"))
    text += "Fewer experts per token (fp32, context 256):\n\n| text | top-4 | top-3 | top-2 | top-1 |\n|---|---|---|---|---|\n"
    for name, row in result["fp32_ppl_by_experts_per_token"].items():
        text += f"| {name} | " + " | ".join(f"{row[f'top{k}']:.3f}" for k in (4, 3, 2, 1)) + " |\n"
    text += (
        "\nShare of the routed tokens per expert over all held-out domains (even: 0.0625):\n\n"
        "| layer | smallest | largest |\n|---|---|---|\n"
    )
    for row in result["expert_load_all_texts"]:
        text += f"| {row['layer']} | {row['min_share']:.4f} | {row['max_share']:.4f} |\n"
    (folder / "README.md").write_text(text + TAIL.format(limits=LIMITS), encoding="utf-8")


if __name__ == "__main__":
    main()

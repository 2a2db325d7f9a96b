"""Build the training corpus: self-made stories and dialogues, and two public-domain books.

    python corpus.py --out WORK/corpus --shakespeare shakespeare.txt --bible kjv.txt

``kjv.txt`` is the output of ``bible -f gen1:1-rev22:21`` (package ``bible-kjv``).  Either book may be
left out.  Writes tokenizer.json, train/*.npy, heldout/*.npy (uint16 ids) and heldout/*.txt.
"""

from __future__ import annotations

import argparse
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import dialogues
import numpy as np
import stories
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOT = SPECIAL[0]
# The split of Qwen2/Qwen3 tokenizers, so that the files look like those of the large models.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def self_made(kind: str, seed: str, start: int, count: int, held_out: bool) -> list[str]:
    """``count`` documents, each numbered."""
    numbers = range(start, start + count)
    if kind == "stories":
        return [stories.story(seed, i, held_out).text for i in numbers]
    return [dialogues.conversation(seed, i, held_out) for i in numbers]


def read_bible(path: Path) -> str:
    """Verses without their references."""
    return (
        "\n".join(
            re.sub(r"^\S+:\d+ ", "", line) for line in path.read_text(encoding="utf-8").splitlines()
        )
        + "\n"
    )


def split_book(text: str) -> tuple[str, str]:
    """Hold out the last 5 %, at most 150 kB."""
    cut = text.rfind("\n", 0, max(int(len(text) * 0.95), len(text) - 150_000)) + 1
    return text[:cut], text[cut:].lstrip()


def make_tokenizer(vocab: int) -> tuple[Tokenizer, trainers.BpeTrainer]:
    """Byte-level BPE with the components of a Qwen tokenizer."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    return tok, trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shakespeare", type=Path)
    parser.add_argument("--bible", type=Path)
    parser.add_argument("--stories", type=int, default=50_000)
    parser.add_argument("--dialogues", type=int, default=40_000)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    for split in ("train", "heldout"):
        (args.out / split).mkdir(parents=True, exist_ok=True)

    train: dict[str, list[str]] = {}
    held: dict[str, list[str]] = {}
    with ProcessPoolExecutor(2) as pool:
        for kind, count in (("stories", args.stories), ("dialogues", args.dialogues)):
            jobs = [
                pool.submit(self_made, kind, "train", i, min(2500, count - i), False)
                for i in range(0, count, 2500)
            ]
            train[kind] = [doc for job in jobs for doc in job.result()]
            held[kind] = self_made(kind, "heldout", 0, 150, True)
    for name, path in (("shakespeare", args.shakespeare), ("bible", args.bible)):
        if path:
            text = read_bible(path) if name == "bible" else path.read_text(encoding="utf-8")
            first, last = split_book(text)
            train[name], held[name] = [first], [last]

    tok, trainer = make_tokenizer(args.vocab)
    sample = [doc for docs in train.values() for doc in docs[:6000]]
    tok.train_from_iterator(
        (line for doc in sample for line in doc.splitlines(keepends=True)), trainer
    )
    tok.save(str(args.out / "tokenizer.json"))
    for split, sets in (("train", train), ("heldout", held)):
        for name, docs in sets.items():
            joined = [doc + EOT for doc in docs] if len(docs) > 1 else docs
            ids = np.concatenate(
                [np.array(e.ids, dtype=np.uint16) for e in tok.encode_batch(joined)]
            )
            np.save(args.out / split / f"{name}.npy", ids)
            size = sum(len(d.encode()) for d in joined)
            print(
                f"{split}/{name}: {len(docs)} documents, {size} bytes, {len(ids)} tokens",
                flush=True,
            )
            if split == "heldout":
                (args.out / split / f"{name}.txt").write_text("".join(joined), encoding="utf-8")


if __name__ == "__main__":
    main()

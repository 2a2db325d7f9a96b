"""Small trained vocabularies as GGUF metadata: byte-level BPE and SentencePiece-like BPE."""

import functools
import re
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

CONTROL, USER, UNUSED, BYTE, UNKNOWN, NORMAL = 3, 4, 5, 6, 2, 1
NAMED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USERS = ["<think>", "</think>"]
# Text with everything that the splitting patterns tell apart.
CORPUS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; it's they'll WE'RE I'M camelCaseWord",
    "def f(x):\n    return x**2  # comment\n\n\n\tindented\r\nnext line   \n",
    "Größe naïve café ΑΒΓ αβγ Привет мир ŁÓDŹ ǅungla ა ბ გ",
    "中文字符 日本語のテキスト カタカナ 한국어 텍스트 。，「引用」",
    "emoji 🙂👍🏽🇩🇪 math ∑∫√ currency €£¥ $100.50 +-*/=<>^~|`",
    "2024-01-31T12:34:56 v1.2.3 1,000,000 x1 1x ²³ ١٢٣ Ⅷ ½",
    "http://example.com/a_b?c=d&e=f#g user@host (a[0]{b}) !!! ... --- ___",
    "ALLCAPS MixedCase lowerUPPER XMLHttp iPhone O'Neil 'quoted' \"double\"",
    "\u00a0nbsp \u200bzero\u3000wide \u2028sep e\u0301 combining",
]
CORPUS += [
    " ".join(f"{w}{i * 37}" for i, w in enumerate(line.split())) + "  " + line for line in CORPUS
]


@functools.cache
def byte_level(size: int = 900) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tokens, merges) of a byte-level BPE; merges cross the borders that patterns draw."""
    raw = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"\S+\s*|\s+"), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.train_from_iterator(
        [*CORPUS, *(" " + line for line in CORPUS)],
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(t) for t in NAMED],
            show_progress=False,
        ),
    )
    vocab = raw.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__) + USERS
    merges = re.search(r'"merges":\[(.*)\]', raw.to_str())
    assert merges is not None
    pairs = re.findall(r'\["((?:[^"\\]|\\.)*)","((?:[^"\\]|\\.)*)"\]', merges[1])
    plain = [tuple(p.replace('\\"', '"').replace("\\\\", "\\") for p in pair) for pair in pairs]
    return tuple(tokens), tuple(f"{a} {b}" for a, b in plain)


@functools.cache
def sentence_piece(size: int = 700) -> tuple[tuple[str, ...], tuple[float, ...], tuple[int, ...]]:
    """(tokens, scores, types) as SentencePiece orders them: named, bytes, pieces, characters."""
    raw = Tokenizer(models.BPE())
    raw.train_from_iterator(
        ["▁" + line.replace(" ", "▁") for line in CORPUS],
        trainers.BpeTrainer(vocab_size=size, show_progress=False, max_token_length=16),
    )
    vocab = raw.get_vocab()
    pieces = sorted((t for t in vocab if len(t) > 1), key=vocab.__getitem__)
    letters = sorted(t for t in vocab if len(t) == 1)
    named = ["<unk>", "<s>", "</s>"]
    tokens = [*named, *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) + len(letters))
    return tuple(tokens), tuple(scores), tuple(types)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _common(path: Path, tokens: int) -> gguf.GGUFWriter:
    """Enough of a llama for other programs to read the vocabulary."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(64)
    w.add_embedding_length(32)
    w.add_block_count(1)
    w.add_feed_forward_length(32)
    w.add_head_count(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(tokens)
    return w


def write_byte_level(path: Path, pre: str | None, **flags: bool) -> Path:
    """A vocabulary-only file with byte-level BPE."""
    tokens, merges = byte_level()
    w = _common(path, len(tokens))
    w.add_tokenizer_model("gpt2")
    if pre is not None:
        w.add_tokenizer_pre(pre)
    w.add_token_list(list(tokens))
    kinds = {**dict.fromkeys(NAMED, CONTROL), **dict.fromkeys(USERS, USER)}
    w.add_token_types([kinds.get(t, NORMAL) for t in tokens])
    w.add_token_merges(list(merges))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    for name, value in flags.items():
        getattr(w, f"add_{name}")(value)
    _finish(w)
    return path


def write_sentence_piece(path: Path, **flags: bool) -> Path:
    """A vocabulary-only file with SentencePiece BPE."""
    tokens, scores, types = sentence_piece()
    w = _common(path, len(tokens))
    w.add_tokenizer_model("llama")
    w.add_token_list(list(tokens))
    w.add_token_scores(list(scores))
    w.add_token_types(list(types))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    for name, value in flags.items():
        getattr(w, f"add_{name}")(value)
    _finish(w)
    return path


def samples(count: int = 400, seed: int = 0) -> list[str]:
    """The corpus, and random strings over its characters."""
    import random

    rng = random.Random(seed)
    characters = sorted(set("".join(CORPUS)))
    words = " ".join(CORPUS).split(" ")
    made = []
    for i in range(count):
        if i % 2:
            made.append("".join(rng.choice(characters) for _ in range(rng.randint(1, 24))))
        else:
            made.append(rng.choice([" ", "", "\n", "  "]).join(rng.choices(words, k=6)))
    return [*CORPUS, *made]


def metadata(path: Path) -> dict[str, Any]:
    """Metadata as our reader gives them."""
    from cpumoe.checkpoint import open_gguf

    return dict(open_gguf(path).metadata)

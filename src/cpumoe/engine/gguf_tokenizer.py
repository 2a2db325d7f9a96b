"""A GGUF file's tokenizer: vocabulary, merges and named tokens of its metadata, as one of ours.

tokenizer.ggml.model "gpt2" is byte-level BPE, its splitting of text named by tokenizer.ggml.pre;
"llama" is SentencePiece BPE, whose merges follow from the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from cpumoe._core import Error
from cpumoe.models.config import MAX_VOCAB, Config

# tokenizer.ggml.token_type
_NORMAL, _CONTROL, _USER = 1, 3, 4

# Parts of the splitting patterns, as published in the models' tokenizer.json.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join([_CONTRACTION, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES])
_QWEN2 = "|".join([_CONTRACTION, _WORD, r"\p{N}", _SYMBOLS, _SPACES])
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(end: str) -> str:
    """Words split where capitals begin, each with what follows it at once."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{_UPPER}*{_LOWER}+{end}|{head}{_UPPER}+{_LOWER}*{end}"


_GPT4O = "|".join([_cased(f"{_CONTRACTION}?"), r"\p{N}{1,3}", _SLASHED, _SPACES])
_TEKKEN = "|".join([_cased(""), r"\p{N}", _SLASHED, _SPACES])
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u10D0-\u10FF]]+",  # letters with case, as of an older Unicode
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
# What tokenizer.ggml.pre "default" stands for in the program that made the files.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "glm4": (_LLAMA3,),
    "chatglm-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "gpt-4o": (_GPT4O,),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK3,
    "tekken": (_TEKKEN,),
}
_NFC = ("qwen2", "deepseek-r1-qwen", "olmo")
# A whole word that is a token stays whole; texts begin with the beginning-of-text token.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")

# Control tokens that end an answer; files often state one id only.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
    "<|observation|>",
)


class Vocabulary:
    """tokenizer.ggml.* of a file, checked: tokens, their types and the named ids."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = c = Config(metadata, where)
        self.kind = c.choice("tokenizer.ggml.model", ("gpt2", "llama"))
        self.tokens = self._texts("tokenizer.ggml.tokens")
        if not 1 <= len(self.tokens) <= MAX_VOCAB:
            raise self._fail("tokenizer.ggml.tokens", f"1 to {MAX_VOCAB} strings", self.tokens)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise Error(f"{where}: tokenizer.ggml.tokens must be distinct; {twice[:100]!r} is not")
        types = metadata.get("tokenizer.ggml.token_type")
        self.types = (
            np.full(len(self.tokens), _NORMAL)
            if types is None
            else self._numbers("tokenizer.ggml.token_type")
        )

    def _fail(self, key: str, must: str, got: object) -> Error:
        size = f"{len(got)} of them" if isinstance(got, list | np.ndarray) else repr(got)[:100]
        return Error(f"{self.metadata.where}: {key} must be {must}; got {size}")

    def _texts(self, key: str) -> list[str]:
        value = self.metadata.values.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._fail(key, "an array of strings", value)
        return value

    def _numbers(self, key: str) -> np.ndarray[Any, Any]:
        """An array with one number for each token."""
        value = self.metadata.values.get(key)
        if not isinstance(value, np.ndarray) or value.shape != (len(self.tokens),):
            raise self._fail(key, f"an array of {len(self.tokens)} numbers, one a token", value)
        return value

    def merges(self) -> list[tuple[str, str]]:
        """tokenizer.ggml.merges as pairs."""
        pairs = []
        for i, merge in enumerate(self._texts("tokenizer.ggml.merges")):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise self._fail(f"tokenizer.ggml.merges[{i}]", "two texts and a space", merge)
            pairs.append((left, right))
        return pairs

    def scores(self) -> np.ndarray[Any, Any]:
        """tokenizer.ggml.scores."""
        scores = self._numbers("tokenizer.ggml.scores").astype(np.float64)
        if not np.isfinite(scores).all():
            raise self._fail("tokenizer.ggml.scores", "finite numbers", "others")
        return scores

    def named(self, name: str) -> int | None:
        """Id of tokenizer.ggml.{name}_token_id, None when absent."""
        key = f"tokenizer.ggml.{name}_token_id"
        return (
            self.metadata.integer(key, 0, len(self.tokens) - 1) if self.metadata.has(key) else None
        )

    def end_ids(self) -> frozenset[int]:
        """Ids that end a text: the stated ones, and control tokens known to."""
        stated = {i for n in ("eos", "eot", "eom") if (i := self.named(n)) is not None}
        known = {self.ids[t] for t in _ENDS if t in self.ids}
        return frozenset(stated | {i for i in known if self.types[i] == _CONTROL})


def _byte_level(v: Vocabulary, pre: str) -> RawTokenizer:
    ignore = pre in _WHOLE_WORDS
    raw = RawTokenizer(models.BPE(vocab=v.ids, merges=v.merges(), ignore_merges=ignore))
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in _SPLITS[pre]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    raw.decoder = decoders.ByteLevel()
    if pre in _NFC:
        raw.normalizer = normalizers.NFC()
    return raw


def piece_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Merges that make BPE build SentencePiece's pieces: the best-scored piece first.

    Every way to cut a normal piece in two normal pieces is a merge.
    """
    ids = {t: i for i, t in enumerate(tokens) if types[i] == _NORMAL}
    ranked = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]


def _sentence_piece(v: Vocabulary) -> RawTokenizer:
    unknown = v.named("unknown") or 0
    merges = piece_merges(v.tokens, v.scores().tolist(), v.types.tolist())
    model = models.BPE(
        vocab=v.ids,
        merges=merges,
        unk_token=v.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    raw = RawTokenizer(model)
    prefix = v.metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    space = normalizers.Replace(" ", "▁")
    raw.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space])
        if prefix
        else normalizers.Sequence([space])
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return raw


def _add_named(raw: RawTokenizer, v: Vocabulary) -> None:
    """Control and user-defined tokens are found in the text before anything is split."""
    for kind, special in ((_CONTROL, True), (_USER, False)):
        chosen = [v.tokens[i] for i in np.flatnonzero(v.types == kind) if v.tokens[i]]
        added = [AddedToken(t, normalized=False, special=special) for t in chosen]
        if special:
            raw.add_special_tokens(added)
        else:
            raw.add_tokens(added)
    if raw.get_vocab_size() != len(v.tokens):
        raise Error(f"{v.metadata.where}: tokenizer.ggml.tokens cannot all be added by their ids")


@dataclass(frozen=True, slots=True)
class Parts:
    """A tokenizer, what tokenizer_config.json would say, the chat template, ids that end a text."""

    raw: RawTokenizer
    config: Mapping[str, Any]
    template: str | None
    end_ids: frozenset[int]


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> Parts:
    """The tokenizer that `metadata` describe.

    Raises Error when they hold none, or one of a kind that is not supported, by name.
    """
    v = Vocabulary(metadata, where)
    c = v.metadata
    key = "tokenizer.ggml.pre"
    pre = c.choice(key, list(_SPLITS), default="default") if v.kind == "gpt2" else ""
    try:
        raw = _byte_level(v, pre) if v.kind == "gpt2" else _sentence_piece(v)
        _add_named(raw, v)
    except (KeyboardInterrupt, SystemExit, Error):
        raise
    except BaseException as e:  # the package's own panics derive from BaseException only
        raise Error(f"{where}: tokenizer.ggml.* make no tokenizer ({str(e)[:200]})") from None
    adds_bos = v.kind == "llama" or pre in _WHOLE_WORDS
    config: dict[str, Any] = {
        "add_bos_token": c.flag("tokenizer.ggml.add_bos_token", default=adds_bos)
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for name, field in names.items():
        if (i := v.named(name)) is not None:
            config[field] = v.tokens[i]
    template = c.text("tokenizer.chat_template") if c.has("tokenizer.chat_template") else None
    return Parts(raw, config, template, v.end_ids())


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata describe a tokenizer at all."""
    return metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")

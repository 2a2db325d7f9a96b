"""Streaming: whole characters only, the joined pieces are the decoded text, stops stay hidden."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cpumoe.engine.text import StopMatcher, TextStream

SAMPLES = [
    "plain text, nothing special",
    "日本語のテキスト、漢字とかな",
    "emoji 👩‍👩‍👧‍👦 family, flag 🇫🇮, skin 👍🏽 and ☕️",
    "combining e\u0301 a\u0308\u0323, Devanagari नमस्ते, Thai สวัสดี",
    "mixed Ωmega → 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff end",
    " leading and trailing ",
    "line\nbreaks\r\n\ttabs",
    "a real replacement character \ufffd inside",
    "\ufffd",
]


def byte_level() -> Tokenizer:
    """Every byte a token, as in GPT-2, Qwen and OLMoE tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece-like: words with a low line for the space, unknown characters as bytes."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for piece in [
        "▁",
        "e",
        "t",
        "a",
        "o",
        "i",
        "n",
        "s",
        "r",
        "l",
        "d",
        "p",
        "x",
        "c",
        "g",
        "h",
        "m",
        "b",
        "u",
        ",",
    ]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def decode_with(tokenizer: Tokenizer):
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def pieces_of(tokenizer: Tokenizer, ids, context=()):
    stream = TextStream(decode_with(tokenizer), context)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_text_and_never_split_a_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] in ("", "\ufffd")  # only what looks broken waits for the end


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_behind_a_prompt(kind, text):
    """The pieces continue the prompt's text: a leading space is kept."""
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("some prompt 漢字" + text).ids
    for cut in (1, 3, len(ids) // 2, len(ids) - 1):
        before = tokenizer.decode(ids[:cut])
        if before.endswith("\ufffd"):
            continue  # cut inside a character: there is no text to continue
        assert before + "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(), st.integers(0, 50))
def test_any_text_byte_level(text, cut):
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode(text).ids
    assert "".join(pieces_of(tokenizer, ids)) == text
    assert "".join(pieces_of(tokenizer, ids[:cut])) == tokenizer.decode(ids[:cut])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_byte_level(ids):
    """Also from broken bytes nothing is lost, and no whole character comes out broken."""
    tokenizer = TOKENIZERS["byte level"]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_waits_for_its_last_byte():
    tokenizer = TOKENIZERS["byte level"]
    pieces = pieces_of(tokenizer, tokenizer.encode("é漢👍").ids)
    assert pieces == ["", "é", "", "", "漢", "", "", "", "👍", ""]


def test_special_tokens_do_not_eat_a_space():
    vocab = {"<s>": 0, "<|im_end|>": 1, "▁a": 2, "▁b": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    for ids in ([0, 2, 3, 1, 2], [2, 1, 1, 3], [1, 2, 3]):
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def run_matcher(stops, pieces):
    matcher = StopMatcher(stops)
    out = [matcher.push(p) for p in pieces]
    if matcher.found is None:
        out.append(matcher.finish())
    return "".join(out), matcher.found


def expected(stops, text):
    hits = [(text.find(s), s) for s in stops if s in text]
    return (text[: min(hits)[0]], True) if hits else (text, False)


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.integers(0, 10**6),
)
def test_stops_are_found_across_pieces(text, stops, seed):
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        size = rng.randint(0, 4)
        pieces.append(text[at : at + size])
        at += size
    # A matcher may settle for the first stop to be complete; the earliest start wins within it.
    got, found = run_matcher(stops, pieces)
    want, hit = expected(stops, text)
    assert bool(found) == hit
    assert text.startswith(got)
    assert all(s not in got for s in stops)
    assert len(got) >= len(want)
    if len(stops) <= 1:
        assert got == want


def test_nothing_of_a_stop_is_emitted():
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(p) for p in ("Hi.\n", "\nUs", "er", ": what")] == ["Hi.", "", "", ""]
    assert matcher.found == "\n\nUser:"


def test_a_false_start_is_emitted_at_the_end():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("xSTO") == "x"
    assert matcher.finish() == "STO"

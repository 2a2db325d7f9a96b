"""Bounded fuzzing of GGUF files: bytes of the header, metadata, tensors, tokenizers.

As in test_fuzz.py: the answer is a model or an Error, whatever the file.
"""

import contextlib
import itertools
import random
import struct
import time
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cpumoe
import gguf_bytes as raw
from cpumoe import Error
from cpumoe.checkpoint import open_gguf
from cpumoe.checkpoint.gguf_types import GGUF_TYPES
from cpumoe.engine.tokenizer import Tokenizer
from fuzzing import SECONDS, rounds
from gguf_tiny import FIELDS, TENSORS, model

ENTRIES = [
    raw.u32("general.alignment", 32),
    raw.entry("a.flag", raw.BOOL, b"\1"),
    raw.entry("a.text", raw.STRING, raw.text("héllo")),
    raw.array("a.texts", raw.STRING, 3, raw.text("x") + raw.text("") + raw.text("yz")),
    raw.array("a.numbers", raw.FLOAT32, 4, bytes(16)),
    raw.array("a.nested", raw.ARRAY, 1, struct.pack("<IQ", raw.UINT8, 2) + b"\1\2"),
]
INFOS = [raw.info("w", [8, 2]), raw.info("q", [32, 3], raw.Q4_0, 64), raw.info("h", [5], 1, 128)]
WHOLE = raw.pack(ENTRIES, INFOS, bytes(range(160)))
EDGES = [0, 1, 2, 7, 8, 9, 12, 13, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def inspect(path: Path) -> bool:
    """Open the file; touch every byte that its tensors claim."""
    with contextlib.suppress(Error):
        opened = open_gguf(path)
        size, spans = path.stat().st_size, []
        for ref in opened.tensors.values():
            assert 0 <= ref.offset <= ref.offset + ref.nbytes <= size
            assert len(ref.data.tobytes()) == ref.nbytes
            spans.append((ref.offset, ref.offset + ref.nbytes))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        return True
    return False


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few damages to bytes and to the numbers among them."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not out:
            break
        at, kind = rng.randrange(len(out)), rng.randrange(5)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            width = rng.choice([4, 8])
            value = rng.choice([*EDGES, rng.getrandbits(16)]) % (1 << 8 * width)
            out[at : at + width] = value.to_bytes(width, "little")
        elif kind == 2:
            del out[at : at + rng.randint(1, 9)]
        elif kind == 3:
            other = rng.randrange(len(out))
            out[at:at] = out[min(at, other) : max(at, other)][:48]
        else:
            del out[at:]
            out += b"\0"
    return bytes(out)


def test_damaged_bytes(tmp_path):
    path, opened = tmp_path / "m.gguf", 0
    for seed in rounds():
        path.write_bytes(mutate(WHOLE, random.Random(seed)))
        opened += inspect(path)
    assert opened  # some damages do no harm: tensors are reached
    path.write_bytes(WHOLE)
    assert inspect(path)


NUMBER = st.one_of(st.integers(0, 40), st.sampled_from(EDGES))
TEXT = st.one_of(st.binary(max_size=6), st.sampled_from([b"general.alignment", b"split.count"]))
ENTRY = st.builds(
    lambda key, kind, body: raw.entry(key, kind % 2**32, body),
    TEXT,
    st.one_of(st.integers(0, 14), NUMBER),
    st.binary(max_size=40),
)
INFO = st.builds(
    lambda name, dims, kind, offset: raw.info(name, dims, kind % 2**32, offset),
    TEXT,
    st.lists(NUMBER, max_size=6),
    st.one_of(st.sampled_from(list(GGUF_TYPES)), NUMBER),
    NUMBER.map(lambda n: n * 32 % 2**64),
)


def test_headers_of_any_shape(tmp_path):
    end = time.monotonic() + SECONDS

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(ENTRY, max_size=3),
        st.lists(INFO, max_size=3),
        st.binary(max_size=64),
        st.one_of(st.none(), st.tuples(NUMBER, NUMBER)),
    )
    def check(entries, infos, data, counts):
        if time.monotonic() < end:
            (tmp_path / "m.gguf").write_bytes(raw.pack(entries, infos, data, counts=counts))
            inspect(tmp_path / "m.gguf")

    check()


ODD = [
    None,
    0,
    1,
    2,
    3,
    5,
    -1,
    2**31,
    2**62,
    True,
    False,
    0.0,
    0.5,
    1e300,
    float("nan"),
    "",
    "yarn",
]
ODD += [
    "llama",
    "qwen2moe",
    "olmoe",
    "gpt-oss",
    "deepseek2",
    "glm4moe",
    "none",
    "linear",
    [1],
    [2, 2],
]
MORE = """rope.scaling.type rope.scaling.factor rope.scale_linear rope.dimension_count vocab_size
nextn_predict_layers expert_gating_func expert_weights_scale expert_weights_norm logit_scale
attention.sliding_window rope.scaling.attn_factor rope.scaling.yarn_log_multiplier
leading_dense_block_count expert_shared_count expert_group_count expert_group_used_count
attention.kv_lora_rank attention.q_lora_rank attention.key_length_mla attention.value_length_mla"""
KEYS = [*FIELDS, *(f"qwen3moe.{name}" for name in MORE.split())]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen2moe", "olmoe", "gpt-oss", "deepseek2", "glm4moe"]


def test_metadata_and_tensors(tmp_path):
    """Well-formed files whose fields and tensors are at odds: loaded, and run if they load."""
    accepted = 0
    for seed in rounds():
        rng = random.Random(seed)
        fields = {rng.choice(KEYS): rng.choice(ODD) for _ in range(rng.randint(0, 2))}
        tensors: dict[str, list[int] | None] = {}
        if rng.random() < 0.5:
            name = rng.choice(list(TENSORS))
            shape = TENSORS[name]
            changes = [
                None,
                shape[::-1],
                [*shape, 1],
                shape[1:],
                [max(1, shape[0] - 1), *shape[1:]],
            ]
            tensors[name] = rng.choice(changes) or None
        arch = rng.choice(["qwen3moe"] * 4 + ARCHITECTURES)
        fields = {k.replace("qwen3moe.", f"{arch}."): v for k, v in fields.items()}
        with contextlib.suppress(Error):
            loaded = cpumoe.load(model(tmp_path / "m.gguf", fields, tensors, arch), threads=1)
            loaded.generate([1, 2, 3], max_tokens=2, temperature=0)
            accepted += 1
    assert accepted  # some changes do no harm: the test reaches the model


TOKENS = [
    "<s>",
    "<0x0A>",
    "▁",
    "a",
    "b",
    "ab",
    "▁ab",
    "Ġ",
    "Ġa",
    "Ċ",
    "",
    "<|im_end|>",
    "é",
    "\ud7ff",
]
VALUES = [
    None,
    0,
    3,
    -1,
    2**40,
    True,
    1.5,
    "gpt2",
    "llama",
    "qwen2",
    [],
    ["a b"],
    ["Ġ a"],
    ["x"],
    [1],
]


def test_tokenizers():
    working = 0
    for seed in rounds():
        rng = random.Random(seed)
        tokens = rng.choices(TOKENS, k=rng.randint(0, 12)) if seed % 4 else rng.sample(TOKENS, 9)
        fields = {
            "model": rng.choice(["gpt2", "llama"]),
            "pre": rng.choice(["default", "qwen2", "deepseek-llm", "smollm"]),
            "tokens": tokens,
            "merges": rng.choice([[], ["a b"], ["Ġ a", "a b"]]),
            "scores": np.array([rng.choice([0.0, -1.0, rng.random()]) for _ in tokens]),
            "token_type": np.array([rng.choice([1, 1, 1, 3, 4, 6, 9, -1]) for _ in tokens]),
            "bos_token_id": 0,
        }
        for _ in range(rng.choice([0, 0, 1, 2])):
            fields[rng.choice(list(fields))] = rng.choice(VALUES)
        metadata = {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}
        with contextlib.suppress(Error):
            made = Tokenizer(Path("m.gguf"), metadata)
            ids = made.encode("ab a\n<|im_end|>é 1")
            assert all(0 <= i < made.size for i in ids)
            assert isinstance(made.decode(ids), str)
            working += 1
    assert working

"""Bounded fuzzing of what strangers write: the safetensors header and config.json.

Whatever the bytes, the answer is a model or an Error: no other exception, no crash, no read outside
the file. tests/fuzzing.py says for how long.
"""

import contextlib
import json
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cpumoe
from cpumoe import Error
from cpumoe.checkpoint import open_safetensors
from fuzzing import SECONDS, rounds
from hostile import QWEN3, checkpoint, header_of, pack, qwen3_tensors, values, write

TENSORS = {"a": ("F32", [2, 3]), "b": ("BF16", [4]), "c": ("F16", [0, 5]), "d": ("I32", [3])}
WHOLE = pack(header_of(TENSORS), bytes(range(44)))


def inspect(path):
    """Open the file; touch every byte that its tensors claim."""
    with contextlib.suppress(Error):
        file = open_safetensors(path)
        covered = sum(t.nbytes for t in file.tensors.values())
        assert covered <= path.stat().st_size
        for ref in file.tensors.values():
            assert ref.data.tobytes() is not None
        return True
    return False


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few byte-level damages."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at : at + rng.randint(1, 8)] = b""
        elif kind == 2:
            out[at:at] = rng.choice([b"[", b"]", b"{", b"}", b'"', b",", b"9" * 20, b"-1", b"null"])
        elif kind == 3:
            out[at : at + 1] = str(rng.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1])).encode()
        elif kind == 4:
            other = rng.randrange(len(out) + 1)
            out[at:at] = out[min(at, other) : max(at, other)][:64]
        else:
            out[:8] = rng.getrandbits(rng.choice([4, 8, 9, 16, 40, 64])).to_bytes(8, "little")
    return bytes(out)


def test_damaged_bytes(tmp_path):
    for seed in rounds():
        inspect(write(tmp_path / "m", mutate(WHOLE, random.Random(seed))))
    assert inspect(write(tmp_path / "m", WHOLE))


SIZES = st.one_of(st.integers(0, 12), st.sampled_from([-1, 2**31, 2**63 - 1, 2**63, 2**64]))
JUNK = st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=3), SIZES)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "F4", ""]), JUNK),
        "shape": st.one_of(st.lists(st.one_of(SIZES, JUNK), max_size=4), JUNK),
        "data_offsets": st.one_of(st.lists(st.one_of(SIZES, JUNK), max_size=3), JUNK),
    }
)
HEADER = st.dictionaries(
    st.one_of(st.sampled_from("abcd"), st.just("__metadata__")), st.one_of(ENTRY, JUNK), max_size=4
)


def test_headers_of_any_shape(tmp_path):
    end = time.monotonic() + SECONDS

    @settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(HEADER, st.binary(max_size=48), st.one_of(st.none(), st.integers(0, 2**64 - 1)))
    def check(header, data, length):
        if time.monotonic() < end:
            inspect(write(tmp_path / "m", pack(header, data, length=length)))

    check()


FIELDS = [*QWEN3, "layer_types", "rope_scaling", "rope_parameters", "rope_theta", "hidden_act"]
FIELDS += ["num_local_experts", "tie_word_embeddings", "quantization_config", "mlp_only_layers"]
FIELDS += ["decoder_sparse_step", "use_sliding_window", "sliding_window", "attention_bias"]
ODD = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    4,
    7,
    -1,
    2**31,
    2**63,
    2**200,
    0.0,
    0.5,
    1e308,
    -2.5,
    float("nan"),
]
ODD += ["", "silu", "qwen3_moe", "mixtral", "olmoe", "qwen2_moe", [], [0], [[]], {}]
ODD += [{"type": "yarn"}, {"type": "linear", "factor": 1e-300}, {"rope_type": "llama3"}]
ODD += [{"rope_type": "yarn", "factor": 1e300, "beta_fast": 1e-300}, float("inf")]


def load_and_run(path):
    """Load; if that works the model must also run."""
    with contextlib.suppress(Error):
        cpumoe.load(path, threads=1).generate([1, 2, 3], max_tokens=2, temperature=0)
        return True
    return False


def test_configs(tmp_path):
    path, accepted = checkpoint(tmp_path), 0
    for seed in rounds():
        rng = random.Random(seed)
        config = dict(QWEN3)
        for _ in range(rng.randint(1, 3)):
            config[rng.choice(FIELDS)] = rng.choice(ODD)
        (path / "config.json").write_text(json.dumps(config))
        accepted += load_and_run(path)
    assert accepted  # some changes do no harm: the test reaches the model


def test_tensors_against_the_config(tmp_path):
    """Headers that are well-formed but hold other tensors than the config asks for."""
    path, whole = checkpoint(tmp_path), qwen3_tensors()
    data = values(whole)
    for seed in rounds():
        rng, tensors = random.Random(seed), dict(whole)
        for _ in range(rng.randint(0, 2)):
            name = rng.choice(list(tensors))
            dtype, shape = tensors[name]
            kind = rng.randrange(5)
            if kind == 0:
                del tensors[name]
            elif kind == 1:
                tensors[name] = (rng.choice(["F16", "BF16", "I32"]), shape)
            elif kind == 2:
                tensors[name] = (dtype, shape[::-1])
            elif kind == 3:
                tensors[name] = (dtype, [*shape, 1])
            else:
                tensors[name] = (dtype, [rng.choice([0, 1, s + 1]) for s in shape])
        header = header_of(tensors)
        size = max((e["data_offsets"][1] for e in header.values()), default=0)
        content = (data * (size // len(data) + 1))[:size]
        write(path / "model.safetensors", pack(header, content))
        load_and_run(path)


@pytest.mark.parametrize(
    "file", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_damaged_companions(tmp_path, bundled, file):
    path = checkpoint(tmp_path)
    good = (bundled / file).read_bytes()[:4000]
    for seed in range(60):
        write(path / file, mutate(good, random.Random(seed)))
        with contextlib.suppress(Error):
            loaded = cpumoe.load(path, threads=1)
            loaded.generate([1, 2], max_tokens=1)
            loaded.tokenizer.encode("some text")

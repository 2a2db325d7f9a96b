"""Whole checkpoints: what is in the files, who reads them, what is refused."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from quantized_files import FAMILIES, decode, model, tensors, write_decoded

import cpumoe
from cpumoe import Error, quantize

# As in tests/models: fp32 arithmetic in another order on so small a model stays far below.
BOUND = 1e-4
FORMATS = ["int4_g32", "int8_g16", "int4_row", "u2_g16", "mxfp4"]
IDS = np.random.default_rng(0).integers(0, 101, 33).tolist()


def relative(got, want):
    return float(np.abs(got - want).max() / np.abs(want).max())


def logits(path, **options):
    return cpumoe.load(path, kv="fp32", **options).logits(IDS)


def make(tmp_path, source, name="out", **options):
    return quantize.quantize_model(source, tmp_path / name, **options)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_reads_what_is_written(family, name, tmp_path):
    made = make(tmp_path, model(family), format=name)
    plain = write_decoded(made.path, tmp_path / "plain")
    # Both hold the same real numbers, so the logits differ by roundings of fp32 only.
    assert relative(logits(made.path, activations="fp32"), logits(plain)) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_written(family, tmp_path):
    pytest.importorskip("compressed_tensors")
    made = make(tmp_path, model(family), format="int4_g32", scale_dtype="fp32")
    hf = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    with torch.no_grad():
        want = hf(torch.tensor([IDS])).logits[0].numpy()
    assert relative(logits(made.path, activations="fp32"), want) < BOUND


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_decodes_the_same_weights(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    made = make(tmp_path, model("qwen3_moe"), format=name)
    hf = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.bfloat16)
    hf(torch.tensor([IDS]))  # it decodes on the first call
    state, want = hf.state_dict(), decode(made.path)

    def same(got, weight):
        # Transformers rounds the decoded weights to the model's bf16.
        assert torch.equal(got, torch.from_numpy(weight).to(torch.bfloat16))

    for i in range(4):
        p = f"model.layers.0.mlp.experts.{i}"
        fused = state["model.layers.0.mlp.experts.gate_up_proj"][i]
        same(fused[:32], want[f"{p}.gate_proj.weight"])
        same(fused[32:], want[f"{p}.up_proj.weight"])
        same(state["model.layers.0.mlp.experts.down_proj"][i], want[f"{p}.down_proj.weight"])
    for module in ("0.self_attn.q_proj", "1.self_attn.o_proj", "1.mlp.down_proj"):
        same(state[f"model.layers.{module}.weight"], want[f"model.layers.{module}.weight"])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fused_experts_give_the_same_files(family, tmp_path):
    made = make(tmp_path, model(family), "a", format="int4_g32")
    fused = make(tmp_path, model(family, published=False), "b", format="int4_g32")
    assert not any("block_sparse_moe" in n for n in tensors(model(family, published=False)))
    a, b = made.path / "model.safetensors", fused.path / "model.safetensors"
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scales_are_of_the_models_dtype(dtype, tmp_path):
    made = make(tmp_path, model("qwen3_moe", dtype=dtype), format="int4_g32")
    scale = tensors(made.path)["model.layers.0.self_attn.q_proj.weight_scale"]
    assert scale.dtype == (np.float16 if dtype == "float16" else "bfloat16")
    norm = tensors(made.path)["model.norm.weight"]
    assert norm.dtype == dtype


def test_what_is_left_alone_is_equal_byte_for_byte(tmp_path):
    source = model("qwen2_moe")
    made = make(tmp_path, source, format="int8_g32")
    before, after = tensors(source), tensors(made.path)
    kept = [n for n in before if n in after]
    assert {n.rpartition(".layers.")[2] for n in kept} == {
        f"{layer}.{name}"
        for layer in (0, 1)
        for name in (
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "mlp.gate.weight",
            "mlp.shared_expert_gate.weight",
            *(f"self_attn.{p}_proj.bias" for p in "qkv"),
        )
    } | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for name in kept:
        assert before[name].tobytes() == after[name].tobytes()
    ignored = json.loads((made.path / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [
        "lm_head",
        *(f"model.layers.{i}.mlp.{g}" for i in (0, 1) for g in ("gate", "shared_expert_gate")),
    ]


def test_options_choose_what_is_quantised(tmp_path):
    source = model("qwen3_moe")
    bare = make(tmp_path, source, "a", format="int4_g32", attention=False)
    assert set(bare.classes) == {"experts", "dense", "all"}
    assert "model.layers.1.self_attn.q_proj.weight" in tensors(bare.path)
    full = make(tmp_path, source, "b", format="int4_g32", head=True)
    assert set(full.classes) == {"experts", "dense", "attention", "head", "all"}
    assert "lm_head.weight_packed" in tensors(full.path)
    for made in (bare, full):
        plain = write_decoded(made.path, made.path.with_name(f"{made.path.name}-plain"))
        assert relative(logits(made.path, activations="fp32"), logits(plain)) < BOUND


def test_report(tmp_path):
    source = model("qwen3_moe")
    made = make(tmp_path, source, format="int4_g32")
    before, after = tensors(source), decode(made.path)
    assert made.source_bytes == sum(a.nbytes for a in before.values())
    assert made.bytes == (made.path / "model.safetensors").stat().st_size
    experts = [n for n in before if ".experts." in n]
    assert made.classes["experts"].matrices == len(experts)
    error = sum(np.square(before[n].astype(np.float64) - after[n]).sum() for n in experts)
    power = sum(np.square(before[n].astype(np.float64)).sum() for n in experts)
    assert made.classes["experts"].error == pytest.approx((error / power) ** 0.5, rel=1e-6)


def test_search_beats_absmax_on_the_bundled_model(bundled, tmp_path):
    searched = make(tmp_path, bundled, "a", format="int4_g128")
    absmax = make(tmp_path, bundled, "b", format="int4_g128", scales="absmax")
    for name in ("experts", "attention"):
        assert searched.classes[name].error < 0.95 * absmax.classes[name].error


def test_importance_lowers_the_weighted_error(tmp_path):
    source = model("qwen3_moe")
    rng = np.random.default_rng(0)
    importance = {
        name.removesuffix(".weight"): np.exp(2 * rng.standard_normal(w.shape[1])).astype(np.float32)
        for name, w in tensors(source).items()
        if ".experts." in name
    }
    plain = make(tmp_path, source, "a", format="int4_g32")
    made = make(tmp_path, source, "b", format="int4_g32", importance=importance)
    before, after, without = tensors(source), decode(made.path), decode(plain.path)

    def weighted(values):
        return sum(
            (np.square(before[f"{m}.weight"].astype(np.float64) - values[f"{m}.weight"]) * h).sum()
            for m, h in importance.items()
        )

    assert weighted(after) < 0.97 * weighted(without)
    power = sum(
        (np.square(before[f"{m}.weight"].astype(np.float64)) * h).sum()
        for m, h in importance.items()
    )
    want = (weighted(after) / power) ** 0.5
    assert made.classes["experts"].weighted_error == pytest.approx(want, rel=1e-6)


def test_quantised_sources_are_read(tmp_path):
    """int8 to int4: the same as from the int8 model's decoded weights."""
    first = make(tmp_path, model("mixtral"), "a", format="int8_g32")
    plain = write_decoded(first.path, tmp_path / "plain")
    again = make(tmp_path, first.path, "b", format="int4_g32")
    direct = make(tmp_path, plain, "c", format="int4_g32")
    got, want = tensors(again.path), tensors(direct.path)
    packed = [n for n in want if n.endswith(("_packed", "_scale"))]
    assert packed
    for name in packed:
        assert np.array_equal(got[name], want[name])


def write_fp8(source, to):
    """The checkpoint with FP8 projections in blocks of 128 x 128, and its values in fp32."""
    from safetensors.torch import save_file

    plain, coded = {}, {}
    for name, array in tensors(source).items():
        w = torch.from_numpy(array.astype(np.float32))
        if name.endswith("_proj.weight"):
            scale = w.abs().max() / 448
            codes = (w / scale).to(torch.float8_e4m3fn)
            grid = [-(-n // 128) for n in w.shape]
            coded[name], coded[f"{name}_scale_inv"] = codes, scale.expand(grid).contiguous()
            plain[name] = codes.float() * scale
        else:
            coded[name] = plain[name] = w
    config = json.loads((source / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    for name, values, more in (
        ("fp8", coded, {"quantization_config": {**fp8, "weight_block_size": [128, 128]}}),
        ("plain", plain, {}),
    ):
        (to / name).mkdir()
        save_file(values, to / name / "model.safetensors", {"format": "pt"})
        (to / name / "config.json").write_text(json.dumps(config | more))
    return to / "fp8", to / "plain"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_fp8_sources_are_read(family, tmp_path):
    """FP8 to int4: the same codes as from the values in fp32. What stays float becomes bf16."""
    coded, plain = write_fp8(model(family, dtype="float32"), tmp_path)
    made = make(tmp_path, coded, "a", format="int4_g32")
    want = tensors(make(tmp_path, plain, "b", format="int4_g32").path)
    got = tensors(made.path)
    assert sorted(got) == sorted(want)
    for name, array in want.items():
        if name.endswith("kv_b_proj.weight"):
            assert np.array_equal(got[name], array.astype(got[name].dtype))
            assert str(got[name].dtype) == "bfloat16"
        else:
            assert np.array_equal(got[name], array)
    unquantised = write_decoded(made.path, tmp_path / "c")
    assert relative(logits(made.path, activations="fp32"), logits(unquantised)) < BOUND


def test_companions_are_copied_and_nothing_else(bundled, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(bundled, source)
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "NOTICE").write_text("whose it is")
    made = make(tmp_path, source, format="int8_row")
    assert sorted(p.name for p in made.path.iterdir()) == [
        "NOTICE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in ("NOTICE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (made.path / name).read_bytes() == (source / name).read_bytes()
    want = cpumoe.load(made.path).generate("Once upon a time", max_tokens=5, temperature=0)
    assert len(want.ids) == 5


def test_bundled_model_in_shards(bundled, tmp_path):
    whole = make(tmp_path, bundled, "a", format="int4_g32")
    split = make(tmp_path, bundled, "b", format="int4_g32", shard_bytes=1_500_000)
    files = sorted(split.path.glob("*.safetensors"))
    assert len(files) > 4
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    largest = max(sum(a.nbytes for a in safetensors.numpy.load_file(f).values()) for f in files)
    assert largest <= 2_097_152  # the embedding: larger than a shard should be, and alone in one
    index = json.loads((split.path / "model.safetensors.index.json").read_text())
    a, b = tensors(whole.path), tensors(split.path)
    assert sorted(index["weight_map"]) == sorted(a) == sorted(b)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in a.values())
    for name, array in a.items():
        assert array.tobytes() == b[name].tobytes()
    assert np.array_equal(cpumoe.load(whole.path).logits(IDS), cpumoe.load(split.path).logits(IDS))


def test_threads_do_not_change_the_bytes(bundled, tmp_path):
    made = [
        make(tmp_path, bundled, str(n), format="mxfp4", threads=n).path / "model.safetensors"
        for n in (1, 3)
    ]
    assert made[0].read_bytes() == made[1].read_bytes()


BAD = {
    "format": ({"format": "int3_g32"}, "format: must be mxfp4, or one of"),
    "scales": ({"scales": "best"}, "scales must be absmax or search; got 'best'"),
    "scale type": ({"scale_dtype": "e8m0"}, "scale_dtype must be auto, bf16, fp16, fp32"),
    "shards": ({"shard_bytes": 0}, "a shard must be of at least 1 byte; got 0"),
    "groups": ({"format": "int4_g128"}, "inputs of .* must be a multiple of 128 for int4_g128"),
    "tied head": ({"tied": True, "head": True}, "must have a head of its own"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_before_anything_is_written(name, bundled, tmp_path):
    options, message = BAD[name]
    options = {"format": "int4_g32", **options}
    source = bundled if options.pop("tied", False) else model("olmoe")
    with pytest.raises(Error, match=message):
        make(tmp_path, source, **options)
    assert not (tmp_path / "out").exists()


def test_places_that_are_refused(tmp_path, bundled):
    source = tmp_path / "source"
    shutil.copytree(bundled, source)
    for out in (source, source / "inside"):
        with pytest.raises(Error, match="a directory apart from the model"):
            quantize.quantize_model(source, out, format="int4_g32")
    assert sorted(p.name for p in source.iterdir()) == sorted(p.name for p in bundled.iterdir())
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "letters.txt").write_text("mine")
    with pytest.raises(Error, match=r"must be a new or empty directory; it holds letters.txt"):
        quantize.quantize_model(source, busy, format="int4_g32")
    assert [p.name for p in busy.iterdir()] == ["letters.txt"]
    with pytest.raises(Error, match="no such directory"):
        quantize.quantize_model(tmp_path / "none", tmp_path / "out", format="int4_g32")


def test_the_same_format_again_is_refused(tmp_path):
    made = make(tmp_path, model("olmoe"), format="int4_g32")
    with pytest.raises(Error, match="must be in another format than int4_g32; its weights are"):
        make(tmp_path, made.path, "again", format="int4_g32")
    assert not (tmp_path / "again").exists()


def test_a_finished_model_is_not_overwritten(tmp_path):
    made = make(tmp_path, model("olmoe"), format="int4_g32")
    before = {p.name: p.read_bytes() for p in made.path.iterdir()}
    for name in ("int4_g32", "int8_g32"):
        with pytest.raises(Error, match="it holds a finished model"):
            make(tmp_path, model("olmoe"), format=name)
    assert {p.name: p.read_bytes() for p in made.path.iterdir()} == before


def test_weights_that_are_no_numbers_are_named(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model("olmoe", dtype="float32"), source)
    broken = tensors(source)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    broken[name][9, 3] = np.nan
    safetensors.numpy.save_file(broken, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(Error, match=r"layers.1.mlp.experts.2.up_proj, from row 0 on: .* NaN"):
        make(tmp_path, source, format="int4_g32")
    assert not (tmp_path / "out" / "config.json").exists()

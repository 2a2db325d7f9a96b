"""Tiny models of every architecture as GGUF: the logits are those of Transformers' model."""

import copy
import functools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import cpumoe
from gguf_models import ARCHITECTURES, write_gguf
from tiny_models import VARIANTS, prompt, relative_error, tiny

BOUND = 1e-4  # as for safetensors: fp32 arithmetic in another order

# Variants that a GGUF file can describe; the others turn on what its metadata have no field for.
REPRESENTABLE = [
    "mixtral",
    "mixtral-window",
    "mixtral-yarn",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe-linear",
    "olmoe",
    "olmoe-clip",
    "llama",
    "llama-biased",
    "qwen2",
    "qwen3",
    "qwen3-biased",
    "glm4_moe",
    "glm4_moe-groups",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2-groups",
    "deepseek_v3",
]


def load(path: Path) -> cpumoe.Model:
    return cpumoe.load(path, kv="fp32", activations="fp32")


def test_every_architecture_is_here():
    assert {VARIANTS[v][0] for v in REPRESENTABLE} == set(ARCHITECTURES)


@pytest.mark.parametrize("variant", REPRESENTABLE)
def test_prefill_equals_transformers(tmp_path, variant):
    case, ids = tiny(variant), prompt(37)
    write_gguf(tmp_path / "m.gguf", case)
    assert relative_error(load(tmp_path / "m.gguf").logits(ids), case.logits(ids)) < BOUND


@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v2-groups", "deepseek_v3"])
def test_latent_attention_with_its_parts_apart(tmp_path, variant):
    case, ids = tiny(variant), prompt(37)
    write_gguf(tmp_path / "m.gguf", case, absorbed=True)
    model = load(tmp_path / "m.gguf")
    assert any("attn_k_b" in name for name in model.checkpoint.tensors)
    assert relative_error(model.logits(ids), case.logits(ids)) < BOUND


def test_weights_are_used_in_place(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny("mixtral"))
    model = load(tmp_path / "m.gguf")
    inside = [np.frombuffer(f.mapping, np.uint8) for f in model.checkpoint.files]
    first, last = inside[0].ctypes.data, inside[0].ctypes.data + inside[0].nbytes
    layer = model.spec.layers[1]
    for ref in (model.spec.embed, layer.attn.q.w, *layer.ffn.expert_gate, *layer.ffn.expert_down):
        assert first <= ref.data.ctypes.data < last


KINDS = gguf.GGMLQuantizationType


def as_kind(kind):
    return lambda value: (gguf.quantize(value, kind), kind)


@pytest.mark.parametrize("kind", [KINDS.F16, KINDS.BF16], ids=lambda k: k.name)
@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_half_precision_weights(tmp_path, variant, kind):
    dtype = {KINDS.F16: "float16", KINDS.BF16: "bfloat16"}[kind]
    case, ids = tiny(variant, dtype=dtype), prompt(19)
    write_gguf(tmp_path / "m.gguf", case, as_kind(kind))
    model = load(tmp_path / "m.gguf")
    assert model.spec.layers[0].attn.q.w.format == {KINDS.F16: "fp16"}.get(kind, "bf16")
    assert relative_error(model.logits(ids), case.logits(ids)) < BOUND


# Byte offsets of a block's fp16 scales, of types that the gguf package can only decode.
SCALES = {
    KINDS.Q2_K: (80, 82),
    KINDS.Q3_K: (108,),
    KINDS.Q4_K: (0, 2),
    KINDS.Q5_K: (0, 2),
    KINDS.Q6_K: (208,),
    KINDS.IQ4_NL: (0,),
    KINDS.IQ4_XS: (0,),
}


@functools.cache
def unit(kind: gguf.GGMLQuantizationType) -> float:
    """What scale gives random blocks of this type values of size 0.12."""
    size = float(
        np.sqrt(np.mean(gguf.dequantize(scaled(noise(64, 8, kind), kind, 1.0), kind) ** 2))
    )
    return 0.12 / size


def noise(seeds: np.ndarray | int, blocks: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random bytes [rows, blocks, bytes of one], each row by its own seed (splitmix64)."""
    count = blocks * gguf.GGML_QUANT_SIZES[kind][1]
    z = np.arange(1, count // 8 + 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = z + np.atleast_1d(np.asarray(seeds, np.uint64))[:, None]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).view(np.uint8)[:, :count].reshape(len(z), blocks, -1)


def scaled(blocks: np.ndarray, kind: gguf.GGMLQuantizationType, by: float) -> np.ndarray:
    """The blocks with this scale, as rows of bytes."""
    blocks = blocks.copy()
    for at in SCALES[kind]:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(by).tobytes(), np.uint8)
    return blocks.reshape(len(blocks), -1)


def stored(value: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The matrix in the format; of types only decoded there, blocks drawn by the rows' bytes."""
    if kind not in SCALES:
        return gguf.quantize(value, kind)
    rows = np.ascontiguousarray(value, np.float32).reshape(-1, value.shape[-1])
    weights = np.random.default_rng(1).integers(1, 1 << 62, rows.shape[1], dtype=np.uint64)
    seeds = (rows.view(np.uint32).astype(np.uint64) * weights).sum(axis=1)
    blocks = noise(seeds, rows.shape[1] // gguf.GGML_QUANT_SIZES[kind][0], kind)
    return scaled(blocks, kind, unit(kind)).reshape(*value.shape[:-1], -1)


def test_gate_up_and_down_of_different_types(tmp_path):
    """Files whose types follow each tensor's importance: a layer's gate and up may differ."""
    case, ids = tiny("qwen3_moe-wide"), np.random.default_rng(0).integers(0, 40, 21).tolist()
    kinds = {"gate": KINDS.Q4_K, "up": KINDS.Q6_K, "down": KINDS.F16}
    apart = {
        f"ffn_{part}_exps": lambda value, kind=kind: (stored(value, kind), kind)
        for part, kind in kinds.items()
    }
    write_gguf(tmp_path / "m.gguf", case, apart=apart)
    reference = copy.deepcopy(case.hf)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                half = p.shape[1] // 2
                for part, rows in (("gate", slice(half)), ("up", slice(half, None))):
                    kind, values = kinds[part], p[:, rows].contiguous().numpy()
                    p[:, rows] = torch.from_numpy(
                        gguf.dequantize(stored(values, kind), kind).reshape(values.shape)
                    )
            elif name.endswith("experts.down_proj"):
                p.copy_(p.half().float())
        want = reference(torch.tensor([ids])).logits[0].numpy()
    model = load(tmp_path / "m.gguf")
    ffn = model.spec.layers[0].ffn
    assert [w[0].format for w in (ffn.expert_gate, ffn.expert_up)] == ["q4_k", "q6_k"]
    assert relative_error(model.logits(ids), want) < BOUND
    rounded = cpumoe.load(tmp_path / "m.gguf", kv="fp32").logits(ids)  # int8 beside fp32 products
    assert BOUND < relative_error(rounded, want) < 0.05


BLOCKS = [KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1, KINDS.MXFP4, *SCALES]


CASES = [("llama-wide", kind) for kind in BLOCKS]
CASES += [("qwen3_moe-wide", kind) for kind in BLOCKS]
CASES += [("deepseek_v2-wide", KINDS.Q8_0), ("deepseek_v2-wide", KINDS.Q4_1)]


@pytest.mark.parametrize(("variant", "kind"), CASES, ids=[f"{v}-{k.name}" for v, k in CASES])
def test_block_formats_equal_their_decoded_weights(tmp_path, variant, kind):
    """Every matrix in the format, against Transformers on the gguf package's decoded values."""
    case, ids = tiny(variant), np.random.default_rng(0).integers(0, 40, 21).tolist()
    write_gguf(tmp_path / "m.gguf", case, lambda value: (stored(value, kind), kind))
    reference = copy.deepcopy(case.hf)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if p.ndim > 1 and ".gate." not in name:
                decoded = gguf.dequantize(stored(p.numpy(), kind), kind)
                p.copy_(torch.from_numpy(decoded.reshape(p.shape)))
        want = reference(torch.tensor([ids])).logits[0].numpy()
    got = load(tmp_path / "m.gguf").logits(ids)
    assert relative_error(got, want) < BOUND
    assert relative_error(case.logits(ids), want) > BOUND  # the format did matter

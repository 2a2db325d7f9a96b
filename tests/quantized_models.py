"""Tiny random checkpoints in every published quantisation, and what their writers' tools decode.

FP8 blocks are written and read by Transformers' own operations, everything of compressed-tensors by
that package. GPTQ, AWQ and ModelOpt checkpoints come from writers here, made from the published
layouts: their own packages need a GPU stack; AWQ is read back by compressed-tensors' converter.
"""

import functools
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from tiny_models import COMMON, Tiny

Tensors = dict[str, torch.Tensor]
# Whole blocks of 128 in some matrices, parts of one in others; groups of 32 and 128 everywhere.
SIZES = COMMON | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen2_moe": {
        "num_experts": 3,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "mixtral": {"num_local_experts": 3, "intermediate_size": 128},
    "llama": {"intermediate_size": 384},
    "deepseek_v3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 256,
        "q_lora_rank": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_mtp_layers": 0,
    },
}
FLOAT_MODULES = re.compile(r"(embed_tokens|lm_head|norm|mlp\.gate|_moe\.gate|shared_expert_gate)$")


@dataclass(frozen=True)
class Method:
    """quantization_config, and how one matrix [N, K] is stored: {ending: tensor}, its values.

    same: whether our values equal the tool's bit for bit; else to one rounding of fp32.
    """

    config: dict
    store: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    same: bool = True


# FP8, by Transformers ----------------------------------------------------------------------------
class _Fp8:
    """What the operations of Transformers ask of their quantiser."""

    quantization_config = FineGrainedFP8Config(weight_block_size=(128, 128))


def _fp8_blocks(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    n, k = w.shape
    whole = torch.nn.functional.pad(w, (0, -k % 128, 0, -n % 128))  # it takes whole blocks only
    made = Fp8Quantize(_Fp8()).convert({"x.weight": whole})
    codes, scales = made["x.weight"], made["x.weight_scale_inv"]
    back = Fp8Dequantize(_Fp8())._dequantize_one(codes, scales, torch.float32)
    parts = {".weight": codes[:n, :k].contiguous(), ".weight_scale_inv": scales}
    return parts, back[:n, :k]


def _fp8_rows(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = w.abs().amax(1, keepdim=True) / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale


def _fp8_tensor(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = w.abs().max() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    extra = {".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return {".weight": codes, **extra}, codes.float() * scale


# compressed-tensors, by compressed-tensors -------------------------------------------------------
def _parameters(w: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype) -> Tensors:
    """Scales and zero points by absmax or the range, of the shapes the package wants."""
    n, k = w.shape
    if args.strategy == "block":
        rows, cols = -(-n // 128), -(-k // 128)
        padded = torch.nn.functional.pad(w, (0, -k % 128, 0, -n % 128))
        peak = padded.reshape(rows, 128, cols, 128).abs().amax((1, 3))
        return {"weight_scale": (peak / 448).to(dtype)}
    if args.strategy == "tensor":
        return {"weight_scale": (w.abs().max() / 448).reshape(1).to(dtype)}
    groups = w.reshape(n, -1, k if args.strategy == "channel" else args.group_size)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    peak = groups.abs().amax(2)
    if args.type == "float":
        top = 448.0 if args.num_bits == 8 else 6.0
        if args.strategy == "tensor_group":
            factor = (448.0 * 6.0 / w.abs().max()).reshape(1)
            scale = (peak / 6 * factor).to(torch.float8_e4m3fn).float()
            return {"weight_scale": scale, "weight_global_scale": factor.float()}
        scale = peak / top
        if args.num_bits == 4:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return {"weight_scale": scale.to(dtype)}
    half = 2 ** (args.num_bits - 1)
    if args.symmetric:
        return {"weight_scale": (peak / (half - 0.5)).to(dtype)}
    scale = ((high - low) / (2 * half - 1)).to(dtype)
    zero = (-half - torch.round(low / scale.float())).clamp(-half, half - 1).to(torch.int8)
    return {"weight_scale": scale, "weight_zero_point": zero}


def _compressed(form: str, dtype: torch.dtype = torch.bfloat16, **args) -> Method:
    args = {"type": "int"} | args
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    tool = BaseCompressor.get_value_from_registry(form)

    def store(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        made = tool.compress({"weight": w, **_parameters(w, weights, dtype)}, scheme)
        parts = {f".{name}": t.contiguous() for name, t in made.items()}
        # In the scales' own bf16 the package would round the values too.
        if args["type"] == "float" and args["num_bits"] == 4:
            back = dequantize(
                unpack_fp4_from_uint8(made["weight_packed"], *w.shape, dtype=torch.float32),
                tool._decompress_scale(made["weight_scale"], torch.float32),
                args=weights,
                dtype=torch.float32,
                global_scale=made.get("weight_global_scale"),
            )
            return parts, back
        wide = made | {"weight_scale": made["weight_scale"].float()}
        return parts, tool.decompress(wide, scheme)["weight"]

    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*_moe.gate$", "re:.*shared_expert_gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": json.loads(weights.model_dump_json()),
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
    return Method(config, store, same=form != "nvfp4-pack-quantized")


# From the published layouts ----------------------------------------------------------------------
def _affine(w: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, ...]:
    """(codes [N, K], zero points [N, G], fp16 scales [N, G], values) of the range of each group."""
    n, k = w.shape
    groups = w.reshape(n, -1, group if group > 0 else k)
    top = 2**bits - 1
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = ((high - low) / top).half()
    zeros = torch.round(-low / scales.float()).clamp(1, top).int()
    codes = torch.round(groups / scales.float()[:, :, None]) + zeros[:, :, None]
    codes = codes.clamp(0, top).int()
    values = (codes - zeros[:, :, None]).float() * scales.float()[:, :, None]
    return codes.reshape(n, k), zeros, scales, values.reshape(n, k)


def _words(x: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Numbers of `bits` bits along the last dimension as int32 words, the first one lowest."""
    per = 32 // bits
    parts = x.reshape(*x.shape[:-1], -1, per).numpy().astype(np.uint64)
    parts = parts if order is None else parts[..., order]
    shifts = np.arange(per, dtype=np.uint64) * np.uint64(bits)
    return torch.from_numpy((parts << shifts).sum(-1).astype(np.uint32).view(np.int32))


def _gptq(bits: int, group: int, revision: str = "gptq", **config) -> Method:
    def store(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, values = _affine(w, bits, group)
        stored = zeros.T - (1 if revision == "gptq" else 0)
        k = w.shape[1]
        parts = {
            ".qweight": _words(codes, bits).T.contiguous(),
            ".qzeros": _words(stored.contiguous(), bits),
            ".scales": scales.T.contiguous(),
            ".g_idx": torch.arange(k, dtype=torch.int32) // (group if group > 0 else k),
        }
        return parts, values

    base = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    return Method(base | {"sym": False, "checkpoint_format": revision} | config, store)


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _awq(group: int) -> Method:
    tool = AutoAWQConverter(group_size=group)

    def store(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, values = _affine(w, 4, group)
        parts = {
            ".qweight": _words(codes.T.contiguous(), 4, _AWQ_ORDER),
            ".qzeros": _words(zeros.T.contiguous(), 4, _AWQ_ORDER),
            ".scales": scales.T.contiguous(),
        }
        q, s, z = tool._convert_gemm_module(parts[".qweight"], parts[".scales"], parts[".qzeros"])
        wide = (q - z.repeat_interleave(group, 1)).float() * s.float().repeat_interleave(group, 1)
        assert torch.equal(wide, values)
        return parts, wide

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Method(config | {"version": "gemm", "modules_to_not_convert": ["gate"]}, store)


def _modelopt_fp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    made, _ = NVFP4.store(w)
    factor = 1 / made[".weight_global_scale"]
    codes = made[".weight_packed"]
    lut = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([codes & 15, codes >> 4], -1).reshape(w.shape).int()
    signs = torch.where(nibbles > 7, -1.0, 1.0)
    scales = made[".weight_scale"].float() * factor
    back = signs * lut[nibbles & 7] * scales.repeat_interleave(16, 1)
    parts = {".weight": codes, ".weight_scale": made[".weight_scale"]}
    return parts | {".weight_scale_2": factor.reshape(()), ".input_scale": torch.ones(())}, back


NVFP4 = _compressed(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
)
_FLOAT_NAMES = ["lm_head", "gate", "shared_expert_gate"]
METHODS = {
    "fp8-block": Method(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        | {"weight_block_size": [128, 128], "modules_to_not_convert": _FLOAT_NAMES},
        _fp8_blocks,
    ),
    "fp8-tensor": Method(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": _FLOAT_NAMES},
        _fp8_tensor,
    ),
    "fbgemm": Method(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": _FLOAT_NAMES}, _fp8_rows
    ),
    "ct-fp8-block": _compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "ct-fp8-channel": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-fp8-tensor": _compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct-int8-channel": _compressed("int-quantized", num_bits=8, strategy="channel"),
    "ct-int8-g64": _compressed("naive-quantized", num_bits=8, strategy="group", group_size=64),
    "ct-int4-g32": _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct-int4-g128-fp16": _compressed(
        "pack-quantized", torch.float16, num_bits=4, strategy="group", group_size=128
    ),
    "ct-int4-channel": _compressed("pack-quantized", num_bits=4, strategy="channel"),
    "ct-int4-asym": _compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False
    ),
    "ct-int8-packed": _compressed("pack-quantized", num_bits=8, strategy="group", group_size=128),
    "ct-int8-packed-asym": _compressed(
        "pack-quantized", num_bits=8, strategy="channel", symmetric=False
    ),
    "ct-int3": _compressed("pack-quantized", num_bits=3, strategy="group", group_size=32),
    "ct-int2-asym": _compressed(
        "pack-quantized", num_bits=2, strategy="group", group_size=32, symmetric=False
    ),
    "ct-nvfp4": NVFP4,
    "ct-mxfp4": _compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    ),
    "gptq4": _gptq(4, 128),
    "gptq4-v2": _gptq(4, 32, "gptq_v2"),
    "gptq4-row": _gptq(4, -1),
    "gptq8": _gptq(8, 64),
    "auto-round": _gptq(4, 128, quant_method="auto-round", packing_format="auto_round:auto_gptq"),
    "awq": _awq(64),
    "modelopt-fp4": Method(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*gate"]},
        _modelopt_fp4,
    ),
    "modelopt-fp8": Method(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*gate"]},
        _fp8_tensor,
    ),
}


@dataclass(frozen=True)
class Quantised(Tiny):
    """path: the quantised checkpoint. hf: Transformers on the decoded values. values: those."""

    values: Tensors


@functools.cache
def root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cpumoe-quantised-")


@functools.cache
def base(family: str) -> Path:
    """A directory with the family's random weights in fp32, under their published names."""
    torch.manual_seed(23)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    )
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.1)
    path = Path(root().name) / family
    made.save_pretrained(path)
    return path


def write(path: Path, family: str, config: dict | None, tensors: Tensors) -> Path:
    """A checkpoint of `family` with this quantization_config."""
    path.mkdir(parents=True, exist_ok=True)
    values = json.loads((base(family) / "config.json").read_text())
    if config is not None:
        values["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(values))
    save_file(tensors, path / "model.safetensors")
    return path


def reference(path: Path) -> transformers.PreTrainedModel:
    """Transformers' eager fp32 model of a checkpoint."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether a published tensor is the weight of a layer that publishers quantise."""
    module = name.removesuffix(".weight")
    return tensor.ndim == 2 and module != name and not FLOAT_MODULES.search(module)


@functools.cache
@torch._dynamo.config.patch(disable=True)  # the package compiles its rounding to FP4: too slow here
def quantised(method: str, family: str = "qwen2_moe") -> Quantised:
    """The family's checkpoint in one of METHODS."""
    how = METHODS[method]
    tensors: Tensors = {}
    decoded: Tensors = {}
    values: Tensors = {}
    for name, w in load_file(base(family) / "model.safetensors").items():
        if not is_linear(name, w):
            tensors[name] = decoded[name] = w
            continue
        parts, back = how.store(w)
        module = name.removesuffix(".weight")
        tensors |= {module + end: t for end, t in parts.items()}
        decoded[name] = values[module] = back.contiguous()
    at = Path(root().name)
    plain = write(at / f"{method}-{family}-decoded", family, None, decoded)
    path = write(at / f"{method}-{family}", family, how.config, tensors)
    return Quantised(path, reference(plain), values)

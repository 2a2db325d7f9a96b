"""Independent decoders of every published weight format, and random weights to feed them.

A :class:`Sample` is a weight as it lies in a checkpoint; ``expected`` comes from the tools that
define the format: the gguf package's dequantisers, Transformers' MXFP4 and torch's FP8 conversion,
compressed-tensors' unpackers. What no package decodes on a CPU (GPTQ, zero points apart) is written
in numpy from the published layout, one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import gguf
import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from numpy.typing import NDArray
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

GGUF = {
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q5_0": "Q5_0",
    "q5_1": "Q5_1",
    "q2_k": "Q2_K",
    "q3_k": "Q3_K",
    "q4_k": "Q4_K",
    "q5_k": "Q5_K",
    "q6_k": "Q6_K",
    "iq4_nl": "IQ4_NL",
    "iq4_xs": "IQ4_XS",
    "gguf_mxfp4": "MXFP4",
}
# Byte offsets of the fp16 numbers of a block (core/formats/gguf.cc).
HALVES = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "gguf_mxfp4": (),
}


@dataclass
class Grid:
    """Scales or zero points: element code, rows, columns and bytes, line after line."""

    code: str
    rows: int
    cols: int
    data: Bytes


@dataclass
class Sample:
    """One weight [n, k] in a format, and its elements as another tool decodes them."""

    format: str
    n: int
    k: int
    data: Bytes
    expected: Floats  # [n, k]
    layout: str = "rows"
    scales: Grid | None = None
    zeros: Grid | None = None
    global_scale: float = 1.0
    tool: str = field(default="numpy")


def as_bytes(a: NDArray[np.generic] | torch.Tensor) -> Bytes:
    """The memory of an array."""
    if isinstance(a, torch.Tensor):
        a = a.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def random_bytes(rng: np.random.Generator, *shape: int) -> Bytes:
    """Uniform bytes."""
    return rng.integers(0, 256, shape, dtype=np.uint8)


def random_scales(rng: np.random.Generator, code: str, rows: int, cols: int) -> tuple[Grid, Floats]:
    """Scales of either sign around 2^-4 in a scale code, and their values."""
    if code == "e8m0":
        exponents = rng.integers(115, 130, (rows, cols), dtype=np.uint8)
        return Grid(code, rows, cols, as_bytes(exponents)), np.exp2(
            exponents.astype(np.float32) - 127
        )
    dtype = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
    }[code]
    values = torch.from_numpy(rng.normal(0, 0.0625, (rows, cols)).astype(np.float32)).to(dtype)
    return Grid(code, rows, cols, as_bytes(values)), values.to(torch.float32).numpy()


def spread(scales: NDArray[np.generic], n: int, k: int, rows: int, cols: int) -> Floats:
    """Scales [groups of features, groups of inputs] repeated over the elements they belong to."""
    wide = np.repeat(np.repeat(scales, rows, axis=0), cols, axis=1)
    return np.asarray(wide[:n, :k], dtype=np.float32)


def gguf_sample(rng: np.random.Generator, name: str, n: int, k: int, wild: bool = False) -> Sample:
    """Random blocks; ``wild``: d and m too, so that NaN, infinities and subnormals occur."""
    kind = gguf.GGMLQuantizationType[GGUF[name]]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random_bytes(rng, n * k // elements, size)
    if not wild:
        for at in HALVES.get(name, (0,)):
            half = rng.normal(0, 0.05, len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = half.view(np.uint8).reshape(-1, 2)
        if name == "gguf_mxfp4":
            blocks[:, 0] = rng.integers(110, 140, len(blocks))
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(blocks.reshape(n, -1), kind)
    return Sample(name, n, k, as_bytes(blocks), np.asarray(values).reshape(n, k), tool="gguf")


def fp8_sample(
    rng: np.random.Generator, name: str, n: int, k: int, rows: int, cols: int, code: str = "fp32"
) -> Sample:
    """FP8 e4m3 with a scale for every block of rows x cols."""
    codes = random_bytes(rng, n, k)
    grid, scales = random_scales(rng, code, -(-n // rows), -(-k // cols))
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    expected = values * spread(scales, n, k, rows, cols)
    return Sample(name, n, k, as_bytes(codes), expected, scales=grid, tool="torch")


def mxfp4_sample(rng: np.random.Generator, n: int, k: int) -> Sample:
    """gpt-oss: blocks of 16 bytes and a power of two for 32 inputs."""
    blocks = torch.from_numpy(random_bytes(rng, 1, n, k // 32, 16))
    grid, _ = random_scales(rng, "e8m0", n, k // 32)
    scales = torch.from_numpy(grid.data.reshape(1, n, k // 32).copy())
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    return Sample("mxfp4", n, k, as_bytes(blocks), values.numpy(), scales=grid, tool="transformers")


def nvfp4_sample(rng: np.random.Generator, n: int, k: int) -> Sample:
    """compressed-tensors: e4m3 scales for 16 inputs, one fp32 scale for the tensor."""
    codes = torch.from_numpy(random_bytes(rng, n, k // 2))
    grid, scales = random_scales(rng, "e4m3", n, k // 16)
    values = unpack_fp4_from_uint8(codes, n, k, torch.float32).numpy()
    total = np.float32(1 / 3)
    expected = values * spread(scales * total, n, k, 1, 16)
    return Sample(
        "nvfp4",
        n,
        k,
        as_bytes(codes),
        expected,
        scales=grid,
        global_scale=float(total),
        tool="compressed-tensors",
    )


def int4_sample(rng: np.random.Generator, name: str, n: int, k: int, group: int) -> Sample:
    """compressed-tensors pack-quantized: 8 codes plus 8 to a word, bf16 scales."""
    words = torch.from_numpy(random_bytes(rng, n, k // 2)).view(torch.int32)
    grid, scales = random_scales(rng, "bf16", n, -(-k // group))
    values = unpack_from_int32(words, 4, torch.Size((n, k))).numpy().astype(np.float32)
    expected = values * spread(scales, n, k, 1, group)
    return Sample(name, n, k, as_bytes(words), expected, scales=grid, tool="compressed-tensors")


def int8_sample(rng: np.random.Generator, name: str, n: int, k: int, group: int) -> Sample:
    """Signed bytes with fp16 scales."""
    codes = random_bytes(rng, n, k)
    grid, scales = random_scales(rng, "fp16", n, -(-k // group))
    expected = codes.view(np.int8).astype(np.float32) * spread(scales, n, k, 1, group)
    return Sample(name, n, k, as_bytes(codes), expected, scales=grid)


def bit_stream(lines: Bytes, width: int, count: int) -> NDArray[np.int64]:
    """Numbers of ``width`` bits from a little-endian stream of bits per line."""
    bits = np.unpackbits(lines, axis=1, bitorder="little")[:, : count * width]
    weights = 1 << np.arange(width)
    return (bits.reshape(len(lines), count, width).astype(np.int64) * weights).sum(axis=2)


def qmoe_sample(
    rng: np.random.Generator, name: str, n: int, k: int, width: int, group: int, packed: bool
) -> Sample:
    """QMoE: unsigned codes of 2, 3, 4 or 8 bits, zero points in the middle or stored.

    ``packed``: zero points in codes of the same width, each line from a byte of its own."""
    stored = "_zp_" in name
    step = 8 if width == 3 else 1
    line = -(-k // step) * step * width
    codes = random_bytes(rng, n, -(-line // 8))
    groups = -(-k // group)
    grid, scales = random_scales(rng, "fp32", n, groups)
    values = bit_stream(codes, width, k)
    zeros = None
    if stored and packed:
        raw = random_bytes(rng, n, -(-groups * width // 8))
        zeros = Grid(f"u{width}", n, groups, as_bytes(raw))
        points = bit_stream(raw, width, groups)
    elif stored:
        raw = rng.integers(0, 1 << width, (n, groups), dtype=np.uint8)
        zeros = Grid("u8", n, groups, as_bytes(raw))
        points = raw.astype(np.int64)
    else:
        points = np.full((n, groups), 1 << (width - 1))
    difference = (values - spread(points, n, k, 1, group).astype(np.int64)).astype(np.float32)
    expected = difference * spread(scales, n, k, 1, group)
    return Sample(name, n, k, as_bytes(codes), expected, scales=grid, zeros=zeros)


def gptq_sample(
    rng: np.random.Generator, name: str, n: int, k: int, width: int, group: int, plus: int
) -> Sample:
    """GPTQ: code j of word [r, n] is input r * (32 / width) + j of feature n; zero points likewise
    along features, ``plus`` less than they mean."""
    per = 32 // width
    words = random_bytes(rng, k // per, n, 4).view("<u4")[..., 0]
    groups = -(-k // group)
    zero_words = random_bytes(rng, groups, n // per, 4).view("<u4")[..., 0]
    grid, scales = random_scales(rng, "fp16", groups, n)
    mask = (1 << width) - 1
    expected = np.empty((n, k), np.float32)
    for row in range(k):
        g = row // group
        for feature in range(n):
            code = int(words[row // per, feature]) >> (row % per * width) & mask
            zero = int(zero_words[g, feature // per]) >> (feature % per * width) & mask
            expected[feature, row] = np.float32(code - zero - plus) * scales[g, feature]
    zeros = Grid(f"u{width}", groups, n, as_bytes(zero_words))
    return Sample(name, n, k, as_bytes(words), expected, "columns", grid, zeros)


def awq_sample(rng: np.random.Generator, name: str, n: int, k: int, group: int) -> Sample:
    """AWQ (gemm): words along features in AWQ's own order of nibbles."""
    words = torch.from_numpy(random_bytes(rng, k, n // 2)).view(torch.int32)
    groups = -(-k // group)
    zero_words = torch.from_numpy(random_bytes(rng, groups, n // 2)).view(torch.int32)
    grid, scales = random_scales(rng, "fp16", groups, n)
    codes, points = AutoAWQConverter.reverse_awq_order(
        *AutoAWQConverter.unpack_awq(words, zero_words, 4), 4
    )
    assert points is not None
    difference = (codes & 15).numpy().astype(np.int64) - np.repeat(
        (points & 15).numpy().astype(np.int64), group, axis=0
    )[:k]
    expected = difference.astype(np.float32) * np.repeat(scales, group, axis=0)[:k]
    zeros = Grid("u4_awq", groups, n, as_bytes(zero_words))
    return Sample(
        name,
        n,
        k,
        as_bytes(words),
        np.ascontiguousarray(expected.T),
        "columns",
        grid,
        zeros,
        tool="compressed-tensors",
    )


def samples(seed: int, n: int) -> Iterator[Sample]:
    """A small weight of every kind that is not GGUF's, with ``n`` features or a few times more."""
    rng = np.random.default_rng(seed)
    makers: list[Callable[[], Sample]] = [
        lambda: fp8_sample(rng, "fp8_block", n, 130, 128, 128),
        lambda: fp8_sample(rng, "fp8_block", 128 + n, 1, 128, 128, "bf16"),
        lambda: fp8_sample(rng, "fp8_row", n, 48, 1, 48, "bf16"),
        lambda: fp8_sample(rng, "fp8_tensor", n, 40, n, 40),
        lambda: mxfp4_sample(rng, n, 64),
        lambda: nvfp4_sample(rng, n, 48),
        lambda: int8_sample(rng, "int8_g32", n, 72, 32),
        lambda: int8_sample(rng, "int8_row", n, 40, 40),
        lambda: int4_sample(rng, "int4_g32", n, 64, 32),
        lambda: int4_sample(rng, "int4_g128", n, 136, 128),
        lambda: qmoe_sample(rng, "u8_g16", n, 40, 8, 16, False),
        lambda: qmoe_sample(rng, "u2_g64", n, 70, 2, 64, False),
        lambda: qmoe_sample(rng, "u3_row", n, 43, 3, 43, False),
        lambda: qmoe_sample(rng, "u4_zp_g16", n, 50, 4, 16, True),
        lambda: qmoe_sample(rng, "u2_zp_g16", n, 50, 2, 16, True),
        lambda: qmoe_sample(rng, "u8_zp_g32", n, 40, 8, 32, True),
        lambda: qmoe_sample(rng, "u3_zp_g32", n, 50, 3, 32, False),
        lambda: gptq_sample(rng, "gptq4_g32", 8 * n, 40, 4, 32, 1),
        lambda: gptq_sample(rng, "gptq4_v2_g32", 8 * n, 40, 4, 32, 0),
        lambda: gptq_sample(rng, "gptq8_g32", 4 * n, 36, 8, 32, 1),
        lambda: gptq_sample(rng, "gptq8_v2_row", 4 * n, 36, 8, 36, 0),
        lambda: awq_sample(rng, "awq4_g32", 8 * n, 40, 32),
    ]
    for make in makers:
        yield make()


def gguf_samples(seed: int, n: int, wild: bool = False) -> Iterator[Sample]:
    """A weight [n, 256 or 32] of every GGUF type."""
    rng = np.random.default_rng(seed)
    for name, kind in GGUF.items():
        elements = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        yield gguf_sample(rng, name, n, elements, wild)

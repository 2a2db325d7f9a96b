"""Tensor types of GGUF: the number in the file -> name, block size and our name of the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufType:
    """One tensor type. A block of `elements` values takes `nbytes` bytes.

    format: our name of it; "" for types that are known by name only.
    """

    name: str
    elements: int = 0
    nbytes: int = 0
    format: str = ""


GGUF_TYPES: Mapping[int, GgufType] = {
    0: GgufType("F32", 1, 4, "fp32"),
    1: GgufType("F16", 1, 2, "fp16"),
    2: GgufType("Q4_0", 32, 18, "q4_0"),
    3: GgufType("Q4_1", 32, 20, "q4_1"),
    4: GgufType("Q4_2"),
    5: GgufType("Q4_3"),
    6: GgufType("Q5_0", 32, 22, "q5_0"),
    7: GgufType("Q5_1", 32, 24, "q5_1"),
    8: GgufType("Q8_0", 32, 34, "q8_0"),
    9: GgufType("Q8_1"),
    10: GgufType("Q2_K", 256, 84, "q2_k"),
    11: GgufType("Q3_K", 256, 110, "q3_k"),
    12: GgufType("Q4_K", 256, 144, "q4_k"),
    13: GgufType("Q5_K", 256, 176, "q5_k"),
    14: GgufType("Q6_K", 256, 210, "q6_k"),
    15: GgufType("Q8_K"),
    16: GgufType("IQ2_XXS"),
    17: GgufType("IQ2_XS"),
    18: GgufType("IQ3_XXS"),
    19: GgufType("IQ1_S"),
    20: GgufType("IQ4_NL", 32, 18, "iq4_nl"),
    21: GgufType("IQ3_S"),
    22: GgufType("IQ2_S"),
    23: GgufType("IQ4_XS", 256, 136, "iq4_xs"),
    24: GgufType("I8", 1, 1, "int8"),
    25: GgufType("I16", 1, 2, "int16"),
    26: GgufType("I32", 1, 4, "int32"),
    27: GgufType("I64", 1, 8, "int64"),
    28: GgufType("F64", 1, 8, "fp64"),
    29: GgufType("IQ1_M"),
    30: GgufType("BF16", 1, 2, "bf16"),
    31: GgufType("Q4_0_4_4"),
    32: GgufType("Q4_0_4_8"),
    33: GgufType("Q4_0_8_8"),
    34: GgufType("TQ1_0"),
    35: GgufType("TQ2_0"),
    36: GgufType("IQ4_NL_4_4"),
    37: GgufType("IQ4_NL_4_8"),
    38: GgufType("IQ4_NL_8_8"),
    39: GgufType("MXFP4", 32, 17, "gguf_mxfp4"),
    40: GgufType("NVFP4"),
    41: GgufType("Q1_0"),
}
# What a model may be made of; integer types are for other data.
WEIGHT_TYPES = tuple(
    t.name for t in GGUF_TYPES.values() if t.format and not t.format.startswith("int")
)
BLOCK_FORMATS = tuple(t.format for t in GGUF_TYPES.values() if t.format and t.elements > 1)

"""What a model can be written as: rows of data, and how compressed-tensors describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cpumoe._core import Error


@dataclass(frozen=True, slots=True)
class Target:
    """A format that `cpumoe quantize` writes.

    bits: of a code. group: inputs of a feature that share a scale; 0: all of them. floating: codes
    are E2M1 and scales powers of two (MXFP4), else signed integers times a scale of the model's
    dtype. low, high: range of the codes' values. clip: range of the ratios to the absmax scale that
    a search tries. reads_as: the row of the format table that readers of the result see.
    """

    name: str
    bits: int
    group: int
    low: float
    high: float
    clip: tuple[float, float]
    reads_as: str
    floating: bool = False

    @property
    def grid(self) -> str:
        """The group as a word."""
        return f"groups of {self.group} inputs" if self.group else "whole rows"

    def scheme(self) -> dict[str, Any]:
        """`weights` of a config group, as compressed-tensors has it."""
        scheme: dict[str, Any] = {
            "num_bits": self.bits,
            "type": "float" if self.floating else "int",
            "symmetric": True,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "dynamic": False,
        }
        if self.floating:
            scheme |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return scheme

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json; ignore: linear modules that stay floats."""
        packing = "mxfp4-pack-quantized" if self.floating else "pack-quantized"
        group = {
            "targets": ["Linear"],
            "weights": self.scheme(),
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": packing,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


# name -> (bits, code's row in the format table, ratios that a search tries). Few codes want more
# clipping: 2 bits are best near 0.6 of the absmax scale, 8 bits near 1.
_INTEGERS: dict[str, tuple[int, str, tuple[float, float]]] = {
    "int8": (8, "u8", (0.80, 1.005)),
    "int4": (4, "int4", (0.45, 1.075)),
    "u2": (2, "u2", (0.25, 1.50)),
}
_GROUPS = ("g16", "g32", "g64", "g128", "g256", "row")
_MXFP4 = Target("mxfp4", 4, 32, -6.0, 6.0, (0.5, 2.0), "mxfp4", floating=True)

FORMATS = (*(f"{name}_{group}" for name in _INTEGERS for group in _GROUPS), "mxfp4")


def find_target(name: str) -> Target:
    """The format called `name`; Error lists the known ones.

    Example:
        >>> find_target("int4_g32").bits, find_target("int8_row").group
        (4, 0)
    """
    if name == "mxfp4":
        return _MXFP4
    match = re.fullmatch(r"([a-z0-9]+)_(g\d+|row)", name)
    if match is None or match[1] not in _INTEGERS or match[2] not in _GROUPS:
        kinds, groups = ", ".join(_INTEGERS), ", ".join(f"_{g}" for g in _GROUPS)
        raise Error(
            f"format: must be mxfp4, or one of {kinds} with one of {groups}, as in int4_g32; "
            f"got {name!r:.100}. Choose one of these"
        )
    bits, code, clip = _INTEGERS[match[1]]
    group = 0 if match[2] == "row" else int(match[2][1:])
    half = float(1 << (bits - 1))
    return Target(name, bits, group, -half, half - 1, clip, f"{code}_{match[2]}")

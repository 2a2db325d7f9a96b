"""quantization_config -> which modules are stored how. One row of METHODS per quant_method.

A config is read once; nothing of the tensors is looked at. Whatever would change a weight's value
and is not understood is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cpumoe import _core
from cpumoe._core import Error
from cpumoe.checkpoint import quantized_storage as storage
from cpumoe.checkpoint.quantized_patterns import (
    Names,
    expression,
    first_match,
    modules,
    targets,
    wildcards,
)
from cpumoe.checkpoint.quantized_storage import Scheme

_INSTEAD = (
    "Use this model in FP8, MXFP4, NVFP4, compressed-tensors, GPTQ, AWQ or GGUF, or unquantised"
)
_BLOCK = (128, 128)


class Settings:
    """An object of the config, read field by field; every error names the field and its value."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise Error(f"{where} must be an object; got {values!r:.100}")
        self.values: Mapping[str, Any] = values
        self.where = where

    def fail(self, name: str, must: str, advice: str = _INSTEAD) -> Error:
        """The error of field `name`, to be raised."""
        got = f"got {self.values[name]!r:.100}" if name in self.values else "it is missing"
        return Error(f"{self.where}: {name} must be {must}; {got}. {advice}")

    def get(self, name: str, default: Any = None) -> Any:
        """The field, `default` when it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The field, which must be one of `allowed` (in type too: 1 is not true)."""
        value = self.get(name, default)
        if not any(value == a and type(value) is type(a) for a in allowed):
            raise self.fail(name, "one of " + ", ".join(repr(a) for a in allowed))
        return value

    def object(self, name: str) -> Settings:
        """A nested object."""
        return Settings(self.values.get(name), f"{self.where}: {name}")

    def absent(self, name: str, why: str) -> None:
        """Refuses the field unless it is absent, null, false or empty."""
        if self.values.get(name):
            raise self.fail(name, f"absent, since {why}")


@dataclass(frozen=True, slots=True)
class Rules:
    """How the modules of a checkpoint are stored.

    complete: the config names every linear layer that is not quantised, so one that is stored as
    floats and not named contradicts it. Where it is False, the tensors decide.
    """

    method: str
    groups: tuple[tuple[Names, Scheme | None], ...]
    skipped: Names = field(default_factory=Names)
    complete: bool = True
    overrides: tuple[tuple[Names, Scheme], ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        """How `module` is stored; None: as floats."""
        if module in self.skipped:
            return None
        for names, scheme in self.overrides:
            if module in names:
                return scheme
        found: Scheme | None = first_match(self.groups, module)
        return found


_LINEAR = Names(everything=True)


def _group_format(base: str, group: int, settings: Settings, name: str) -> str:
    """Format `base` with `group` inputs per scale (-1 or 0: all of them)."""
    found = f"{base}_g{group}" if group > 0 else f"{base}_row"
    names = [str(f["name"]) for f in _core.formats()]
    if found not in names:
        sizes = [f.removeprefix(f"{base}_g") for f in names if f.startswith(f"{base}_g")]
        raise settings.fail(name, f"-1 or one of {', '.join(sizes)}")
    return found


def _integer_groups(
    s: Settings, of: storage.Storage, base: str, bits: int, name: str = "group_size"
) -> Scheme:
    group = s.get(name, -1)
    if type(group) is not int or group == 0 or group < -1:
        raise s.fail(name, "-1 or a number of inputs")
    text = f"{of.name} of {bits} bits, " + (f"groups of {group}" if group > 0 else "whole rows")
    return Scheme(of, _group_format(base, group, s, name), bits, (1, max(group, 0)), text)


def _fp8(grid: tuple[int, int]) -> Scheme:
    name, text = {
        _BLOCK: ("fp8_block", "FP8, blocks of 128 x 128"),
        (1, 0): ("fp8_row", "FP8, a scale per output"),
        (0, 0): ("fp8_tensor", "FP8, a scale per tensor"),
    }[grid]
    return Scheme(storage.FP8, name, 8, grid, text)


def _finegrained_fp8(s: Settings) -> Rules:
    s.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    s.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    s.one_of("expert_dtype", ("fp8",), "fp8")
    block = s.get("weight_block_size")
    if block is not None and block != [128, 128]:
        raise s.fail("weight_block_size", "[128, 128] or absent")
    skipped = "modules_to_not_convert" if s.get("modules_to_not_convert") else "ignored_layers"
    return Rules(
        "fp8",
        ((_LINEAR, _fp8(_BLOCK if block else (0, 0))),),
        modules(s.get(skipped), f"{s.where}: {skipped}"),
    )


def _fbgemm(s: Settings) -> Rules:
    skipped = modules(s.get("modules_to_not_convert"), f"{s.where}: modules_to_not_convert")
    return Rules("fbgemm_fp8", ((_LINEAR, _fp8((1, 0))),), skipped)


def _mxfp4(s: Settings) -> Rules:
    skipped = wildcards(s.get("modules_to_not_convert"), f"{s.where}: modules_to_not_convert")
    stack = Scheme(storage.MXFP4_STACK, "mxfp4", 4, (1, 32), "MXFP4, blocks of 32")
    experts = Names(expressions=(expression(r".*\.experts\.(gate_up|down)_proj$", s.where),))
    return Rules("mxfp4", ((experts, stack),), skipped)


def _gptq(s: Settings) -> Rules:
    bits = s.one_of("bits", (4, 8))
    revision = s.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    ordered = s.one_of("desc_act", (False, True), False)
    base = f"gptq{bits}{'_v2' if revision == 'gptq_v2' else ''}"
    scheme = replace(_integer_groups(s, storage.GPTQ, base, bits), ordered=ordered)
    return Rules(
        "gptq", ((_LINEAR, scheme),), complete=False, overrides=tuple(_gptq_overrides(s, scheme))
    )


def _gptq_overrides(s: Settings, scheme: Scheme) -> list[tuple[Names, Scheme]]:
    """gptqmodel's `dynamic`: expression -> changed fields. `-:` excludes; there tensors decide."""
    found = []
    for key, change in Settings(s.get("dynamic", {}), f"{s.where}: dynamic").values.items():
        if key.startswith("-:"):
            continue
        where = f"{s.where}: dynamic: {key[:100]}"
        changed = Settings(change, where)
        merged = Settings({**s.values, **changed.values, "dynamic": None}, where)
        names = Names(expressions=(expression(key.removeprefix("+:"), where),))
        found.append((names, _gptq(merged).groups[0][1] or scheme))
    return found


def _auto_round(s: Settings) -> Rules:
    s.one_of("packing_format", ("auto_round:auto_gptq",))
    s.absent("extra_config", "settings of single layers are not supported")
    return replace(_gptq(s), method="auto-round")


def _awq(s: Settings) -> Rules:
    s.one_of("version", ("gemm", "GEMM"), "gemm")
    s.one_of("zero_point", (True,), True)
    bits = s.one_of("bits" if s.get("bits") is not None else "w_bit", (4,))
    name = "group_size" if s.get("group_size") is not None else "q_group_size"
    scheme = _integer_groups(s, storage.AWQ, "awq4", bits, name)
    return Rules("awq", ((_LINEAR, scheme),), complete=False)


def _modelopt(s: Settings) -> Rules:
    if "quantization" in s.values:  # hf_quant_config.json
        s = s.object("quantization")
    algorithm = s.one_of("quant_algo", ("NVFP4", "FP8"))
    listed = next((n for n in ("exclude_modules", "ignore") if s.get(n)), "ignore")
    skipped = wildcards(s.get(listed), f"{s.where}: {listed}")
    if algorithm == "NVFP4":
        s.one_of("group_size", (16,), 16)
        scheme = Scheme(storage.MODELOPT_FP4, "nvfp4", 4, (1, 16), "NVFP4, groups of 16")
    else:
        scheme = _fp8((0, 0))
    return Rules("modelopt", ((_LINEAR, scheme),), skipped)


_PACKED = {  # bits -> format without and with stored zero points
    2: ("u2", "u2_zp"),
    3: ("u3", "u3_zp"),
    4: ("int4", "u4_zp"),
    8: ("u8", "u8_zp"),
}


def _sized(w: Settings, strategy: Any) -> Settings:
    """`w` with the group size that its strategy means."""
    return Settings({**w.values, "group_size": -1}, w.where) if strategy == "channel" else w


def _compressed_scheme(group: Settings, form: str) -> Scheme | None:
    """The scheme of one of config_groups, whose tensors are written in the layout `form`."""
    if group.get("weights") is None:
        return None
    w = group.object("weights")
    kind, strategy = w.one_of("type", ("int", "float"), "int"), w.get("strategy")
    symmetric = w.one_of("symmetric", (True, False), True)
    if w.get("actorder") not in (None, False, "weight", "static"):
        raise w.fail("actorder", "null, weight or static: permuted inputs are not supported")
    w.absent("dynamic", "weights are not quantised as they are used")
    bits = w.get("num_bits", 8)
    if strategy is None:
        size = w.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if form == "pack-quantized" and kind == "int":
        w.one_of("num_bits", tuple(_PACKED), 8)
        if strategy not in ("group", "channel"):
            raise w.fail("strategy", "group or channel")
        of = storage.PACKED if symmetric else storage.PACKED_ZEROS
        return _integer_groups(_sized(w, strategy), of, _PACKED[bits][not symmetric], bits)
    if not symmetric:
        raise w.fail("symmetric", f"true in {form}")
    if form in ("int-quantized", "naive-quantized") and kind == "int":
        w.one_of("num_bits", (8,), 8)
        if strategy not in ("group", "channel"):
            raise w.fail("strategy", "group or channel")
        return _integer_groups(_sized(w, strategy), storage.INT8, "int8", 8)
    if form in ("float-quantized", "naive-quantized") and kind == "float":
        w.one_of("num_bits", (8,), 8)
        grids = {"tensor": (0, 0), "channel": (1, 0), "block": _BLOCK}
        if strategy not in grids:
            raise w.fail("strategy", f"one of {', '.join(grids)}")
        if strategy == "block" and w.get("block_structure") not in ([128, 128], "128x128"):
            raise w.fail("block_structure", "[128, 128]")
        return _fp8(grids[strategy])
    if form == "nvfp4-pack-quantized" and kind == "float":
        w.one_of("num_bits", (4,))
        w.one_of("group_size", (16,))
        return Scheme(storage.FP4_PACKED, "nvfp4", 4, (1, 16), "NVFP4, groups of 16")
    if form == "mxfp4-pack-quantized" and kind == "float":
        w.one_of("num_bits", (4,))
        w.one_of("group_size", (32,))
        return Scheme(storage.MXFP4_PACKED, "mxfp4", 4, (1, 32), "MXFP4, blocks of 32")
    raise Error(
        f"{group.where}: weights of type {kind!r} in format {form!r:.100} are not supported. "
        f"{_INSTEAD}"
    )


def _compressed(s: Settings) -> Rules:
    s.absent("transform_config", "rotations of activations are not supported")
    s.absent("moe_sparsity_config", "pruned experts are not supported")
    if s.get("sparsity_config"):
        s.object("sparsity_config").one_of("format", ("dense",), "dense")
    groups: list[tuple[Names, Scheme | None]] = []
    listed = s.object("config_groups")
    for name, value in listed.values.items():
        group = Settings(value, f"{listed.where}: {name[:100]}")
        form = group.get("format") or s.get("format")
        scheme = _compressed_scheme(group, str(form))
        groups.append((targets(group.get("targets"), f"{group.where}: targets"), scheme))
    if not groups:
        raise s.fail("config_groups", "an object that names at least one group")
    ignored = targets(s.get("ignore"), f"{s.where}: ignore")
    return Rules("compressed-tensors", tuple(groups), ignored)


METHODS: Mapping[str, Callable[[Settings], Rules]] = {
    "fp8": _finegrained_fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed,
    "compressed_tensors": _compressed,
}


def read_rules(config: Any, where: str) -> Rules:
    """The rules of a quantization_config. `where` begins every error. Raises Error."""
    s = Settings(config, where)
    method = s.get("quant_method")
    if method is None and s.get("quant_algo"):
        method = "modelopt"
    if not isinstance(method, str) or method not in METHODS:
        names = ", ".join(m for m in METHODS if "_fp4" not in m and m != "compressed_tensors")
        raise s.fail("quant_method", f"one of {names}")
    return METHODS[method](s)

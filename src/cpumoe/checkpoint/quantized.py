"""Quantised safetensors checkpoints: quantization_config and tensors -> cpumoe.Weight, in place.

The config says what the tensors of a module mean, the tensors must agree with it, and what neither
explains is refused. Nothing is converted, and opening reads headers, not weights. What is read:
- zero points of asymmetric compressed-tensors weights (packed along the outputs, which no kernel
  reads in place): unpacked to a byte each;
- of latent attention's kv_b_proj the part that is used turned, in formats that cannot be read so:
  a copy in fp32. `Quantized.copied` counts the bytes of both;
- the one global scale of each NVFP4 matrix;
- scales, to refuse those that are no finite number or 0, and GPTQ's g_idx: every one of a
  checkpoint with at most CHECKED_BYTES of them, else of evenly spaced matrices up to that sum, so
  that opening a model of any size takes seconds. Checkpoint.verify checks all of them. A NaN that
  was not looked at stays one: the logits are NaN, and generation refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cpumoe._core import Error
from cpumoe.checkpoint.directory import Checkpoint
from cpumoe.checkpoint.json_file import read_json_object
from cpumoe.checkpoint.quantized_methods import Rules, read_rules
from cpumoe.checkpoint.quantized_storage import (
    AWQ,
    FP4_PACKED,
    FP8,
    FP8_STACK,
    GPTQ,
    INT8,
    MODELOPT_FP4,
    MXFP4_STACK,
    PACKED_ZEROS,
    Scheme,
    Storage,
    Stored,
    read_stored,
)
from cpumoe.checkpoint.quantized_values import check_order, check_scales, check_values
from cpumoe.checkpoint.safetensors import TensorRef
from cpumoe.weight import Weight

CHECKED_BYTES = 32 << 20
"""Scales and orders of inputs that opening a checkpoint reads at most, in bytes."""

_FLOATS = ("fp32", "fp16", "bf16")
_BYTES = ("e4m3", "e5m2", "int8", "uint8")
_STORAGES = (FP8, INT8, PACKED_ZEROS, FP4_PACKED, MODELOPT_FP4, GPTQ, AWQ)
_STACKS = (FP8_STACK, MXFP4_STACK)
# Endings that only quantised matrices have.
_OTHERS = (end for s in _STORAGES for end in (*s.scales, s.zeros, s.factor))
_ENDS = (*(s.codes for s in _STORAGES), *_OTHERS)
_MARKS = tuple(dict.fromkeys(e for e in _ENDS if e not in ("", ".weight")))
# Tensors that say nothing of the weights: scales of activations and of the publisher's own cache,
# neither of which is rounded that way here.
_UNREAD = tuple(
    {end for s in _STORAGES for end in s.unread}
    | {".k_scale", ".v_scale", ".q_scale", ".output_scale"}
)
_CHECKED = tuple({e for s in (*_STORAGES, *_STACKS) for e in (*s.scales, s.order) if e})


class Quantized:
    """The weights of a checkpoint by module name, quantised or not."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads the config. Raises Error when it is malformed or of an unsupported method."""
        self.checkpoint = checkpoint
        self.rules = self._read_rules()
        self.copied = 0
        self._schemes: dict[str, Scheme | None] = {}
        self._matrices = self._step = self._seen = 0

    def _read_rules(self) -> Rules | None:
        c = self.checkpoint
        config, where = c.config.get("quantization_config"), f"{c.where}: quantization_config"
        if config is None and c.metadata is None:
            old = c.path / "hf_quant_config.json"
            if old.exists():
                config, where = {**read_json_object(old), "quant_method": "modelopt"}, str(old)
        return None if config is None else read_rules(config, where)

    def scheme(self, module: str) -> Scheme | None:
        """How the config says that `module` is stored; None: as floats."""
        if self.rules is None:
            return None
        if module not in self._schemes:
            self._schemes[module] = self.rules.scheme(module)
        return self._schemes[module]

    def linear(
        self, module: str, n: int, k: int, formats: tuple[str, ...], *, either: bool = False
    ) -> TensorRef | Weight:
        """W[n, k] of `module`: `module.weight` as it is, in one of `formats`, or a Weight.

        either: the module may be stored as floats though the config says otherwise (lm_head).
        Raises Error when config and tensors contradict each other.
        """
        stored = self.matrix(module, n, k, either=either)
        if stored is None:
            return self.checkpoint.tensor(f"{module}.weight", (n, k), formats)
        return stored.weight()

    def matrix(self, module: str, n: int, k: int, *, either: bool = False) -> Stored | None:
        """W[n, k] of `module` as it is quantised, or None where it is stored as floats."""
        scheme, marked = self.scheme(module), self._marked(module)
        if scheme is None or not marked:
            if marked:
                raise self._unexplained(module, marked)
            if scheme is not None and not either:
                self._require_exempt(module, scheme, n, k)
            return None
        return self._keep(read_stored(self.checkpoint, scheme, module, n, k))

    def turned(self, stored: Stored, first: int, count: int) -> Weight:
        """Features [first, first + count) as the matrix [K, count] whose columns they are."""
        weight = stored.turned(first, count)
        self.copied += weight.nbytes if weight.format == "fp32" else 0
        return weight

    def plain(self, module: str, n: int, k: int, formats: tuple[str, ...]) -> TensorRef:
        """`module.weight` [n, k], of what is never quantised: a router."""
        marked = self._marked(module)
        if marked and f"{module}.weight" not in self.checkpoint:
            raise self._unexplained(module, marked)
        return self.checkpoint.tensor(f"{module}.weight", (n, k), formats)

    def stack(self, module: str, experts: int, n: int, k: int) -> Stored | None:
        """The experts of one projection in one tensor: [experts, n, k] in rows, or None.

        module: the tensor's name without endings, such as `...mlp.experts.gate_up_proj`. None when
        it is stored as floats, or as one tensor per expert.
        """
        scheme = self.scheme(module)
        names = {MXFP4_STACK: f"{module}_blocks", FP8_STACK: f"{module}_scale_inv"}
        found = next((s for s, name in names.items() if name in self.checkpoint), None)
        if found is None:
            if scheme is not None and self.rules is not None and self.rules.complete:
                self._refuse_floats(module, module, scheme)
            return None
        if scheme is not None and scheme.storage is FP8:
            scheme = Scheme(FP8_STACK, scheme.format, 8, scheme.grid, scheme.text)
        if scheme is None or scheme.storage is not found:
            raise self._unexplained(module, names[found])
        return self._keep(read_stored(self.checkpoint, scheme, module, n, k, experts))

    def unread(self, name: str) -> bool:
        """Whether tensor `name` has no part in the weights' values, or is a bias of zeros.

        GPTQ writers add a bias to layers that have none.
        """
        if self.rules is None:
            return False
        if name.endswith(_UNREAD):
            return True
        module, _, end = name.rpartition(".")
        if end != "bias" or f"{module}.qweight" not in self.checkpoint:
            return False
        ref = self.checkpoint.tensors[name]
        return ref.format in _FLOATS and not ref.data.any()

    def _marked(self, module: str) -> str:
        """A tensor that shows that `module` is quantised, or nothing."""
        held = self.checkpoint.tensors.get(f"{module}.weight")
        if held is not None and held.format in _BYTES:
            return held.name
        for end in _MARKS:
            if f"{module}{end}" in self.checkpoint:
                return f"{module}{end}"
        return ""

    def _unexplained(self, module: str, name: str) -> Error:
        ref = self.checkpoint.tensors[name]
        if self.rules is None:
            why = f"{self.checkpoint.describer} has no quantization_config"
        else:
            why = f"quantization_config ({self.rules.method}) leaves {module} unquantised"
        return Error(
            f"{ref.file}: tensor {name}: must not be there, since {why}; got {ref.format} "
            f"{list(ref.shape)}. Download config.json and the weights from the same place"
        )

    def _require_exempt(self, module: str, scheme: Scheme, n: int, k: int) -> None:
        """Refuses floats where the config says `scheme`, unless writers leave such shapes alone."""
        assert self.rules is not None
        ragged = any(b and size % b for b, size in zip(scheme.grid, (n, k), strict=True) if b > 1)
        if not self.rules.complete:
            if not self._any_quantised():
                raise Error(
                    f"{self.checkpoint.where}: quantization_config says {scheme.text}, but no "
                    "tensor is stored so. Download config.json and the weights from the same place"
                )
            return
        if not ragged:
            self._refuse_floats(f"{module}.weight", module, scheme)

    def _refuse_floats(self, name: str, module: str, scheme: Scheme) -> None:
        ref = self.checkpoint.tensors.get(name)
        if ref is not None and ref.format in _FLOATS:
            raise Error(
                f"{ref.file}: tensor {name}: must be stored as {scheme.text}, as "
                f"quantization_config says; got {ref.format}. If it is meant to be, list {module} "
                "among the modules that are not quantised"
            )

    def _any_quantised(self) -> bool:
        if not self._seen:
            marks = any(name.endswith(_MARKS) for name in self.checkpoint.tensors)
            self._seen = 1 if marks else -1
        return self._seen > 0

    def _keep(self, stored: Stored) -> Stored:
        self._matrices += 1
        if isinstance(stored.zeros, np.ndarray):
            self.copied += stored.zeros.nbytes
        if not self._step:
            self._step = self._spacing()
        if stored.scheme.ordered or self._matrices % self._step == 0:
            check_values(stored)
        return stored

    def _spacing(self) -> int:
        """n such that checking every nth matrix stays within CHECKED_BYTES."""
        tensors = self.checkpoint.tensors
        total = sum(ref.nbytes for name, ref in tensors.items() if name.endswith(_CHECKED))
        return 1 + total // CHECKED_BYTES


def summary(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Name of a format -> (matrices and vectors stored so, their bytes), from the headers alone.

    A quantised matrix counts once, with its scales and zero points.
    """
    quantized, found = Quantized(checkpoint), dict[str, tuple[int, int]]()

    def add(name: str, count: int, size: int) -> None:
        before = found.get(name, (0, 0))
        found[name] = (before[0] + count, before[1] + size)

    for name, ref in checkpoint.tensors.items():
        module, storage = _owner(quantized, name)
        if storage is None:
            add(ref.format, 1, ref.nbytes)
        else:
            scheme = quantized.scheme(module)
            assert scheme is not None
            add(scheme.format, int(name == module + storage.codes), ref.nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def verify(checkpoint: Checkpoint) -> Iterator[tuple[int, int]]:
    """Check every scale and every order of inputs; yields (bytes done, bytes in all).

    Raises Error as opening does for those it looks at.
    """
    quantized, found = Quantized(checkpoint), list[tuple[TensorRef, int | None]]()
    for name, ref in checkpoint.tensors.items():
        module, storage = _owner(quantized, name) if name.endswith(_CHECKED) else ("", None)
        scheme = quantized.scheme(module)
        if storage is not None and scheme is not None:
            order = bool(storage.order) and name.endswith(storage.order)
            found.append((ref, scheme.grid[1] if order else None))
    done, total = 0, sum(ref.nbytes for ref, _ in found)
    for ref, group in found:
        if group is None:
            check_scales(ref)
        else:
            check_order(ref, group)
        done += ref.nbytes
        yield done, total


def _owner(quantized: Quantized, name: str) -> tuple[str, Storage | None]:
    """The quantised module that tensor `name` belongs to, and its storage; or None."""
    checkpoint = quantized.checkpoint
    for storage in (*_STORAGES, *_STACKS):
        for end in storage.endings:
            if not name.endswith(end) or (not end and f"{name}_scale_inv" not in checkpoint):
                continue
            module = name.removesuffix(end) if end else name
            scheme = quantized.scheme(module)
            if scheme is None or module + storage.codes not in checkpoint:
                continue
            own = scheme.storage
            same = own.codes == storage.codes or (own is FP8 and storage is FP8_STACK)
            if same and any(module + e in checkpoint for e in storage.scales):
                return module, storage
    return "", None

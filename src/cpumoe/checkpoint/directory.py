"""A checkpoint as published: a directory of config.json and safetensors files, or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cpumoe._core import Error
from cpumoe.checkpoint.gguf import is_gguf, open_gguf
from cpumoe.checkpoint.json_file import read_json_object
from cpumoe.checkpoint.mapping import Memory, Report, widen
from cpumoe.checkpoint.safetensors import TensorFile, TensorRef, open_safetensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `used` collects the names that a model has asked for.

    metadata: of a GGUF file, whose config is empty and whose tensors have the file's names
    (cpumoe.models.gguf translates both); None for a directory.
    """

    path: Path
    config: Mapping[str, Any]
    files: tuple[TensorFile, ...]
    tensors: Mapping[str, TensorRef]
    used: set[str] = field(default_factory=set, repr=False)
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """What describes the model, to begin an error with."""
        return f"{self.path}{'/config.json' if self.metadata is None else ': metadata'}"

    @property
    def describer(self) -> str:
        """The same without the path."""
        return "config.json" if self.metadata is None else "the metadata"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str, shape: tuple[int, ...], formats: tuple[str, ...]) -> TensorRef:
        """Tensor `name`, which must have this shape and one of these formats.

        Raises Error when it is absent or at odds with the config.
        """
        ref = self.tensors.get(name)
        if ref is None:
            raise Error(
                f"{self.path}: tensor {name} is missing, though {self.describer} asks for it. "
                f"The checkpoint is incomplete or of another family; it holds {self._sample(name)}"
            )
        if ref.shape != shape:
            raise Error(
                f"{ref.file}: tensor {name}: shape must be {list(shape)} by {self.describer}; "
                f"got {list(ref.shape)}"
            )
        if ref.format not in formats:
            raise Error(
                f"{ref.file}: tensor {name}: format must be one of {', '.join(formats)}; "
                f"got {ref.format}"
            )
        self.used.add(name)
        return ref

    def _sample(self, name: str) -> str:
        prefix = name.rsplit(".", 2)[0]
        near = [n for n in sorted(self.tensors) if n.startswith(prefix)] or sorted(self.tensors)
        return ", ".join(near[:4]) + (", ..." if len(near) > 4 else "") if near else "no tensor"

    def summary(self) -> dict[str, tuple[int, int]]:
        """Format -> (matrices and vectors stored so, their bytes), the largest part first.

        From the headers alone. A quantised matrix counts once, its scales and zero points with it.
        Raises Error when the config's quantization_config is malformed or not supported.

        >>> from cpumoe.checkpoint import open_checkpoint
        >>> list(open_checkpoint("models/tiny-stories-moe").summary())
        ['bf16']
        """
        from cpumoe.checkpoint.quantized import summary  # which imports this module

        return summary(self)

    def verify(self) -> Iterator[tuple[int, int]]:
        """Read every scale of quantised matrices and every order of their inputs, and check them.

        Opening checks a bounded part of them. Yields (bytes done, bytes in all). Raises Error with
        the tensor's name when a scale is NaN, infinite or 0, or inputs are in another order.
        """
        from cpumoe.checkpoint.quantized import verify

        return verify(self)

    def widen(self) -> None:
        """Ask for huge pages behind all weights that are read from now on.

        Opening reads little here and there, in small pages; running reads whole matrices. Where the
        system grants none nothing happens.
        """
        for file in self.files:
            widen(file.mapping)

    def touch(self, step: int = 64 << 20) -> Iterator[int]:
        """Bring every page of the files into memory, by address; yields bytes done, rising.

        Reads from the disk in file order, which is the fastest order it has.
        """
        done = 0
        for file in self.files:
            for begin in range(0, file.size, step):
                length = min(step, file.size - begin)
                _populate(file, begin, length)
                done += length
                yield done


def _populate(file: TensorFile, begin: int, length: int) -> None:
    try:
        file.mapping.madvise(22, begin, length)  # MADV_POPULATE_READ, Linux 5.14
    except OSError:
        pages = np.frombuffer(file.mapping, np.uint8, length, begin)[::4096]
        int(pages.sum(dtype=np.int64))


def _shards(path: Path) -> tuple[list[str], Mapping[str, str] | None]:
    """(file names, tensor -> file name or None) of the directory's weights."""
    if (path / _INDEX).exists():
        where = path / _INDEX
        weight_map = read_json_object(where, unique=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise Error(f"{where}: weight_map must be an object that names at least one tensor")
        for name, shard in weight_map.items():
            plain = isinstance(shard, str) and shard not in ("", ".", "..")
            if not plain or Path(shard).name != shard or "\0" in shard or "\\" in shard:
                raise Error(
                    f"{where}: weight_map must give a file name without a folder; "
                    f"{name[:200]!r} has {shard!r:.200}"
                )
        return sorted(set(weight_map.values())), weight_map
    if (path / _SINGLE).exists():
        return [_SINGLE], None
    found = sorted(p.name for p in path.iterdir())
    single = [n for n in found if n.endswith(".safetensors")]
    if len(single) == 1:
        return single, None
    if single:
        raise Error(f"{path}: several safetensors files need {_INDEX}; got {', '.join(single[:4])}")
    other = [n for n in found if n.endswith((".bin", ".pt", ".pth", ".gguf", ".onnx"))]
    gguf = [n for n in other if n.endswith(".gguf")]
    advice = f"Give the file itself: {path / gguf[0]}" if gguf else "Save the model as safetensors"
    raise Error(
        f"{path}: must hold {_SINGLE} or {_INDEX}"
        + (f"; got {', '.join(other[:4])}. {advice}" if other else "")
    )


def open_checkpoint(
    path: str | os.PathLike[str],
    opened: Callable[[int, int], None] | None = None,
    memory: Memory = "mapped",
    report: Report | None = None,
) -> Checkpoint:
    """Map every weight file of the directory `path` and read its config.json.

    path: the directory, or a GGUF file (any part of a split one).
    opened(files, of) is called after each file. Nothing is converted, and nothing copied unless
    `memory` says so (map_file), when report(bytes) is called for each piece.
    Raises Error when the directory, config.json or a shard is missing, a header is malformed, or
    the index names a tensor that its shard does not hold.
    """
    path = Path(path)
    try:
        exists, is_dir = path.exists(), path.is_dir()
    except (OSError, ValueError) as e:
        raise Error(f"{path!s:.200}: cannot be read ({e})") from None
    if not exists:
        raise Error(
            f"{path}: no such directory or file. Give the path of a downloaded checkpoint: the "
            "folder that holds config.json and the safetensors files, or a GGUF file"
        )
    if not is_dir:
        if not is_gguf(path):
            raise Error(
                f"{path}: must be a checkpoint directory or a GGUF file; got another file. "
                "Give the folder that holds it"
            )
        gguf = open_gguf(path, opened, memory, report)
        return Checkpoint(path, {}, gguf.files, gguf.tensors, metadata=gguf.metadata)
    if not (path / "config.json").exists():
        found = sorted(p.name for p in path.glob("*.gguf"))
        advice = "Is this a checkpoint directory?"
        if found:
            advice = f"Give the GGUF file itself: {path / found[0]}"
        elif any(path.glob("*.part")):
            advice = "It holds an unfinished `cpumoe quantize`: run that command again"
        raise Error(f"{path}: config.json is missing. {advice}")
    config = read_json_object(path / "config.json")
    names, weight_map = _shards(path)
    missing = [n for n in names if not (path / n).exists()]
    if missing:
        raise Error(
            f"{path}: {len(missing)} of {len(names)} weight files are missing: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Download them again"
        )
    files = []
    for name in names:
        files.append(open_safetensors(path / name, memory, report))
        if opened is not None:
            opened(len(files), len(names))
    by_name = dict(zip(names, files, strict=True))
    if weight_map is None:
        return Checkpoint(path, config, tuple(files), files[0].tensors)
    tensors = {}
    for name, shard in weight_map.items():
        ref = by_name[shard].tensors.get(name)
        if ref is None:
            raise Error(f"{path / _INDEX}: says {shard} holds {name[:200]!r}, which it does not")
        tensors[name] = ref
    return Checkpoint(path, config, tuple(files), tensors)

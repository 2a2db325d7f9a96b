"""GGUF files: mapped read-only, all parts of a split model, tensors as TensorRefs in place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpumoe._core import Error
from cpumoe.checkpoint.gguf_parse import parse_header
from cpumoe.checkpoint.json_file import require_regular_file
from cpumoe.checkpoint.mapping import Memory, Report, map_file
from cpumoe.checkpoint.safetensors import TensorFile, TensorRef

_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$", re.DOTALL)
Opened = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Gguf:
    """An opened GGUF model: one file, or all parts of a split one.

    metadata: of the first part; ints, floats, bools and strings, arrays as numpy or lists.
    tensors: by the names in the file, shapes in numpy's order (the last extent contiguous).
    """

    path: Path
    files: tuple[TensorFile, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorRef]


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that says it is GGUF, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _open_file(path: Path, memory: Memory = "mapped", report: Report | None = None) -> TensorFile:
    require_regular_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise Error(
                    f"{path}: a GGUF file begins with 24 bytes of header; got {size} bytes. "
                    "The file is truncated, or no GGUF file: download it again"
                )
            mapping = map_file(file, size, memory, report)
    except OSError as e:
        raise Error(f"{path}: cannot be read ({e.strerror or e})") from None
    header = parse_header(memoryview(mapping), str(path))
    everything = np.frombuffer(mapping, np.uint8)
    tensors = {
        t.name: TensorRef(t.name, t.format, t.shape, path, t.begin, everything[t.begin : t.end])
        for t in header.tensors
    }
    return TensorFile(path, tensors, header.metadata, size, mapping)


def _split_field(file: TensorFile, name: str, default: int) -> int:
    value = file.metadata.get(name, default)
    if type(value) is not int or value < 0:
        raise Error(f"{file.path}: {name} must be a count; got {value!r:.100}")
    return value


def _parts(file: TensorFile) -> list[Path]:
    """Paths of all parts of the model that `file` is a part of."""
    count, number = _split_field(file, "split.count", 1), _split_field(file, "split.no", 0)
    if count <= 1:
        return [file.path]
    match = _SPLIT.match(file.path.name)
    if match is None or int(match[3]) != count or int(match[2]) != number + 1:
        raise Error(
            f"{file.path}: this is part {number + 1} of {count}, so its name must end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf. Give the parts their published names"
        )
    folder = file.path.parent
    return [folder / f"{match[1]}-{i:05d}-of-{match[3]}.gguf" for i in range(1, count + 1)]


def open_gguf(
    path: str | os.PathLike[str],
    opened: Opened | None = None,
    memory: Memory = "mapped",
    report: Report | None = None,
) -> Gguf:
    """Map the GGUF model at `path` and check its headers in full; no tensor byte is read.

    path: the file, or any part of a split model, whose other parts lie beside it.
    opened(files, of) is called after each file; memory, report: as map_file says. Raises Error when
    a file is missing, truncated or malformed in any way, or holds a tensor of a type that is not
    supported.

    Example:
        >>> import numpy as np, tempfile, cpumoe.checkpoint, struct
        >>> empty = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
        >>> with tempfile.TemporaryDirectory() as d:
        ...     _ = open(f"{d}/a.gguf", "wb").write(empty)
        ...     len(cpumoe.checkpoint.open_gguf(f"{d}/a.gguf").tensors)
        0
    """
    path = Path(path)
    first = _open_file(path, memory, report)
    paths = _parts(first)
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise Error(
            f"{path}: {len(missing)} of its {len(paths)} parts are missing: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Download them again"
        )
    files = []
    for i, p in enumerate(paths):
        file = first if p == path else _open_file(p, memory, report)
        if _split_field(file, "split.count", 1) != len(paths) and len(paths) > 1:
            raise Error(f"{p}: split.count must be {len(paths)}, as in {path.name}")
        if _split_field(file, "split.no", 0) != i:
            raise Error(f"{p}: split.no must be {i} by its name; the parts are mixed up")
        files.append(file)
        if opened is not None:
            opened(len(files), len(paths))
    tensors: dict[str, TensorRef] = {}
    for file in files:
        for name, ref in file.tensors.items():
            if name in tensors:
                raise Error(
                    f"{file.path}: tensor {name[:200]!r} is in {tensors[name].file.name} too"
                )
            tensors[name] = ref
    stated = _split_field(files[0], "split.tensors.count", len(tensors))
    if len(paths) > 1 and stated != len(tensors):
        raise Error(
            f"{path}: all parts together must hold {stated} tensors by split.tensors.count; "
            f"got {len(tensors)}. The parts are not of one model"
        )
    return Gguf(path, tuple(files), files[0].metadata, tensors)

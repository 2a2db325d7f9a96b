"""A checkpoint written anew with quantised weights: streaming, resumable, in bounded memory.

The work is a list of tasks in the order of the output: some rows of a matrix, or some bytes of a
tensor that is copied. Threads compute tasks ahead, a few at a time; the caller's thread writes
their results in order, so what is done is always a beginning of the list. A result depends on
nothing but its task: the bytes are the same whatever the threads, and whether interrupted or not.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cpumoe import _core
from cpumoe._core import Error
from cpumoe.checkpoint import Checkpoint, TensorRef, open_checkpoint
from cpumoe.quantize.finish import finish, require_apart
from cpumoe.quantize.journal import Output
from cpumoe.quantize.plan import Piece, Plan, Role, ScaleDtype, make_plan
from cpumoe.quantize.scales import (
    Floats,
    Method,
    ScaleType,
    pack,
    quantise,
    scale_dtype,
    stored_scales,
)
from cpumoe.quantize.shards import Shard, plan_shards
from cpumoe.quantize.source import read_rows, step_of
from cpumoe.quantize.target import Target, find_target

Progress = Callable[[int, int], None]
"""Called with (bytes of the source done, bytes in all)."""
Importance = Mapping[str, Floats]
"""Module -> fp32 [K], the mean square of each of its inputs."""

SHARD_BYTES = 4_000_000_000
# Elements of a matrix that one task quantises: 4 MiB in fp32.
_TASK_ELEMENTS = 1 << 20
_COPY_BYTES = 16 << 20
# Pages of the source are given back after so many bytes; they stay in the page cache.
_RELEASE_BYTES = 64 << 20
_SCALES: dict[ScaleDtype, ScaleType] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_STORED: dict[str, ScaleDtype] = {kind: dtype for dtype, kind in _SCALES.items()}
_BY_CONFIG: dict[str, ScaleDtype] = {"float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Task:
    """Rows [first, first + count) of a piece; of a copy without decoding, bytes."""

    piece: Piece
    shard: Shard
    first: int
    count: int
    nbytes: int
    ends_shard: bool = False


@dataclass(frozen=True, slots=True)
class ClassReport:
    """Of one class of matrices. error: rms of the difference over rms of the weights.

    weighted_error: the same with each input's mean square as its weight; equal without importance.
    """

    matrices: int
    elements: int
    source_bytes: int
    bytes: int
    error: float
    weighted_error: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was written. classes: by role, and "all". resumed: tasks done by an earlier run."""

    path: Path
    format: str
    classes: Mapping[str, ClassReport]
    source_bytes: int
    bytes: int
    seconds: float
    tasks: int
    resumed: int


def _is_plain_copy(piece: Piece) -> bool:
    kinds = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
    weight = piece.weight
    return (
        piece.target is None
        and not piece.pairs
        and isinstance(weight, TensorRef)
        and kinds.get(weight.format) == piece.dtype
    )


def _split(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """(first, count, bytes of the source) of the tasks of a piece."""
    size = int(piece.weight.nbytes)
    if _is_plain_copy(piece):
        for at in range(0, max(size, 1), _COPY_BYTES):
            count = min(_COPY_BYTES, size - at)
            yield at, count, count
        return
    rows = piece.shape[0]
    width = int(np.prod(piece.shape[1:], dtype=np.int64))
    step = math.lcm(step_of(piece.weight), max(1, piece.pairs))
    block = rows if step == 0 else max(1, _TASK_ELEMENTS // width // step) * step
    for at in range(0, rows, block):
        count = min(block, rows - at)
        yield at, count, size * (at + count) // rows - size * at // rows


def _make_tasks(plan: Plan, shard_bytes: int) -> tuple[list[tuple[Shard, int]], list[Task]]:
    """(shards with their number of tasks, all tasks)."""
    planned = plan_shards((p.tensors() for p in plan.pieces), shard_bytes)
    shards: list[tuple[Shard, int]] = []
    tasks: list[Task] = []
    pieces = iter(plan.pieces)
    for shard, count in planned:
        begin = len(tasks)
        for _ in range(count):
            piece = next(pieces)
            tasks += [Task(piece, shard, *part) for part in _split(piece)]
        last = tasks[-1]
        tasks[-1] = Task(last.piece, shard, last.first, last.count, last.nbytes, True)
        shards.append((shard, len(tasks) - begin))
    return shards, tasks


@dataclass(frozen=True, slots=True)
class _Result:
    """Buffers to be written, as (tensor, offset in it, bytes), and what to sum up."""

    parts: list[tuple[str, int, NDArray[Any]]]
    sums: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


def _compute(task: Task, kind: ScaleType, method: Method, importance: Importance | None) -> _Result:
    piece, target = task.piece, task.piece.target
    if _is_plain_copy(piece):
        assert isinstance(piece.weight, TensorRef)
        data = piece.weight.data[task.first : task.first + task.count]
        return _Result([(piece.name, task.first, data)])
    x = read_rows(piece.weight, task.first, task.count)
    if piece.pairs:
        x = x.reshape(-1, piece.pairs // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if target is None:
        width = int(np.prod(piece.shape[1:], dtype=np.int64))
        copy = x.astype(scale_dtype(_SCALES[piece.dtype]))  # type: ignore[index]
        return _Result([(piece.name, task.first * width * copy.itemsize, copy.view(np.uint8))])
    weights = None if importance is None else importance.get(piece.name)
    try:
        found = quantise(x, target, scales=kind, method=method, importance=weights)
    except Error as e:
        raise Error(f"{piece.name}, from row {task.first} on: {e}") from None
    codes = pack(found.codes, target.bits)
    scales = stored_scales(found.scales, target, kind)
    parts: list[tuple[str, int, NDArray[Any]]] = [
        (f"{piece.name}.weight_packed", task.first * codes.shape[1], codes),
        (f"{piece.name}.weight_scale", task.first * scales.shape[1] * scales.itemsize, scales),
    ]
    if task.first == 0 and not target.floating:
        shape = np.array(piece.shape, "<i8")
        parts.append((f"{piece.name}.weight_shape", 0, shape))
    parts = [(name, at, part.view(np.uint8)) for name, at, part in parts]
    return _Result(parts, (found.error, found.power, *found.weighted))


def _release(checkpoint: Checkpoint) -> None:
    """Gives back the pages that were read; where that is not possible they stay a little longer."""
    for file in checkpoint.files:
        with suppress(OSError, ValueError):
            file.mapping.madvise(mmap.MADV_DONTNEED)


def _fingerprint(plan: Plan, shards: Sequence[tuple[Shard, int]], options: Any) -> str:
    """What makes two runs write the same bytes: the source files, the options, the layout."""
    digest = hashlib.sha256()
    for file in plan.checkpoint.files:
        info = file.path.stat()
        digest.update(f"{file.path.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    digest.update(json.dumps(options, sort_keys=True).encode())
    for shard, _ in shards:
        digest.update(shard.header)
    return digest.hexdigest()


def _importance_digest(importance: Importance | None) -> str:
    digest = hashlib.sha256()
    for name in sorted(importance or ()):
        digest.update(name.encode() + importance[name].tobytes())  # type: ignore[index]
    return digest.hexdigest()


def _require_new_format(plan: Plan, target: Target, path: Path) -> None:
    found = {p.weight.format for p in plan.pieces if p.target is not None}
    if found == {target.reads_as}:
        raise Error(
            f"quantize: {path} must be in another format than {target.name}; its weights are "
            "already. Copy it, or choose another format"
        )


def _ahead(
    pool: ThreadPoolExecutor, threads: int, tasks: Sequence[Task], work: Callable[[Task], _Result]
) -> Iterator[tuple[Task, _Result]]:
    """Results in order, with twice as many tasks under way as there are threads."""
    waiting: deque[tuple[Task, Future[_Result]]] = deque()
    try:
        for task in tasks:
            waiting.append((task, pool.submit(work, task)))
            if len(waiting) >= 2 * threads:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


def _reports(plan: Plan, sums: Mapping[str, Sequence[float]]) -> dict[str, ClassReport]:
    classes: dict[str, ClassReport] = {}
    pieces = [p for p in plan.pieces if p.target is not None]
    for role in [*get_args(Role), "all"]:
        of = [p for p in pieces if role in ("all", p.role)]
        if not of:
            continue
        totals = [sums[r] for r in sums if role in ("all", r)]
        error, power, weighted, weighted_power = (
            sum(column) for column in zip(*totals, strict=True)
        )
        classes[role] = ClassReport(
            matrices=len(of),
            elements=sum(p.shape[0] * p.shape[1] for p in of),
            source_bytes=sum(int(p.weight.nbytes) for p in of),
            bytes=sum(t.nbytes for p in of for t in p.tensors()),
            error=(error / power) ** 0.5 if power else 0.0,
            weighted_error=(weighted / weighted_power) ** 0.5 if weighted_power else 0.0,
        )
    return classes


def quantize_model(
    source: str | Path,
    out: str | Path,
    *,
    format: str,
    attention: bool = True,
    head: bool = False,
    scales: Method = "search",
    scale_dtype: ScaleType | Literal["auto"] = "auto",
    importance: Importance | None = None,
    shard_bytes: int = SHARD_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes the model at `source` to the new directory `out` with quantised weights.

    source: a checkpoint that cpumoe reads, in any of its formats. format: a name of
    cpumoe.quantize.FORMATS. Experts and dense feed-forward layers are quantised; attention: its
    projections too; head: lm_head too. Embedding, norms, routers and biases are copied.
    scales: how they are chosen (cpumoe.quantize.scales). scale_dtype: type of the scales of integer
    formats; auto: the model's own, bf16 for fp32 models. importance: weights of the errors.
    shard_bytes: size of an output file at most. progress(done, total): bytes of the source.

    The result is a Hugging Face checkpoint in the layout of compressed-tensors. A run that was
    killed, or found the disk full, is continued by the same call. Raises Error for bad arguments,
    a directory that holds something else, a full disk, and weights that are no finite numbers.

    Example:
        >>> import tempfile, cpumoe.quantize
        >>> with tempfile.TemporaryDirectory() as d:
        ...     made = cpumoe.quantize.quantize_model(
        ...         "models/tiny-stories-moe", f"{d}/int4", format="int4_g32"
        ...     )
        >>> 0.07 < made.classes["experts"].error < 0.1
        True
    """
    begin = time.monotonic()
    source, out = Path(source), Path(out)
    target = find_target(format)
    if scales not in get_args(Method):
        raise Error(f"quantize: scales must be absmax or search; got {scales!r}. Choose one")
    if shard_bytes < 1:
        raise Error(f"quantize: a shard must be of at least 1 byte; got {shard_bytes}. Allow more")
    require_apart(source, out)
    checkpoint = open_checkpoint(source)
    dtype = _scale_dtype(checkpoint, scale_dtype)
    roles: set[Role] = {"experts", "shared", "dense"}
    roles |= {"attention"} if attention else set()
    roles |= {"head"} if head else set()
    plan = make_plan(checkpoint, target, frozenset(roles), dtype)
    if head and not any(p.role == "head" for p in plan.pieces):
        raise Error(
            f"quantize: {source} must have a head of its own to quantise it; its head is the "
            "embedding. Leave out the option head"
        )
    _require_new_format(plan, target, source)
    shards, tasks = _make_tasks(plan, shard_bytes)
    options = [1, format, scales, dtype, sorted(roles), _importance_digest(importance)]
    output = Output(out, _fingerprint(plan, shards, options), shards)
    finished = False
    try:
        output.require_space()
        resumed = output.done
        _run(plan, tasks, output, _SCALES[dtype], scales, importance, threads, progress)
        finish(plan, target, [s for s, _ in shards], out)
        finished = True
    finally:
        output.close(finished=finished)
    return Report(
        path=out,
        format=format,
        classes=_reports(plan, output.state),
        source_bytes=sum(t.nbytes for t in tasks),
        bytes=sum(s.size for s, _ in shards),
        seconds=time.monotonic() - begin,
        tasks=len(tasks),
        resumed=resumed,
    )


def _scale_dtype(checkpoint: Checkpoint, asked: ScaleType | Literal["auto"]) -> ScaleDtype:
    """The type of stored scales: as asked, or the model's own."""
    if asked in _STORED:
        return _STORED[asked]
    if asked != "auto":
        raise Error(
            f"quantize: scale_dtype must be auto, {', '.join(_STORED)}; got {asked!r}. "
            "Choose one of these"
        )
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return _BY_CONFIG.get(str(named), "BF16")


def _run(
    plan: Plan,
    tasks: Sequence[Task],
    output: Output,
    kind: ScaleType,
    method: Method,
    importance: Importance | None,
    threads: int | None,
    progress: Progress | None,
) -> None:
    """Does the tasks that are left, and writes them."""
    threads = threads or _core.Machine.probe().default_threads
    total = sum(t.nbytes for t in tasks)
    first = output.done
    done = sum(t.nbytes for t in tasks[:first])
    sums: dict[str, list[float]] = {k: list(v) for k, v in output.state.items()}
    released = 0
    with ThreadPoolExecutor(threads) as pool:
        results = _ahead(
            pool, threads, tasks[first:], lambda t: _compute(t, kind, method, importance)
        )
        for index, (task, result) in enumerate(results, first + 1):
            for name, offset, data in result.parts:
                output.write(task.shard, name, offset, data)
            if task.piece.target is not None:
                row = sums.setdefault(task.piece.role, [0.0] * 4)
                row[:] = [a + b for a, b in zip(row, result.sums, strict=True)]
            output.finished(index, sums, shard_ends=task.ends_shard)
            done, released = done + task.nbytes, released + task.nbytes
            if released > _RELEASE_BYTES:
                _release(plan.checkpoint)
                released = 0
            if progress is not None:
                progress(done, total)

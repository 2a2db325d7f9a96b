"""The output directory while it is written: temporary names, a journal, and a lock.

State of an unfinished directory: finished shards under their names, at most one shard with the
suffix .part, and the journal, a file of JSON lines. Its first line names the job; each further one
says how many tasks are done, and what was summed up to there. A line is appended only when the
bytes of its tasks are on the disk, so whatever ends the process, the last whole line is true.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from cpumoe._core import Error
from cpumoe.quantize.shards import Shard

JOURNAL = ".cpumoe-quantize.journal"
_PART = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# After so many bytes or seconds the finished tasks are made durable.
_SYNC_BYTES = 256 << 20
_SYNC_SECONDS = 10.0

State = Mapping[str, Any]


def raise_write_error(error: OSError, path: Path) -> NoReturn:
    """The Error of a failed write, which says how to go on."""
    if error.errno in _FULL:
        raise Error(
            f'{path}: the disk must have room for the model; got "{error.strerror}". Free space '
            "and run the same command again: it continues where it stopped"
        ) from None
    raise Error(
        f"{path}: cannot be written ({error.strerror or error}). Remove the cause and run the same "
        "command again: it continues where it stopped"
    ) from None


def sync_directory(path: Path) -> None:
    """Makes names in the directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """`data` as the file `path`, whole or not at all. Raises Error when it cannot be written."""
    part = path.with_name(path.name + _PART)
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)
    except OSError as e:
        raise_write_error(e, path)


def _read_lines(data: bytes) -> tuple[list[State], int]:
    """The whole lines of a journal and their length in bytes: a kill may have torn the last one."""
    lines: list[State] = []
    length = 0
    for line in data.splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not isinstance(value, dict) or not line.endswith(b"\n"):
            break
        lines.append(value)
        length += len(line)
    return lines, length


class Output:
    """The directory `path` being filled by the job `job` (a fingerprint), task by task.

    shards: (shard, tasks in it), in order. Raises Error when the directory holds a finished model,
    the unfinished result of another job, files that are no part of one, or is being written by
    another process.
    """

    def __init__(self, path: Path, job: str, shards: list[tuple[Shard, int]]) -> None:
        self.path = path
        self.shards = shards
        self._file: BinaryIO | None = None
        self._open: Shard | None = None
        self._unsaved, self._saved_at = 0, time.monotonic()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._journal = self._lock(path / JOURNAL)
        except OSError as e:
            raise_write_error(e, path)
        try:
            self.done, self.state = self._start(job)
        except BaseException:
            os.close(self._journal)
            raise

    def _start(self, job: str) -> tuple[int, State]:
        """Reads the journal, or begins it; as `_resume`."""
        path = self.path
        lines, length = _read_lines((path / JOURNAL).read_bytes())
        if lines and lines[0].get("job") != job:
            raise Error(
                f"{path}: must be a new directory or hold the unfinished result of the same "
                "command; it holds that of other settings or of another source. Remove it, or "
                "choose another directory"
            )
        os.ftruncate(self._journal, length)
        if not lines:
            self._append({"job": job})
        return self._resume(lines[1:])

    def _lock(self, journal: Path) -> int:
        others = [p for p in sorted(self.path.iterdir()) if p.name != JOURNAL]
        if others and not journal.exists():
            kind = "a finished model" if (self.path / "config.json").exists() else others[0].name
            raise Error(
                f"{self.path}: must be a new or empty directory; it holds {kind}. "
                "Choose another one, or remove it"
            )
        handle = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise Error(
                f"{self.path}: must be written by one process at a time; another one is at work. "
                "Wait for it, or end it"
            ) from None
        return handle

    def _resume(self, lines: list[State]) -> tuple[int, State]:
        """(tasks that need not be done again, what was summed over them)."""
        safe, first = 0, 0
        for shard, tasks in self.shards:
            if (self.path / shard.name).exists():
                if (self.path / shard.name).stat().st_size != shard.size:
                    break
                safe = first = first + tasks
                continue
            if (self.path / (shard.name + _PART)).exists():
                safe = first + tasks
            break
        last: State = {"done": 0, "state": {}}
        for line in lines:
            if line["done"] <= safe:
                last = line
        done, first = int(last["done"]), 0
        for shard, tasks in self.shards:
            first += tasks
            part = self.path / (shard.name + _PART)
            if first <= done and part.exists():  # killed between the journal and the new name
                part.replace(self.path / shard.name)
        return done, last["state"]

    @property
    def remaining(self) -> int:
        """Bytes still to be written, shards in progress in full."""
        total, first = 0, 0
        for shard, tasks in self.shards:
            if first + tasks > self.done:
                total += shard.size
            first += tasks
        return total

    def require_space(self) -> None:
        """Raises Error when the file system has less room than is still needed."""
        used = sum(p.stat().st_blocks * 512 for p in self.path.glob(f"*{_PART}"))
        info = os.statvfs(self.path)
        free = info.f_bavail * info.f_frsize
        if self.remaining - used > free:
            raise Error(
                f"{self.path}: the disk must have room for {self.remaining / 1e9:.2f} GB more; "
                f"{free / 1e9:.2f} GB are free. Free space and run the same command again"
            )

    def _append(self, line: State) -> None:
        try:
            os.write(self._journal, json.dumps(line).encode() + b"\n")
            os.fsync(self._journal)
        except OSError as e:
            raise_write_error(e, self.path / JOURNAL)

    def write(self, shard: Shard, tensor: str, offset: int, data: Any) -> None:
        """Puts bytes (a buffer) at `offset` into `tensor` of `shard`."""
        path = self.path / (shard.name + _PART)
        try:
            if self._open is not shard:
                self._close()
                fresh = not path.exists()
                self._file = path.open("w+b" if fresh else "r+b", buffering=0)
                self._open = shard
                os.pwrite(self._file.fileno(), shard.header, 0)
            assert self._file is not None
            view, at = memoryview(data).cast("B"), shard.offsets[tensor] + offset
            while view:
                n = os.pwrite(self._file.fileno(), view, at)
                view, at = view[n:], at + n
                self._unsaved += n
        except OSError as e:
            raise_write_error(e, path)

    def finished(self, tasks: int, state: State, *, shard_ends: bool) -> None:
        """Tells that the first `tasks` tasks are written; state: what was summed over them."""
        self.done, self.state = tasks, state
        late = time.monotonic() - self._saved_at > _SYNC_SECONDS
        if shard_ends or late or self._unsaved > _SYNC_BYTES:
            self.save(shard_ends=shard_ends)

    def save(self, *, shard_ends: bool = False) -> None:
        """Makes what is written durable, and a shard that has ended a file of its own name."""
        try:
            if self._file is not None:
                os.fdatasync(self._file.fileno())
            self._append({"done": self.done, "state": self.state})
            if shard_ends and self._open is not None:
                shard = self._open
                self._close()
                (self.path / (shard.name + _PART)).replace(self.path / shard.name)
                sync_directory(self.path)
        except OSError as e:
            raise_write_error(e, self.path)
        self._unsaved, self._saved_at = 0, time.monotonic()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._open = None

    def close(self, *, finished: bool) -> None:
        """Ends the work on the directory; finished: it needs no journal any more."""
        if finished:
            (self.path / JOURNAL).unlink()
        else:
            with suppress(Error):  # what is lost is work, and another error is on its way
                self.save()
        self._close()
        os.close(self._journal)

"""Where the bytes of a weight file lie: mapped, or read once into memory with huge pages."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import BinaryIO, Literal

from cpumoe._core import Error

Memory = Literal["mapped", "huge"]
Report = Callable[[int], None]
"""Called with the bytes of each piece that was read."""

_PIECE = 16 << 20


def map_file(
    file: BinaryIO, size: int, memory: Memory = "mapped", report: Report | None = None
) -> mmap.mmap:
    """The `size` bytes of `file`, read-only by convention.

    mapped: a view of the file, whose pages come from the page cache as they are read (see `widen`).
    huge: a copy in anonymous memory that asks for transparent huge pages. Address translation then
    costs nothing, which is worth some 15 % of decode speed at 60 GB/s where pages of files stay
    small; it takes the time to read the file and as much memory as it has bytes.

    Raises OSError as reading does, and Error for another `memory` or a file that got shorter.
    """
    if memory == "mapped":
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    if memory != "huge":
        raise Error(f'load: memory must be "mapped" or "huge"; got {memory!r:.100}')
    copy = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        copy.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        raise Error(
            "memory: huge pages must be allowed by the kernel (transparent ones); this one refuses "
            'them. Use memory="mapped"'
        ) from None
    file.seek(0)
    view = memoryview(copy)
    try:
        done = 0
        while done < size:
            count = file.readinto(view[done : done + _PIECE])  # type: ignore[attr-defined]
            if not count:
                raise Error(f"{file.name}: ends at byte {done} of {size} while it is read")
            done += count
            if report is not None:
                report(count)
    finally:
        view.release()
    return copy


def widen(mapping: mmap.mmap) -> None:
    """Ask that what is read of the file from now on comes in huge pages.

    ext4 and XFS of recent Linux kernels then read 2 MiB at a time into one page, and map it whole.
    Pages that the page cache holds already stay as small as they are (those of a file that was
    written just now, until it is read anew), as do those of most other file systems.
    """
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)

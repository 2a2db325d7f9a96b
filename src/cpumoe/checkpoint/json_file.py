"""JSON of untrusted files: bounded size, strict UTF-8, one clear error for every malformation."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from cpumoe._core import Error

# The largest published index.json and tokenizer files are below 30 MB.
MAX_JSON_BYTES = 100_000_000


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:200]!r} appears twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def parse_json_object(data: bytes, where: str, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in `data` (UTF-8).

    Raises Error, beginning with `where`, when the bytes are no JSON object, nest too deeply, or,
    with `unique`, when a key appears twice in one object or a number is NaN or infinite.
    """
    try:
        value = (
            json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
            if unique
            else json.loads(data.decode("utf-8"))
        )
    except UnicodeDecodeError as e:
        raise Error(f"{where}: must be UTF-8; byte {e.start} is not. The file is damaged") from None
    except RecursionError:
        raise Error(f"{where}: nests too deeply. The file is damaged") from None
    except ValueError as e:
        raise Error(f"{where}: must be valid JSON; {e}. The file is damaged") from None
    if not isinstance(value, dict):
        raise Error(f"{where}: must be a JSON object; got {type(value).__name__}")
    return value


def require_regular_file(path: Path) -> os.stat_result:
    """stat of `path`, which must be a regular file (a pipe or a device could block for ever)."""
    try:
        info = path.stat()
    except OSError as e:
        raise Error(f"{path}: cannot be read ({e.strerror or e})") from None
    except ValueError as e:
        raise Error(f"{path!s:.200}: is no path ({e})") from None
    if not stat.S_ISREG(info.st_mode):
        raise Error(f"{path}: must be a regular file")
    return info


def read_json_object(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in the file `path`; Error as `parse_json_object`, or when it is too large."""
    size = require_regular_file(path).st_size
    if size > MAX_JSON_BYTES:
        raise Error(f"{path}: must be at most {MAX_JSON_BYTES} bytes; got {size}")
    try:
        data = path.read_bytes()
    except OSError as e:
        raise Error(f"{path}: cannot be read ({e.strerror or e})") from None
    return parse_json_object(data, str(path), unique=unique)

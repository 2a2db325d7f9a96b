"""Weights read into memory with huge pages: the same bytes, progress, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import cpumoe
from cpumoe import Error
from cpumoe.checkpoint import open_checkpoint, open_safetensors
from cpumoe.engine import model as engine_model

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-stories-moe"


def test_the_same_bytes_and_progress(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    wanted = {"a": np.arange(9_000_000, dtype=np.float32), "b": np.ones((3, 5), np.float16)}
    safetensors.numpy.save_file(wanted, path)
    pieces: list[int] = []
    got = open_safetensors(path, "huge", pieces.append).tensors
    for name, array in wanted.items():
        assert np.array_equal(got[name].array(), array)
    assert sum(pieces) == path.stat().st_size
    assert len(pieces) == 3, "36 MB in pieces of 16 MiB"


def test_the_file_may_go_away(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"a": np.ones(1000, np.float32)}, path)
    tensors = open_safetensors(path, "huge").tensors
    path.write_bytes(b"")
    assert (tensors["a"].array() == 1).all()


def test_logits_are_the_same() -> None:
    ids = [5, 6, 7, 8]
    mapped = cpumoe.load(MODEL).logits(ids)
    assert np.array_equal(cpumoe.load(MODEL, memory="huge").logits(ids), mapped)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Error, match='memory must be "mapped" or "huge"'):
        open_checkpoint(MODEL, None, "heap")  # type: ignore[arg-type]
    monkeypatch.setattr(engine_model, "weight_file_bytes", lambda path: 1 << 50)
    with pytest.raises(Error, match="must leave 1 GB free"):
        cpumoe.load(MODEL, memory="huge")

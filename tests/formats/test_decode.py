"""Every published format decodes to the bits of the tools that define it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cpumoe

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from make_golden import files
from references import GGUF, Floats, Grid, Sample, gguf_sample, gguf_samples, samples


def scales_of(grid: Grid | None) -> object:
    """A grid as cpumoe.Weight takes it."""
    if grid is None:
        return None
    native = {"fp32": np.float32, "fp16": np.float16}.get(grid.code)
    if native is not None:
        return grid.data.view(native).reshape(grid.rows, grid.cols)
    if grid.code == "bf16":
        import torch

        return torch.from_numpy(grid.data.copy()).view(torch.bfloat16).reshape(grid.rows, -1)
    return grid.data, grid.code


def decode(s: Sample) -> Floats:
    """The sample's elements, by cpumoe."""
    weight = cpumoe.Weight(
        s.data,
        format=s.format,
        shape=(s.n, s.k),
        scales=scales_of(s.scales),  # type: ignore[arg-type]
        zeros=None if s.zeros is None else s.zeros.data,  # type: ignore[arg-type]
        layout=s.layout,  # type: ignore[arg-type]
        global_scale=s.global_scale,
    )
    return weight.decode()


def check(s: Sample) -> None:
    """Bit for bit, any NaN being as good as another."""
    got, want = decode(s), np.ascontiguousarray(s.expected, np.float32)
    assert got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    different = (got.view(np.uint32) != want.view(np.uint32)) & ~nan
    # -0 and 0 times a scale of either sign: tools disagree on the sign of nothing.
    different &= ~((got == 0) & (want == 0))
    assert not different.any(), f"{s.format} ({s.tool}): {np.argwhere(different)[:4].tolist()}"


def random_samples() -> Iterator[Sample]:
    """Three draws of every kind."""
    for seed in range(3):
        yield from samples(seed, 1 + 6 * seed)
        yield from gguf_samples(seed, 1 + 6 * seed)


@pytest.mark.parametrize("sample", list(random_samples()), ids=lambda s: f"{s.format}-{s.n}x{s.k}")
def test_random_weights_decode_as_their_tools_do(sample: Sample) -> None:
    """Also with scales of either sign, ragged groups and stored zero points."""
    check(sample)


@pytest.mark.parametrize("name", GGUF)
def test_any_bytes_decode_as_gguf_does(name: str) -> None:
    """Wild fp16 factors: NaN, infinities, subnormals."""
    rng = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        check(gguf_sample(rng, name, 16, 4096, wild=True))


def test_every_named_kind_is_drawn() -> None:
    """A format added to formats.inc must be added to references.py: every code and zero rule."""
    drawn = {s.format for s in random_samples()}
    table = {f["name"]: f for f in cpumoe._core.formats()}
    kinds = {(table[name]["code"], table[name]["zeros"]) for name in drawn}
    missing = {
        f["name"]
        for f in table.values()
        if (f["code"], f["zeros"]) not in kinds and f["code"] not in ("fp32", "fp16", "bf16")
    }
    assert not missing


def test_golden_files_are_what_the_tools_give() -> None:
    """core/formats/golden*.inc, which the C++ tests read."""
    for path, contents in files().items():
        assert path.read_text() == contents, f"{path} is stale; run make_golden.py"

"""Writes core/formats/golden*.inc: small weights of every format as other tools decode them.

python tests/formats/make_golden.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from references import Grid, Sample, gguf_samples, samples

SEED = 20261130
FORMATS = Path(__file__).resolve().parents[2] / "core" / "formats"


def text(data: bytes, indent: str = "    ") -> str:
    """A C++ string literal of hex digits, split over lines."""
    digits = data.hex()
    width = 92
    lines = [digits[i : i + width] for i in range(0, len(digits), width)] or [""]
    return "\n".join(f'{indent}"{line}"' for line in lines)


def grid(g: Grid | None) -> str:
    """The arguments of a grid."""
    if g is None:
        return '    f32, 0, 0, ""'
    code = {"fp32": "f32", "fp16": "f16"}.get(g.code, g.code)
    return f"    {code}, {g.rows}, {g.cols},\n{text(g.data.tobytes())}"


def entry(s: Sample) -> str:
    """One CPUMOE_GOLDEN(...)."""
    expected = np.ascontiguousarray(s.expected, dtype="<f4")
    nan = np.isnan(expected)
    expected.view("<u4")[nan] = 0x7FC00000
    parts = [
        f"CPUMOE_GOLDEN({s.format}, {s.layout}, {s.n}, {s.k}, {s.global_scale!r}f,  // {s.tool}",
        text(s.data.tobytes()) + ",",
        grid(s.scales) + ",",
        grid(s.zeros) + ",",
        text(expected.tobytes()) + ")",
    ]
    return "\n".join(parts)


def render(weights: Iterable[Sample]) -> str:
    """A whole file."""
    head = (
        "// Made by tests/formats/make_golden.py; not for editing.\n"
        "// CPUMOE_GOLDEN(format, layout, n, k, global_scale, data,\n"
        "//               scale code, rows, cols, scales, zero code, rows, cols, zeros,\n"
        "//               fp32 [n, k])   bytes as hex digits; any NaN is 7fc00000\n"
    )
    return head + "\n".join(entry(s) for s in weights) + "\n"


def files() -> dict[Path, str]:
    """What the golden files must hold."""
    return {
        FORMATS / "golden.inc": render(samples(SEED, 1)),
        FORMATS / "golden_gguf.inc": render(gguf_samples(SEED, 1)),
    }


if __name__ == "__main__":
    for path, contents in files().items():
        path.write_text(contents)

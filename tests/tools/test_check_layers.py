from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_layers

ROOT = Path(__file__).parents[2]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def problems(root: Path) -> list[str]:
    return [*check_layers.cpp_problems(root), *check_layers.python_problems(root)]


def test_this_repository_holds() -> None:
    assert problems(ROOT) == []


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("core/machine/a.cc", '#include "kernels/dot/dot.h"', "machine/ may not include"),
        ("core/formats/a.h", '#include "machine/isa.h"', "formats/ may not include"),
        ("core/moe/a.cc", "#include <immintrin.h>", "only kernels/ may include <immintrin.h>"),
        ("core/moe/a.cc", "  #  include <arm_neon.h>", "only kernels/"),
        ("core/kernels/dot/a.cc", '#include "moe/moe.h"', "kernels/ may not include"),
        ("core/kernels/dot/a.cc", '#include "kernels/act/act.h"', "another room"),
        ("core/moe/a.cc", '#include "testing/test.h"', "only test code"),
        ("core/moe/a.cc", '#include "kernels/testing/guard.h"', "only test code"),
        ("core/decoder/a.cc", "#include <Python.h>", "only bindings/"),
        ("core/decoder/a.cc", "#include <cuda_runtime.h>", "only bindings/"),
        ("core/decoder/a.cc", '#include "decoder.h"', "is in no room"),
        ("core/attic/a.h", "", "attic/ is no known room"),
        ("bindings/a.cc", '#include "testing/test.h"', "only test code"),
        ("src/cpumoe/ops.py", "import cpumoe.engine", "ops may not import cpumoe.engine"),
        ("src/cpumoe/models/a.py", "from cpumoe.engine import load", "models may not import"),
        ("src/cpumoe/models/a.py", "from cpumoe import engine", "models may not import"),
        ("src/cpumoe/models/a.py", "from ..engine import load", "models may not import"),
        ("src/cpumoe/checkpoint/a.py", "from cpumoe import load", "checkpoint may not import"),
        ("src/cpumoe/engine/a.py", "def f():\n    import torch", "only frontends/hf/ may import"),
        ("src/cpumoe/serve/a.py", "from cpumoe.cli import app", "serve may not import"),
        ("src/cpumoe/attic.py", "", "attic is no known layer"),
    ],
)
def test_wrong_edges_are_found(tmp_path: Path, name: str, line: str, reason: str) -> None:
    write(tmp_path, name, f"\n{line}\n")
    (found,) = problems(tmp_path)
    assert found.startswith(f"{name}:")
    assert reason in found


def test_line_number_is_that_of_the_edge(tmp_path: Path) -> None:
    write(tmp_path, "core/base/a.h", '\n\n#include "moe/moe.h"\n')
    assert problems(tmp_path)[0].startswith("core/base/a.h:3: ")
    assert check_layers.main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("core/moe/a_test.cc", '#include "testing/test.h"'),
        ("core/kernels/dot/a_test.cc", '#include "kernels/act/act.h"'),
        ("core/kernels/dot/avx2.cc", "#include <immintrin.h>"),
        ("core/kernels/dot/a.cc", '#include "kernels/vec/avx2.h"'),
        ("core/kernels/act/a.cc", '#include "kernels/select.h"'),
        ("bindings/a.cc", '#include "arrays.h"'),
        ("bindings/a.cc", "#include <nanobind/nanobind.h>"),
        ("src/cpumoe/engine/a.py", "from cpumoe import Error, _core, moe"),
        ("src/cpumoe/frontends/hf/a.py", "import torch"),
        ("src/cpumoe/cli/a.py", "from cpumoe import load"),
    ],
)
def test_right_edges_pass(tmp_path: Path, name: str, line: str) -> None:
    write(tmp_path, name, line)
    assert problems(tmp_path) == []


def test_an_empty_tree_fails(tmp_path: Path) -> None:
    assert check_layers.main([str(tmp_path)]) == 1

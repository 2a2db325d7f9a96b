from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import check_isa_leak

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")
FLAGS = ["-mavx2", "-mfma", "-mf16c"]
ISAS = {"avx2": FLAGS}


def test_rows_of_the_build_are_read() -> None:
    isas = check_isa_leak.read_isas((ROOT / "cmake" / "isa.cmake").read_text())
    assert isas["avx2"] == FLAGS
    assert set(FLAGS) < set(isas["avx512"]) < set(isas["avx512_bf16"])
    assert "scalar" not in isas


def check(tmp_path: Path, source: str, name: str = "avx2.cc", *extra: str) -> list[str]:
    """Compile one source and check it as a build of its own."""
    file = tmp_path / name
    file.write_text(source)
    command = [CXX, "-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", *extra]
    command += ["-o", str(tmp_path / "a.o"), "-c", str(file)]
    subprocess.run(command, check=True)
    entry = {"directory": str(tmp_path), "command": " ".join(command), "file": str(file)}
    (tmp_path / "compile_commands.json").write_text(json.dumps([entry]))
    return list(check_isa_leak.problems(check_isa_leak.read_units(tmp_path), ISAS))


GOOD = """
#include <string.h>
namespace cpumoe::avx2 {
static float twice(float x) { return 2 * x; }
template <class T> static T half(T x) { return x / 2; }
void helper(float*);
void good(float* p, int n) { for (int i = 0; i < n; ++i) p[i] = half(twice(p[i])); helper(p); }
void move(char* a, const char* b, int n) { memcpy(a, b, n); }
}
"""


@pytest.fixture(autouse=True)
def _tools() -> None:
    """These tests compile for x86-64."""
    if shutil.which(CXX) is None or os.uname().machine != "x86_64":
        pytest.skip("needs an x86-64 compiler")


def test_a_good_file_passes(tmp_path: Path) -> None:
    assert check(tmp_path, GOOD, "avx2.cc", *FLAGS) == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("namespace cpumoe { inline int f(int x) { return x; } }\n"
         "namespace cpumoe::avx2 { int (*p)(int) = cpumoe::f; }", "weak symbol"),
        ("namespace cpumoe { int f(int x) { return x; } }", "outside namespace cpumoe::avx2"),
        ("#include <vector>\nnamespace cpumoe::avx2 {\n"
         "float f(int n) { std::vector<float> v(n); v.resize(n * 2); return v[n]; } }",
         "weak symbol"),
        ("#include <stdlib.h>\nnamespace cpumoe::avx2 { void* f() { return malloc(8); } }",
         "calls malloc"),
        ("namespace cpumoe::avx2 { struct S { S(); int x; }; S global; }", "static initialiser"),
        ("namespace cpumoe { int g(); }\n"
         "namespace cpumoe::avx2 { int f() { return cpumoe::g(); } }", "calls cpumoe::g()"),
    ],
)  # fmt: skip
def test_leaks_are_found(tmp_path: Path, source: str, reason: str) -> None:
    found = check(tmp_path, source, "avx2.cc", *FLAGS)
    assert any(reason in line for line in found), found


def test_flags_on_the_wrong_file_are_found(tmp_path: Path) -> None:
    (found,) = check(tmp_path, "int x;", "scalar.cc", "-mfma")
    assert "compiled with -mfma, flags of avx2" in found


def test_a_wider_row_may_have_the_flags_of_a_narrower_one(tmp_path: Path) -> None:
    source = GOOD.replace("avx2", "avx512")
    flags = [*FLAGS, "-mavx512f"]
    check(tmp_path, source, "avx512.cc", *flags)
    units = check_isa_leak.read_units(tmp_path)
    isas = ISAS | {"avx512": flags}
    assert list(check_isa_leak.problems(units, isas)) == []


def test_missing_flags_are_found(tmp_path: Path) -> None:
    found = check(tmp_path, GOOD, "avx2.cc", "-mavx2")
    assert any("compiled without -mavx2 -mfma -mf16c" in line for line in found)


def test_a_build_without_isa_files_fails(tmp_path: Path) -> None:
    check(tmp_path, "int x;", "plain.cc")
    assert check_isa_leak.main([str(tmp_path)]) == 1

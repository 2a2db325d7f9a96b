"""Check that C++ includes and Python imports follow the direction of dependencies.

Usage: python tools/check_layers.py [ROOT]

Prints one line `file:line: reason` for each edge that points the wrong way and exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Room -> rooms whose headers it may include. ARCHITECTURE.md draws the same arrows.
CPP_ROOMS: dict[str, set[str]] = {
    "base": {"base"},
    "machine": {"base", "machine"},
    "formats": {"base", "formats"},
    "kernels": {"base", "machine", "formats", "kernels"},
    "moe": {"base", "machine", "formats", "kernels", "moe"},
    "decoder": {"base", "machine", "formats", "kernels", "moe", "decoder"},
    "testing": {"base", "machine", "testing"},
}
CPP_ROOMS["bindings"] = set(CPP_ROOMS) - {"testing"}
# One kernel room may use these of its neighbours; anything else in kernels/ is its own.
SHARED_KERNEL_ROOMS = {"vec"}
INTRINSICS = re.compile(r"^(\w*intrin|x86intrin|arm_\w+|amxintrin)\.h$")
FOREIGN = re.compile(r"^(Python\.h|nanobind/|pybind11/|torch/|ATen/|c10/|cuda|onnxruntime)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')

# Python layers, lowest first. A layer may import itself and what stands in an earlier row.
PYTHON_LAYERS: list[set[str]] = [
    {"_core"},
    {"_arrays"},
    {"weight"},
    {"ops"},
    {"checkpoint"},
    {"models"},
    {"placement"},
    {"engine"},
    {"frontends", "quantize", "bench"},
    {"serve", "cli"},
    {"__init__", "__main__"},
]
# What `from cpumoe import NAME` really imports, for names that are no modules.
PUBLIC_NAMES = {"Error": "_core", "Executor": "_core", "load": "engine", "Model": "engine"}
# Framework -> the only folder below src/cpumoe that may import it.
FRAMEWORKS = {
    "torch": "frontends/hf",
    "transformers": "frontends/hf",
    "accelerate": "frontends/hf",
    "onnx": "frontends/onnx",
    "onnxruntime": "frontends/onnx",
    "starlette": "serve",
    "uvicorn": "serve",
    "typer": "cli",
    "rich": "cli",
}


def is_test_code(path: str) -> bool:
    """Tests, benchmarks and testing/ folders, which may use the test helpers."""
    return path.endswith(("_test.cc", "_bench.cc")) or "/testing/" in f"/{path}"


def check_include(path: str, room: str, quote: str, name: str) -> str | None:
    """Why `path` (relative to core/, or in bindings/) may not include `name`; None if it may."""
    if quote == "<":
        if INTRINSICS.match(name) and room != "kernels":
            return f"only kernels/ may include <{name}>"
        if FOREIGN.match(name) and room != "bindings":
            return f"only bindings/ may include <{name}>"
        return None
    parts = name.split("/")
    if room == "bindings" and len(parts) == 1:
        return None
    target = parts[0]
    if target not in CPP_ROOMS or target == "bindings":
        return f'"{name}" is in no room of core/; includes are relative to core/'
    test_code = is_test_code(path)
    if target == "testing" or (target == "kernels" and parts[1] == "testing"):
        return None if test_code else f'only test code may include "{name}"'
    if target not in CPP_ROOMS[room]:
        return f'{room}/ may not include "{name}"'
    if room == target == "kernels":
        own, other = path.split("/")[1], parts[1]
        shared = len(parts) == 2 or other in SHARED_KERNEL_ROOMS  # kernels/*.h belong to no room
        if not shared and other != own and not (test_code or own == "testing"):
            return f'kernels/{own}/ may not include another room\'s "{name}"'
    return None


def cpp_problems(root: Path) -> Iterator[str]:
    """Problems in core/ and bindings/."""
    for base in (root / "core", root / "bindings"):
        for file in sorted(base.rglob("*")):
            if file.suffix not in {".h", ".cc", ".inc"}:
                continue
            inner = file.relative_to(base).as_posix()
            room = "bindings" if base.name == "bindings" else inner.split("/")[0]
            where = file.relative_to(root).as_posix()
            if room not in CPP_ROOMS:
                yield f"{where}:1: {room}/ is no known room; add it to tools/check_layers.py"
                continue
            for number, line in enumerate(file.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                reason = match and check_include(inner, room, match[1], match[2])
                if reason:
                    yield f"{where}:{number}: {reason}"


def layer_of(name: str) -> int | None:
    """Index of a layer in PYTHON_LAYERS."""
    for index, names in enumerate(PYTHON_LAYERS):
        if name in names:
            return index
    return None


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted parts) of every imported module; `from cpumoe import x` gives cpumoe.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            if module == ["cpumoe"]:
                for alias in node.names:
                    yield node.lineno, ["cpumoe", alias.name]
            else:
                yield node.lineno, module


def python_problems(root: Path) -> Iterator[str]:
    """Problems in src/cpumoe."""
    source = root / "src" / "cpumoe"
    for file in sorted(source.rglob("*.py")):
        inner = file.relative_to(source).as_posix()
        own = inner.split("/")[0].removesuffix(".py")
        where = file.relative_to(root).as_posix()
        rank = layer_of(own)
        if rank is None:
            yield f"{where}:1: {own} is no known layer; add it to tools/check_layers.py"
            continue
        package = ["cpumoe", *inner.split("/")[:-1]]
        tree = ast.parse(file.read_text(), str(file))
        for line, parts in imported_modules(tree, package):
            home = FRAMEWORKS.get(parts[0])
            if home is not None and not inner.startswith(f"{home}/") and inner != f"{home}.py":
                yield f"{where}:{line}: only {home}/ may import {parts[0]}"
            if parts[0] != "cpumoe":
                continue
            target = parts[1] if len(parts) > 1 else "ops"
            target = PUBLIC_NAMES.get(target, target)
            target_rank = layer_of(target)
            if target_rank is None:
                target, target_rank = "ops", layer_of("ops")  # a function of the public API
            if target != own and target_rank is not None and target_rank >= rank:
                yield f"{where}:{line}: {own} may not import {'.'.join(parts)}"


def main(arguments: list[str]) -> int:
    """Run both checks; the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    problems = [*cpp_problems(root), *python_problems(root)]
    for problem in problems:
        print(problem)
    files = sum(1 for f in (root / "core").rglob("*") if f.suffix in {".h", ".cc", ".inc"})
    print(f"check_layers: {files} C++ files, {len(problems)} problems")
    if files == 0:
        print("check_layers: no file found; is this the root of the repository?")
        return 1
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

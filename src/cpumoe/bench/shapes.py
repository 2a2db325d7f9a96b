"""Shapes: the geometry of one layer of experts, read from ``benchmarks/shapes/NAME.txt``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cpumoe import Error

_ROUTERS = ("softmax_topk", "topk_softmax", "sigmoid")
_LAYOUTS = ("rows", "columns")
_ACTIVATIONS = ("identity", "relu", "silu", "gelu", "gelu_tanh", "swiglu_oai")


@dataclass(frozen=True)
class Shape:
    """Geometry of one layer of experts. Sizes in elements; the fields are the keys of a shape file.

    Args:
        name: name of the file, or ``NAME-Ne`` for the same layer cut to N experts.
        hidden: features of a token (H).
        inter: features between the two products of an expert (I).
        experts: number of experts (E).
        top_k: experts of one token.
        layout: ``rows`` ([E, 2I, H] and [E, H, I]) or ``columns`` ([E, H, 2I] and [E, I, H]).
        interleaved: gate and up features alternate instead of standing one after the other.
        bias: every projection has a bias.
        model_type: Transformers' name of the family, for peers.

    Example:
        >>> from cpumoe.bench.shapes import load_shape
        >>> load_shape("qwen3-30b-a3b").flops(tokens=1)
        75497472
    """

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    model_type: str = ""
    router: str = "softmax_topk"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    activation: str = "silu"
    alpha: float = 1.702
    limit: float | None = None
    layout: str = "rows"
    interleaved: bool = False
    bias: bool = False

    def expert_elements(self) -> int:
        """Weights of one expert (gate, up and down), biases left out."""
        return 3 * self.hidden * self.inter

    def flops(self, tokens: int) -> int:
        """Floating point operations (one multiply-add = 2) of the three products for `tokens`."""
        return 2 * tokens * self.top_k * self.expert_elements()


def shape_folder() -> Path:
    """Folder of the shape files, see `data_folder`."""
    return data_folder("shapes")


def data_folder(name: str) -> Path:
    """Folder ``benchmarks/NAME``: its copy in the installed package, else that of the checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / name, here.parents[2] / "benchmarks" / name):
        if folder.is_dir():
            return folder
    raise Error(
        f"bench: the folder {name!r} must be installed beside {here}; it is missing. "
        "Install cpumoe again, or run from a checkout"
    )


def shape_names() -> list[str]:
    """Names of all shape files, sorted."""
    return sorted(p.stem for p in shape_folder().glob("*.txt"))


def load_shape(name: str, folder: Path | None = None) -> Shape:
    """Reads one shape.

    Args:
        name: a file's name without ``.txt``; a trailing ``-Ne`` (``deepseek-v3-32e``) cuts that
            layer to N experts. Or the path of a file, ending in ``.txt``.
        folder: where the files are; default `shape_folder()`.

    Raises:
        Error: no such file, or a line of it is malformed.

    Example:
        >>> load_shape("deepseek-v3-32e").experts
        32
    """
    if name.endswith(".txt"):
        if not Path(name).is_file():
            raise Error(f"shape: the file must exist; got {name}. Check the path")
        return parse_shape(Path(name).stem, Path(name).read_text(encoding="utf-8"))
    folder = folder or shape_folder()
    path = folder / f"{name}.txt"
    cut = re.fullmatch(r"([a-z0-9.-]+)-(\d+)e", name)
    if path.is_file() and re.fullmatch(r"[a-z0-9.-]+", name):
        return parse_shape(name, path.read_text(encoding="utf-8"))
    if cut and (folder / f"{cut[1]}.txt").is_file():
        whole = load_shape(cut[1], folder)
        if not whole.top_k <= int(cut[2]) <= whole.experts:
            raise Error(
                f"shape {name}: the number of experts must be in {whole.top_k}.."
                f"{whole.experts}; got {cut[2]}. Choose one of these"
            )
        return check_shape(replace(whole, name=name, experts=int(cut[2])))
    known = ", ".join(sorted(p.stem for p in folder.glob("*.txt")))
    raise Error(
        f"shape: the name must be one of {known}; got {name!r}. A trailing -Ne cuts a layer "
        "to N experts (deepseek-v3-32e); a path ending in .txt names a file of your own"
    )


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


_READERS: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "float | None": float,
    "bool": _flag,
    "str": str,
}


def parse_shape(name: str, text: str) -> Shape:
    """Reads the text of a shape file: ``key = value`` lines, ``#`` starts a comment.

    Raises:
        Error: an unknown, doubled or missing key, or a value that does not fit.
    """
    kinds = {f.name: str(f.type) for f in fields(Shape) if f.name != "name"}
    values: dict[str, object] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        where = f"shape {name}, line {number}"
        if not equals or key not in kinds or key in values:
            raise Error(
                f"{where}: must be KEY = VALUE with each key once and out of "
                f"{', '.join(kinds)}; got {line!r}. Correct the line"
            )
        try:
            values[key] = _READERS[kinds[key]](value)
        except ValueError:
            raise Error(
                f"{where}: {key} must be of type {kinds[key].replace('bool', 'yes or no')}; "
                f"got {value!r}. Correct the line"
            ) from None
    missing = [key for key in ("hidden", "inter", "experts", "top_k") if key not in values]
    if missing:
        raise Error(
            f"shape {name}: must name hidden, inter, experts and top_k; got no "
            f"{', '.join(missing)}. Add them"
        )
    return check_shape(Shape(name, **values))  # type: ignore[arg-type]


def check_shape(shape: Shape) -> Shape:
    """Returns `shape`, or raises Error naming the first rule that it breaks."""
    s = shape
    rules = [
        (min(s.hidden, s.inter, s.experts) >= 1, "sizes must be at least 1"),
        (1 <= s.top_k <= s.experts, "top_k must be in 1..experts"),
        (s.router in _ROUTERS, f"router must be one of {', '.join(_ROUTERS)}"),
        (s.layout in _LAYOUTS, f"layout must be one of {', '.join(_LAYOUTS)}"),
        (
            s.activation in _ACTIVATIONS,
            f"activation must be one of {', '.join(_ACTIVATIONS)}",
        ),
        (s.groups >= 1 and s.experts % s.groups == 0, "groups must divide experts"),
        (1 <= s.top_groups <= s.groups, "top_groups must be in 1..groups"),
        (
            s.experts // max(s.groups, 1) * s.top_groups >= s.top_k,
            "the chosen groups must hold top_k experts",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise Error(f"shape {s.name}: {rule}; got {s}. Correct the shape file")
    return s

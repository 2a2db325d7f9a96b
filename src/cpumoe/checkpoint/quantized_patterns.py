"""Names of modules in a quantization_config: literal names, regular expressions, wildcards.

A config is untrusted: expressions that could take for ever are refused, since every module's name
is matched against them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cpumoe._core import Error

_MAX_PATTERNS = 100_000
_MAX_LENGTH = 1000
# Each unbounded repeat multiplies the steps of a failing match by the name's length; published
# configs have at most four. A repeated group may take exponentially many.
_MAX_REPEATS = 6
_REPEAT = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\})")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)(?:[*+]|\{)")


@dataclass(frozen=True, slots=True)
class Names:
    """A set of modules: those of these names, below them, or matched from the start."""

    exact: frozenset[str] = frozenset()
    inside: tuple[str, ...] = ()  # a name, what is below it, and what ends with it
    expressions: tuple[re.Pattern[str], ...] = ()
    everything: bool = False
    listed: tuple[str, ...] = field(default=(), compare=False)

    def __contains__(self, module: str) -> bool:
        return (
            self.everything
            or module in self.exact
            or module.endswith(self.inside)
            or any(module.startswith(f"{key}.") for key in self.inside)
            or any(e.match(module) for e in self.expressions)
        )


def strings(value: Any, where: str) -> list[str]:
    """A list of strings of the config; empty when absent."""
    if value is None:
        return []
    good = isinstance(value, list) and len(value) <= _MAX_PATTERNS
    if not good or not all(isinstance(v, str) and 0 < len(v) <= _MAX_LENGTH for v in value):
        raise Error(f"{where} must be a list of module names; got {value!r:.100}")
    return list(value)


def expression(text: str, where: str) -> re.Pattern[str]:
    """A compiled expression; Error when it is none or could take for ever."""
    if len(_REPEAT.findall(text)) > _MAX_REPEATS or _REPEATED_GROUP.search(text):
        raise Error(
            f"{where} must hold patterns of at most {_MAX_REPEATS} unbounded repeats, no group "
            f"repeated; got {text!r:.100}. Name the modules instead"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as e:
        raise Error(f"{where} must hold regular expressions; got {text!r:.100} ({e})") from None


def targets(value: Any, where: str) -> Names:
    """compressed-tensors: names, `re:` expressions that match from the start, classes.

    Of classes only `Linear` is known here: every linear layer.
    """
    listed = strings(value, where)
    return Names(
        exact=frozenset(t for t in listed if not t.startswith("re:")),
        expressions=tuple(expression(t[3:], where) for t in listed if t.startswith("re:")),
        everything="Linear" in listed,
        listed=tuple(listed),
    )


def modules(value: Any, where: str) -> Names:
    """Transformers' modules_to_not_convert: a module, all below it, or the end of a name."""
    listed = strings(value, where)
    plain = [t for t in listed if re.fullmatch(r"[\w.\-]+", t)]
    return Names(
        inside=tuple(plain),
        expressions=tuple(
            expression(rf"(?:{t})(?:(?<=\.)|(?=\.|$))", where) for t in listed if t not in plain
        ),
        listed=tuple(listed),
    )


def wildcards(value: Any, where: str) -> Names:
    """ModelOpt: names in which * stands for anything; a name includes all below it."""
    listed = strings(value, where)
    return Names(
        expressions=tuple(
            expression(re.escape(t).replace(r"\*", ".*") + r"(?:\.|$)", where) for t in listed
        ),
        listed=tuple(listed),
    )


def first_match(groups: Iterable[tuple[Names, Any]], module: str) -> Any:
    """compressed-tensors' order: an exact name, then expressions by their text, then classes."""
    groups = list(groups)
    for names, value in groups:
        if module in names.exact:
            return value
    matching = [
        (e.pattern, i)
        for i, (names, _) in enumerate(groups)
        for e in names.expressions
        if e.match(module)
    ]
    if matching:
        return groups[min(matching)[1]][1]
    return next((value for names, value in groups if names.everything), None)

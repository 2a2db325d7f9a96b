"""Options that several verbs share, defined once, and how errors name them as they were typed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from cpumoe._core import Error
from cpumoe.ops import ActivationClass


@contextmanager
def named_as_typed(**options: str) -> Iterator[None]:
    """Error that begins with the name of an argument -> one that begins with its option.

    options: argument -> option. Any other error passes.
    """
    try:
        yield
    except Error as error:
        argument, _, rest = str(error).partition(": ")
        if argument not in options:
            raise
        raise Error(f"{options[argument]}: {rest}") from None


def _json_target(value: str) -> str:
    folder = Path(value).parent
    if value not in ("", "-") and not folder.is_dir():
        raise Error(f"--json: must name a file in a directory; there is no {folder}. Create it")
    return value


ModelPath = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Checkpoint directory or GGUF file.", show_default=False),
]
KvElements = Literal["fp16", "bf16", "fp32"]
Activations = Annotated[
    ActivationClass,
    typer.Option(help="Inputs of products are rounded to this; auto: by format and CPU."),
]
Kv = Annotated[KvElements, typer.Option(help="Elements of the KV cache.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Worker threads. Default: CPUMOE_THREADS, or one a physical core."
    ),
]
Warm = Annotated[
    bool, typer.Option("--warm/--no-warm", help="Read the weights into memory first, if they fit.")
]
HugePages = Annotated[
    bool,
    typer.Option(
        "--huge-pages", help="Copy the weights into huge pages: faster, needs the memory."
    ),
]
Json = Annotated[
    str,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the figures to FILE, too; - is standard output.",
        callback=_json_target,
        show_default=False,
    ),
]
ShowStats = Annotated[bool, typer.Option("--stats/--no-stats", help="Figures on standard error.")]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None: as the checkpoint asks."""

    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="New tokens at most. Default: the model's, or no limit."),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0: always the likeliest token. Default: the model's, or 0."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Keep the k likeliest tokens; 0: all. Default: the model's."),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Keep the likeliest tokens up to this mass. Default: the model's."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Keep tokens above this share of the best one. Default: the model's.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: repeat less. Default: the model's, or 1.")
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Same seed, same text. Default: another one each time."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop at this string; may be repeated. Default: none."),
    ] = None

    def values(self) -> dict[str, Any]:
        """Field -> value, as `Model.params` takes them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Opening:
    """How a model is opened."""

    threads: Threads = None
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens that fit. Default: the model's.")
    ] = None
    kv: Kv = "fp16"
    activations: Activations = "auto"
    warm: Warm = True
    huge_pages: HugePages = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of a dataclass as options where a parameter has that type."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            annotation = hints[parameter.name]
            parameters.append(
                parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=f.default,
                annotation=types[f.name],
            )
            for f in fields(group)
        ]

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = command.__doc__
    return run

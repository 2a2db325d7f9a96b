"""`cpumoe VERB ...`: finds the verbs, turns errors into one sentence.

A verb is a module of this folder without a leading underscore: its file name is the verb and it
defines `app`, a `typer.Typer` (one command, or several for sub-commands). Nothing is registered
anywhere else. A module is imported when its verb is used (or listed by `--help`), so it must import
what is slow (numpy, the native part, rich) inside its functions.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_PACKAGE = "cpumoe.cli"


def verbs() -> list[str]:
    """Names of all verbs: the modules of this folder, sorted."""
    path = importlib.import_module(_PACKAGE).__path__
    names = (m.name for m in pkgutil.iter_modules(path))
    return sorted(n for n in names if n != "main" and not n.startswith("_"))


class _Verbs(TyperGroup):
    """A group whose commands are files; typer asks for them by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return verbs()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in verbs():
            return None
        module = importlib.import_module(f"{_PACKAGE}.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from cpumoe import __version__

        typer.echo(f"cpumoe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (any verb takes it).")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Mixture-of-experts language models on CPUs, from weights as published."""


def describe_error(error: BaseException) -> tuple[str, int] | None:
    """(sentence, exit code) of an error that a user can act on; None for a fault of our own."""
    if isinstance(error, MemoryError):
        return "out of memory. Close other programs, or choose a smaller model or context", 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", 2
    from cpumoe import Error

    return (str(error), 2) if isinstance(error, Error) else None


def main(args: list[str] | None = None) -> None:
    """Run the command line with `args` (default: the process's own) and exit.

    Exit codes: 0 done, 1 a fault of cpumoe itself, 2 bad input, 130 interrupted.
    """
    words = list(sys.argv[1:] if args is None else args)
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    words = [w for i, w in enumerate(words) if w != "--debug" or i > end]
    try:
        app(words, prog_name="cpumoe")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); what is left to flush would raise again.
        sys.stdout = None
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        known = describe_error(error)
        if known is None:
            text = f"internal error: {type(error).__name__}: {error}. Run again with --debug"
            print(f"cpumoe: {text}", file=sys.stderr)
            sys.exit(1)
        print(f"cpumoe: {known[0]}", file=sys.stderr)
        sys.exit(known[1])


if __name__ == "__main__":
    main()

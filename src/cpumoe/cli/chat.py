"""`cpumoe chat MODEL`: a conversation in the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpumoe.cli import _common as common
from cpumoe.cli import _options as options

if TYPE_CHECKING:
    from cpumoe.engine import Conversation

app = typer.Typer(add_completion=False)

_HELP = """/reset         forget the conversation     /undo          take back the last turn
/save FILE     write it as JSON            /load FILE     continue from such a file
/system TEXT   set the system message      /stats         figures after each answer, on or off
/exit, Ctrl-D  leave                       Ctrl-C         stop the answer, keep what has come
A line that ends with \\ goes on in the next one."""


def _read_piped(number: int) -> str | None:
    """Line `number` of standard input; None at its end. Raises Error when it is not UTF-8."""
    from cpumoe import Error

    raw = sys.stdin.buffer.readline()
    try:
        return raw.decode("utf-8").rstrip("\r\n") if raw else None
    except UnicodeDecodeError as e:
        raise Error(
            f"chat: line {number} of the input must be UTF-8 text; got byte 0x{raw[e.start]:02x} "
            f"at position {e.start}. Convert the input"
        ) from None


def _read_line() -> str | None:
    """The next turn from the terminal, with editing and history; None at the end."""
    try:
        line = input("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(". ")
    except EOFError:
        common.note("")
        return None
    except UnicodeDecodeError:
        common.note("That line is not UTF-8 text.")
        return ""
    return line


class _Chat:
    """The conversation and what the commands change about it."""

    def __init__(self, talk: Conversation, stats: bool) -> None:
        self.talk = talk
        self.stats = stats
        self.sampling: dict[str, object] = {}
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: common.note(_HELP),
            "reset": lambda _: self.talk.reset(),
            "undo": self._undo,
            "save": self._save,
            "load": self._load,
            "system": self._system,
            "stats": self._stats,
        }

    def command(self, line: str) -> bool:
        """Run a line that begins with a slash; False when it says to leave."""
        name, _, rest = line[1:].partition(" ")
        if name in ("exit", "quit"):
            return False
        if name in self.commands:
            self.commands[name](rest.strip())
        else:
            common.note(f"No command /{name}. /help lists them.")
        return True

    def answer(self, text: str) -> None:
        """Say `text` and print the answer as it comes; Ctrl-C ends it early."""
        with common.progress("Prompt", "tokens") as report:
            stream = self.talk.say(text, progress=report, **self.sampling)
            try:
                first = next(stream, "")
            except KeyboardInterrupt:
                stream.close()
                common.note("[interrupted; the question is taken back]")
                return
        try:
            common.write(first)
            for piece in stream:
                common.write(piece)
        except KeyboardInterrupt:
            stream.close()
            common.write(" [interrupted]")
        common.write("\n")
        if self.stats:
            common.note(common.closing_line(self.talk.model, stream.completion.stats))
        if stream.completion.finish == "context":
            common.note("The context is full. /undo, or /reset to go on.")

    def _undo(self, _: str) -> None:
        if not self.talk.undo():
            common.note("Nothing to take back.")

    def _save(self, name: str) -> None:
        self.talk.save(self._file(name))
        common.note(f"Saved {len(self.talk.messages)} messages.")

    def _load(self, name: str) -> None:
        self.talk.load(self._file(name))
        common.note(f"Loaded {len(self.talk.messages)} messages.")

    def _file(self, name: str) -> Path:
        from cpumoe import Error

        if not name:
            raise Error("file: must be named; write /save FILE or /load FILE")
        return Path(name).expanduser()

    def _system(self, text: str) -> None:
        self.talk.system = text or None
        self.talk.reset()

    def _stats(self, _: str) -> None:
        self.stats = not self.stats


def _turn(chat: _Chat, line: str, interactive: bool) -> bool:
    """One line of the user; errors end a piped conversation and not one at the terminal."""
    from cpumoe import Error

    try:
        if line.startswith("/"):
            return chat.command(line)
        chat.answer(line)
    except (Error, OSError) as e:
        if not interactive:
            raise
        common.note(str(e))
    return True


@app.command(help="Talk with a model; /help lists the commands. Piped: one line is one turn.")
@options.grouped
def chat(
    model: options.ModelPath,
    system: Annotated[str | None, typer.Option(help="System message. Default: none.")] = None,
    *,
    sampling: options.Sampling,
    opening: options.Opening,
    stats: options.ShowStats = False,
) -> None:
    """Read turns until the end of input and answer each."""
    from cpumoe import Error
    from cpumoe.engine import Conversation

    loaded = common.open_model(model, opening)
    if not loaded.tokenizer.has_template:
        raise Error(f"{model}: has no chat template. Use `cpumoe generate` to continue text")
    talk = _Chat(Conversation(loaded, system), stats)
    talk.sampling = sampling.values()
    common.sampling_params(loaded, sampling)  # refuses bad values before the first turn
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() editing and history)

        common.note(f"{loaded.path.name}, {loaded.nbytes / 1e9:.2f} GB. /help lists the commands.")
    for number in count(1):
        try:
            line = _read_line() if interactive else _read_piped(number)
            if line is None or (line.strip() and not _turn(talk, line, interactive)):
                break
        except KeyboardInterrupt:
            if not interactive:
                raise
            common.note("\nCtrl-D or /exit leaves.")

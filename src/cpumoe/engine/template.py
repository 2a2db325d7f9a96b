"""The checkpoint's chat template: untrusted Jinja text, run in a sandbox with the usual helpers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cpumoe._core import Error
from cpumoe.checkpoint.json_file import MAX_JSON_BYTES, read_json_object, require_regular_file

if TYPE_CHECKING:
    import jinja2


def find_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Template text of the checkpoint `path`; `config` is its tokenizer_config.json.

    chat_template.jinja comes first, then chat_template.json, then tokenizer_config.json.
    """
    file = path / "chat_template.jinja"
    if file.exists():
        if require_regular_file(file).st_size > MAX_JSON_BYTES:
            raise Error(f"{file}: must be at most {MAX_JSON_BYTES} bytes")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise Error(f"{file}: must be UTF-8 text") from None
    file = path / "chat_template.json"
    found = read_json_object(file).get("chat_template") if file.exists() else None
    if found is None:
        file, found = path / "tokenizer_config.json", config.get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default", next(iter(named.values()), None))
    if found is not None and not isinstance(found, str):
        raise Error(f"{file}: chat_template must be text or a list of named texts")
    return found


def _environment() -> jinja2.Environment:
    """Jinja as templates on the Hub expect it: trimmed blocks, loop controls, three helpers."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the model's own text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which no model was trained on.
        known = {k: v for k, v in options.items() if k in ("separators", "sort_keys")}
        ascii_only = bool(options.get("ensure_ascii", False))
        return json.dumps(value, ensure_ascii=ascii_only, indent=indent, **known)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template. special: the named tokens (bos_token, ...) it may use."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        from jinja2.exceptions import TemplateError

        self._special = dict(special)
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as e:
            raise Error(f"chat template: must be a Jinja template; {e}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises Error when the template refuses the messages."""
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as e:  # template code can raise anything
            raise Error(f"chat template: cannot render these messages; {e}") from None

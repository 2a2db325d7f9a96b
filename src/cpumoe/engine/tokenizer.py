"""A checkpoint's tokenizer: text <-> token ids, and the conversation template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from cpumoe._core import Error
from cpumoe.checkpoint.json_file import read_json_object, require_regular_file
from cpumoe.engine import gguf_tokenizer as gguf
from cpumoe.engine.gguf_tokenizer import Parts
from cpumoe.engine.template import ChatTemplate, find_template
from cpumoe.engine.text import TextStream

Message = Mapping[str, Any]


def _content(token: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _read_directory(path: Path) -> Parts:
    """tokenizer.json, tokenizer_config.json and the template of the checkpoint `path`."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise Error(
            f"{path}: tokenizer.json is missing. Download it, or save the tokenizer with "
            "Transformers' fast tokenizer; token ids work without it"
        )
    require_regular_file(file)
    try:
        raw = RawTokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the package's own panics derive from BaseException only
        raise Error(f"{file}: cannot be read as a tokenizer ({str(e)[:200]})") from None
    config_file = path / "tokenizer_config.json"
    config = read_json_object(config_file) if config_file.exists() else {}
    eos = _content(config.get("eos_token"))
    eos_id = None if eos is None else raw.token_to_id(eos)
    ends = frozenset(() if eos_id is None else (eos_id,))
    return Parts(raw, config, find_template(path, config), ends)


def has_tokenizer(path: Path, metadata: Mapping[str, Any] | None = None) -> bool:
    """Whether the checkpoint at `path` brings a tokenizer; metadata: of a GGUF file."""
    return (path / "tokenizer.json").exists() if metadata is None else gguf.has_tokenizer(metadata)


class Tokenizer:
    """Text to ids and back, as the checkpoint at `path` defines it.

    metadata: of a GGUF file. end_ids: the tokens that end a text.
    Raises Error when tokenizer.json is missing or cannot be read.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any] | None = None) -> None:
        self.path = path
        parts = (
            _read_directory(path)
            if metadata is None
            else gguf.read_tokenizer(metadata, f"{path}: metadata")
        )
        self._raw = parts.raw
        self._raw.no_truncation()
        self._raw.no_padding()
        self.special = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _content(parts.config.get(name))) is not None
        }
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        self.end_ids = parts.end_ids
        # As Transformers does: a stated add_bos_token overrules the file's post-processor.
        self._stated_bos = parts.config.get("add_bos_token")
        self._template_source = parts.template
        self._template: ChatTemplate | None = None

    def _id(self, name: str) -> int | None:
        text = self.special.get(name)
        return None if text is None else self._raw.token_to_id(text)

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._raw.get_vocab_size())

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint brings a conversation template."""
        return self._template_source is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special`: with the beginning-of-text token, if there is one."""
        stated = self._stated_bos if isinstance(self._stated_bos, bool) else None
        try:
            ids = list(self._raw.encode(text, add_special_tokens=special and stated is None).ids)
        except (UnicodeEncodeError, TypeError):
            raise Error("prompt: must be valid Unicode text; got a lone surrogate") from None
        if special and stated and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; unknown ids vanish, broken bytes become U+FFFD."""
        return str(self._raw.decode(list(ids), skip_special_tokens=skip_special))

    def stream(self, context: Sequence[int] = (), *, skip_special: bool = True) -> TextStream:
        """A TextStream of tokens that follow `context`."""
        return TextStream(lambda ids: self.decode(ids, skip_special=skip_special), context)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text, by the checkpoint's template. Raises Error without one."""
        if self._template_source is None:
            raise Error(
                f"{self.path}: this checkpoint has no chat template. It continues text: "
                "use `cpumoe generate` or Model.generate"
            )
        if self._template is None:
            self._template = ChatTemplate(self._template_source, self.special)
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, ready for the model's answer."""
        return self.encode(self.render(messages), special=False)

"""A conversation: messages, one session whose KV cache every turn reuses, and partial answers."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from cpumoe._core import Error
from cpumoe.checkpoint.json_file import read_json_object
from cpumoe.engine.model import Model, Stream
from cpumoe.engine.run import Progress, Stats, run


class Conversation:
    """Turns with a chat model. `messages` is [{"role": ..., "content": ...}, ...].

    Example:
        >>> import cpumoe
        >>> from cpumoe.engine import Conversation
        >>> talk = Conversation(cpumoe.load("models/tiny-stories-moe"))
        >>> answer = "".join(talk.say("Tell me a story.", max_tokens=8))
        >>> [m["role"] for m in talk.messages]
        ['user', 'assistant']
    """

    def __init__(self, model: Model, system: str | None = None) -> None:
        self.model = model
        self.system = system
        self.session = model.session()
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def undo(self) -> bool:
        """Forget the last question and its answer; False when there is none."""
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if asked:
            del self.messages[asked[-1] :]
        return bool(asked)

    def say(self, text: str, *, progress: Progress | None = None, **sampling: Any) -> Stream:
        """Ask `text`; the returned stream is the answer.

        When the stream ends, is closed or is interrupted, what has come of the answer becomes part
        of the conversation; when nothing has come, the question is taken back.
        Raises Error for an empty text or when the conversation has outgrown the context.
        """
        if not text.strip():
            raise Error("message: must not be empty; got nothing to say")
        asked = [*self.messages, {"role": "user", "content": text}]
        model, params = self.model, self.model.params(**sampling)
        ids = model.tokenizer.encode_chat(asked)
        if len(ids) >= model.context:
            raise Error(
                f"conversation: must be shorter than the context of {model.context} tokens; "
                f"got {len(ids)}. Start over, or raise the context"
            )
        request = model.request(ids, params, self.session, after_prompt=False)
        stats = Stats()

        def pieces() -> Generator[str, None, None]:
            try:
                with closing(run(model.decoder, [request], stats, progress)) as steps:
                    for _, piece in steps:
                        yield piece
            finally:
                answer = "".join(request.pieces)
                if answer or request.finish:
                    self.messages = [*asked, {"role": "assistant", "content": answer}]

        return Stream(pieces(), request, stats)

    def save(self, path: Path) -> None:
        """Write the messages as JSON."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Continue from a file that `save` wrote. Raises Error when it is none."""
        messages = read_json_object(path).get("messages")
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
        ):
            raise Error(f"{path}: must hold a list of messages with role and content")
        self.messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]

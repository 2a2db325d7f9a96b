"""load(path) -> Model: a published checkpoint, opened by memory map, that generates text."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from cpumoe import _core
from cpumoe._core import Error
from cpumoe.checkpoint import Checkpoint, Memory, open_checkpoint
from cpumoe.engine.defaults import Defaults, read_defaults
from cpumoe.engine.run import FinishReason, Progress, Request, Stats, run
from cpumoe.engine.sampling import Sampler, SamplingParams
from cpumoe.engine.session import Session
from cpumoe.engine.text import StopMatcher
from cpumoe.engine.tokenizer import Message, Tokenizer, has_tokenizer
from cpumoe.models import ModelSpec, build_spec
from cpumoe.ops import ActivationClass

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What was generated. ids: the new tokens, the one that ended the text included.

    finish: "stop" (end of text or a stop string), "length" (max_tokens), "context" (no room), or
    "" when generation was interrupted.
    """

    text: str
    ids: list[int]
    finish: FinishReason
    stats: Stats


class Stream(Iterator[str]):
    """Pieces of text as they are generated; `completion` is what has come so far."""

    def __init__(self, source: Generator[str, None, None], request: Request, stats: Stats) -> None:
        self._source = source
        self._request = request
        self._stats = stats

    def __next__(self) -> str:
        """The next piece; never a part of a character or of a stop string."""
        return next(self._source)

    def read(self) -> str:
        """Generate to the end; returns the whole text."""
        for _ in self:
            pass
        return self.completion.text

    def close(self) -> None:
        """Stop generating; the session stays usable."""
        self._source.close()

    @property
    def completion(self) -> Completion:
        """The text and tokens so far."""
        r = self._request
        return Completion("".join(r.pieces), list(r.ids), r.finish, self._stats)


class Model:
    """A loaded model. Made by `cpumoe.load`; safe to share between threads, one call at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        executor: _core.Executor,
        kv: str,
        context: int | None,
        activations: ActivationClass = "auto",
    ) -> None:
        self.path = checkpoint.path
        self.checkpoint = checkpoint
        self.spec: ModelSpec = replace(build_spec(checkpoint), act_class=activations)
        self.kv = kv
        self.context = self.spec.max_tokens if context is None else context
        if not 1 <= self.context <= self.spec.max_tokens:
            raise Error(
                f"context: must be from 1 to {self.spec.max_tokens}, the positions this model was "
                f"made for; got {self.context}. Leave it out for all of them"
            )
        self.executor = executor
        self.decoder = _core.Decoder(self.spec, executor)
        self._tokenizer: Tokenizer | None = None
        self._defaults: Defaults | None = None
        self.session()  # refuses a bad `kv` now

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, read on first use. Raises Error when it has none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.path, self.checkpoint.metadata)
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint brings a tokenizer; without one there are only ids."""
        return has_tokenizer(self.path, self.checkpoint.metadata)

    @property
    def defaults(self) -> Defaults:
        """The checkpoint's own sampling parameters and end-of-text ids."""
        if self._defaults is None:
            c = self.checkpoint
            ends = self.tokenizer.end_ids if self.has_tokenizer else ()
            self._defaults = read_defaults(self.path, c.config, ends, c.metadata)
        return self._defaults

    @property
    def nbytes(self) -> int:
        """Bytes of weights in the checkpoint."""
        return self.checkpoint.nbytes

    def session(self) -> Session:
        """An empty session: pass it to several calls and they share the KV cache's beginning."""
        return Session(self.decoder, self.context, self.kv)

    def params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's sampling parameters with those of `changes` that are not None.

        Names as in SamplingParams. `stop` may be a string or a sequence of strings.
        """
        names = [f.name for f in fields(SamplingParams)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise Error(
                f"generate: sampling parameters must be among {', '.join(names)}; "
                f"got {', '.join(unknown)}. Check the spelling"
            )
        known = {k: v for k, v in changes.items() if v is not None}
        stop = known.get("stop", ())
        if isinstance(stop, str | list):
            known["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        return replace(self.defaults.params, **known)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise Error("prompt: must not be empty; got ''. Write the text to continue")
            return self.tokenizer.encode(prompt)
        try:
            if isinstance(prompt, bytes | bytearray | memoryview):
                raise TypeError
            given = list(prompt)
            if any(isinstance(i, bool) for i in given):
                raise TypeError
            ids = [operator.index(i) for i in given]
        except TypeError:
            raise Error(
                f"prompt: must be text or token ids; got {prompt!r:.100}. "
                "Decode bytes, and pass ids as integers"
            ) from None
        bad = [i for i in ids if not 0 <= i < self.spec.vocab]
        if bad:
            raise Error(f"prompt: token ids must be in [0, {self.spec.vocab}); got {bad[0]}")
        return ids

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        session: Session | None = None,
        *,
        after_prompt: bool = True,
    ) -> Request:
        """A Request for `engine.run`. after_prompt: the text continues the prompt's own."""
        ids = self._ids(prompt)
        has_text = self.has_tokenizer
        if params.stop and not has_text:
            file = "tokenizer.json" if self.checkpoint.metadata is None else "a tokenizer"
            raise Error(f"stop: needs {file}, which {self.path} lacks")
        return Request(
            session=session or self.session(),
            prompt=ids,
            params=params,
            sampler=Sampler(params, ids, self.spec.vocab),
            text=self.tokenizer.stream(ids if after_prompt else ()) if has_text else None,
            stops=StopMatcher(params.stop),
            eos_ids=self.defaults.eos_ids,
        )

    def stream_request(self, request: Request, progress: Progress | None = None) -> Stream:
        """Generate `request` lazily."""
        stats = Stats()

        def pieces() -> Generator[str, None, None]:
            with closing(run(self.decoder, [request], stats, progress)) as steps:
                for _, piece in steps:
                    yield piece

        return Stream(pieces(), request, stats)

    def stream(
        self,
        prompt: Prompt,
        *,
        session: Session | None = None,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> Stream:
        """Generate from `prompt` (text or token ids), piece by piece.

        sampling: fields of SamplingParams; those left out are the checkpoint's own.
        progress(done, total): prompt tokens computed so far, called now and then.

        Example:
            >>> import cpumoe
            >>> model = cpumoe.load("models/tiny-stories-moe")
            >>> pieces = list(model.stream("Once upon a time", max_tokens=8))
            >>> len(pieces)
            8
        """
        return self.stream_request(self.request(prompt, self.params(**sampling), session), progress)

    @overload
    def generate(self, prompt: Prompt, **sampling: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **sampling: Any) -> list[Completion]: ...
    def generate(self, prompt: Any, **sampling: Any) -> Completion | list[Completion]:
        """Generate from one prompt, or from a list of prompts in one ragged batch.

        Raises Error for an empty prompt, one longer than the context, or ids out of range.

        Example:
            >>> import cpumoe
            >>> model = cpumoe.load("models/tiny-stories-moe")
            >>> len(model.generate("Once upon a time", max_tokens=8, temperature=0).ids)
            8
        """
        many = (
            isinstance(prompt, Iterable)
            and not isinstance(prompt, str)
            and any(np.ndim(p) or isinstance(p, str) for p in prompt)
        )
        params = self.params(**sampling)
        requests = [self.request(p, params) for p in (prompt if many else [prompt])]
        stats = Stats()
        for _ in run(self.decoder, requests, stats):
            pass
        done = [Completion("".join(r.pieces), r.ids, r.finish, stats) for r in requests]
        return done if many else done[0]

    def chat(self, messages: str | Sequence[Message], **sampling: Any) -> Completion:
        """Answer a conversation through the checkpoint's chat template.

        messages: the user's text, or [{"role": "user", "content": ...}, ...]. For a conversation
        of several turns use `cpumoe.engine.Conversation`, which reuses the KV cache.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        ids = self.tokenizer.encode_chat(turns)
        stream = self.stream_request(self.request(ids, self.params(**sampling), after_prompt=False))
        stream.read()
        return stream.completion

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """fp32 logits [tokens, vocab] behind every token of `prompt` (text or ids)."""
        session = self.session()
        ids = session.begin(self._ids(prompt))
        out: NDArray[np.float32] = self.decoder.forward(
            [(session.cache, np.asarray(ids, np.int32))], all=True
        )
        return out


def weight_file_bytes(path: Path) -> int:
    """Bytes of the weight files of a checkpoint, as far as names tell."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    if path.is_file() and "-of-" in path.name:
        files = [*path.parent.glob(path.name.rpartition("-of-")[0][:-5] + "*-of-*.gguf")]
    return sum(f.stat().st_size for f in files)


def _require_room(path: Path) -> None:
    need, free = weight_file_bytes(path), _core.Machine.probe().memory_available
    if need + 1e9 > free:
        raise Error(
            f"memory: huge pages must leave 1 GB free; {path.name} has {need / 1e9:.1f} GB of "
            f"weights and {free / 1e9:.1f} GB are available. Use the mapped files"
        )


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    kv: str = "fp16",
    context: int | None = None,
    activations: ActivationClass = "auto",
    executor: _core.Executor | None = None,
    memory: Memory = "mapped",
    report: Callable[[int], None] | None = None,
) -> Model:
    """Open a checkpoint as published; nothing is converted or copied.

    path: a Hugging Face directory with config.json, one or many safetensors, and for text
    tokenizer.json; or a GGUF file, of a split model any part.
    threads: workers; default CPUMOE_THREADS, else this machine's physical cores within its limits.
    kv: element type of the KV cache, "fp16", "bf16" or "fp32".
    context: tokens a sequence may hold; default what the model was made for. Memory is used only as
    far as a sequence grows, long contexts in steps of 128 tokens. executor: use these workers
    instead of new ones.
    activations: what inputs are rounded to inside products, "fp32" (not at all), "bf16" (where
    weights are bf16 or FP8; needs a CPU with avx512_bf16), "int8" (per token and 32 inputs; where
    the weights have integer products) or "auto" (each format's default on this CPU; so do weights
    without products of the class asked for).
    memory: "mapped" uses the files in place. "huge" reads them into memory with huge pages first,
    calling report(bytes) for each piece: decode is faster where pages of files are small (measure
    with `cpumoe bench e2e`), opening takes the time to read, and memory holds every weight.
    Raises Error when anything in it is missing, malformed or not supported.

    Example:
        >>> import cpumoe
        >>> cpumoe.load("models/tiny-stories-moe").spec.family
        'qwen3_moe'
    """
    if executor is not None and threads is not None:
        raise Error("load: give threads or executor, not both")
    if memory == "huge":
        _require_room(Path(path))
    checkpoint = open_checkpoint(Path(path), None, memory, report)
    model = Model(checkpoint, executor or _core.Executor(threads), kv, context, activations)
    checkpoint.widen()
    return model

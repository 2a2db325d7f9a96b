#!/usr/bin/env python3
"""One model in llama.cpp, driven by lines on standard input. Run by against_llama_cpp.py.

    python benchmarks/e2e/llama_cpp_worker.py FILE.gguf CONTEXT THREADS

Each line is a JSON object, answered by one: {"do": "prompt", "ids": [...]} forgets the sequence
and computes a prompt, {"do": "step", "id": n} appends a token. Both give the seconds of a decode
call with the greedy choice, and the likeliest next token; with "logits": true the logits in base64.
Settings are llama.cpp's defaults (memory map, weights repacked where it can, flash attention where
it chooses) with logits for the last token only and prompts in batches of up to 2048 tokens, 512 at
a time inside.
Runs in whichever interpreter has llama-cpp-python; needs numpy besides, and nothing of cpumoe.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp
import numpy as np


class Text:
    """The model and its one sequence."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        """Opens the file; ends the program where llama.cpp refuses it."""
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = 2048
        params.n_threads = params.n_threads_batch = threads
        self.settings = {"n_batch": params.n_batch, "n_ubatch": params.n_ubatch}
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("llama.cpp cannot make a context")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def feed(self, ids: list[int], logits: bool) -> dict[str, Any]:
        """Appends tokens."""
        array = (llama_cpp.llama_token * len(ids))(*ids)
        batch = llama_cpp.llama_batch_get_one(array, len(ids))
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self.context, batch)
        # The result is ready only now: llama_decode may return before its threads have ended.
        row = llama_cpp.llama_get_logits_ith(self.context, -1)
        values = np.ctypeslib.as_array(row, (self.vocab,)) if status == 0 else np.zeros(1)
        choice = int(values.argmax())
        seconds = time.perf_counter() - start
        if status != 0 or not np.isfinite(values).all():
            sys.exit(f"llama.cpp failed (status {status}) or gave logits that are no numbers")
        answer: dict[str, Any] = {"seconds": seconds, "next": choice}
        if logits:
            answer["logits"] = base64.b64encode(values.astype(np.float32).tobytes()).decode()
        return answer

    def clear(self) -> None:
        """Forgets the sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)


def main() -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")  # what the library prints must not come between
    os.dup2(2, 1)
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    text = Text(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    system = llama_cpp.llama_print_system_info().decode()
    hello = {"version": llama_cpp.__version__, "system": system, **text.settings}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "prompt":
            text.clear()
        ids = asked["ids"] if asked["do"] == "prompt" else [asked["id"]]
        answer = text.feed(ids, bool(asked.get("logits")))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

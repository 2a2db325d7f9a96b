#!/usr/bin/env python3
"""`cpumoe bench e2e` with llama.cpp between our runs: one model, one run, the same threads.

    python benchmarks/e2e/against_llama_cpp.py MODEL FILE.gguf [--prompt 512] [--json FILE]

MODEL is what cpumoe loads: a checkpoint directory, or the same GGUF file. Both must be one model:
their logits behind a short prompt are compared before anything is timed. llama.cpp runs in a
process of its own, in the interpreter that CPUMOE_PEER_PYTHON names (default: this one), through
llama-cpp-python. Its `bytes` are the weights of a token, or of a prompt that meets every expert.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from cpumoe import Error
from cpumoe.bench.e2e import run_model
from cpumoe.bench.limits import probe
from cpumoe.bench.measure import Run
from cpumoe.checkpoint import open_checkpoint

_PAUSE = 0.03  # seconds until llama.cpp's threads have stopped spinning for work


def active(path: Path) -> tuple[int, int, int, int]:
    """(bytes a token reads, bytes a long prompt reads, elements in layers, elements in the head).

    A prompt of hundreds of tokens meets every expert; the embedding's rows are left out.
    """
    checkpoint = open_checkpoint(path)
    values = checkpoint.metadata or {}
    family = values["general.architecture"]
    share = values[f"{family}.expert_used_count"] / values[f"{family}.expert_count"]
    token = prompt = layers = head = 0.0
    for name, ref in checkpoint.tensors.items():
        if name == "token_embd.weight" and "output.weight" in checkpoint.tensors:
            continue
        part = share if "_exps." in name else 1.0
        token += part * ref.data.nbytes
        prompt += ref.data.nbytes
        if len(ref.shape) < 2:
            continue
        elements = part * float(np.prod(ref.shape))
        if name in ("output.weight", "token_embd.weight"):
            head += elements
        else:
            layers += elements
    return int(token), int(prompt), int(layers), int(head)


class LlamaCpp:
    """llama.cpp in its own process. See `cpumoe.bench.peers.ModelPeer`."""

    name = "llama_cpp"

    def __init__(self, path: Path, context: int, threads: int) -> None:
        """Starts it and waits until the model is loaded. Raises Error when that fails."""
        self._token, self._all, self._layers, self._head = active(path)
        worker = Path(__file__).with_name("llama_cpp_worker.py")
        python = os.environ.get("CPUMOE_PEER_PYTHON") or sys.executable
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        try:
            self._process = subprocess.Popen(
                [python, str(worker), str(path), str(context), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        except OSError as e:
            raise Error(f"CPUMOE_PEER_PYTHON: must be an interpreter; got {python} ({e})") from None
        self._hello = self._answer()
        self._next = 0

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Error(
                "bench: llama.cpp must run in the interpreter of CPUMOE_PEER_PYTHON; it ended "
                f"with status {self._process.wait()}. Install llama-cpp-python there"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._next = answer["next"]
        time.sleep(_PAUSE)
        return answer

    def setting(self) -> dict[str, Any]:
        """Version, what it was built for and batch sizes; the rest is llama.cpp's default."""
        return dict(self._hello)

    def logits(self, ids: Any) -> Any:
        """fp32 [vocab] behind the last of `ids`."""
        answer = self._ask(do="prompt", ids=ids.tolist(), logits=True)
        return np.frombuffer(base64.b64decode(answer["logits"]), np.float32)

    def prompt(self, ids: Any) -> Run:
        """A fresh prompt."""
        seconds = self._ask(do="prompt", ids=ids.tolist())["seconds"]
        return Run(seconds, self._all, 2 * (len(ids) * self._layers + self._head))

    def step(self) -> Run:
        """One greedy token."""
        seconds = self._ask(do="step", id=self._next)["seconds"]
        return Run(seconds, self._token, 2 * (self._layers + self._head))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, measures and prints."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", type=Path, help="what cpumoe loads")
    p.add_argument("gguf", type=Path, help="what llama.cpp loads")
    p.add_argument("--prompt", type=int, default=512, help="default 512")
    p.add_argument("--new", type=int, default=32, help="tokens to decode; default 32")
    p.add_argument("--threads", type=int, default=2, help="of both; default 2")
    p.add_argument("--tries", type=int, default=3, help="measurements of a noisy phase")
    p.add_argument("--activations", default="auto", help="of cpumoe: auto, fp32 or int8")
    p.add_argument("--json", default="", help="file for the result; - is standard output")
    a = p.parse_args(argv)
    from cpumoe.cli.bench import finish

    try:
        peer = LlamaCpp(a.gguf, a.prompt + a.new + 8, a.threads)
        try:
            cells = run_model(
                a.model,
                probe,
                prompt=a.prompt,
                new=a.new,
                threads=a.threads,
                tries=a.tries,
                activations=a.activations,
                peer=peer,
            )
        finally:
            peer.close()
    except Error as e:
        sys.exit(f"against_llama_cpp: {e}")
    finish("e2e", cells, a.json)


if __name__ == "__main__":
    main()

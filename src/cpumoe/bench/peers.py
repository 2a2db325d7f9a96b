"""Peers: one file in ``benchmarks/peers/`` each, loaded by name."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

from cpumoe import Error
from cpumoe.bench.formats import Array
from cpumoe.bench.measure import Run
from cpumoe.bench.shapes import Shape, data_folder
from cpumoe.bench.weights import Weights


@dataclass
class Stored:
    """Weights of a peer that are not ours: what its result is checked against.

    Args:
        shape: the geometry, in the layout of `arrays`.
        arrays: as `Weights.arrays`; each is indexed by an expert and gives its decoded values.
        expert_bytes: bytes of one expert as the peer stores it.
        rounding: for activations [K, M] in front of a product, bounds of the peer's rounding of
            each: (independent errors, errors that may all have one sign).
    """

    shape: Shape
    arrays: Mapping[str, Any]
    expert_bytes: int
    rounding: Callable[[Array], tuple[Array, Array]]


class Peer(Protocol):
    """What a peer's file defines as a class called ``Peer``.

    It is made without arguments, or with the text behind the colon of ``--peer NAME:OPTION``.
    """

    name: str

    def available(self) -> str | None:
        """Why it cannot run here (with what to do), or None."""

    def prepare(self, weights: Weights, small: Weights, threads: int, memory: int) -> None:
        """Takes the weights; may use `memory` further bytes. Called once per shape and threads.

        Args:
            small: the same layer with tiny experts, for a warm-up that leaves `weights` alone.
        """

    def stored(self) -> Stored | None:
        """The weights that it uses instead of ours, or None."""

    def settle(self, x: Array, ids: Array, scores: Array) -> dict[str, Any]:
        """Warms up, chooses the peer's best setting for this number of tokens and describes it."""

    def run(self, x: Array, ids: Array, scores: Array) -> tuple[float, Array]:
        """(seconds, output [T, H]) of one call.

        Two untimed calls on the small layer go before it, as they do before ours; afterwards the
        peer's threads are at rest.
        """

    def release(self) -> None:
        """Lets go of the weights and of every copy."""

    def roundoff(self, tokens: int) -> float:
        """Unit roundoff of what the chosen setting stores between its steps."""


class ModelPeer(Protocol):
    """A rival that runs a whole model beside ours, in `cpumoe.bench.e2e.run_model`."""

    name: str

    def setting(self) -> dict[str, Any]:
        """Version and settings."""

    def logits(self, ids: Array) -> Array:
        """fp32 logits [vocab] behind the last of `ids` [T] int32, as one prompt."""

    def prompt(self, ids: Array) -> Run:
        """Forgets the sequence, then computes a prompt and chooses the token behind it, timed."""

    def step(self) -> Run:
        """Appends the token chosen last and chooses the next one, timed."""


def peer_names() -> list[str]:
    """Names of all peers, sorted. Files with a leading underscore are helpers."""
    return sorted(p.stem for p in data_folder("peers").glob("*.py") if p.stem[0] != "_")


def load_file(name: str) -> ModuleType:
    """The module in ``benchmarks/peers/NAME.py``; peers load their helpers with it."""
    path = data_folder("peers") / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"cpumoe_peer_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_peer(text: str) -> Peer:
    """The peer called `text`, or NAME of ``NAME:OPTION``, ready to run here.

    Raises:
        Error: no such peer, it takes no option, or it cannot run here.
    """
    name, _, option = text.partition(":")
    if name not in peer_names():
        raise Error(
            f"peer: must be one of {', '.join(peer_names())}; got {name!r}. Choose one of these"
        )
    made = load_file(name).Peer
    if option and not inspect.signature(made).parameters:
        raise Error(f"peer: {name} takes no option; got {option!r}. Leave it out")
    peer = cast(Peer, made(option) if option else made())
    reason = peer.available()
    if reason is not None:
        raise Error(f"peer: {name} must be installed; got: {reason}")
    return peer

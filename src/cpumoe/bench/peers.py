"""Peers: one file in ``benchmarks/peers/`` each, loaded by name."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol, cast

from cpumoe import Error
from cpumoe.bench.formats import Array
from cpumoe.bench.shapes import data_folder
from cpumoe.bench.weights import Weights


class Peer(Protocol):
    """What a peer's file defines as a class called ``Peer``, made without arguments."""

    name: str

    def available(self) -> str | None:
        """Why it cannot run here (with what to do), or None."""

    def prepare(self, weights: Weights, small: Weights, threads: int, memory: int) -> None:
        """Takes the weights; may use `memory` further bytes. Called once per shape and threads.

        Args:
            small: the same layer with tiny experts, for a warm-up that leaves `weights` alone.
        """

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


def peer_names() -> list[str]:
    """Names of all peers, sorted."""
    return sorted(p.stem for p in data_folder("peers").glob("*.py"))


def load_peer(name: str) -> Peer:
    """The peer called `name`, ready to run here.

    Raises:
        Error: no such peer, or it cannot run here.
    """
    if name not in peer_names():
        raise Error(
            f"bench: the peer must be one of {', '.join(peer_names())}; got {name!r}. "
            "Choose one of these"
        )
    path = data_folder("peers") / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"cpumoe_peer_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    peer = cast(Peer, module.Peer())
    reason = peer.available()
    if reason is not None:
        raise Error(f"bench: the peer {name} must be installed; got: {reason}")
    return peer

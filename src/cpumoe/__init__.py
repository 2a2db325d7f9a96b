"""Mixture-of-experts language models on CPUs, from weights as published.

>>> import numpy as np, cpumoe
>>> x = np.ones((1, 8), np.float32)
>>> experts = cpumoe.Experts(gate_up=np.ones((4, 32, 8), np.float32),
...                          down=np.ones((4, 8, 16), np.float32))
>>> ids, weights = cpumoe.route(np.zeros((1, 4), np.float32), 2)
>>> cpumoe.moe(x, experts, ids, weights).shape
(1, 8)

Importing it imports numpy and no framework. `load` and `Model` come from
`cpumoe.engine` on first use.
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING, Any

# Where developers keep a native module that was built out of the package.
if "CPUMOE_CORE_DIR" in _os.environ:
    __path__.insert(0, _os.environ["CPUMOE_CORE_DIR"])

from cpumoe._core import Error, Executor
from cpumoe.ops import Experts, linear, machine, moe, route
from cpumoe.weight import Weight

if TYPE_CHECKING:
    from cpumoe.engine import Model, load

__version__ = "0.1.0"
__all__ = [
    "Error",
    "Executor",
    "Experts",
    "Model",
    "Weight",
    "__version__",
    "linear",
    "load",
    "machine",
    "moe",
    "route",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "Model"):
        from cpumoe import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'cpumoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

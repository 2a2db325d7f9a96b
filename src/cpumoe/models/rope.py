"""Rotary position embedding parameters: config.json -> inverse frequencies and cos/sin scale.

Formulas as in Transformers' modeling_rope_utils for `default`, `linear`, `llama3` and `yarn`,
computed in float64 and rounded once to fp32 (their float32 differs in the last bits). `factors` is
of GGUF files, which store what each frequency is divided by.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error
from cpumoe.models.config import MAX_POSITIONS, Config

_KINDS = ("default", "linear", "llama3", "yarn", "factors")


def rope(
    config: Config, head_dim: int, default_theta: float, partial: float | None = None
) -> tuple[tuple[float, ...], float]:
    """(inverse frequencies [rotated / 2], factor on cos and sin).

    Reads `rope_parameters` (Transformers v5) or `rope_theta` and `rope_scaling` (before).
    partial: default of partial_rotary_factor, the part of a head that rotates; None: all of it in
    this family. Raises Error for a kind not in the list above, by name.
    """
    scaling = config.object("rope_parameters") or config.object("rope_scaling")
    head_dim = _rotated(config, scaling, head_dim, partial)
    theta = config.number("rope_theta", 1.0, default=default_theta)
    if scaling is None:
        return _frequencies(_base(theta, head_dim), config), 1.0
    theta = scaling.number("rope_theta", 1.0, default=theta)
    key = "rope_type" if scaling.has("rope_type") or not scaling.has("type") else "type"
    kind = scaling.choice(key, _KINDS, default="default")
    base = _base(theta, head_dim)
    if kind == "default":
        return _frequencies(base, scaling), 1.0
    if kind == "linear":
        return _frequencies(base / scaling.number("factor", 0.0), scaling), 1.0
    if kind == "factors":
        return _frequencies(base / _factors(scaling, len(base)), scaling), 1.0
    trained = scaling.integer(
        "original_max_position_embeddings",
        1,
        MAX_POSITIONS,
        default=config.integer("max_position_embeddings", 1, MAX_POSITIONS),
    )
    if kind == "llama3":
        return _frequencies(_llama3(base, scaling, trained), scaling), 1.0
    return _yarn(base, scaling, trained, theta, config)


def _rotated(config: Config, scaling: Config | None, head_dim: int, partial: float | None) -> int:
    name, owners = "partial_rotary_factor", [o for o in (scaling, config) if o is not None]
    owner = next((o for o in owners if o.has(name)), config)
    factor = owner.number(name, 0.0, 1.0, default=1.0 if partial is None else partial)
    dims = int(head_dim * factor)
    if partial is None and factor != 1.0:
        raise owner.fail(name, "1 in this family")
    if dims < 2 or dims % 2:
        raise owner.fail(name, f"so that an even part of head_dim {head_dim} rotates")
    return dims


def _base(theta: float, head_dim: int) -> NDArray[np.float64]:
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _frequencies(values: NDArray[np.float64], config: Config) -> tuple[float, ...]:
    # theta >= 1 makes them at most 1; only a scaling that is no scaling takes them far above.
    if not np.all(np.abs(values) <= 1e6):
        raise Error(f"{config.where}: rope frequencies must stay below 10^6. Check its factors")
    return tuple(float(v) for v in values.astype(np.float32))


def _factors(scaling: Config, count: int) -> NDArray[np.float64]:
    values = scaling.values.get("factors")
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(type(v) is float and 0.0 < v < math.inf for v in values)
    ):
        raise scaling.fail("factors", f"{count} finite numbers above 0")
    return np.array(values, np.float64)


def _llama3(base: NDArray[np.float64], scaling: Config, trained: int) -> NDArray[np.float64]:
    factor = scaling.number("factor", 0.0)
    low, high = scaling.number("low_freq_factor", 0.0), scaling.number("high_freq_factor", 0.0)
    if low == high:
        raise scaling.fail("high_freq_factor", "other than low_freq_factor")
    turns = trained * base / (2 * math.pi)  # full turns within the trained context
    share = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray((1 - share) * base / factor + share * base)


def _yarn(
    base: NDArray[np.float64], scaling: Config, trained: int, theta: float, config: Config
) -> tuple[tuple[float, ...], float]:
    longest = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    factor = scaling.number("factor", 0.0, default=longest / trained)
    fast = scaling.number("beta_fast", 0.0, default=32.0)
    slow = scaling.number("beta_slow", 0.0, default=1.0)
    dim = 2 * len(base)

    def dim_of(turns: float) -> float:
        """The dimension that makes this many turns within the trained context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(fast), dim_of(slow)
    if scaling.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(len(base)) - low) / ((high - low) or 0.001), 0, 1)
    frequencies = base / factor * ramp + base * (1 - ramp)
    return _frequencies(frequencies, scaling), _yarn_scale(scaling, factor)


def _magnitude(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_scale(scaling: Config, factor: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", 0.0)
    one = scaling.number("mscale", -math.inf, default=0.0)
    all_dims = scaling.number("mscale_all_dim", -math.inf, default=0.0)
    return (
        _magnitude(one, factor) / _magnitude(all_dims, factor)
        if one and all_dims
        else _magnitude(1.0, factor)
    )


def score_factor(config: Config) -> float:
    """What DeepSeek's attention multiplies its scores with, by mscale_all_dim."""
    scaling = config.object("rope_parameters") or config.object("rope_scaling")
    if scaling is None or not scaling.has("mscale_all_dim"):
        return 1.0
    key = "rope_type" if scaling.has("rope_type") or not scaling.has("type") else "type"
    weight = scaling.number("mscale_all_dim", -math.inf)
    if scaling.text(key, default="default") == "default" or weight == 0.0:
        return 1.0
    return _magnitude(weight, scaling.number("factor", 0.0)) ** 2

"""The examples in the docstrings of the public operators run."""

from __future__ import annotations

import doctest

import pytest

import cpumoe
import cpumoe.frontends.hf.experts
import cpumoe.ops

MODULES = [cpumoe, cpumoe.ops, cpumoe.frontends.hf, cpumoe.frontends.hf.experts]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_examples(module: object) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0

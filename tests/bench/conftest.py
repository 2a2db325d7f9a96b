"""A shape small enough for a test, and limits that cost nothing."""

import pytest

SHAPE = """
hidden = 64
inter = 48
experts = 8
top_k = 2
router = softmax_topk
renormalize = yes
model_type = qwen3_moe
"""

GPT_OSS = """
hidden = 64
inter = 48
experts = 8
top_k = 2
router = topk_softmax
activation = swiglu_oai
limit = 7
layout = columns
interleaved = yes
bias = yes
model_type = gpt_oss
"""


class SteadyLimits:
    """A machine that always measures the same."""

    def __init__(self, executor):
        self.executor = executor

    def read_gb_per_s(self):
        return 40.0

    def fma_gflop_per_s(self):
        return 200.0


@pytest.fixture
def tiny_shape(tmp_path):
    """Path of a shape file, as --shape takes it."""
    path = tmp_path / "tiny.txt"
    path.write_text(SHAPE)
    return str(path)


@pytest.fixture
def tiny_gpt_oss(tmp_path):
    """The same in gpt-oss's layout."""
    path = tmp_path / "tiny-gpt-oss.txt"
    path.write_text(GPT_OSS)
    return str(path)


@pytest.fixture
def steady(monkeypatch):
    """Replaces the measured limits: what is tested is not how fast this machine is."""
    monkeypatch.setattr("cpumoe.bench.limits.probe", SteadyLimits)
    return SteadyLimits

"""Skips tests of the llama.cpp peer where llama-cpp-python is missing."""

import pytest

from cpumoe.bench.peers import load_file

ggml = load_file("_ggml")
needs_llama_cpp = pytest.mark.skipif(
    ggml.package_folder() is None,
    reason="no llama-cpp-python here, nor in the interpreter of CPUMOE_PEER_PYTHON",
)

"""quantization_config of strangers: any JSON gives rules or an Error, and soon."""

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpumoe import Error
from cpumoe.checkpoint.quantized_methods import METHODS, read_rules
from cpumoe.checkpoint.quantized_patterns import modules, targets, wildcards

FIELDS = [
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "desc_act",
    "sym",
    "checkpoint_format",
    "dynamic",
    "version",
    "zero_point",
    "fmt",
    "weight_block_size",
    "activation_scheme",
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "config_groups",
    "format",
    "quant_algo",
    "exclude_modules",
    "quantization",
    "packing_format",
    "transform_config",
    "sparsity_config",
]
INSIDE = [
    "targets",
    "weights",
    "num_bits",
    "type",
    "strategy",
    "group_size",
    "symmetric",
    "actorder",
    "block_structure",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(),
    st.sampled_from(
        [
            "gptq",
            "gptq_v2",
            "gemm",
            "dynamic",
            "e4m3",
            "pack-quantized",
            "float-quantized",
            "int",
            "float",
            "group",
            "channel",
            "tensor",
            "block",
            "re:.*experts.*",
            "re:(",
            "Linear",
            "lm_head",
            "NVFP4",
            "FP8",
        ]
    ),
    st.text(max_size=5),
)
JSON = st.recursive(
    VALUES,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(INSIDE), v, max_size=6),
    max_leaves=12,
)


@given(st.sampled_from([*METHODS, "other"]), st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_config_gives_rules_or_an_error(method, config):
    with contextlib.suppress(Error):
        rules = read_rules({"quant_method": method, **config}, "config.json")
        rules.scheme("model.layers.0.mlp.experts.3.up_proj")


@pytest.mark.parametrize("make", [targets, modules, wildcards])
@pytest.mark.parametrize(
    "text", ["re:(a*)*$", "(a|a)*b", "re:" + "a*" * 20 + "b", "*" * 40, ".*" * 30, "re:(?:a+){9}b"]
)
def test_no_pattern_takes_long(make, text):
    start = time.process_time()
    with contextlib.suppress(Error):
        make([text], "ignore").__contains__("a" * 60)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("make", "listed", "inside", "outside"),
    [
        (targets, ["re:.*experts.*"], "m.experts.0.up", "m.attn.q"),
        (targets, ["m.attn.q"], "m.attn.q", "m.attn.q.x"),
        (targets, ["re:attn"], "attn.q", "m.attn.q"),
        (modules, ["m.attn"], "m.attn.q", "m.attn2.q"),
        (modules, ["gate"], "m.mlp.gate", "m.mlp.gate_proj"),
        (modules, ["m.layers.1"], "m.layers.1.x", "m.layers.11.x"),
        (modules, ["m.layers.*.q"], "m.layers.11.q", "m.layers.11.qk"),
        (wildcards, ["m.*.gate"], "m.3.gate", "m.3.gate_proj"),
        (wildcards, ["m.attn*"], "m.attn.q", "n.attn.q"),
    ],
)
def test_names_are_matched_as_their_writers_mean_them(make, listed, inside, outside):
    names = make(listed, "ignore")
    assert inside in names
    assert outside not in names

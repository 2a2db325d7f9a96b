"""Shape files: all parse, cuts work, mistakes are named."""

import pytest

from cpumoe import Error
from cpumoe.bench.shapes import load_shape, parse_shape, shape_names

GOOD = "hidden = 8\ninter = 4\nexperts = 4\ntop_k = 2\n"


@pytest.mark.parametrize("name", shape_names())
def test_every_file_parses(name):
    shape = load_shape(name)
    assert shape.name == name
    assert shape.model_type, "a peer needs the family's name"


def test_the_shapes_that_the_figures_are_quoted_for_are_there():
    wanted = "qwen3-30b-a3b mixtral-8x7b deepseek-v3 gpt-oss-20b qwen3-235b-a22b mixtral-8x22b"
    assert set(wanted.split()) <= set(shape_names())


@pytest.mark.parametrize(
    ("name", "bf16_bytes_of_one_token"),
    [
        ("qwen3-30b-a3b", 8 * 3 * 2048 * 768 * 2),
        ("mixtral-8x7b", 2 * 3 * 4096 * 14336 * 2),
        ("deepseek-v3", 8 * 3 * 7168 * 2048 * 2),
        ("gpt-oss-20b", 4 * 3 * 2880 * 2880 * 2),
    ],
)
def test_published_geometry(name, bf16_bytes_of_one_token):
    shape = load_shape(name)
    assert shape.flops(tokens=1) == bf16_bytes_of_one_token  # 2 operations and 2 bytes a weight
    assert shape.flops(tokens=5) == 5 * shape.flops(tokens=1)


def test_gpt_oss_is_the_shape_with_another_layout():
    shape = load_shape("gpt-oss-20b")
    assert (shape.layout, shape.interleaved, shape.bias) == ("columns", True, True)
    assert (shape.activation, shape.limit) == ("swiglu_oai", 7.0)


def test_a_cut_keeps_all_but_the_number_of_experts():
    whole, cut = load_shape("deepseek-v3"), load_shape("deepseek-v3-32e")
    assert (cut.name, cut.experts) == ("deepseek-v3-32e", 32)
    assert (cut.hidden, cut.inter, cut.top_k, cut.groups) == (
        whole.hidden,
        whole.inter,
        whole.top_k,
        whole.groups,
    )


@pytest.mark.parametrize("name", ["mixtral-8x7b-1e", "mixtral-8x7b-9e"])
def test_a_cut_below_top_k_or_above_the_layer_is_refused(name):
    with pytest.raises(Error, match=r"must be in 2\.\.8"):
        load_shape(name)


def test_a_cut_that_breaks_the_groups_is_refused():
    with pytest.raises(Error, match="groups must divide experts"):
        load_shape("deepseek-v3-33e")


@pytest.mark.parametrize("name", ["", "no-such", "../shapes/mixtral-8x7b", "no-such-4e"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(Error, match="mixtral-8x7b"):
        load_shape(name)


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "mine.txt").write_text(GOOD + "limit = 7  # clamped\n")
    shape = load_shape(str(tmp_path / "mine.txt"))
    assert (shape.name, shape.hidden, shape.limit) == ("mine", 8, 7.0)
    with pytest.raises(Error, match="must exist"):
        load_shape(str(tmp_path / "other.txt"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "colour = red", "line 5: must be KEY = VALUE"),
        (GOOD + "hidden = 8", "line 5: must be KEY = VALUE"),
        (GOOD + "scale", "line 5: must be KEY = VALUE"),
        (GOOD + "name = x", "line 5: must be KEY = VALUE"),
        (GOOD + "bias = true", "bias must be of type yes or no"),
        (GOOD + "scale = big", "scale must be of type float"),
        ("hidden = 8", "got no inter, experts, top_k"),
        (GOOD.replace("top_k = 2", "top_k = 5"), "top_k must be in 1..experts"),
        (GOOD.replace("hidden = 8", "hidden = 0"), "sizes must be at least 1"),
        (GOOD + "router = hash", "router must be one of"),
        (GOOD + "layout = diagonal", "layout must be one of"),
        (GOOD + "activation = tanh", "activation must be one of"),
        (GOOD + "groups = 4\ntop_groups = 1", "chosen groups must hold top_k"),
    ],
)
def test_mistakes_in_a_file(text, message):
    with pytest.raises(Error, match=message):
        parse_shape("x", text)

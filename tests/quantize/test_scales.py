"""Codes and scales against the formulas in float64, and against compressed-tensors' own code."""

import ml_dtypes
import numpy as np
import pytest

from cpumoe import Error
from cpumoe.quantize import FORMATS, find_target, scales

INTEGERS = [f for f in FORMATS if f != "mxfp4"]
SCALE_TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def matrix(n=6, k=512, seed=0):
    """Rows of different sizes, a few of them with outliers, zeros and single elements."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, k)) * np.exp(rng.standard_normal((n, 1)) * 3)
    x[0, :256] = 0
    x[1, 7] *= 40
    x[2] = 0
    x[2, 5] = -1.5
    return x.astype(np.float32)


def groups(x, target):
    return x.reshape(x.shape[0], -1, target.group or x.shape[1])


def nearest(x, scale, target):
    """Values of the codes nearest to x / scale, by comparing with every one of them."""
    y = x / scale[..., None]
    if target.floating:
        values = np.concatenate([-E2M1[::-1], E2M1])
        parity = np.concatenate([np.arange(8)[::-1], np.arange(8)]) % 2
    else:
        values = np.arange(target.low, target.high + 1)
        parity = values.astype(int) % 2
    distance = np.abs(y[..., None] - values) + 1e-9 * parity  # ties: the even code
    return values[distance.argmin(-1)]


def values(found, target):
    """The codes as numbers."""
    q = found.codes.astype(np.int64)
    if target.floating:
        return E2M1[q & 7] * np.where(q & 8, -1, 1)
    return q + target.low


def errors(x, found, target, h=None):
    """float64 squared error of each group."""
    difference = groups(x, target) - groups(values(found, target), target) * found.scales[..., None]
    weights = 1.0 if h is None else groups(np.broadcast_to(h, x.shape), target)
    return (np.square(difference.astype(np.float64)) * weights).sum(-1)


@pytest.mark.parametrize("kind", SCALE_TYPES)
@pytest.mark.parametrize("name", INTEGERS)
def test_absmax_is_the_formula(name, kind):
    target, x = find_target(name), matrix()
    found = scales.quantise(x, target, scales=kind, method="absmax")
    top = np.abs(groups(x, target)).max(-1)
    want = (top / np.float32((2**target.bits - 1) / 2)).astype(SCALE_TYPES[kind]).astype(np.float32)
    used = top > 0
    representable = used & (want > 0) & np.isfinite(want)
    assert np.array_equal(found.scales[representable], want[representable])
    assert (found.scales > 0).all()
    assert np.isfinite(found.scales).all()
    q = nearest(groups(x, target), found.scales, target)
    assert np.array_equal(q.reshape(x.shape), values(found, target))


def test_absmax_of_mxfp4_is_the_formula():
    target, x = find_target("mxfp4"), matrix()
    found = scales.quantise(x, target, method="absmax")
    top = np.abs(groups(x, target)).max(-1).astype(np.float64)
    used = top > 0
    # The power of two with max |x| in [3.5, 7) of it.
    assert (top[used] / found.scales[used] >= 3.5).all()
    assert (top[used] / found.scales[used] < 7).all()
    assert np.array_equal(np.log2(found.scales), np.round(np.log2(found.scales)))
    q = nearest(groups(x, target), found.scales, target)
    assert np.array_equal(q.reshape(x.shape), values(found, target))


@pytest.mark.parametrize("name", FORMATS)
def test_absmax_equals_compressed_tensors(name):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    torch = pytest.importorskip("torch")
    target, x = find_target(name), matrix(seed=3)
    x[0, :256], x[2] = 0.25, 1.0  # zeros get another scale there: 1 here, an epsilon there
    found = scales.quantise(x, target, method="absmax")
    args = quantization.QuantizationArgs.model_validate(target.scheme())
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    part = torch.from_numpy(groups(x, target).copy())
    want, _ = calculate_qparams(part.amin(-1), part.amax(-1), args)
    if target.floating:
        assert np.array_equal(found.scales, want.numpy())
    else:
        assert np.array_equal(found.scales, want.to(torch.bfloat16).float().numpy())
    packing = target.quantization_config([])["format"]
    compressed = BaseCompressor.get_value_from_registry(packing).compress(
        {"weight": torch.from_numpy(x), "weight_scale": torch.from_numpy(found.scales)}, scheme
    )
    packed = scales.pack(found.codes, target.bits)
    assert np.array_equal(packed, compressed["weight_packed"].numpy().view(np.uint8))
    if target.floating:
        stored = scales.stored_scales(found.scales, target, "bf16")
        assert np.array_equal(stored, compressed["weight_scale"].numpy())


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", FORMATS)
def test_search_is_never_worse_and_the_best_of_its_candidates(name, weighted):
    target, x = find_target(name), matrix(seed=1)
    rng = np.random.default_rng(9)
    h = np.exp(rng.standard_normal(x.shape[1])).astype(np.float32) if weighted else None
    absmax = scales.quantise(x, target, method="absmax", importance=h)
    found = scales.quantise(x, target, method="search", importance=h)
    size = target.group or x.shape[1]
    # Sums of `size` products in fp32: each term carries four roundings, the sum size more.
    slack = 1 + 2 * (size + 4) * 2.0**-24
    got = errors(x, found, target, h)
    assert (got <= errors(x, absmax, target, h) * slack).all()
    assert (got < errors(x, absmax, target, h)).any()
    if not target.floating:
        for ratio in np.linspace(*target.clip, scales.RATIOS, dtype=np.float32):
            tried = scales.round_scale(absmax.scales * ratio, "bf16")
            q = nearest(groups(x, target), tried, target)
            other = scales.Quantised((q - target.low).reshape(x.shape), tried, 0, 0, (0, 0))
            assert (got <= errors(x, other, target, h) * slack).all()
    q = nearest(groups(x, target), found.scales, target)
    assert np.array_equal(q.reshape(x.shape), values(found, target))


@pytest.mark.parametrize("name", ["int4_g32", "int8_row", "mxfp4"])
def test_reported_errors_are_those_of_the_values(name):
    target, x = find_target(name), matrix(n=300)
    h = np.linspace(0, 2, x.shape[1], dtype=np.float32)
    found = scales.quantise(x, target, importance=h)
    assert found.error == pytest.approx(errors(x, found, target).sum(), rel=1e-6)
    assert found.power == pytest.approx(np.square(x.astype(np.float64)).sum(), rel=1e-12)
    assert found.weighted[0] == pytest.approx(errors(x, found, target, h).sum(), rel=1e-6)


def test_rows_do_not_depend_on_each_other():
    target, x = find_target("int4_g64"), matrix(n=333)
    whole = scales.quantise(x, target)
    for row in (0, 1, 130, 332):
        alone = scales.quantise(x[row : row + 1], target)
        assert np.array_equal(alone.codes[0], whole.codes[row])
        assert np.array_equal(alone.scales[0], whole.scales[row])


def test_every_tie_of_e2m1_goes_to_the_even_code():
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    exact = np.concatenate([E2M1, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), [6.9]])
    y = np.concatenate([exact, -exact]).astype(np.float32)
    rounded = y.copy()
    scales.round_e2m1(rounded)
    for given, got in zip(y, rounded, strict=True):
        distance = np.abs(abs(given) - E2M1)
        best = np.flatnonzero(distance == distance.min())
        want = E2M1[best[0] if len(best) == 1 else next(b for b in best if b % 2 == 0)]
        assert abs(got) == want
        assert np.signbit(got) == np.signbit(given)


@pytest.mark.parametrize("kind", SCALE_TYPES)
def test_extreme_magnitudes_keep_scales_finite_and_positive(kind):
    for size in (3e38, 1e-38, 1e-45, 6e-8, 65504 * 8):
        x = np.full((1, 32), size, np.float32)
        x[0, 1] = -x[0, 0]
        for name in ("int4_g32", "mxfp4"):
            found = scales.quantise(x, find_target(name), scales=kind)
            assert np.isfinite(found.scales).all()
            assert (found.scales > 0).all()
            stored = scales.stored_scales(found.scales, find_target(name), kind)
            assert np.isfinite(stored.astype(np.float32)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(bad):
    x = matrix()
    x[4, 300] = bad
    with pytest.raises(Error, match="must be finite numbers; got NaN or infinity"):
        scales.quantise(x, find_target("int4_g32"))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing(bits):
    rng = np.random.default_rng(bits)
    q = rng.integers(0, 1 << bits, (5, 64)).astype(np.uint8)
    packed = scales.pack(q, bits)
    words = packed.view("<u4")
    per = 32 // bits
    for n in range(5):
        for k in range(64):
            assert words[n, k // per] >> (bits * (k % per)) & (2**bits - 1) == q[n, k]


@pytest.mark.parametrize("name", ["", "int4", "int5_g32", "int4_g33", "q4_k", "INT4_G32", "mxfp8"])
def test_unknown_formats_are_refused(name):
    with pytest.raises(Error, match="format: must be mxfp4, or one of"):
        find_target(name)

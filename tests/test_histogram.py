"""Counted values: the same W1 as sorting, mergeable in any order, exact quantiles."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_study.distance import ValueHistogram, wasserstein_distance
from fa_study.distance.wasserstein import sorted_wasserstein

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def every_code(dtype: torch.dtype) -> torch.Tensor:
    numpy_type = np.uint8 if dtype.itemsize == 1 else np.uint16
    return torch.from_numpy(np.arange(1 << (8 * dtype.itemsize)).astype(numpy_type)).view(dtype)


def random_codes(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    """Values over the whole range, subnormals, NaN and infinities too."""
    numpy_type = np.uint8 if dtype.itemsize == 1 else np.uint16
    codes = np.random.default_rng(seed).integers(0, 1 << (8 * dtype.itemsize), n).astype(numpy_type)
    return torch.from_numpy(codes).view(dtype)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NARROW), st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**31))
def test_counting_gives_the_distance_that_sorting_gives(dtype, n, m, seed):
    a, b = random_codes(dtype, n, seed), random_codes(dtype, m, seed + 1)
    x, y = (np.sort(side[side.isfinite()].double().numpy()) for side in (a.float(), b.float()))
    if not len(x) or not len(y):
        return
    counted = ValueHistogram.of(a).wasserstein(ValueHistogram.of(b))
    assert counted == pytest.approx(sorted_wasserstein(x, y), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NARROW), st.lists(st.integers(0, 100), min_size=1, max_size=6), st.randoms())
def test_shards_merge_to_the_whole_in_any_order(dtype, sizes, random):
    whole = random_codes(dtype, sum(sizes), 7)
    shards = [pickle.loads(pickle.dumps(ValueHistogram.of(shard))) for shard in whole.split(sizes)]
    random.shuffle(shards)
    merged = ValueHistogram(dtype)
    for shard in shards:
        merged.merge(shard)
    assert np.array_equal(merged.counts, ValueHistogram.of(whole).counts)
    assert len(merged) == whole.numel()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_code_is_counted_once_under_its_value(dtype):
    x = every_code(dtype)
    histogram = ValueHistogram.of(x)
    values = x.double() if dtype.itemsize > 1 else x.float().double()
    assert (histogram.counts == 1).all()
    assert histogram.nan == int(values.isnan().sum())
    assert histogram.inf == int(values.isinf().sum())
    assert histogram.finite == int(values.isfinite().sum())
    assert histogram.zero == 2
    counted, counts = histogram.distribution()
    assert np.array_equal(counted, np.sort(values[values.isfinite()].numpy()))
    assert (counts == 1).all()


def test_numpy_and_torch_half_are_the_same():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float16)
    assert np.array_equal(ValueHistogram.of(x).counts, ValueHistogram.of(torch.from_numpy(x)).counts)


def test_distances_between_formats():
    a, b = torch.linspace(-1, 1, 77).bfloat16(), torch.linspace(-1, 2, 55).half()
    counted = ValueHistogram.of(a).wasserstein(ValueHistogram.of(b))
    assert counted == pytest.approx(wasserstein_distance(a.double(), b.double()), rel=1e-12)


def test_counts_larger_than_any_array_do_not_overflow():
    a, b = ValueHistogram(torch.bfloat16), ValueHistogram(torch.bfloat16)
    one, two = (int(torch.tensor(x).bfloat16().view(torch.int16)) for x in (1.0, 2.0))
    a.counts[one] = 5 * 10**9
    b.counts[one], b.counts[two] = 2 * 10**9, 2 * 10**9
    assert a.wasserstein(b) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 101])
def test_quantiles_equal_numpy(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16()
    q = np.linspace(0, 1, 23)
    np.testing.assert_allclose(ValueHistogram.of(x).quantile(q), np.quantile(x.double().numpy(), q), rtol=1e-12)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="at most 16 bits"):
        ValueHistogram(torch.float32)
    with pytest.raises(ValueError, match=r"counts torch.bfloat16, got torch.float16"):
        ValueHistogram(torch.bfloat16).add(torch.zeros(2).half())
    with pytest.raises(ValueError, match="cannot merge"):
        ValueHistogram(torch.bfloat16).merge(ValueHistogram(torch.float16))
    with pytest.raises(ValueError, match="at least one finite value"):
        ValueHistogram(torch.bfloat16).wasserstein(ValueHistogram.of(torch.ones(2).bfloat16()))
    with pytest.raises(ValueError, match="no finite value"):
        ValueHistogram(torch.bfloat16).quantile(0.5)

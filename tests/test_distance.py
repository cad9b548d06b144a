"""Distances between two tensors: against SciPy, against closed forms, and on values that are not finite."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fa_study.distance import max_difference, tensor_distance, value_quantiles, wasserstein_distance
from fa_study.distance.metrics import METRICS, compare
from fa_study.distance.values import BLOCK, flatten

FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
few = settings(max_examples=60, deadline=None)
values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60)
seeds = st.integers(0, 2**31)


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (500, 500), (500, 333), (1, 700), (3 * BLOCK + 5, 2 * BLOCK - 1)], ids=str)
def test_wasserstein_equals_scipy_for_every_float(dtype, sizes):
    a, b = normal(sizes[0], 1).to(dtype), (normal(sizes[1], 2) * 1.5 + 0.25).to(dtype)
    expected = stats.wasserstein_distance(a.double().numpy(), b.double().numpy())
    assert wasserstein_distance(a, b) == pytest.approx(expected, rel=1e-12)


def test_wasserstein_of_different_formats_is_exact():
    a, b = normal(999, 1, torch.bfloat16), normal(777, 2, torch.float16)
    for x, y in ((a, b), (a, b.double()), (a.float(), b), (a.float(), b.double()), (a.double(), b.double())):
        expected = stats.wasserstein_distance(a.double().numpy(), b.double().numpy())
        assert wasserstein_distance(x, y) == pytest.approx(expected, rel=1e-12)


@few
@given(values, seeds)
def test_a_permutation_has_distance_zero(a, seed):
    a = np.array(a, dtype=np.float32)
    assert wasserstein_distance(a, np.random.default_rng(seed).permutation(a)) == 0


@few
@given(st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=50), st.integers(-(2**20), 2**20))
def test_a_shift_by_c_has_distance_c(a, c):
    a = np.array(a, dtype=np.float64) / 1024
    assert wasserstein_distance(a, a + c / 1024) == pytest.approx(abs(c) / 1024, rel=1e-13)


@few
@given(values, values, st.sampled_from([-8.0, -1.0, 0.0, 0.5, 3.0]))
def test_a_factor_scales_the_distance(a, b, k):
    a, b = np.array(a), np.array(b)
    assert wasserstein_distance(k * a, k * b) == pytest.approx(
        abs(k) * wasserstein_distance(a, b), rel=1e-12, abs=1e-300
    )


@few
@given(values, values, values)
def test_triangle_inequality_and_symmetry(a, b, c):
    ab, bc, ac = wasserstein_distance(a, b), wasserstein_distance(b, c), wasserstein_distance(a, c)
    assert ac <= (ab + bc) * (1 + 1e-12)
    assert ab == pytest.approx(wasserstein_distance(b, a), rel=1e-14)


@few
@given(st.integers(1, 300), seeds, st.sampled_from(FLOATS), st.floats(0, 10))
def test_order_of_the_metrics(n, seed, dtype, noise):
    a = normal(n, seed)
    row = tensor_distance(a.to(dtype), (a + noise * normal(n, seed + 1)).to(dtype))
    chain = [abs(row["signed_difference"]), row["wasserstein"], row["mean_difference"], row["max_difference"]]
    for smaller, larger in itertools.pairwise(chain):
        assert smaller <= larger * (1 + 1e-12)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elementwise_metrics_equal_plain_float64_formulas(dtype):
    n = 2 * BLOCK + 17
    a = normal(n, 3).to(dtype)
    b = (normal(n, 3) * 1.01 + 0.01).to(dtype)
    x, y = a.double().numpy(), b.double().numpy()
    d = x - y
    row = tensor_distance(a, b)
    assert set(row) == {"numel", *METRICS}
    assert row["max_difference"] == max_difference(a, b) == np.abs(d).max()
    assert row["mean_difference"] == pytest.approx(np.abs(d).mean(), rel=1e-12)
    assert row["signed_difference"] == pytest.approx(math.fsum(d) / n, rel=1e-10)
    assert row["relative_l2"] == pytest.approx(np.linalg.norm(d) / np.linalg.norm(x), rel=1e-12)
    assert row["cosine"] == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    assert row["equal_fraction"] == np.mean(x == y)
    assert row["wasserstein_floor"] == pytest.approx(1.75 * math.sqrt((x.var() + y.var()) / 2 / n), rel=1e-9)
    assert row["wasserstein_ratio"] == row["wasserstein"] / row["mean_difference"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_step_in_the_last_place(dtype):
    a = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0], dtype=torch.float32).to(dtype)
    same = tensor_distance(a, a.clone())
    assert (same["max_ulp"], same["equal_fraction"], same["max_difference"], same["wasserstein"]) == (0, 1, 0, 0)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for i, steps in ((0, 3), (1, -2)):
        b = a.clone().view(integer)
        b[i] += steps
        assert tensor_distance(a, b.view(dtype))["max_ulp"] == abs(steps)


def test_ulp_distance_across_zero_and_over_the_whole_range():
    tiny = 2.0**-1074
    assert tensor_distance(np.array([tiny]), np.array([-tiny]))["max_ulp"] == 2
    assert tensor_distance(np.array([0.0]), np.array([-0.0]))["max_ulp"] == 0
    assert tensor_distance(np.array([0.0]), np.array([-0.0]))["equal_fraction"] == 0
    top = np.finfo(np.float64).max
    assert tensor_distance(np.array([top]), np.array([-top]))["max_ulp"] == float(2 * (2**63 - 2**52 - 1))
    assert math.isnan(tensor_distance(torch.ones(3), torch.ones(3).half())["max_ulp"])


def test_the_sampling_floor_is_what_independent_samples_give():
    n = 4000
    rows = [tensor_distance(normal(n, 2 * i), normal(n, 2 * i + 1)) for i in range(100)]
    measured = np.mean([row["wasserstein"] for row in rows])
    assert np.mean([row["wasserstein_floor"] for row in rows]) == pytest.approx(1.75 / math.sqrt(n), rel=0.01)
    assert measured == pytest.approx(1.75 / math.sqrt(n), rel=0.15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float32], ids=str)
def test_d1_tensors_of_any_kind_and_with_gradients(dtype):
    a, b = normal(50, 1, torch.float32), normal(50, 2, torch.float32)
    a, b = (x.to(dtype).requires_grad_() if dtype == torch.float32 else x.to(dtype) for x in (a, b))
    result = wasserstein_distance(a, b)
    assert type(result) is float
    assert result == pytest.approx(
        stats.wasserstein_distance(*(x.detach().double().numpy() for x in (a, b))), rel=1e-12
    )
    assert type(max_difference(a, b)) is float


def test_d2_shapes_are_flattened_and_strides_do_not_matter():
    a, b = normal(60, 1).reshape(3, 4, 5), normal(30, 2).reshape(6, 5)
    assert wasserstein_distance(a, b) == wasserstein_distance(a.flatten(), b.flatten())
    assert tensor_distance(a, a.flip(0)) == tensor_distance(a.contiguous(), a.flip(0).contiguous())
    assert tensor_distance(b.t(), b.t() + 1) == tensor_distance(b.t().contiguous(), b.t().contiguous() + 1)
    assert wasserstein_distance(a[:, ::2], b[::3]) == wasserstein_distance(a[:, ::2].clone(), b[::3].clone())


@pytest.mark.parametrize("scale", [2.0**-1030, 2.0**-600, 1.0, 2.0**600, 2.0**1010])
def test_d3_no_norm_underflows_or_overflows(scale):
    a, b = np.array([3.0, 4.0, -1.0]), np.array([3.0, 4.5, -1.0])
    plain, scaled = tensor_distance(a, b), tensor_distance(a * scale, b * scale)
    for name in ("relative_l2", "cosine"):
        assert scaled[name] == pytest.approx(plain[name], rel=1e-12)
    for name in ("max_difference", "mean_difference", "signed_difference", "wasserstein", "wasserstein_floor"):
        assert scaled[name] == pytest.approx(plain[name] * scale, rel=1e-12)
    assert tensor_distance([1.0, 1e-170], [1.0, 0.0])["relative_l2"] == pytest.approx(1e-170, rel=1e-12)


def test_d3_the_mean_of_the_largest_numbers_does_not_overflow():
    top = np.full(8, 1.7e308)
    assert wasserstein_distance(top, np.zeros(8)) == pytest.approx(1.7e308, rel=1e-12)
    assert tensor_distance(top, np.zeros(8))["mean_difference"] == pytest.approx(1.7e308, rel=1e-12)


def test_d4_very_unequal_sizes_keep_integer_counts():
    a, b = np.zeros(1), np.r_[np.zeros(999_999), 1.0].astype(np.float32)
    assert wasserstein_distance(a, b) == 1e-6
    assert wasserstein_distance(torch.zeros(1).bfloat16(), torch.from_numpy(b).bfloat16()) == 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_d5_quantiles_of_twenty_million_values(dtype):
    # torch.quantile refuses more than 16 million values, and BF16 altogether.
    x = torch.arange(20_000_001, dtype=torch.float32).to(dtype)
    low, middle, high = value_quantiles(x, [0.0, 0.5, 1.0])
    assert (low, high) == (0, x.max().item())
    assert middle == x[10_000_000].item()
    small = normal(101, 5).to(dtype)
    q = np.linspace(0, 1, 37)
    np.testing.assert_allclose(value_quantiles(small, q), np.quantile(small.double().numpy(), q), rtol=1e-12)
    with pytest.raises(ValueError, match="between 0 and 1"):
        value_quantiles(small, 1.5)


@pytest.mark.parametrize("function", [max_difference, tensor_distance, wasserstein_distance])
def test_d6_empty_comparisons_are_errors(function):
    with pytest.raises(ValueError, match="empty"):
        function(torch.empty(0), torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2], ids=str)
def test_d6_values_that_are_not_finite_are_counted_and_left_out(dtype):
    nan, inf = math.nan, math.inf
    a = torch.tensor([1.0, nan, inf, 2.0, -inf, nan, 0.0]).to(dtype)
    b = torch.tensor([1.5, nan, inf, 1.0, 4.0, 3.0, 0.0]).to(dtype)
    row = tensor_distance(a, b)
    assert [row[k] for k in ("nan_a", "nan_b", "inf_a", "inf_b", "zero_a", "zero_b")] == [2, 1, 2, 1, 1, 1]
    assert row["nonfinite"] == 4
    assert (row["max_difference"], row["mean_difference"], row["signed_difference"]) == (1.0, 0.5, 0.5 / 3)
    assert row["equal_fraction"] == 3 / 7  # the same NaN, the same infinity, zero
    assert row["wasserstein"] == pytest.approx(stats.wasserstein_distance([1, 2, 0], [1.5, 1, 4, 3, 0]), rel=1e-12)
    with pytest.warns(RuntimeWarning, match="4 of 7 pairs are not finite"):
        assert max_difference(a, b) == 1.0
    with pytest.warns(RuntimeWarning, match="6 of 14 values are not finite"):
        assert wasserstein_distance(a, b) == row["wasserstein"]


def test_d6_nothing_finite_is_an_error_or_a_counted_nan():
    a = torch.full((3,), math.nan)
    for function in (max_difference, wasserstein_distance):
        with pytest.raises(ValueError):
            function(a, a)
    row = tensor_distance(a, a)
    assert math.isnan(row["max_difference"]) and math.isnan(row["wasserstein"])
    assert (row["nan_a"], row["nonfinite"], row["equal_fraction"]) == (3, 3, 1)


def test_mismatched_shapes_are_an_error_that_names_both():
    for function in (max_difference, tensor_distance):
        with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
            function(torch.zeros(2, 3), torch.zeros(3, 2))


def test_integers_and_booleans_are_compared_exactly():
    row = tensor_distance(np.array([2**63 - 1, 5]), np.array([-(2**63), 5]))
    assert row["max_difference"] == float(2**64 - 1)
    assert tensor_distance(np.array([2**62]), np.array([2**62 + 1]))["max_difference"] == 1
    assert max_difference(np.array([2**62]), np.array([2**62 + 1])) == 1
    assert (row["equal_fraction"], math.isnan(row["wasserstein"])) == (0.5, True)
    row = tensor_distance(torch.tensor([True, False]), torch.tensor([True, True]))
    assert (row["max_difference"], row["equal_fraction"]) == (1, 0.5)
    assert (
        tensor_distance(np.array([2**64 - 1], dtype=np.uint64), np.array([0], dtype=np.uint64))["max_difference"]
        == 2.0**64
    )


def test_zero_dimensional_complex_and_read_only_values():
    assert tensor_distance(torch.tensor(1.0), torch.tensor(3.0))["max_difference"] == 2
    assert max_difference(torch.tensor([1 + 2j]), torch.tensor([1 + 5j])) == 3
    x = np.arange(4, dtype=np.float16)
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wasserstein_distance(x, x) == 0
        assert tensor_distance(x, x)["equal_fraction"] == 1
    big_endian = np.arange(4, dtype=">f4")
    assert max_difference(big_endian, np.arange(4, dtype=np.float32)) == 0


@pytest.mark.parametrize(
    "x", [np.array(["a"]), torch.eye(3).to_sparse(), np.array([1.0], dtype=np.longdouble)], ids=str
)
def test_what_has_no_values_here_is_refused(x):
    with pytest.raises(ValueError, match="expected"):
        max_difference(x, x)


def test_results_do_not_depend_on_threads_and_inputs_are_not_changed():
    a, b = normal(5 * BLOCK, 1, torch.float32), normal(5 * BLOCK, 2, torch.float32)
    before = a.clone(), b.clone()
    threads = torch.get_num_threads()
    results = []
    for n in (1, 2):
        torch.set_num_threads(n)
        results.append(tensor_distance(a, b) | tensor_distance(a.bfloat16(), b.bfloat16()))
    torch.set_num_threads(threads)
    assert results[0] == results[1]
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_sums_of_parts_are_the_sums_of_the_whole():
    a, b = (flatten(normal(1000, seed)) for seed in (1, 2))
    whole = compare(a, b).sums
    merged = compare(a[:300], b[:300]).sums.merge(compare(a[300:], b[300:]).sums)
    for name, value in whole.metrics().items():
        assert merged.metrics()[name] == pytest.approx(value, rel=1e-12)
    assert merged.sigma() == pytest.approx(whole.sigma(), rel=1e-12)

"""The attention functions against the slow twin, the truth, and the rules about bits."""

import math

import numpy as np
import pytest
import torch

from fa_study.attention import baseline_attention, flash_attention, golden_attention, merge_attention
from fa_study.attention.exponentials import exact_exp
from fa_study.attention.forward import Call
from fa_study.attention.reference import reference_attention
from fa_study.attention.tile_products import bf16_products
from fa_study.rounding import RoundingPolicy

ALGORITHMS = ("fa1", "fa2", "fa4")
FORMATS = ("bf16", "fp16", "fp8_e5m2", "fp8_e4m3", "e6m9", "tf32")


def whole_numbers(*shape, top=4):
    """Halves of small whole numbers: their products add up exactly, in whatever order."""
    return torch.randint(-top, top + 1, shape).float() / 2


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


# The slow twin


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("features", [False, True])
def test_equals_the_slow_twin_to_the_bit(fmt, algorithm, features):
    q, k, v = whole_numbers(22, 8), whole_numbers(37, 8), whole_numbers(37, 8)
    policy = RoundingPolicy.uniform(fmt)
    extra, live = {}, None
    if features:
        live = torch.rand(22, 37) > 0.6
        extra = {"softcap": 5.0, "bias": torch.randn(22, 37)}
    got = flash_attention(
        q[None, None],
        k[None, None],
        v[None, None],
        policy=policy,
        tile=(16, 16),
        algorithm=algorithm,
        mask=live,
        **extra,
    )
    out, lse = reference_attention(q, k, v, policy, 16, algorithm, live=live, **extra)
    assert torch.equal(got.out[0, 0].double(), out.double())
    assert torch.equal(got.lse[0, 0].double(), lse.double())


def test_equals_the_slow_twin_with_site_formats_and_reverse_order():
    q, k, v = whole_numbers(16, 16), whole_numbers(40, 16), whole_numbers(40, 16)
    policy = RoundingPolicy(
        inputs="bf16", scores="fp16", max="bf16", exponentials="fp8_e5m2", probabilities="bf16", sum="e6m9",
        rescale="tf32", accumulator="fp16", output="bf16", lse="bf16",
    )  # fmt: skip
    got = flash_attention(
        q[None, None], k[None, None], v[None, None], policy=policy, tile=(8, 16), algorithm="fa1", key_order="reverse"
    )
    out, lse = reference_attention(q, k, v, policy, 16, "fa1", reverse=True)
    assert torch.equal(got.out[0, 0].double(), out.double())
    assert torch.equal(got.lse[0, 0].double(), lse.double())


def test_fp64_twin_agrees_to_the_last_bits():
    q, k, v = (normal(20, 8, dtype=torch.float64) for _ in range(3))
    policy = RoundingPolicy.uniform("fp64")
    for algorithm in ALGORITHMS:
        out, _ = reference_attention(q, k, v, policy, 7, algorithm)
        got = flash_attention(
            q[None, None], k[None, None], v[None, None], policy=policy, tile=(3, 7), algorithm=algorithm
        )
        torch.testing.assert_close(got.out[0, 0], out, rtol=1e-14, atol=1e-15)


# Native and generic path


@pytest.mark.skipif(not bf16_products(), reason="needs AVX-512")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_native_path_equals_the_generic_one(algorithm, monkeypatch):
    paths = []
    monkeypatch.setattr(
        Call, "chunk", lambda self, rows, f=Call.chunk: (paths.append(self.paths.native), f(self, rows))[1]
    )
    q, k, v = whole_numbers(2, 4, 50, 16), whole_numbers(2, 2, 70, 16), whole_numbers(2, 2, 70, 16)
    extra = {"causal": "bottom_right", "softcap": 6.0, "bias": torch.randn(4, 50, 70)}
    for options in ({}, extra):
        native = flash_attention(
            q, k, v, policy=RoundingPolicy.uniform("bf16"), tile=(16, 16), algorithm=algorithm, **options
        )
        assert all(paths)
        paths.clear()
        # A callable is taken by the generic path only.
        generic = flash_attention(
            q, k, v, policy=RoundingPolicy.uniform("bf16"), tile=(16, 16), algorithm=algorithm, exp=exact_exp, **options
        )
        assert not any(paths)
        paths.clear()
        assert same_bits(native.out, generic.out)
        assert torch.equal(native.lse, generic.lse)


@pytest.mark.parametrize("size", [2.0**-66, 40.0])
def test_subnormals_and_large_scores_take_the_generic_path(size):
    q, k, v = (normal(1, 1, 16, 16, dtype=torch.bfloat16) for _ in range(3))
    q, k = (q * size).bfloat16(), (k * size).bfloat16()
    got = flash_attention(q, k, v, policy=RoundingPolicy.uniform("bf16"))
    same = flash_attention(q, k, v, policy=RoundingPolicy.uniform("bf16"), exp=exact_exp)
    assert same_bits(got.out, same.out)


# Bits that must not change

BIT_POLICIES = {
    "native": RoundingPolicy.uniform("bf16"),
    "kernel": RoundingPolicy.kernel("bf16"),
    "fp16": RoundingPolicy.uniform("fp16"),
    "fp32": RoundingPolicy.uniform("fp32"),
    "fp64": RoundingPolicy.uniform("fp64"),
}


@pytest.mark.parametrize("policy", BIT_POLICIES.values(), ids=BIT_POLICIES)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_row_tile_strides_and_repeats_change_no_bit(policy, algorithm):
    q, k, v = normal(2, 4, 150, 40), normal(2, 2, 131, 40), normal(2, 2, 131, 24)
    options = {"policy": policy, "algorithm": algorithm, "causal": "bottom_right"}
    for Bc in (16, 48, 131):
        want = flash_attention(q, k, v, tile=(64, Bc), **options)
        for Br in (1, 7, 16, 150, 1000):
            got = flash_attention(q, k, v, tile=(Br, Bc), **options)
            assert same_bits(got.out, want.out) and same_bits(got.lse, want.lse)
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
        wide = torch.stack([v, v], -1)[..., 0]
        assert same_bits(flash_attention(*strided, wide, tile=(64, Bc), **options).out, want.out)


@pytest.mark.parametrize("policy", BIT_POLICIES.values(), ids=BIT_POLICIES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
def test_few_rows_and_one_head_give_the_bits_of_many(policy, rows):
    q, k, v = normal(2, 3, 100, 64), normal(2, 3, 300, 64), normal(2, 3, 300, 64)
    for attend in (
        lambda q, k, v: flash_attention(q, k, v, policy=policy, tile=(32, 512)).out,
        lambda q, k, v: flash_attention(q, k, v, policy=policy, tile=(32, 64)).out,
        lambda q, k, v: baseline_attention(q, k, v, policy=policy).out,
    ):
        many = attend(q, k, v)
        assert same_bits(attend(q[:1, 1:2, 40 : 40 + rows], k[:1, 1:2], v[:1, 1:2]), many[:1, 1:2, 40 : 40 + rows])


@pytest.mark.parametrize("policy", BIT_POLICIES.values(), ids=BIT_POLICIES)
def test_one_and_two_threads_give_the_same_bits(policy):
    q, k, v = (normal(1, 2, 200, 64) for _ in range(3))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(flash_attention(q, k, v, policy=policy, tile=(64, 512)).out)
            results.append(baseline_attention(q, k, v, policy=policy).out)
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[2]) and same_bits(results[1], results[3])


@pytest.mark.parametrize("policy", BIT_POLICIES.values(), ids=BIT_POLICIES)
@pytest.mark.parametrize("keys, added", [(32, 8), (100, 30), (130, 400), (200, 90), (250, 300), (512, 1)])
def test_a_padded_and_masked_key_is_no_key(policy, keys, added):
    q, k, v = normal(1, 2, 33, 32), normal(1, 2, keys + added, 32), normal(1, 2, keys + added, 32)
    k[..., keys:, :], v[..., keys:, :] = 1e30, math.nan
    mask = torch.arange(keys + added) < keys
    for attend in (
        lambda *x, **o: flash_attention(*x, policy=policy, tile=(16, 64), algorithm="fa1", **o),
        lambda *x, **o: flash_attention(*x, policy=policy, tile=(16, 512), **o),
        lambda *x, **o: baseline_attention(*x, policy=policy, **o),
    ):
        want, got = attend(q, k[..., :keys, :], v[..., :keys, :]), attend(q, k, v, mask=mask)
        assert same_bits(got.out, want.out) and same_bits(got.lse, want.lse)


def test_swapped_blocks_change_bits_only_through_the_key_tile():
    q, k, v = (normal(1, 1, 48, 32, dtype=torch.bfloat16) for _ in range(3))
    policy = RoundingPolicy.uniform("bf16")

    def attend(tile):
        return flash_attention(q, k, v, policy=policy, tile=tile, algorithm="fa1").out

    assert same_bits(attend((64, 128)), attend((128, 64)))
    assert not torch.equal(attend((16, 32)), attend((32, 16)))


def test_stochastic_sites_repeat_with_the_generator():
    q, k, v = (normal(1, 2, 40, 16) for _ in range(3))
    policy = RoundingPolicy.uniform("bf16:stochastic")
    runs = [flash_attention(q, k, v, policy=policy, generator=torch.Generator().manual_seed(s)).out for s in (1, 1, 2)]
    assert same_bits(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# The truth


def test_golden_value_against_extended_precision():
    q, k, v = (normal(1, 1, 30, 16, dtype=torch.float64) * 3 for _ in range(3))
    got = golden_attention(q, k, v, softcap=20.0, causal="top_left")
    Q, K, V = (x[0, 0].numpy().astype(np.longdouble) for x in (q, k, v))
    s = 20 * np.tanh(np.einsum("id,jd->ij", Q, K) / np.sqrt(np.longdouble(16)) / 20)
    s[np.triu_indices(30, 1)] = -np.inf
    e = np.exp(s - s.max(1, keepdims=True))
    out = np.einsum("ij,jd->id", e / e.sum(1, keepdims=True), V)
    assert np.finfo(np.longdouble).eps < 1e-18, "this machine has no extended precision"
    bound = (
        5e-16 * (10 + np.abs(s[np.isfinite(s)]).max()) * np.einsum("ij,jd->id", e / e.sum(1, keepdims=True), np.abs(V))
    )
    assert (np.abs(got.out[0, 0].numpy() - out) <= bound).all()
    lse = s.max(1) + np.log(e.sum(1))
    assert np.abs(got.lse[0, 0].numpy() - lse).max() < 1e-14


def test_eager_policy_is_eager_attention():
    q, k, v = (normal(1, 2, 128, 64, dtype=torch.bfloat16) for _ in range(3))
    eager = torch.softmax((q @ k.mT) * 0.125, -1) @ v
    got = baseline_attention(q, k, v, policy=RoundingPolicy.eager("bf16")).out
    assert got.dtype == torch.bfloat16
    assert (got == eager).float().mean() > 0.999


# Results


def test_merged_halves_are_the_whole():
    q, k, v = (normal(1, 2, 20, 16, dtype=torch.float64) for _ in range(3))
    policy = RoundingPolicy.uniform("fp64")
    mask = torch.rand(20, 20) > 0.8
    mask[3] = False
    parts = [
        flash_attention(q, k[..., s, :], v[..., s, :], policy=policy, mask=mask[:, s]) for s in (slice(7), slice(7, 20))
    ]
    merged, whole = merge_attention(parts), flash_attention(q, k, v, policy=policy, mask=mask)
    torch.testing.assert_close(merged.out, whole.out, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(merged.lse, whole.lse)
    assert torch.equal(merged.max_scores, whole.max_scores)
    assert (merged.out[..., 3, :] == 0).all() and (merged.lse[..., 3] == -math.inf).all()


def test_counts_of_tiles_and_rescalings():
    k = torch.arange(1.0, 9.0).reshape(1, 1, 8, 1)
    q, policy = torch.ones(1, 1, 8, 1), RoundingPolicy.uniform("fp32")
    result = flash_attention(q, k, k, policy=policy, tile=(4, 2), scale=1.0)
    assert result.counts["tiles"] == 2 * 4
    assert result.counts["rescalings"] == 8 * 3
    assert flash_attention(q, k, k, policy=policy, tile=(4, 2), key_order="reverse").counts["rescalings"] == 0
    # From the first tile's maximum 2 to 8 the growth is 8.66 in log2 units.
    for threshold, rescalings in ((8.0, 8), (9.0, 0)):
        lazy = flash_attention(
            q, k, k, policy=policy, tile=(4, 2), scale=1.0, algorithm="fa4", rescale_threshold=threshold
        )
        assert lazy.counts["rescalings"] == rescalings
        torch.testing.assert_close(lazy.out, result.out)
    causal = flash_attention(q, k, k, policy=policy, tile=(4, 2), causal="top_left")
    assert causal.counts["tiles"] == 2 + 4
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[5, 2] = True
    assert flash_attention(q, k, k, policy=policy, tile=(4, 2), mask=mask).counts["tiles"] == 1
    assert torch.equal(result.max_scores, torch.full((1, 1, 8), 8.0))


def test_overflows_are_counted_per_site_and_flow():
    x = torch.full((1, 1, 2, 64), 200.0, dtype=torch.float16)
    result = flash_attention(x, x, x, policy=RoundingPolicy.uniform("fp16"))
    assert result.counts["overflows"]["scores"] == 4
    assert result.counts["nonfinite"] == result.out.numel()
    huge = torch.full((1, 1, 2, 4), 3e38)
    result = flash_attention(huge, huge, torch.ones(1, 1, 2, 4), policy=RoundingPolicy.uniform("fp32"))
    assert result.counts["overflows"]["scores"] == 4
    saturating = flash_attention(huge, huge * 0, huge * 0 + 1000, policy=RoundingPolicy(output="fp8_e4m3"))
    assert saturating.counts["overflows"]["output"] == 8 and (saturating.out == 448).all()


@pytest.mark.parametrize(
    "given, fmt, expected",
    [
        (torch.bfloat16, "bf16", torch.bfloat16),
        (torch.float16, "bf16", torch.float32),
        (torch.float16, "fp8_e4m3", torch.float16),
        (torch.float32, "bf16", torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float32, "fp64", torch.float64),
    ],
)
def test_dtype_of_the_result(given, fmt, expected):
    x = normal(1, 1, 4, 8, dtype=given)
    result = flash_attention(x, x, x, policy=RoundingPolicy.uniform("fp32").replace(output=fmt, lse=fmt))
    assert result.out.dtype == expected
    assert result.lse.dtype in (torch.float32, torch.float64)


def test_memory_does_not_grow_with_the_square(monkeypatch):
    sizes = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (sizes.append(math.prod(a[0])), real(*a, **k))[1])
    x = normal(1, 1, 2048, 16)
    flash_attention(x, x, x, policy=RoundingPolicy.kernel("bf16"))
    assert max(sizes) < 2048 * 128


# Bad input


@pytest.mark.parametrize(
    "change, words",
    [
        ({"k": torch.randn(1, 2, 4, 7)}, ["(1, 2, 4, 8)", "(1, 2, 4, 7)"]),
        ({"v": torch.randn(1, 2, 5, 8)}, ["(1, 2, 4, 8)", "(1, 2, 5, 8)"]),
        ({"q": torch.randn(1, 3, 4, 8)}, ["3 query heads", "2 key/value heads"]),
        ({"q": torch.randn(2, 4, 8)}, ["4 dimensions", "(2, 4, 8)"]),
        ({"q": torch.ones(1, 2, 4, 8, dtype=torch.int64)}, ["q", "floating", "int64"]),
        ({"mask": torch.ones(3, 4, dtype=torch.bool)}, ["mask", "(3, 4)", "(1, 2, 4, 4)"]),
        ({"mask": torch.ones(4, 4)}, ["mask", "boolean", "bias"]),
        ({"bias": torch.ones(4, 4, dtype=torch.int32)}, ["bias", "floating", "mask"]),
        ({"tile": (0, 64)}, ["tile=(0, 64)", "positive"]),
        ({"tile": 64}, ["tile=64", "positive"]),
        ({"causal": True}, ["causal=True", "top_left", "bottom_right"]),
        ({"window": (3,)}, ["window", "(left, right)"]),
        ({"softcap": 0.0}, ["softcap", "positive"]),
        ({"algorithm": "fa3"}, ["'fa3'", "fa1, fa2, fa4"]),
        ({"exp": "fast"}, ["'fast'", "exact", "fexp_u20"]),
        ({"key_order": "up"}, ["'up'", "forward", "reverse"]),
        ({"policy": "bf16"}, ["RoundingPolicy", "str"]),
        ({"softcap": 5.0, "key_offset": lambda k: k.mean(-2, keepdim=True)}, ["key_offset", "softcap"]),
    ],
)
def test_mistakes_are_named(change, words):
    arguments = {name: torch.randn(1, 2, 4, 8) for name in "qkv"} | {"policy": RoundingPolicy.uniform("fp32")} | change
    with pytest.raises(ValueError) as error:
        flash_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_merging_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        merge_attention([])

"""Every feature, alone and with others, on random shapes: the error bound of FP64, and the rules about bits.

Bound: |error| <= 2e-15 (10 + max|s|) (P |V|), elementwise against the golden value.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_study.attention import baseline_attention, flash_attention, golden_attention
from fa_study.attention.golden import golden_scores
from fa_study.rounding import RoundingPolicy

POLICIES = [RoundingPolicy.uniform("bf16"), RoundingPolicy.kernel("bf16"), RoundingPolicy.eager("fp16")]
FAST = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
THOROUGH = settings(FAST, max_examples=100_000)
FEATURES = ("mask", "bias", "hiding bias", "causal", "window", "softcap", "scale")


@st.composite
def problems(draw):
    """(q, k, v, features, tile, algorithm and its options) of a small problem in float64."""
    B, Hkv, G = (draw(st.integers(1, 2)) for _ in range(3))
    L, S = draw(st.integers(1, 24)), draw(st.integers(1, 40))
    D, Dv = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    size = draw(st.sampled_from([0.1, 1.0, 5.0]))
    q, k, v = normal(B, G * Hkv, L, D) * size, normal(B, Hkv, S, D), normal(B, Hkv, S, Dv)
    chosen = draw(st.sets(st.sampled_from(FEATURES), max_size=4))
    shape = [draw(st.sampled_from([1, full])) for full in (B, G * Hkv, L, S)]
    options = {}
    if "mask" in chosen:
        options["mask"] = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.05, 0.5, 0.9]))
    if {"bias", "hiding bias"} & chosen:
        options["bias"] = normal(*shape) * 3
        if "hiding bias" in chosen:
            options["bias"][torch.rand(shape, generator=generator) < 0.4] = -math.inf
    if "causal" in chosen:
        options["causal"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    if "window" in chosen:
        options["window"] = tuple(draw(st.one_of(st.none(), st.integers(0, 12))) for _ in range(2))
    if "softcap" in chosen:
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if "scale" in chosen:
        options["scale"] = draw(st.sampled_from([0.0, 0.3, 1.0, -0.7]))
    tile = draw(st.integers(1, 30)), draw(st.integers(1, 50))
    algorithm = draw(st.sampled_from(["baseline", "fa1", "fa2", "fa4"]))
    order = {} if algorithm == "baseline" else {"key_order": draw(st.sampled_from(["forward", "reverse"]))}
    return q, k, v, options, tile, algorithm, order


def run(q, k, v, policy, options, tile, algorithm, order):
    if algorithm == "baseline":
        return baseline_attention(q, k, v, policy=policy, **options)
    return flash_attention(q, k, v, policy=policy, tile=tile, algorithm=algorithm, **order, **options)


def check_bound(problem):
    q, k, v, options, tile, algorithm, order = problem
    got = run(q, k, v, RoundingPolicy.uniform("fp64"), options, tile, algorithm, order)
    golden = golden_attention(q, k, v, **options)
    rows = slice(0, q.shape[2])
    plain = golden_scores(q, k, rows, options.get("scale"), None, None)
    final = golden_scores(q, k, rows, options.get("scale"), options.get("softcap"), options.get("bias"))
    largest = max(plain.abs().max(), final[final.isfinite()].abs().max() if final.isfinite().any() else 0.0)
    weighted = golden_attention(q, k, v.abs(), **options).out
    assert ((got.out - golden.out).abs() <= 2e-15 * (10 + largest) * weighted).all()
    empty = golden.lse == -math.inf
    assert torch.equal(got.lse == -math.inf, empty) and (got.out[empty] == 0).all()
    assert ((got.lse - golden.lse)[~empty].abs() <= 2e-15 * (10 + largest)).all()
    assert ((got.max_scores - golden.max_scores)[~empty].abs() <= 2e-15 * (10 + largest)).all()


@FAST
@given(problems())
def test_error_bound_of_fp64(problem):
    check_bound(problem)


@pytest.mark.slow
@THOROUGH
@given(problems())
def test_error_bound_of_fp64_thorough(problem):
    check_bound(problem)


@settings(FAST, max_examples=150)
@given(problems(), st.integers(1, 60), st.sampled_from(POLICIES))
def test_row_tile_and_rows_alone_change_no_bit(problem, Br, policy):
    q, k, v, options, tile, algorithm, order = problem
    want = run(q, k, v, policy, options, tile, algorithm, order)
    other = run(q, k, v, policy, options, (Br, tile[1]), algorithm, order)
    assert torch.equal(other.out, want.out) and torch.equal(other.lse, want.lse)
    # A window or causal order counts rows from the whole, so a row alone is only asked for without them.
    if not {"causal", "window"} & set(options):
        i = Br % q.shape[2]
        cut = {
            name: x[:, :, i : i + 1] if name in ("mask", "bias") and x.shape[2] > 1 else x
            for name, x in options.items()
        }
        alone = run(q[:, :, i : i + 1], k, v, policy, cut, tile, algorithm, order)
        assert torch.equal(alone.out, want.out[:, :, i : i + 1])


@settings(FAST, max_examples=150)
@given(problems(), st.integers(1, 30), st.sampled_from(POLICIES))
def test_masked_keys_at_the_end_are_no_keys(problem, added, policy):
    q, k, v, options, tile, algorithm, order = problem
    options = {name: x for name, x in options.items() if name in ("softcap", "scale")}
    S = k.shape[2]
    longer = [torch.cat([x, x.new_full((*x.shape[:2], added, x.shape[3]), math.nan)], 2) for x in (k, v)]
    want = run(q, k, v, policy, options, tile, algorithm, order)
    got = run(q, *longer, policy, options | {"mask": torch.arange(S + added) < S}, tile, algorithm, order)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)

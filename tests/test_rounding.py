"""Policies: what a site's text means, the presets, and messages that name what is unknown."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from float_checks import assert_same

from fa_study.formats import BF16, FP16, FP32, FP64, round_to
from fa_study.rounding import SITES, Accumulation, Rounding, RoundingPolicy, parse_rounding


def sites_with(policy: RoundingPolicy, text: str) -> set[str]:
    return {site for site in SITES if str(getattr(policy, site)) == text}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bf16", Rounding(BF16)),
        ("bf16:nearest_even", Rounding(BF16)),
        ("fp16:toward_zero", Rounding(FP16, "toward_zero")),
        (FP32, Rounding(FP32)),
        (Rounding(BF16, "stochastic"), Rounding(BF16, "stochastic")),
    ],
)
def test_a_site_is_a_format_or_its_text(value, expected):
    assert parse_rounding(value) == expected
    assert parse_rounding(str(parse_rounding(value))) == expected


def test_calling_a_rounding_rounds():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    assert_same(parse_rounding("e5m7")(x), round_to(x, "e5m7"))
    assert_same(parse_rounding("fp16:toward_zero")(x), round_to(x, "fp16", rounding="toward_zero"))
    ours = parse_rounding("bf16:stochastic")(x, torch.Generator().manual_seed(1))
    assert_same(ours, round_to(x, "bf16", rounding="stochastic", generator=torch.Generator().manual_seed(1)))


def test_presets():
    assert sites_with(RoundingPolicy.uniform("fp16"), "fp16") == set(SITES)
    assert RoundingPolicy.uniform("fp16").products == Accumulation("fp32")
    assert RoundingPolicy.uniform("fp64").products == Accumulation("fp64")
    kernel = {"inputs", "probabilities", "output", "grad_scores"}
    assert sites_with(RoundingPolicy.kernel("bf16"), "bf16") == kernel
    assert sites_with(RoundingPolicy.kernel("bf16"), "fp32") == set(SITES) - kernel
    assert sites_with(RoundingPolicy.torch_cpu("bf16"), "bf16") == kernel | {"grad_accumulator"}
    assert sites_with(RoundingPolicy.eager(BF16), "bf16") == kernel | {"scores"}
    assert sites_with(RoundingPolicy(), "fp32") == set(SITES)


def test_replace_changes_only_what_is_named():
    policy = RoundingPolicy.kernel("bf16")
    changed = policy.replace(
        scores="bf16:stochastic", products=Accumulation("e8m13:toward_zero", every=32, promote=128)
    )
    assert changed.scores == Rounding(BF16, "stochastic")
    assert str(changed.products) == "e8m13:toward_zero every 32 promote 128"
    assert changed.replace(scores="fp32", products="fp32") == policy


def test_policies_are_values():
    policy = RoundingPolicy.uniform("bf16:stochastic").replace(products=Accumulation("e8m13", every=32))
    for twin in (eval(repr(policy)), pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert twin == policy and hash(twin) == hash(policy)
    assert len({policy, RoundingPolicy(), RoundingPolicy.uniform("fp32"), RoundingPolicy.uniform("e8m23")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.scores = "bf16"
    with pytest.raises(TypeError):
        RoundingPolicy("bf16")


def test_text_names_what_differs():
    assert str(RoundingPolicy.uniform("fp16")) == "fp16, products fp32"
    assert str(RoundingPolicy(output="bf16")) == "fp32, output bf16"


@pytest.mark.parametrize(
    ("policy", "carrier"),
    [
        (RoundingPolicy(), torch.float32),
        (RoundingPolicy.uniform("bf16:stochastic"), torch.float32),
        (RoundingPolicy.uniform("fp16"), torch.float32),
        (RoundingPolicy.kernel("tf32"), torch.float32),
        (RoundingPolicy.kernel("fp8_e4m3"), torch.float32),
        (RoundingPolicy(scores="e8m11"), torch.float64),
        (RoundingPolicy(scores="e9m4"), torch.float64),
        (RoundingPolicy(scores="fp32:toward_zero"), torch.float64),
        (RoundingPolicy.kernel("bf16:toward_zero"), torch.float64),
        (RoundingPolicy(sum="fp64"), torch.float64),
    ],
    ids=str,
)
def test_the_carrier_is_wide_enough_not_to_round_twice(policy, carrier):
    assert policy.carrier == carrier


def test_float32_carriers_round_once_up_to_11_bits_of_precision():
    """The rule behind `carrier`, 24 >= 2 p + 2, where it is tightest: quotients of all pairs of 11-bit significands."""
    significands = 1 + torch.arange(1024, dtype=torch.float64) / 1024
    quotients = significands[:, None] / significands
    assert_same(round_to(quotients.float(), "fp16").double(), round_to(quotients, "fp16"))
    above_tie = torch.tensor([1 + 2.0**-12 + 2.0**-40], dtype=torch.float64)
    assert round_to(above_tie, "e8m11").item() != round_to(above_tie.float(), "e8m11").item()


@pytest.mark.parametrize(
    ("dtype", "accumulation", "native"),
    [
        (torch.float32, Accumulation(), True),
        (torch.float64, Accumulation(), False),
        (torch.float64, Accumulation(FP64), True),
        (torch.float32, Accumulation(every=4), False),
        (torch.float32, Accumulation(promote=128), False),
        (torch.float32, Accumulation("fp32:stochastic"), False),
    ],
)
def test_which_sums_a_plain_product_keeps(dtype, accumulation, native):
    assert accumulation.is_native(dtype) == native


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RoundingPolicy(score="bf16"), "unknown rounding site 'score': use inputs, scores, .*products"),
        (lambda: RoundingPolicy().replace(row_sum="bf16"), "unknown rounding site 'row_sum': use inputs, scores, "),
        (lambda: RoundingPolicy(scores="bf17"), "unknown format 'bf17': use one of fp64, "),
        (lambda: RoundingPolicy(scores="bf16:up"), "unknown rounding mode 'up': use one of nearest_even, "),
        (lambda: RoundingPolicy(scores="bf16:"), "unknown rounding mode ''"),
        (lambda: RoundingPolicy(scores=16), "a format is a FloatFormat or its text, got int"),
        (lambda: Accumulation(every=0), "every=0: use a positive number of terms, or None"),
        (lambda: Accumulation(promote=1.5), "promote=1.5"),
    ],
)
def test_mistakes_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()

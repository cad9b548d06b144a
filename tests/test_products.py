"""Products with emulated sums against plain loops over the terms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from float_checks import assert_same

from fa_study.attention.products import matmul
from fa_study.attention.tile_products import bf16_products, padded, product, round_up, tile_width
from fa_study.formats import round_to
from fa_study.rounding import Accumulation

HOPPER_FP8 = Accumulation("e8m13:toward_zero", every=32, promote=128)


def operands(*shapes: tuple[int, ...], fmt: str = "bf16") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [round_to(torch.randn(shape, generator=generator), fmt) for shape in shapes]


def by_hand(a: np.ndarray, b: np.ndarray, accumulation: Accumulation) -> float:
    """One element of a product: a loop over the terms, each rounding written out."""
    rounding = accumulation.format
    every, promote = accumulation.every or len(a), accumulation.promote or len(a)
    total, partial, pending = np.float32(0), 0.0, 0.0
    for k, (x, y) in enumerate(zip(a.astype(np.float64), b.astype(np.float64)), start=1):
        pending += x * y
        since_promotion = (k - 1) % promote + 1
        if since_promotion % every == 0 or since_promotion == promote or k == len(a):
            partial = rounding(torch.tensor(partial + pending, dtype=torch.float64)).item()
            pending = 0.0
        if since_promotion == promote or k == len(a):
            if accumulation.promote is None:
                return partial
            total = np.float32(np.float64(total) + partial)
            partial = 0.0
    return float(total)


@pytest.mark.parametrize(
    "accumulation",
    [
        HOPPER_FP8,
        Accumulation("bf16"),
        Accumulation("bf16", every=1),
        Accumulation("fp32", every=1),
        Accumulation("fp16:toward_zero", every=7),
        Accumulation("e5m7", every=4, promote=10),
        Accumulation("fp32", promote=64),
        Accumulation("e8m13:toward_zero", every=50, promote=32),
    ],
    ids=str,
)
def test_sums_equal_a_loop_over_the_terms(accumulation):
    a, b = operands((3, 300), (300, 2))
    got = matmul(a, b, accumulation)
    want = [[by_hand(a[i].numpy(), b[:, j].numpy(), accumulation) for j in range(2)] for i in range(3)]
    assert_same(got, torch.tensor(want))
    assert_same(matmul(a.double(), b.double(), accumulation), torch.tensor(want, dtype=torch.float64))


def test_fp32_and_fp64_are_one_native_product():
    a, b = operands((2, 3, 17, 33), (2, 1, 33, 9), fmt="fp32")
    assert_same(matmul(a, b, Accumulation()), a @ b)
    assert_same(matmul(a.double(), b.double(), Accumulation("fp64")), a.double() @ b.double())
    assert_same(matmul(a.bfloat16(), b.bfloat16(), Accumulation()), a.bfloat16().float() @ b.bfloat16().float())


def test_a_narrower_sum_of_wider_operands_is_rounded_at_the_end():
    a, b = (x.double() for x in operands((4, 30), (30, 4), fmt="fp32"))
    assert_same(matmul(a, b, Accumulation("fp32")), (a @ b).float().double())
    assert_same(matmul(a.float(), b.float(), Accumulation("fp64")), (a @ b).float())


def test_truncation_shrinks_sums_and_promotion_saves_them():
    """Sums of positive terms, as P V with V of one sign: truncation is a bias that grows with the number of terms."""
    generator = torch.Generator().manual_seed(1)
    a, b = (round_to(torch.rand(shape, generator=generator), "fp8_e4m3") for shape in ((16, 4096), (4096, 16)))
    exact = a.double() @ b.double()

    def mean_error(accumulation: Accumulation) -> float:
        return ((matmul(a, b, accumulation) - exact) / exact).mean().item()

    never_promoted = mean_error(Accumulation("e8m13:toward_zero", every=32))
    assert never_promoted < -1e-3
    assert mean_error(HOPPER_FP8) < 0 and abs(mean_error(HOPPER_FP8)) < abs(never_promoted) / 10
    assert abs(mean_error(Accumulation("e8m13", every=32))) < abs(never_promoted) / 10


def test_stochastic_sums_follow_the_generator_and_have_no_bias():
    a, b = operands((64, 128), (128, 64))
    accumulation = Accumulation("bf16:stochastic", every=16)
    draws = [matmul(a, b, accumulation, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert_same(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    error = draws[0].double() - a.double() @ b.double()
    assert abs(error.mean()) <= 4 * error.std() / error.numel() ** 0.5


@pytest.mark.parametrize("accumulation", [Accumulation(), HOPPER_FP8], ids=str)
def test_gradients_are_those_of_the_exact_product(accumulation):
    a, b = operands((2, 3, 40), (40, 5))
    a.requires_grad_(), b.requires_grad_()
    weights = torch.arange(30.0).view(2, 3, 5)
    (matmul(a, b, accumulation) * weights).sum().backward()
    torch.testing.assert_close(a.grad, weights @ b.detach().mT)
    torch.testing.assert_close(b.grad, (a.detach().mT @ weights).sum(0))


def test_shapes_broadcast_and_may_be_empty():
    a, b = operands((3, 1, 4, 20), (2, 20, 6))
    accumulation = Accumulation("bf16", every=5)
    apart = [[matmul(a[i, 0], b[j], accumulation) for j in range(2)] for i in range(3)]
    assert_same(matmul(a, b, accumulation), torch.stack([torch.stack(row) for row in apart]))
    assert matmul(a[..., :0], b[:, :0], accumulation).eq(0).all()
    assert matmul(a[..., :0, :], b, HOPPER_FP8).shape == (3, 2, 0, 6)


def test_infinities_and_nan_flow():
    a = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [3e38, 3e38]])
    got = matmul(a, torch.tensor([[1.0], [1.0]]), Accumulation("bf16", every=1))
    assert got[0].item() == torch.inf and got[1].isnan() and got[2].item() == torch.inf


def amx_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sums as AMX tiles take them: per 32 terms one chain over the even and one over the odd ones."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for start in range(0, a.shape[-1], 32):
        chains = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(start, min(start + 32, a.shape[-1])):
            # In float64 product and sum are exact here, but for one rounding.
            wide = a[..., k, None].double() * b[..., k, None, :].double() + chains[k % 2].double()
            chains[k % 2] = wide.float()
        total = total + (chains[0] + chains[1])
    return total


def narrow_product(a, b):
    """The product of BF16 values on the matrix units, padded as tiles are."""
    (rows, terms), columns = a.shape[-2:], b.shape[-1]
    width, terms = round_up(columns, 32), round_up(terms, 16)
    a, b = padded(a, round_up(rows, 16), terms), padded(b, terms, width)
    return product(a, b, Accumulation(), narrow=True)[:, :rows, :columns]


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")
@pytest.mark.parametrize("terms", [1, 8, 16, 59, 64, 300])
def test_bf16_products_add_in_the_order_of_amx(terms):
    a, b = operands((2, 37, terms), (2, terms, 50))
    got = narrow_product(a, b)
    assert_same(got, amx_order(a, b))
    assert terms < 59 or not torch.equal(got, a @ b)


@pytest.mark.skipif(not bf16_products(), reason="needs AVX-512")
@pytest.mark.parametrize("terms", [1, 8, 16, 59, 64, 300, 700])
def test_bf16_products_add_in_one_order_whatever_the_shape(terms):
    a, b = operands((2, 37, terms), (2, terms, 50))
    got = narrow_product(a, b)
    for rows in (1, 2, 7, 16, 17):
        assert_same(narrow_product(a[:, :rows], b[..., 5 : 5 + rows]), got[:, :rows, 5 : 5 + rows])
    assert_same(narrow_product(a[1:], b[1:]), got[1:])
    for more in (64, 448):
        assert_same(narrow_product(padded(a, 37, terms + more), padded(b, terms + more, 50)), got)


def test_bf16_products_leave_the_precision_of_others_alone():
    a, b = operands((1, 64, 64), (1, 64, 64), fmt="fp32")
    before, plain = torch.backends.mkldnn.matmul.fp32_precision, a @ b
    out = torch.empty(1, 64, 64)
    got = product(a, b, Accumulation(), out=out, narrow=True)
    torch.testing.assert_close(got, plain, rtol=0.02, atol=0.2)
    assert got.data_ptr() == out.data_ptr()
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert_same(a @ b, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_and_terms_are_added_in_one_order_on_this_processor(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(1, 48, 500, dtype=dtype), torch.randn(1, 500, 200, dtype=dtype)

    def added(terms, columns):
        return product(padded(a[..., :terms], 48, 512), padded(b[:, :terms, :columns], 512, columns), Accumulation())

    for terms in (100, 130, 250, 500):
        want = added(terms, 192)
        for columns in (16, 32, 64, 112, 128):
            assert_same(added(terms, columns), want[..., :columns])
        width = tile_width(terms)
        short = product(padded(a[..., :terms], 48, width), padded(b[:, :terms, :192], width, 192), Accumulation())
        assert_same(short, want)

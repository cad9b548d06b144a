"""The emulation is the kernel: bit by bit against PyTorch's CPU flash attention, forward and backward.

R2 = 1 - |kernel - emulation|^2 / |kernel - golden|^2 says how much of the kernel's rounding error is explained. The
lengths are multiples of 16, where the kernel's vector code (AVX2 or AVX-512) handles every element.
"""

import ctypes.util
import sys
from functools import cache, reduce

import pytest
import torch

from fa_study.attention import attention_gradients, flash_attention, golden_attention, tile_products
from fa_study.attention.exponentials import fexp_u20
from fa_study.rounding import RoundingPolicy

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the kernel's bits are those of its AVX2 and AVX-512 builds",
)
KERNEL_TILE = 512
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GRID = [(256, 32), (256, 128), (1024, 64), (2048, 64)]
FULL_GRID = [(N, D) for N in (256, 512, 1024, 2048, 4096) for D in (32, 64, 96, 128)]


def inputs(fmt, N, D, distribution, heads=1, count=3):
    draw = torch.randn if distribution == "normal" else torch.rand
    torch.manual_seed(N + D)
    return [draw(1, heads, N, D).to(DTYPES[fmt]) for _ in range(count)]


def r2(kernel, emulation, golden):
    return (
        1 - ((kernel.double() - emulation.double()).square().sum() / (kernel.double() - golden).square().sum()).item()
    )


def kernel_forward(q, k, v, causal=False):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)


def emulated(q, k, v, policy, tile=KERNEL_TILE, **options):
    return flash_attention(q, k, v, policy=policy, tile=(64, tile), exp="fexp_u20", **options)


@cache
def adds_like_the_library(fmt):
    """Whether the kernel adds up P V over its keys as one FP32 product of the library does.

    With equal scores every weight is 1, and the values cancel, so that the order of the sum is seen in the output.
    """
    torch.manual_seed(0)
    half = torch.randn(KERNEL_TILE // 2, 64) * 10 ** torch.empty(KERNEL_TILE // 2, 64).uniform_(0, 4)
    v = torch.cat([half, -half])[torch.randperm(KERNEL_TILE)].to(DTYPES[fmt])[None, None]
    out, _ = kernel_forward(torch.zeros_like(v), torch.zeros_like(v), v)
    total = torch.bmm(torch.ones(1, KERNEL_TILE, KERNEL_TILE), v[0].float())
    return torch.equal(out[0], (total / KERNEL_TILE).to(out.dtype))


def check_forward(fmt, N, D, distribution, causal=False):
    q, k, v = inputs(fmt, N, D, distribution)
    out, lse = kernel_forward(q, k, v, causal)
    options = {"policy": RoundingPolicy.kernel(fmt), "causal": "top_left" if causal else None}
    got = emulated(q, k, v, **options)
    golden = golden_attention(q, k, v, causal=options["causal"]).out
    assert r2(out, got.out, golden) >= 0.99
    assert (got.lse - lse).abs().max() <= 4e-6 * lse.abs().max()
    if adds_like_the_library(fmt):
        # The library cuts a sum by its length; the emulation may not, since a padded key changes no bit there.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_products, "slab", lambda *_: KERNEL_TILE)
            got = emulated(q, k, v, **options)
    assert (got.out == out).float().mean() >= 0.999


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
@pytest.mark.parametrize("N, D", GRID)
@pytest.mark.parametrize("fmt", DTYPES)
def test_forward_bits(fmt, N, D, distribution):
    check_forward(fmt, N, D, distribution)


@pytest.mark.parametrize("fmt", DTYPES)
def test_forward_bits_causal(fmt):
    check_forward(fmt, 1024, 64, "normal", causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["normal", "uniform"])
@pytest.mark.parametrize("N, D", FULL_GRID)
@pytest.mark.parametrize("fmt", DTYPES)
def test_forward_bits_on_the_full_grid(fmt, N, D, distribution):
    check_forward(fmt, N, D, distribution)


def libm(name, x):
    """A function of C's library, which the kernel calls for what it computes once per row."""
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    return torch.tensor([function(value) for value in x.flatten().tolist()]).view_as(x)


def row_sum(e, lanes):
    """Key j in lane j % lanes, each lane from its first key to its last; then halves of the lanes until one is left."""
    terms = torch.nn.functional.pad(e, (0, -e.shape[-1] % lanes)).unflatten(-1, (-1, lanes))
    total = reduce(torch.add, terms.unbind(-2))
    while total.shape[-1] > 1:
        total = torch.add(*total.chunk(2, -1))
    return total[..., 0]


def lse_written_out(q, k, lanes, causal):
    s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -torch.inf)
    m, l = torch.full(s.shape[:-1], -torch.inf), torch.zeros(s.shape[:-1])
    for tile in s.split(KERNEL_TILE, -1):
        top = torch.maximum(m, tile.amax(-1))
        total, factor = row_sum(fexp_u20(tile - top[..., None]), lanes), libm("expf", m - top)
        # One rounding: the compiler makes a fused multiply-add of it.
        l, m = (total.double() + factor.double() * l.double()).float(), top
    return m + libm("logf", l)


@pytest.mark.skipif(sys.platform != "linux", reason="the bits of C's expf and logf are those of Linux's library")
@pytest.mark.parametrize("N, causal", [(256, False), (1024, False), (1040, True)])
@pytest.mark.parametrize("fmt", DTYPES)
def test_log_sum_exp_is_the_kernels_to_the_bit(fmt, N, causal):
    # Eighths, whose products add up exactly in whatever order, so that the order of the row sum alone is seen.
    q, k, v = ((8 * x.float()).round().div(8).to(x.dtype) for x in inputs(fmt, N, 64, "normal"))
    lanes = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 16  # those of two vectors of FP32
    lse = kernel_forward(q, k, v, causal)[1]
    assert torch.equal(lse_written_out(q, k, lanes, causal), lse)
    # The emulation adds rows up in the order of PyTorch's own sum: some have another last bit.
    got = emulated(q, k, v, RoundingPolicy.kernel(fmt), causal="top_left" if causal else None)
    assert 0 < (got.lse != lse).float().mean() < 0.2


WRONG_FORWARD = {
    "P not rounded": lambda fmt: (RoundingPolicy.kernel(fmt).replace(probabilities="fp32"), KERNEL_TILE),
    "row sum from the rounded P": lambda fmt: (RoundingPolicy.kernel(fmt).replace(exponentials=fmt), KERNEL_TILE),
    "key tile 64": lambda fmt: (RoundingPolicy.kernel(fmt), 64),
}


@pytest.mark.parametrize("wrong", WRONG_FORWARD)
@pytest.mark.parametrize("fmt", DTYPES)
def test_a_wrong_policy_is_told_apart(fmt, wrong):
    scores = []
    for distribution in ("normal", "uniform"):
        q, k, v = inputs(fmt, 1024, 64, distribution)
        policy, tile = WRONG_FORWARD[wrong](fmt)
        out, _ = kernel_forward(q, k, v)
        scores.append(r2(out, emulated(q, k, v, policy, tile).out, golden_attention(q, k, v).out))
    assert min(scores) < 0.98


def kernel_gradients(fmt, N, D, distribution):
    """(inputs with dout, the kernel's gradients, the true gradients)."""
    q, k, v, dout = (x.requires_grad_() for x in inputs(fmt, N, D, distribution, count=4))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    kernel = torch.autograd.grad(out, (q, k, v), dout.detach())
    golden = torch.autograd.grad(golden_attention(q, k, v).out, (q, k, v), dout.detach().double())
    return [x.detach() for x in (q, k, v, dout)], kernel, golden


def kernel_rows(N):
    """The kernel's number of rows per tile, which the backward pass adds dK and dV up by."""
    return 256 if N >= 768 else 64 if N >= 192 else 32


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
@pytest.mark.parametrize("N, D", [(256, 64), (1024, 64), (1024, 32)])
@pytest.mark.parametrize("fmt", DTYPES)
def test_gradients_are_those_of_the_kernel(fmt, N, D, distribution):
    x, kernel, golden = kernel_gradients(fmt, N, D, distribution)
    options = {"tile": (kernel_rows(N), KERNEL_TILE), "exp": "fexp_u20"}
    got = attention_gradients(*x, policy=RoundingPolicy.torch_cpu(fmt), **options)
    # 0.98 parts right from wrong here as well. FP16 stays below 0.99 at times: its roundings are eight times finer, and
    # FP32's last bit (another order of sums, another exp within one unit) decides eight times as many of them.
    assert min(r2(a, b, g) for a, b, g in zip(kernel, got, golden)) >= (0.99 if fmt == "bf16" else 0.98)


WRONG_BACKWARD = {
    "dQ, dK and dV added up in FP32": (RoundingPolicy.kernel, {}),
    "dS not rounded": (lambda fmt: RoundingPolicy.torch_cpu(fmt).replace(grad_scores="fp32"), {}),
    "P not rounded": (lambda fmt: RoundingPolicy.torch_cpu(fmt).replace(probabilities="fp32"), {}),
    "delta from the probabilities": (RoundingPolicy.torch_cpu, {"delta": "probabilities"}),
    "rows in tiles of 64": (RoundingPolicy.torch_cpu, {"tile": (64, KERNEL_TILE)}),
}


@pytest.mark.parametrize("wrong", WRONG_BACKWARD)
def test_a_wrong_backward_policy_is_told_apart(wrong):
    x, kernel, golden = kernel_gradients("bf16", 1024, 64, "normal")
    make, change = WRONG_BACKWARD[wrong]
    options = {"tile": (kernel_rows(1024), KERNEL_TILE), "exp": "fexp_u20"} | change
    got = attention_gradients(*x, policy=make("bf16"), **options)
    assert min(r2(a, b, g) for a, b, g in zip(kernel, got, golden)) < 0.98

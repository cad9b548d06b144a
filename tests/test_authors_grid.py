"""The FlashAttention authors' rule on their own grid of cases: error(flash) <= 2 x error(16-bit reference).

Both errors are maxima against float64. The reference is 16-bit attention with the scale applied to K first; gradients
may err 3 times as much (2 times, plus 1e-5, when causal).
"""

import itertools
import math
import random

import pytest
import torch

from fa_study.attention import attention_gradients, flash_attention, golden_attention
from fa_study.attention.golden import live_keys
from fa_study.rounding import RoundingPolicy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KEY_HEADS = (6, 2, 1)
HEAD_SIZES = (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256)
CROSS = [
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048),
]  # fmt: skip
SELF = [(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)]
SWITCHES = list(itertools.product((False, True), repeat=4))  # causal, window, position bias, softcap

# Every value of every list at least once, every pair of switches, short lengths.
FAST = [
    ("bf16", 6, 32, (113, 203), (False, False, False, False)),
    ("fp16", 2, 40, (128, 217), (True, False, False, False)),
    ("bf16", 1, 59, (113, 211), (False, True, False, False)),
    ("fp16", 6, 64, (108, 256), (False, False, True, False)),
    ("bf16", 2, 96, (256, 512), (False, False, False, True)),
    ("fp16", 1, 111, (512, 256), (True, True, False, False)),
    ("bf16", 6, 128, (97, 97), (True, False, True, False)),
    ("fp16", 2, 160, (128, 128), (True, False, False, True)),
    ("bf16", 1, 192, (200, 200), (False, True, True, False)),
    ("fp16", 6, 224, (97, 97), (False, True, False, True)),
    ("bf16", 2, 256, (128, 128), (False, False, True, True)),
    ("fp16", 1, 64, (200, 200), (True, True, True, True)),
]


def product(a, b):
    """A 16-bit product, added up in FP32 and rounded once; PyTorch's own is 20 times slower without AVX-512."""
    return (a.float() @ b.float()).to(a.dtype)


def reference_16_bit(q, k, v, live, bias, softcap):
    """Attention in the dtype of its inputs, step by step."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = product(q, (k * (1 / math.sqrt(q.shape[-1]))).mT)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    if bias is not None:
        s = s + bias.to(s.dtype)
    s = s.masked_fill(~live, -math.inf)
    empty = ~live.any(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return product(p, v)


def position_bias(heads, L, S):
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    distance = torch.arange(L).unsqueeze(1) + S - L - torch.arange(S)
    return -slopes[:, None, None] * distance.abs()


def errors(results, truths):
    return [(a.double() - b).abs().max().item() for a, b in zip(results, truths)]


def check(fmt, key_heads, D, lengths, switches, batch):
    (L, S), (causal, window, biased, capped) = lengths, switches
    torch.manual_seed(L + S + D)
    dice = random.Random(L + S + D)
    q, k, v, dout = (
        torch.randn(batch, h, n, D).to(DTYPES[fmt]) for h, n in ((6, L), (key_heads, S), (key_heads, S), (6, L))
    )
    softcap = 50.0 if capped else None
    if capped:
        q = q * softcap
    options = {
        "causal": "bottom_right" if causal else None,
        "window": (dice.randrange(S), dice.randrange(S)) if window else None,
        "bias": position_bias(6, L, S) if biased else None,
        "softcap": softcap,
    }
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    golden = golden_attention(*leaves, **options).out
    true = torch.autograd.grad(golden, leaves, dout.double())
    live = live_keys(L, S, slice(0, L), q.device, None, None, options["causal"], options["window"])
    coarse = reference_16_bit(*leaves, live, options["bias"], softcap)
    coarse_grads = torch.autograd.grad(coarse, leaves, dout)

    policy = RoundingPolicy.kernel(fmt)
    out = flash_attention(q, k, v, policy=policy, tile=(128, 128), **options).out
    (error,), (allowed,) = errors([out], [golden]), errors([coarse], [golden])
    assert error <= 2 * allowed + 1e-5
    grads = attention_gradients(q, k, v, dout, policy=policy, tile=(128, 128), **options)
    for name, error, allowed in zip("qkv", errors(grads, true), errors(coarse_grads, true)):
        assert error <= (2 * allowed + 1e-5 if causal else 3 * allowed + 1e-5), f"gradient of {name}"


@pytest.mark.parametrize("fmt, key_heads, D, lengths, switches", FAST)
def test_error_at_most_twice_that_of_16_bit_attention(fmt, key_heads, D, lengths, switches):
    check(fmt, key_heads, D, lengths, switches, batch=1)


@pytest.mark.slow
@pytest.mark.parametrize("D", HEAD_SIZES)
@pytest.mark.parametrize("key_heads", KEY_HEADS)
@pytest.mark.parametrize("fmt", DTYPES)
def test_full_grid(fmt, key_heads, D):
    for lengths, switches in itertools.product(CROSS + SELF, SWITCHES):
        check(fmt, key_heads, D, lengths, switches, batch=4)

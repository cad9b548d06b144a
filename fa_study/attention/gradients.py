"""The gradients of attention, and attention that a model can be trained with.

The formulas, with a format per rounding site, are in `fa_study.attention.backward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_study.attention.backward import Backward
from fa_study.attention.call import Call
from fa_study.attention.exponentials import Exponential
from fa_study.attention.features import check_features, check_shapes
from fa_study.attention.forward import baseline_attention, check_tile, flash_attention
from fa_study.attention.result import AttentionResult
from fa_study.attention.sites import result_dtype
from fa_study.attention.tiles import ALGORITHMS
from fa_study.rounding import RoundingPolicy

__all__ = ["attention_gradients", "tiled_attention"]

DELTAS = (None, "output", "probabilities")
FEATURES = ("scale", "mask", "bias", "causal", "window", "softcap")


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    policy: RoundingPolicy,
    algorithm: str = "fa2",
    delta: str | None = None,
    tile: tuple[int, int] = (64, 64),
    exp: Exponential = "exact",
    generator: torch.Generator | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (dq, dk, dv) of attention for the gradient `dout` of its output, rounded as the policy says.

    Parameters
    ----------
    q, k, v : Tensor
        (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv).
    dout : Tensor (B, H, L, Dv)
    policy : RoundingPolicy
        `RoundingPolicy.kernel` is FlashAttention 2, `RoundingPolicy.torch_cpu` PyTorch's CPU flash kernel.
    algorithm : {"baseline", "fa1", "fa2", "fa4"}
        Of the forward pass; the flash algorithms share one backward pass.
    delta : {None, "output", "probabilities"}
        Where delta comes from; None: the output for flash, the probabilities for the baseline, as their real forms do.
    tile : (Br, Bc)
        Unlike in the forward pass Br matters: dK and dV are rounded after every tile of rows.
    exp, generator, **options
        As in `flash_attention` (or `baseline_attention`). The backward pass computes exact exponentials where the
        forward pass uses "fexp_u20", as PyTorch's kernel does.

    Returns
    -------
    (dq, dk, dv) : Tensor
        In the shapes of q, k and v, in their dtypes where those hold the output format, else in float32 or float64.
        A row without a key has gradient 0 and gives none.

    Raises
    ------
    ValueError
        If shapes or options do not fit.
    """
    result = _forward(q, k, v, policy, algorithm, tile, exp, generator, options)
    return _gradients(q, k, v, dout, result, policy, algorithm, delta, tile, exp, generator, options)


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    policy: RoundingPolicy,
    algorithm: str = "fa2",
    tile: tuple[int, int] = (64, 64),
    delta: str | None = None,
    exp: Exponential = "exact",
    generator: torch.Generator | None = None,
    **options,
) -> Tensor:
    """Attention for a model: `flash_attention`, or `baseline_attention` for algorithm="baseline", with its gradients.

    The forward pass rounds as that function does, the backward pass as `attention_gradients` does. Parameters as there.

    Returns
    -------
    Tensor (B, H, L, Dv)
        In the dtype of q. Gradients flow to q, k and v (not to a bias).
    """
    bias = options.get("bias")
    if bias is not None and bias.requires_grad:
        raise ValueError("tiled_attention has no gradient for the bias: detach it, or use plain attention to train it")
    return _TiledAttention.apply(q, k, v, policy, algorithm, tile, delta, exp, generator, options)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, policy, algorithm, tile, delta, exp, generator, options):
        result = _forward(q, k, v, policy, algorithm, tile, exp, generator, options)
        ctx.save_for_backward(q, k, v, result.out, result.lse)
        ctx.arguments = (policy, algorithm, delta, tile, exp, generator, options)
        return result.out.to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = _gradients(q, k, v, dout, AttentionResult(out, lse), *ctx.arguments)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v))), *(None,) * 7


def _forward(q, k, v, policy, algorithm, tile, exp, generator, options) -> AttentionResult:
    if algorithm == "baseline":
        return baseline_attention(q, k, v, policy=policy, exp=exp, generator=generator, **options)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown: use one of baseline, {', '.join(ALGORITHMS)}")
    return flash_attention(
        q, k, v, policy=policy, algorithm=algorithm, tile=tile, exp=exp, generator=generator, **options
    )


def _gradients(q, k, v, dout, result, policy, algorithm, delta, tile, exp, generator, options):
    shapes = check_shapes(q, k, v)
    if delta not in DELTAS:
        raise ValueError(f"delta={delta!r} is unknown: use None, 'output' or 'probabilities'")
    if not isinstance(dout, Tensor) or dout.shape != result.out.shape or not dout.is_floating_point():
        given = f"{dout.dtype} {tuple(dout.shape)}" if isinstance(dout, Tensor) else type(dout).__name__
        raise ValueError(
            f"dout has to be a floating-point tensor of the output's shape {tuple(result.out.shape)}, got {given}"
        )
    features = check_features(shapes, **{name: options[name] for name in FEATURES if name in options})
    exp = "exact" if exp == "fexp_u20" else exp
    call = Call(q, k, v, shapes, features, policy, exp, generator)
    dtypes = [result_dtype(x.dtype, policy.output.format) for x in (q, k, v)]
    sizes = [(s.shape, t) for s, t in zip((q, k, v), dtypes)]
    if not (shapes.B and shapes.L and shapes.S):
        return tuple(torch.zeros(size, dtype=t, device=q.device) for size, t in sizes)
    baseline = algorithm == "baseline"
    source = delta or ("probabilities" if baseline else "output")
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        grads = Backward(call, dout, result, baseline, source).run(check_tile(tile))
    rounded = (call.sites("output", g) for g in grads)
    return tuple(g.reshape(size).to(t) for g, (size, t) in zip(rounded, sizes))

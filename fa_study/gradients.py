"""The backward pass of attention with a format per rounding site, and attention that a model can be trained with.

With P = exp(S - lse) recomputed per tile (baseline: the rounded, normalised P of the forward pass), dO the gradient of
the output, c the scale and R(site, .) the rounding at a site:

    dV += R(probabilities, P)^T dO
    dP  = R(scores, dO V^T)
    dS  = R(grad_scores, P R(exponentials, dP - delta))        times the slope of the softcap
    dQ  = R(grad_accumulator, dQ + c dS K)
    dK  = R(grad_accumulator, dK + c dS^T Q)

delta = R(delta, rowsum(dO O)) from the rounded output, or rowsum(P dP). dQ, dK and dV are rounded like the output at
the end. The baseline applies c to dS and rounds it once more, as automatic differentiation of ``q k^T * c`` does.

Shape letters: see `fa_study.call`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fa_study.call import Call, Chunk
from fa_study.exponentials import Exponential
from fa_study.features import check_features, check_shapes
from fa_study.forward import baseline_attention, check_tile, flash_attention
from fa_study.result import AttentionResult
from fa_study.rounding import RoundingPolicy
from fa_study.sites import result_dtype
from fa_study.tile_products import masked_product, padded, product, round_up

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
    return flash_attention(
        q, k, v, policy=policy, algorithm=algorithm, tile=tile, exp=exp, generator=generator, **options
    )


def _gradients(q, k, v, dout, result, policy, algorithm, delta, tile, exp, generator, options):
    shapes = check_shapes(q, k, v)
    if delta not in DELTAS:
        raise ValueError(f"delta={delta!r} is unknown: use None, 'output' or 'probabilities'")
    if dout.shape != result.out.shape or not dout.is_floating_point():
        raise ValueError(
            f"dout has to be a floating-point tensor of the output's shape {tuple(result.out.shape)}, "
            f"got {dout.dtype} {tuple(dout.shape)}"
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
        grads = _Backward(call, dout, result, baseline, source).run(check_tile(tile))
    rounded = (call.sites("output", g) for g in grads)
    return tuple(g.reshape(size).to(t) for g, (size, t) in zip(rounded, sizes))


class _Backward:
    """One backward pass: dq, dk, dv grow tile by tile in the carrier."""

    def __init__(self, call: Call, dout: Tensor, result: AttentionResult, baseline: bool, delta: str) -> None:
        s = call.shapes
        self.call, self.baseline, self.delta_source = call, baseline, delta
        call.keep_capped = call.features.softcap is not None
        self.dout = call.round_input(dout)
        self.finite_dout = bool(self.dout.isfinite().all())
        self.out, self.lse = result.out.to(call.carrier), result.lse.to(call.carrier).unsqueeze(-1)
        self.dq = call.q.new_zeros(s.B, s.H, s.L, s.D)
        self.dk = call.k.new_zeros(s.B * s.Hkv, s.S, s.D)
        self.dv = call.v.new_zeros(s.B * s.Hkv, s.S, s.Dv)

    def run(self, tile: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        call, s = self.call, self.call.shapes
        tiles, W = call.key_tiles(s.S if self.baseline else tile[1])
        chunks = call.chunks(16, W) if self.baseline else self._row_tiles(tile[0])
        for chunk in chunks:
            dout = self._rows(self.dout, chunk, 0.0)
            lse = self._rows(self.lse, chunk, math.inf)
            # exp(s - inf) = 0: a row without a key, and a padded row, have no weights.
            lse = lse.masked_fill(lse == -math.inf, math.inf)
            delta = self._delta(chunk, tiles, W, dout, lse)
            for keys in tiles:
                if not call.features.is_dead(chunk.rows, keys):
                    self._add_tile(chunk, keys, W, dout, lse, delta)
        if self.baseline:
            # Its dK and dV are single products over all rows: rounded once.
            self.dk, self.dv = (call.sites("grad_accumulator", x) for x in (self.dk, self.dv))
        return self.dq, self.dk, self.dv

    def _row_tiles(self, Br: int) -> Iterator[Chunk]:
        L = self.call.shapes.L
        return (self.call.chunk(slice(i, min(i + Br, L))) for i in range(0, L, Br))

    def _rows(self, x: Tensor, chunk: Chunk, fill: float) -> Tensor:
        """The rows of a chunk, (B, H, R, .), padded."""
        rows = x[:, :, chunk.rows]
        return torch.nn.functional.pad(rows, (0, 0, 0, chunk.R - chunk.length), value=fill)

    def _delta(self, chunk: Chunk, tiles: list[slice], W: int, dout: Tensor, lse: Tensor) -> Tensor:
        call, R = self.call, chunk.length
        if self.delta_source == "output":
            total = (dout * self._rows(self.out, chunk, 0.0)).sum(-1, keepdim=True)
            return call.sites("delta", total, None, R)
        total = torch.zeros_like(lse)
        for keys in tiles:
            if not call.features.is_dead(chunk.rows, keys):
                dead, p, _, dp = self._weights(chunk, keys, W, dout, lse)
                terms = p * dp
                total = total + (terms if dead is None else terms.masked_fill(dead, 0.0)).sum(-1, keepdim=True)
        return call.sites("delta", total, None, R)

    def _weights(self, chunk: Chunk, keys: slice, W: int, dout: Tensor, lse: Tensor):
        """(dead, P, P as the operand for dV, dP) of a tile."""
        call, R = self.call, chunk.length
        dead, bias = call.features.tile(chunk.rows, chunk.R, keys, W, dout.device)
        s, _ = call.scores(chunk, keys, W, dead, bias)
        if self.baseline:
            m = call.sites("max", call.row_max(s), None, R)
            e, _ = call.exp_difference(s, m.masked_fill(m == -math.inf, 0.0), dead, R)
            l = call.sites("sum", e.sum(-1, keepdim=True), None, R)
            p = call.sites("probabilities", e / l.masked_fill(m == -math.inf, 1.0), dead, R)
            operand = p
        else:
            p, unrounded = call.exp_difference(s, lse, dead, R)
            operand = call.probabilities(p, unrounded, dead, R)
        v = call.values(keys, W)
        flat = padded(call.flat(dout), call.flat(dout).shape[-2], call.Dv)
        dp = call.heads(product(flat, v.mT, call.policy.products, call.generator))
        finite = self.finite_dout and call.finite_v
        return dead, p, operand, call.sites.product("scores", dp, finite, dead, R)

    def _add_tile(self, chunk: Chunk, keys: slice, W: int, dout: Tensor, lse: Tensor, delta: Tensor) -> None:
        call, sites, R = self.call, self.call.sites, chunk.length
        s, scale = call.shapes, call.features.scale
        dead, p, operand, dp = self._weights(chunk, keys, W, dout, lse)
        n = keys.stop - keys.start
        self._accumulate(self.dv[:, keys], self._product_t(operand, dout, dead, self.finite_dout)[:, :n, : s.Dv])

        ds = p * sites("exponentials", dp - delta, dead, R)
        if call.capped is not None:
            ds = ds * (1 - (call.capped / call.features.softcap).square())
        ds = sites("grad_scores", ds if dead is None else ds.masked_fill(dead, 0.0), dead, R)
        if self.baseline:
            ds, scale = sites("grad_scores", ds * scale, dead, R), 1.0
        dq = self._product(ds, call.keys(keys, W), dead, call.finite_qk)
        rows = self.dq[:, :, chunk.rows]
        rows.copy_(sites("grad_accumulator", rows + dq[:, :, :R, : s.D] * scale))
        q = chunk.q[..., : s.D]
        dk = self._product_t(ds, call.heads(q), dead, call.finite_qk)[:, :n, : s.D]
        self._accumulate(self.dk[:, keys], dk * scale)

    def _accumulate(self, total: Tensor, part: Tensor) -> None:
        added = total + part
        total.copy_(added if self.baseline else self.call.sites("grad_accumulator", added))

    def _product(self, a: Tensor, b: Tensor, dead: Tensor | None, finite: bool) -> Tensor:
        """a (B, H, R, W) times b (N, W, D), as (B, H, R, D)."""
        call, flat = self.call, self.call.flat(a)
        if finite or dead is None:
            return call.heads(product(flat, b, call.policy.products, call.generator))
        gone = call.flat(dead.expand(a.shape))
        return call.heads(masked_product(flat, b, gone, call.policy.products, call.generator))

    def _product_t(self, a: Tensor, b: Tensor, dead: Tensor | None, finite: bool) -> Tensor:
        """a^T b for a (B, H, R, W) and b (B, H, R, D), summed over the rows and the heads of a group: (N, W, D)."""
        call = self.call
        left = call.flat(a).mT.contiguous()
        right = call.flat(b)
        right = padded(right, right.shape[-2], round_up(right.shape[-1], 16))
        if finite or dead is None:
            return product(left, right, call.policy.products, call.generator)
        gone = call.flat(dead.expand(a.shape)).mT.contiguous()
        return masked_product(left, right, gone, call.policy.products, call.generator)

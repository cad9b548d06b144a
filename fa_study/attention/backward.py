"""The backward pass of attention, tile by tile, with a format per rounding site.

With P = exp(S - lse) recomputed per tile (baseline: the rounded, normalised P of the forward pass), dO the gradient of
the output, c the scale and R(site, .) the rounding at a site:

    dV += R(probabilities, P)^T dO
    dP  = R(scores, dO V^T)
    dS  = R(grad_scores, P R(exponentials, dP - delta))        times the slope of the softcap
    dQ  = R(grad_accumulator, dQ + c dS K)
    dK  = R(grad_accumulator, dK + c dS^T Q)

delta = R(delta, rowsum(dO O)) from the rounded output, or rowsum(P dP). dQ, dK and dV are rounded like the output at
the end. The baseline applies c to dS and rounds it once more, as automatic differentiation of ``q k^T * c`` does.

Shape letters: see `fa_study.attention.call`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fa_study.attention.call import Call, Chunk
from fa_study.attention.result import AttentionResult
from fa_study.attention.tile_products import masked_product, padded, product, round_up


class Backward:
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
        finite = self.finite_dout and call.paths.finite_v
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
        dq = self._product(ds, call.keys(keys, W), dead, call.paths.finite_qk)
        rows = self.dq[:, :, chunk.rows]
        rows.copy_(sites("grad_accumulator", rows + dq[:, :, :R, : s.D] * scale))
        q = chunk.q[..., : s.D]
        dk = self._product_t(ds, call.heads(q), dead, call.paths.finite_qk)[:, :n, : s.D]
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

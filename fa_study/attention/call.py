"""The steps on a tile that all algorithms share: scores, exponentials, product with V.

Two paths, one code. The generic path computes in the policy's carrier (float32 or float64) and rounds at every site.
The native path keeps bfloat16 tensors, whose own arithmetic rounds. Both give the same bits, up to the order of sums
inside a matrix product; `fa_study.attention.bounds` chooses.

Shape letters: B batch, H query heads, Hkv key heads, G = H / Hkv, N = B Hkv, L queries, S keys, D and Dv head sizes,
R rows of a chunk after padding, W keys of a tile after padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_study.attention.exponentials import exact_exp, fexp_u20, shifted_exp
from fa_study.attention.operands import Chunk, Operands
from fa_study.attention.tile_products import masked_product, padded, product

__all__ = ["Call", "Chunk"]


class Call(Operands):
    """The operands of one call and the steps on a tile. A step may overwrite what it is given, as each one says."""

    def scores(
        self, chunk: Chunk, keys: slice, W: int, dead: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (B, H, R, W) of a tile, -inf where dead, and what was taken off each row by the key offset.

        The tensor is a buffer that the next call overwrites.
        """
        f, sites, R = self.features, self.sites, chunk.length
        offset = None
        if self.key_offset is None:
            kt = self.keys_t(keys, W)
        else:
            k, offset = self._offset_keys(chunk, keys, W)
            kt = k.mT
        s = self.buffered_product("scores", chunk.left, kt, self.paths.narrow_scores)
        s = sites.product("scores", self.heads(s), self.paths.finite_qk, dead, R)
        if f.scale != 1.0 and not self.paths.scaled_queries:
            s = sites("scores", s.mul_(f.scale), dead, R)
        if f.softcap is not None:
            s = self._narrow(self._wide(s).div(f.softcap).tanh_().mul_(f.softcap))
            s = sites("scores", s, dead, R)
            self.capped = s.clone() if self.keep_capped else None
        if bias is not None:
            wide = self._wide(s)
            s = sites("scores", self._narrow(wide + bias.to(wide.dtype)), dead, R)
        if dead is not None:
            s = s.masked_fill_(dead, -math.inf)
        return s, offset

    def buffered_product(self, name: str, a: Tensor, b: Tensor, narrow: bool) -> Tensor:
        """a b in a buffer of that name: a fresh tensor for each tile would cost as much as the product."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != shape:
            buffer = self.buffers[name] = torch.empty(shape, dtype=self.carrier, device=a.device)
        return product(a, b, self.policy.products, self.generator, buffer, narrow)

    def _offset_keys(self, chunk: Chunk, keys: slice, W: int) -> tuple[Tensor, Tensor]:
        s = self.shapes
        tile = self.k[:, keys, : s.D].view(s.B, s.Hkv, -1, s.D)
        taken = self.key_offset(tile).to(self.carrier)
        k = self.sites("inputs", tile - taken).reshape(s.B * s.Hkv, -1, s.D)
        taken = taken.expand(s.B, s.Hkv, 1, s.D).reshape(s.B * s.Hkv, 1, s.D)
        part = product(chunk.q, padded(taken, 16, self.D).mT, self.policy.products, self.generator)
        return padded(k, W, self.D), self.heads(part)[..., :1] * self.features.scale

    def row_max(self, s: Tensor) -> Tensor:
        # Float32's maximum is vectorised, bfloat16's is not.
        return self._narrow(self._wide(s).amax(-1, keepdim=True))

    def exponentials(
        self, s: Tensor, subtracted: Tensor, dead: Tensor | None, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(e, p, sum of e) of a tile; s (B, H, R, W) is overwritten. p is the operand of the product with V."""
        e, unrounded = self.exp_difference(s, subtracted, dead, rows)
        total = self.sites("sum", self._narrow(self._wide(e).sum(-1, keepdim=True)), None, rows)
        spared = self.paths.casts_probabilities and self.probability_scale == 1 and e is unrounded
        return e, e if spared else self.probabilities(e, unrounded, dead, rows), total

    def exp_difference(self, s: Tensor, subtracted: Tensor, dead: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        """exp(s - subtracted) rounded as the exponentials are, and before its last rounding."""
        sites = self.sites
        if self.exp == "exp2_fma":
            rounding = None if sites.is_free("exponentials") else self.policy.exponentials
            e = shifted_exp(s, subtracted, self.exp, rounding=rounding, generator=self.generator)
            return e, e
        x = self._wide(sites("exponentials", s.sub_(subtracted), dead, rows))
        exact = torch.exp_ if self.paths.mild and dead is None else exact_exp
        function = {"exact": exact, "fexp_u20": fexp_u20}.get(self.exp) if isinstance(self.exp, str) else self.exp
        unrounded = self._narrow(function(x))
        return sites("exponentials", unrounded, dead, rows), unrounded

    def probabilities(self, e: Tensor, unrounded: Tensor, dead: Tensor | None, rows: int) -> Tensor:
        wanted, had = self.policy.probabilities, self.policy.exponentials
        if wanted == had and self.probability_scale == 1:
            return e
        source = e if had.format.mantissa_bits < wanted.format.mantissa_bits else unrounded
        if self.probability_scale != 1:
            source = source * self.probability_scale
        return self.sites("probabilities", source, dead, rows)

    def times_values(self, p: Tensor, keys: slice, W: int, dead: Tensor | None, rows: int) -> Tensor:
        """The product of p (B, H, R, W) with a tile of V, as (B, H, R, Dv); a buffer, as in `scores`."""
        v, flat = self.values(keys, W), self.flat(p)
        if self.paths.finite_v or dead is None:
            o = self.buffered_product("values", flat, v, self.paths.narrow_values)
        else:
            o = masked_product(flat, v, self.flat(dead.expand(p.shape)), self.policy.products, self.generator)
        if self.probability_scale != 1:
            o = o / self.probability_scale
        finite = self.paths.finite_v and self.paths.finite_qk
        return self.sites.product("accumulator", self.heads(o), finite, None, rows)

    def exp_small(self, x: Tensor) -> Tensor:
        """The exact exponential of a column of per-row values."""
        return self._narrow((torch.exp if self.paths.mild else exact_exp)(self._wide(x)))

    def reciprocal(self, l: Tensor) -> Tensor:
        return self._narrow(self._wide(l).reciprocal())

    def lse(self, m: Tensor, l: Tensor, empty: Tensor, rows: int) -> Tensor:
        """m + log(l), -inf for empty rows."""
        value = self._narrow(self._wide(m) + self._wide(l).log())
        return self.sites("lse", value, empty, rows).masked_fill(empty, -math.inf)

    def _wide(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype == torch.bfloat16 else x

    def _narrow(self, x: Tensor) -> Tensor:
        return x.to(self.carrier)

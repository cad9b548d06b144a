"""One attention call made ready: inputs rounded and laid out, chunks of rows, and the tile steps all algorithms share.

Two paths, one code. The generic path computes in the policy's carrier (float32 or float64) and rounds at every site.
The native path keeps bfloat16 tensors, whose own arithmetic rounds, where a policy is BF16 throughout and neither
overflow nor a subnormal number can occur (matrix units flush those to zero). Both give the same bits, up to the order
of sums inside a matrix product.

Shape letters: B batch, H query heads, Hkv key heads, G = H / Hkv, N = B Hkv, L queries, S keys, D and Dv head sizes,
R rows of a chunk after padding, W keys of a tile after padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fa_study.exponentials import EXPONENTIALS, Exponential, exact_exp, fexp_u20, shifted_exp
from fa_study.features import Features, Shapes
from fa_study.formats import BF16, FP32
from fa_study.rounding import SITES, Rounding, RoundingPolicy
from fa_study.sites import Sites, largest_score, overflow_possible
from fa_study.tile_products import masked_product, padded, product, round_up, slab, tile_width

# Elements of a tile of scores: three such float32 tensors stay in a cache of 2 MB.
CHUNK = 2**18


@dataclass
class Chunk:
    """Some query rows of all heads: q (N, G R, D), padded to R rows."""

    rows: slice
    R: int
    q: Tensor

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start


class Call:
    """The operands of one call and the steps on a tile: scores, exponentials, product with V."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shapes: Shapes,
        features: Features,
        policy: RoundingPolicy,
        exp: Exponential,
        generator: torch.Generator | None,
        *,
        growth: float = 0.0,
        probability_scale: float = 1.0,
        key_offset: Callable[[Tensor], Tensor] | None = None,
        hooked: bool = False,
        native_width: int = 0,
    ) -> None:
        if not callable(exp) and exp not in EXPONENTIALS:
            raise ValueError(f"exp={exp!r} is unknown: use one of {', '.join(EXPONENTIALS)}, or a callable")
        if not isinstance(policy, RoundingPolicy):
            raise ValueError(
                f"policy has to be a RoundingPolicy, got {type(policy).__name__}: use RoundingPolicy.uniform(...)"
            )
        self.shapes, self.features, self.exp, self.probability_scale = shapes, features, exp, probability_scale
        self.key_offset, self.generator = key_offset, generator
        self.sites = Sites(policy, policy.carrier, generator, counting=True)
        q, k, v = (self.round_input(x) for x in (q, k, v))
        # What nobody sees is taken out first, so that it can decide neither a bound nor a path.
        rows_seen, keys_seen = features.seen()
        if rows_seen is not None:
            q = q.masked_fill(~rows_seen.unsqueeze(-1), 0.0)
        if keys_seen is not None:
            k, v = (x.masked_fill(~keys_seen.unsqueeze(-1), 0.0) for x in (k, v))
        raw, score = largest_score(q, k, features.scale)
        value = float(v.abs().max()) if v.numel() else 0.0
        # NaN and infinities show in the bounds; a bound that overflows only takes the careful way.
        self.finite_qk, self.finite_v = math.isfinite(raw), math.isfinite(value)
        if features.bias is not None:
            score += float(features.bias.masked_fill(features.bias == -math.inf, 0).abs().max())
        hooked = hooked or callable(exp) or not (self.finite_qk and self.finite_v)
        risky = hooked or overflow_possible(policy, raw, score, value, shapes.S, growth, probability_scale)
        self.sites.counting = risky
        smallest_terms = (
            _smallest(q) * _smallest(k) * min(1.0, abs(features.scale)),
            _smallest(v) * math.exp(-2.1 * min(score, 400)),
        )
        # Where no exponential can be tiny, exact_exp need not look for those.
        self.mild = not risky and 2.1 * score + growth < 80
        # Matrix units flush subnormal numbers to zero: they are used where none can occur.
        units = not risky and q.device.type == "cpu" and min(smallest_terms) > 2.0**-100
        self.narrow_scores = units and _within_bf16(policy.inputs)
        self.narrow_values = self.narrow_scores and _within_bf16(policy.probabilities)
        self.native = (
            units
            and 0 < native_width <= slab(torch.bfloat16)
            and round_up(shapes.D, 16) <= slab(torch.bfloat16)
            and exp == "exact"
            and probability_scale == 1
            and _is_uniform(policy, Rounding(BF16))
        )
        if self.native:
            self.sites = Sites(policy, torch.bfloat16, generator, counting=False)
        self.carrier = self.sites.carrier
        self.D, self.Dv = round_up(max(shapes.D, 1), 16), round_up(max(shapes.Dv, 1), 16)
        s = shapes
        self.q = q.to(self.carrier).reshape(s.B, s.Hkv, s.G, s.L, s.D)
        self.k = padded(k.to(self.carrier).reshape(s.B * s.Hkv, s.S, s.D), s.S, self.D)
        self.v = padded(v.to(self.carrier).reshape(s.B * s.Hkv, s.S, s.Dv), s.S, self.Dv)
        self._buffer: Tensor | None = None
        self._tiles: dict[tuple[str, int, int], Tensor] = {}
        # The backward pass needs the capped scores before the bias.
        self.keep_capped, self.capped = False, None

    @property
    def policy(self) -> RoundingPolicy:
        return self.sites.policy

    def round_input(self, x: Tensor) -> Tensor:
        if x.dtype == self.policy.inputs.format.torch_dtype:
            return x.detach().to(self.policy.carrier)
        # Rounding from the given dtype, never by way of a narrower carrier, which would round twice.
        wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
        if self.policy.carrier == torch.float64:
            wide = wide.double()
        return self.sites("inputs", wide).to(self.policy.carrier)

    def key_tiles(self, size: int) -> tuple[list[slice], int]:
        """The slices of the key tiles, and the padded width that all of them get."""
        S = self.shapes.S
        width = tile_width(min(size, S), self.narrow_scores and not self.native)
        return [slice(j, min(j + size, S)) for j in range(0, S, size)], width

    def chunks(self, step: int, width: int) -> Iterator[Chunk]:
        """The rows in chunks of a multiple of `step`, so that a chunk of scores (B, H, R, width) stays in cache."""
        s = self.shapes
        fitting = CHUNK // max(1, width * s.B * s.H)
        size = step * max(1, fitting // step)
        for start in range(0, s.L, size):
            yield self.chunk(slice(start, min(start + size, s.L)))

    def chunk(self, rows: slice) -> Chunk:
        s, R = self.shapes, round_up(rows.stop - rows.start, 16)
        q = padded(self.q[:, :, :, rows], R, self.D)
        return Chunk(rows, R, q.view(s.B * s.Hkv, s.G * R, self.D))

    def heads(self, x: Tensor) -> Tensor:
        """(N, G R, W) seen as (B, H, R, W)."""
        s = self.shapes
        return x.view(s.B, s.H, -1, x.shape[-1])

    def flat(self, x: Tensor) -> Tensor:
        """(B, H, R, W) seen as (N, G R, W)."""
        s = self.shapes
        return x.reshape(s.B * s.Hkv, -1, x.shape[-1])

    def keys(self, keys: slice, W: int) -> Tensor:
        """A tile of K (N, W, D), made once for all chunks."""
        return self._tile("k", self.k, keys, W, self.D)

    def values(self, keys: slice, W: int) -> Tensor:
        """A tile of V (N, W, Dv), made once for all chunks."""
        return self._tile("v", self.v, keys, W, self.Dv)

    def _tile(self, name: str, x: Tensor, keys: slice, W: int, columns: int) -> Tensor:
        place = (name, keys.start, W)
        if place not in self._tiles:
            self._tiles[place] = padded(x[:, keys], W, columns)
        return self._tiles[place]

    def scores(
        self, chunk: Chunk, keys: slice, W: int, dead: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (B, H, R, W) of a tile, -inf where dead, and what was taken off each row by the key offset.

        The tensor is a buffer that the next call overwrites.
        """
        f, sites, R = self.features, self.sites, chunk.length
        k, offset = self.keys(keys, W), None
        if self.key_offset is not None:
            k, offset = self._offset_keys(chunk, keys, W)
        s = sites.product("scores", self.heads(self._product_scores(chunk.q, k)), self.finite_qk, dead, R)
        if f.scale != 1.0:
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

    def _product_scores(self, q: Tensor, k: Tensor) -> Tensor:
        shape = (q.shape[0], q.shape[1], k.shape[1])
        if self._buffer is None or self._buffer.shape != shape:
            self._buffer = torch.empty(shape, dtype=self.carrier, device=q.device)
        return product(q, k.mT, self.policy.products, self.generator, self._buffer, self.narrow_scores)

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
        return e, self.probabilities(e, unrounded, dead, rows), total

    def exp_difference(self, s: Tensor, subtracted: Tensor, dead: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        """exp(s - subtracted) rounded as the exponentials are, and before its last rounding."""
        sites = self.sites
        if self.exp == "exp2_fma":
            rounding = None if sites.is_free("exponentials") else self.policy.exponentials
            e = shifted_exp(s, subtracted, self.exp, rounding=rounding, generator=self.generator)
            return e, e
        x = self._wide(sites("exponentials", s.sub_(subtracted), dead, rows))
        exact = torch.exp if self.mild and dead is None else exact_exp
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
        """The product of p (B, H, R, W) with a tile of V, as (B, H, R, Dv)."""
        v, flat = self.values(keys, W), self.flat(p)
        if self.finite_v or dead is None:
            o = product(flat, v, self.policy.products, self.generator, narrow=self.narrow_values)
        else:
            o = masked_product(flat, v, self.flat(dead.expand(p.shape)), self.policy.products, self.generator)
        if self.probability_scale != 1:
            o = o / self.probability_scale
        return self.sites.product("accumulator", self.heads(o), self.finite_v and self.finite_qk, None, rows)

    def exp_small(self, x: Tensor) -> Tensor:
        """The exact exponential of a column of per-row values."""
        return self._narrow(exact_exp(self._wide(x)))

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


def _smallest(x: Tensor) -> float:
    """The smallest magnitude other than 0, at most 1."""
    size = x.abs()
    return float(size.masked_fill_(size == 0, 1.0).amin().clamp(max=1.0)) if size.numel() else 1.0


def _within_bf16(rounding: Rounding) -> bool:
    return rounding.format.mantissa_bits <= BF16.mantissa_bits and rounding.format.exponent_bits <= BF16.exponent_bits


def _is_uniform(policy: RoundingPolicy, rounding: Rounding) -> bool:
    products = policy.products
    plain = products.every is None and products.promote is None and products.format == Rounding(FP32)
    return plain and all(getattr(policy, site) == rounding for site in SITES if not site.startswith(("grad", "delta")))

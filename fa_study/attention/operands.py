"""The inputs of one attention call: rounded, laid out, and cut into chunks of rows and tiles of keys.

Shape letters: B batch, H query heads, Hkv key heads, G = H / Hkv, N = B Hkv, L queries, S keys, D and Dv head sizes,
R rows of a chunk after padding, W keys of a tile after padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fa_study.attention.bounds import choose_paths
from fa_study.attention.exponentials import EXPONENTIALS, Exponential
from fa_study.attention.features import Features, Shapes
from fa_study.attention.sites import Sites
from fa_study.attention.tile_products import padded, round_up, tile_width
from fa_study.rounding import RoundingPolicy

# Elements of a tile of scores, 2 MB of float32. Fewer fit a cache better, but pay the fixed cost of a call more often.
CHUNK = 2**19


@dataclass
class Chunk:
    """Some query rows of all heads: q (N, G R, D), padded to R rows; left is q, or scale q if `scaled_queries`.

    place : the batch and the heads that these are, where a call has been taken apart.
    """

    rows: slice
    R: int
    q: Tensor
    left: Tensor
    place: tuple[slice, slice]

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start


class Operands:
    """The rounded inputs of one call, its paths, and tiles and chunks of them."""

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
        self.paths = choose_paths(
            q,
            k,
            v,
            features,
            policy,
            exp,
            growth=growth,
            probability_scale=probability_scale,
            hooked=hooked,
            native_width=native_width,
        )
        self.sites.counting = self.paths.risky
        if self.paths.native:
            self.sites = Sites(policy, torch.bfloat16, generator, counting=False)
        self.carrier = self.sites.carrier
        self.D, self.Dv = round_up(max(shapes.D, 1), 16), round_up(max(shapes.Dv, 1), 16)
        s = shapes
        self.q = q.to(self.carrier).reshape(s.B, s.Hkv, s.G, s.L, s.D)
        self.k = padded(k.to(self.carrier).reshape(s.B * s.Hkv, s.S, s.D), s.S, self.D)
        self.v = padded(v.to(self.carrier).reshape(s.B * s.Hkv, s.S, s.Dv), s.S, self.Dv)
        self.buffers: dict[str, Tensor] = {}
        self._tiles: dict[tuple[str, int, int], Tensor] = {}
        # The backward pass needs the capped scores before the bias.
        self.keep_capped, self.capped = False, None
        self.place = slice(None), slice(None)

    def by_key_head(self) -> Iterator[Self]:
        """A call for each key head, since more rows of fewer heads take fewer products. Only without mask and bias."""
        s = self.shapes
        for n in range(s.B * s.Hkv):
            b, h = divmod(n, s.Hkv)
            part = copy.copy(self)
            part.shapes, part._tiles = replace(s, B=1, H=s.G, Hkv=1), {}
            part.q, part.k, part.v = self.q[b : b + 1, h : h + 1], self.k[n : n + 1], self.v[n : n + 1]
            part.place = slice(b, b + 1), slice(h * s.G, (h + 1) * s.G)
            yield part

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
        width = tile_width(min(size, S), self.paths.narrow_scores and not self.paths.native)
        return [slice(j, min(j + size, S)) for j in range(0, S, size)], width

    def chunks(self, step: int, width: int) -> Iterator[Chunk]:
        """The rows in chunks of a multiple of `step`, of CHUNK scores (B, H, R, width)."""
        s = self.shapes
        fitting = CHUNK // max(1, width * s.B * s.H)
        size = step * max(1, fitting // step)
        for start in range(0, s.L, size):
            yield self.chunk(slice(start, min(start + size, s.L)))

    def chunk(self, rows: slice) -> Chunk:
        s, R = self.shapes, round_up(rows.stop - rows.start, 16)
        q = padded(self.q[:, :, :, rows], R, self.D)
        q = q.view(s.B * s.Hkv, s.G * R, self.D)
        return Chunk(rows, R, q, q * self.features.scale if self.paths.scaled_queries else q, self.place)

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
        return self._tile("k", keys, W, lambda: padded(self.k[:, keys], W, self.D))

    def values(self, keys: slice, W: int) -> Tensor:
        """A tile of V (N, W, Dv), made once for all chunks."""
        return self._tile("v", keys, W, lambda: padded(self.v[:, keys], W, self.Dv))

    def keys_t(self, keys: slice, W: int) -> Tensor:
        """A tile of K transposed, (N, D, W); laid out in that order where the matrix units want it so."""
        if self.paths.narrow_scores or self.paths.native:
            return self._tile("kt", keys, W, lambda: self.keys(keys, W).mT.contiguous())
        return self.keys(keys, W).mT

    def _tile(self, name: str, keys: slice, W: int, make: Callable[[], Tensor]) -> Tensor:
        place = (name, keys.start, W)
        if place not in self._tiles:
            self._tiles[place] = make()
        return self._tiles[place]

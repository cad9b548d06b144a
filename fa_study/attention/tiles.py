"""The loops of FlashAttention 1, 2 and 4 over key tiles, one rounding per operation.

With m the running maximum, l the row sum, a = exp(m_old - m) and P = exp(S - m), for each key tile:

    l = a l + rowsum(P)
    fa1    O = ((a l_old) O + P V) / l       O is normalised after every tile (FlashAttention 1, Algorithm 1; P is taken
                                             from the new running maximum, as in every released kernel)
    fa2    O = a O + P V                     divided by l once, at the end
    fa4    as fa2, but m keeps its old value (a = 1) while it would grow by no more than a threshold
                                             (the first maximum is always taken)

Shape letters: see `fa_study.attention.call`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fa_study.attention.call import Call, Chunk
from fa_study.attention.exponentials import fexp_u20

ALGORITHMS = ("fa1", "fa2", "fa4")
Shift = Callable[[Tensor, Tensor], Tensor]


@dataclass
class TileOptions:
    """What only the tiled algorithms have."""

    Br: int
    Bc: int
    algorithm: str
    reverse: bool
    rescale_threshold: float
    shift: Shift | None


@dataclass
class Rows:
    """The state of a chunk of rows: m, l (B, H, R, 1) and o (B, H, R, Dv); top is the largest score so far."""

    m: Tensor
    l: Tensor
    o: Tensor
    top: Tensor
    counts: dict[str, int] = field(default_factory=lambda: {"tiles": 0, "rescalings": 0})


def run_tiles(call: Call, options: TileOptions):
    """Yields (rows, out (B, H, R, Dv), lse (B, H, R, 1), largest scores, counts) for every chunk of rows."""
    tiles, W = call.key_tiles(options.Bc)
    plain = _is_plain(call, options)
    for part in call.by_key_head() if plain else (call,):
        for chunk in part.chunks(options.Br, W):
            s = part.shapes
            column = torch.full((s.B, s.H, chunk.R, 1), -math.inf, dtype=call.carrier, device=chunk.q.device)
            o = column.new_zeros(s.B, s.H, chunk.R, call.Dv)
            state = Rows(column, torch.zeros_like(column), o, column)
            for keys in reversed(tiles) if options.reverse else tiles:
                if plain and keys.stop - keys.start == W:
                    _add_plain_tile(part, options, chunk, keys, W, state)
                else:
                    _add_tile(part, options, chunk, keys, W, state)
            yield chunk, *_finish(part, options, chunk, state), state.top, state.counts


def _is_plain(call: Call, options: TileOptions) -> bool:
    """Whether `_add_plain_tile` does all that `_add_tile` would, for a full tile of keys."""
    sites, features, paths = call.sites, call.features, call.paths
    inner = all(map(sites.is_free, ("scores", "max", "exponentials", "sum", "rescale", "accumulator")))
    repeatable = call.policy.probabilities.mode != "stochastic"  # whose numbers fall on other elements in other chunks
    simple = features.bias is None and features.softcap is None and not features.hides
    simple = simple and call.exp in ("exact", "fexp_u20") and call.probability_scale == 1
    # Bfloat16 tensors need the detours by way of float32 that only `_add_tile` takes.
    return inner and repeatable and simple and paths.mild and not paths.native and options.algorithm == "fa2"


def _add_plain_tile(call: Call, options: TileOptions, chunk: Chunk, keys: slice, W: int, state: Rows) -> None:
    """The operations of `_add_tile` that have an effect where no key is absent, nothing overflows, and only P is
    rounded: in PyTorch, calls cost as much as arithmetic on a tile of this size."""
    flat = call.buffered_product("scores", chunk.left, call.keys_t(keys, W), call.paths.narrow_scores)
    s = call.heads(flat)
    if not call.paths.scaled_queries:
        s.mul_(call.features.scale)
    m = torch.maximum(state.m, s.amax(-1, keepdim=True))
    e = fexp_u20(s.sub_(m)) if call.exp == "fexp_u20" else s.sub_(m).exp_()
    total = e.sum(-1, keepdim=True)
    p = e if call.paths.casts_probabilities else call.sites("probabilities", e)
    pv = call.heads(call.buffered_product("values", call.flat(p), call.values(keys, W), call.paths.narrow_values))
    if state.counts["tiles"]:
        state.counts["rescalings"] += int(torch.count_nonzero((m > state.m)[:, :, : chunk.length]))
    state.counts["tiles"] += _live_tiles(call, options, chunk, None)
    a = torch.exp(state.m - m)
    state.l.mul_(a).add_(total)
    state.o.mul_(a).add_(pv)
    state.m = state.top = m


def _add_tile(call: Call, options: TileOptions, chunk: Chunk, keys: slice, W: int, state: Rows) -> None:
    if call.features.is_dead(chunk.rows, keys):
        return
    dead, bias = call.features.tile(chunk.rows, chunk.R, keys, W, chunk.q.device)
    gone = None if dead is None else dead.all(-1, keepdim=True)
    if gone is not None and gone[:, :, : chunk.length].all():
        return
    state.counts["tiles"] += _live_tiles(call, options, chunk, gone)
    if gone is not None and not gone.any():
        gone = None

    sites, R = call.sites, chunk.length
    s, offset = call.scores(chunk, keys, W, dead, bias)
    largest = call.row_max(s)
    if offset is not None:
        largest = largest + offset
    m = sites("max", torch.maximum(state.m, largest), gone, R)
    is_top = options.algorithm != "fa4" and options.shift is None and sites.is_free("max")
    top = m if is_top else torch.maximum(state.top, largest)
    if options.algorithm == "fa4":
        # The first maximum is always taken, whatever the threshold.
        kept = ((m - state.m) * math.log2(math.e) <= options.rescale_threshold) & (state.m > -math.inf)
        m = torch.where(kept, state.m, m)
    if options.shift is not None:
        m = sites("max", options.shift(s, m), gone, R)
    # Where every row has a key in this tile, and nothing overflows, every maximum is finite.
    finite_m = m if gone is None and not call.paths.risky else m.masked_fill(m == -math.inf, 0.0)
    grown = (m > state.m) & (state.m > -math.inf)
    if gone is not None:
        grown &= ~gone
    rescalings = int(torch.count_nonzero(grown[:, :, :R]))
    state.counts["rescalings"] += rescalings

    subtracted = finite_m if offset is None else sites("max", finite_m - offset, gone, R)
    _, p, total = call.exponentials(s, subtracted, dead, R)
    pv = call.times_values(p, keys, W, dead, R)
    # A row without a key in this tile gets its old values back below.
    o = state.o if gone is None else state.o.clone()
    if rescalings or call.paths.risky:
        a = sites("rescale", call.exp_small(sites("rescale", state.m - finite_m, gone, R)), gone, R)
        scaled = sites("sum", a * state.l, gone, R)
    else:
        # Each factor is 1, or the first one, on l = 0 and O = 0: it changes no bit.
        a, scaled = None, state.l
    l = sites("sum", scaled + total, gone, R)
    if options.algorithm == "fa1":
        o = sites("accumulator", o.mul_(scaled), gone, R)
        o = sites("accumulator", o.add_(pv), gone, R)
        o = sites("accumulator", o.div_(l), gone, R)
    else:
        o = o if a is None else sites("accumulator", o.mul_(a), gone, R)
        o = sites("accumulator", o.add_(pv), gone, R)
    if gone is not None:
        # A tile without a live key for a row leaves that row alone, to the bit.
        m, l, o, top = (
            torch.where(gone, old, new) for old, new in zip((state.m, state.l, state.o, state.top), (m, l, o, top))
        )
    state.m, state.l, state.o, state.top = m, l, o, top


def _live_tiles(call: Call, options: TileOptions, chunk: Chunk, gone: Tensor | None) -> int:
    """How many of the Br x Bc tiles in this chunk hold a live key."""
    s, Br = call.shapes, options.Br
    if gone is None:
        return s.B * s.H * -(-chunk.length // Br)
    live = ~gone[:, :, : chunk.length].expand(-1, -1, chunk.length, 1).squeeze(-1)
    whole = torch.nn.functional.pad(live, (0, -chunk.length % Br)).unflatten(-1, (-1, Br))
    return int(whole.any(-1).expand(s.B, s.H, -1).sum())


def _finish(call: Call, options: TileOptions, chunk: Chunk, state: Rows) -> tuple[Tensor, Tensor]:
    sites, R = call.sites, chunk.length
    empty = state.m == -math.inf
    o, l = state.o, state.l
    if options.algorithm != "fa1":
        o.mul_(sites("sum", call.reciprocal(l), empty, R))
    out = sites("output", o, empty, R)
    return out.masked_fill(empty, 0.0) if empty.any() else out, call.lse(state.m, l, empty, R)

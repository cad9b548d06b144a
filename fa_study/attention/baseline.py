"""The baseline: attention written out over whole rows of scores.

The sums over keys run in slabs of fixed size, so that keys that are padded and masked change no bit.
Shape letters: see `fa_study.attention.call`.
"""

from __future__ import annotations

import math

from fa_study.attention.call import Call


def run_baseline(call: Call):
    """Yields (chunk, out (B, H, R, Dv), lse (B, H, R, 1), largest scores, counts) for every chunk of rows."""
    (keys,), W = call.key_tiles(call.shapes.S)
    for chunk in call.chunks(16, W):
        dead, bias = call.features.tile(chunk.rows, chunk.R, keys, W, chunk.q.device)
        sites, R = call.sites, chunk.length
        s, _ = call.scores(chunk, keys, W, dead, bias)
        m = sites("max", call.row_max(s), None, R)
        empty = m == -math.inf
        e, _ = call.exp_difference(s, m.masked_fill(empty, 0.0), dead, R)
        l = sites("sum", e.sum(-1, keepdim=True), None, R)
        p = sites("probabilities", e / l.masked_fill(empty, 1.0), dead, R)
        o = call.times_values(p, keys, W, dead, R)
        out = sites("output", o, None, R).masked_fill(empty, 0.0)
        tiles = {"tiles": call.shapes.B * call.shapes.H, "rescalings": 0}
        yield chunk, out, call.lse(m, l, empty, R), m, tiles

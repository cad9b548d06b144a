"""Figure 1: the tiles in which Flash Attention walks over the matrix of scores.

N sequence length, D head size, M elements of fast memory, Br x Bc rows and columns of a tile.
"""

from __future__ import annotations

import math

import pandas as pd


def block_sizes(M: int, D: int) -> tuple[int, int]:
    """Tile of FlashAttention 1 for a fast memory of `M` elements: Bc = ceil(M / 4D), Br = min(ceil(M / 4D), D).

    Returns
    -------
    (Br, Bc) : rows (queries) and columns (keys) of a tile.

    Source: Dao et al. 2022 (arXiv 2205.14135), Algorithm 1, line 1; the paper under study uses the same.
    """
    if M < 1 or D < 1:
        raise ValueError(f"memory and head size are positive numbers of elements, got M={M} and D={D}")
    Bc = math.ceil(M / (4 * D))
    return min(Bc, D), Bc


def tile_walk(N: int, *, M: int, D: int, algorithm: str = "fa1") -> pd.DataFrame:
    """Every tile of the N x N score matrix with its place and its turn.

    FlashAttention 1 loops over key blocks outside and query blocks inside; FlashAttention 2 the other way round. A
    query row meets its key tiles in the same order in both, which is why only Bc matters to its arithmetic.

    Returns
    -------
    DataFrame : columns query_start, query_end, key_start, key_end (half-open), turn (from 1), rescalings (how often the
        tile's rows may have been rescaled before: the number of key tiles already seen).
    """
    if N < 1:
        raise ValueError(f"the sequence length is a positive number, got N={N}")
    if algorithm not in ("fa1", "fa2"):
        raise ValueError(f"algorithm is fa1 or fa2, got {algorithm!r}")
    Br, Bc = block_sizes(M, D)
    queries, keys = range(0, N, Br), range(0, N, Bc)
    order = [(q, k) for k in keys for q in queries] if algorithm == "fa1" else [(q, k) for q in queries for k in keys]
    return pd.DataFrame(
        {
            "query_start": q,
            "query_end": min(q + Br, N),
            "key_start": k,
            "key_end": min(k + Bc, N),
            "turn": turn,
            "rescalings": k // Bc,
        }
        for turn, (q, k) in enumerate(order, start=1)
    )

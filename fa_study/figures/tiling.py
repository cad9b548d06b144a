"""Figure 1: the tiles over the matrix of scores, to scale and numbered in the order of their computation."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.figures.theme import describe


def tiling(walk: pd.DataFrame, title: str) -> alt.LayerChart:
    """Draw the tiles of `experiments.tiling.tile_walk`: keys to the right, queries downwards, darker is later."""
    frame = walk.assign(
        key_middle=(walk["key_start"] + walk["key_end"]) / 2,
        query_middle=(walk["query_start"] + walk["query_end"]) / 2,
        dark=walk["turn"] > walk["turn"].max() * 0.6,
    )
    N = int(frame["query_end"].max())
    first = frame.iloc[0]
    Br, Bc = int(first["query_end"]), int(first["key_end"])
    base = alt.Chart(frame, title=title)
    keys = alt.X("key_start:Q").scale(domain=[0, N], nice=False).title("key").axis(grid=False, tickCount=5)
    queries = alt.Y("query_start:Q").scale(domain=[0, N], reverse=True, nice=False).title("query").axis(grid=False)
    tiles = base.mark_rect(stroke="white", strokeWidth=1.5).encode(
        keys,
        queries,
        alt.X2("key_end:Q"),
        alt.Y2("query_end:Q"),
        alt.Color("turn:Q").scale(scheme="blues", domain=[1, int(frame["turn"].max())]).legend(None),
        tooltip=[
            alt.Tooltip("turn:Q"),
            alt.Tooltip("query_start:Q").title("first query"),
            alt.Tooltip("key_start:Q").title("first key"),
            alt.Tooltip("rescalings:Q").title("rescalings so far"),
        ],
    )
    numbers = base.mark_text(fontSize=12).encode(
        alt.X("key_middle:Q"),
        alt.Y("query_middle:Q"),
        alt.Text("turn:Q"),
        alt.Color("dark:N", legend=None).scale(domain=[False, True], range=["black", "white"]),
    )
    text = f"The {N} x {N} matrix of scores in tiles of {Br} queries by {Bc} keys, numbered in order of computation."
    return describe((tiles + numbers).resolve_scale(color="independent"), text)

"""Figure 2: the micro-benchmark as a drawing (Q, K, V through three computations), and what each preset rounds."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.figures.bands import format_name
from fa_study.figures.theme import COLOURS, describe

# name, x and y of the middle, lines of text, colour
_BOXES = [
    ("qkv", 0, 2, "same random|Q, K, V", "#666666"),
    ("golden", 1.5, 3, "Baseline|in FP64", COLOURS["golden"]),
    ("baseline", 1.5, 2, "Baseline|tested format", COLOURS["Baseline"]),
    ("kernel", 1.5, 1, "Flash kernel|on this device", COLOURS["Flash"]),
    ("emulation", 1.5, 0, "Flash emulated|format per site", COLOURS["Flash"]),
    ("distance", 3, 2, "Max Difference,|RMS, mean", "#666666"),
    ("valid", 3, 0.5, "does it predict|the kernel?", "#666666"),
]
_ARROWS = [
    ("qkv", "golden"),
    ("qkv", "baseline"),
    ("qkv", "kernel"),
    ("qkv", "emulation"),
    ("golden", "distance"),
    ("baseline", "distance"),
    ("kernel", "distance"),
    ("emulation", "distance"),
    ("kernel", "valid"),
    ("emulation", "valid"),
]


def micro_benchmark() -> alt.LayerChart:
    """The design of the micro-benchmark as boxes and arrows."""
    half_width, half_height = 0.52, 0.3
    boxes = pd.DataFrame(_BOXES, columns=["name", "x", "y", "text", "colour"])
    boxes = boxes.assign(
        left=boxes["x"] - half_width,
        right=boxes["x"] + half_width,
        low=boxes["y"] - half_height,
        high=boxes["y"] + half_height,
        text=boxes["text"].str.split("|"),
    )
    places = boxes.set_index("name")
    arrows = pd.DataFrame(
        {
            "x": places.loc[start, "right"],
            "y": places.loc[start, "y"],
            "x2": places.loc[end, "left"] - 0.06,
            "y2": places.loc[end, "y"],
        }
        for start, end in _ARROWS
    )
    # Every layer has to say that it has no axis: one that says nothing breaks the merging of axes.
    x = {name: alt.X(f"{name}:Q", axis=None).scale(domain=[-0.6, 3.6]) for name in ("left", "x", "x2")}
    y = {name: alt.Y(f"{name}:Q", axis=None).scale(domain=[-0.4, 3.4]) for name in ("low", "y", "y2")}
    rectangles = (
        alt.Chart(boxes)
        .mark_rect(fill="white", strokeWidth=2, cornerRadius=4)
        .encode(x["left"], y["low"], alt.X2("right:Q"), alt.Y2("high:Q"), alt.Stroke("colour:N", scale=None))
    )
    words = alt.Chart(boxes).mark_text(fontSize=11, lineHeight=13, dy=-6).encode(x["x"], y["y"], text="text:N")
    lines = alt.Chart(arrows).mark_rule(color="#888888").encode(x["x"], y["y"], alt.X2("x2:Q"), alt.Y2("y2:Q"))
    heads = alt.Chart(arrows).mark_point(shape="triangle-right", color="#888888", filled=True, opacity=1, size=60)
    return describe(
        (rectangles + lines + heads.encode(x["x2"], y["y2"]) + words).properties(width=350, height=270),
        "The same random Q, K and V go through Baseline in FP64, Baseline in the tested format, the real Flash kernel "
        "and the emulated one. All outputs are compared, and the emulation is checked against the kernel.",
    )


def rounding_sites(table: pd.DataFrame) -> alt.LayerChart:
    """A row per rounding site, a column per policy, and in the cell the format that the policy uses there.

    Parameters
    ----------
    table : `experiments.design.policy_table`'s.
    """
    cells = table.melt(["site", "what is rounded"], var_name="policy", value_name="format")
    cells["narrow"] = cells["format"] != "fp32"
    cells["format"] = cells["format"].map(format_name)
    policies = list(dict.fromkeys(cells["policy"]))
    base = alt.Chart(cells).encode(
        alt.X("policy:N", sort=policies).title(None).axis(orient="top", labelAngle=0, ticks=False, domain=False),
        alt.Y("site:N", sort=None).title(None).axis(ticks=False, domain=False),
    )
    rectangles = base.mark_rect(stroke="white", strokeWidth=2).encode(
        alt.Color("narrow:N", legend=None).scale(domain=[True, False], range=[COLOURS["low precision"], "#f0f0f0"]),
        tooltip=["site:N", "what is rounded:N", "policy:N", "format:N"],
    )
    words = base.mark_text(fontSize=11, aria=False).encode(text="format:N")
    rounded = cells[cells["narrow"]].groupby("policy", sort=False)["site"].agg(", ".join)
    return describe(
        (rectangles + words).properties(width=62 * len(policies), height=21 * len(table)),
        "Sites in a format narrower than FP32: " + "; ".join(f"{p}: {rounded.get(p, 'none')}" for p in policies) + ".",
    )

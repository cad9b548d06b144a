"""Where in the network: deviation beside drift per attention layer, and Flash's drift beside a twin's per tensor."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.experiments.layers import YARDSTICKS
from fa_study.figures.theme import COLOURS, describe

KEY_BIASES = "key bias (no gradient)"
# Part of the model -> colour and shape. Here a colour stands for a part and not for a pair of runs.
_PARTS = {
    "self-attention": (COLOURS["Flash"], "circle"),
    "cross-attention": (COLOURS["data order"], "square"),
    "feed-forward": (COLOURS["initialisation"], "diamond"),
    "text encoder": (COLOURS["low precision"], "triangle-up"),
    "other": (COLOURS["repeat"], "triangle-down"),
    KEY_BIASES: (COLOURS["golden"], "cross"),
}


def _marks(data: pd.DataFrame) -> tuple[alt.Color, alt.Shape]:
    """Colour and shape of the parts that occur, with one legend."""
    parts = [part for part in _PARTS if part in set(data["part"])]
    colours, shapes = zip(*(_PARTS[part] for part in parts))
    return (
        alt.Color("part:N").scale(domain=parts, range=list(colours)).title(None).legend(columns=3),
        alt.Shape("part:N").scale(domain=parts, range=list(shapes)).title(None),
    )


def _log_x(field: str, title: str) -> alt.X:
    scale = alt.Scale(type="log", nice=False, padding=8)
    return alt.X(f"{field}:Q", scale=scale, title=title).axis(format=".0e", tickCount=4, labelOverlap=True)


def _log_y(field: str, title: str) -> alt.Y:
    return alt.Y(f"{field}:Q", title=title).scale(type="log", nice=False, padding=8).axis(format=".0e", tickCount=4)


def _beside(charts: list[alt.LayerChart] | list[alt.Chart], text: str) -> alt.ConcatChart:
    return describe(alt.concat(*charts, columns=1).resolve_scale(color="shared", shape="shared"), text)


def deviation_and_drift(layers: pd.DataFrame) -> alt.ConcatChart:
    """Drift of an attention layer's weights against Flash's deviation from Baseline there, a mark per seed and layer.

    Parameters
    ----------
    layers : `experiments.layers.attention_layers` of one step.
    """
    colour, shape = _marks(layers)
    charts = [
        alt.Chart(part)
        .mark_point(size=60)
        .encode(
            _log_x("deviation", YARDSTICKS["deviation"].replace("-", "−")),
            _log_y("flash", "relative L2 distance of the layer's weights"),
            colour,
            shape,
            tooltip=[
                *("layer:N", "seed:Q"),
                *(alt.Tooltip(f"{name}:Q").format(".2e") for name in (*YARDSTICKS, "flash", "twin")),
            ],
        )
        .properties(width=260, height=200, title=precision.upper())
        for precision, part in layers.groupby("precision")
    ]
    medians = layers.groupby(["precision", "part"])[["deviation", "flash"]].median()
    words = "; ".join(
        f"{precision.upper()}, {part}: {row['deviation']:.2g} and {row['flash']:.2g}"
        for (precision, part), row in medians.iterrows()
    )
    return _beside(charts, f"Deviation and drift of the attention layers. Medians: {words}.")


def flash_against_twin(drift: pd.DataFrame) -> alt.ConcatChart:
    """Drift of every tensor between Flash and Baseline against that between ulp twins: the median over the seeds.

    Parameters
    ----------
    drift : `experiments.layers.tensor_drift` of one step.
    """
    keys = ["precision", "name", "part", "zero_gradient"]
    data = drift.groupby(keys, as_index=False)[["flash", "twin"]].median()
    data["part"] = data["part"].where(~data["zero_gradient"], KEY_BIASES)
    colour, shape = _marks(data)
    charts, words = [], []
    for precision, part in data.groupby("precision"):
        x = _log_x("twin", "relative L2 distance of a tensor, ulp twin")
        y = _log_y("flash", "the same, Flash against Baseline")
        points = (
            alt.Chart(part)
            .mark_point(size=45, filled=False)
            .encode(
                x,
                y,
                colour,
                shape,
                tooltip=["name:N", *(alt.Tooltip(f"{n}:Q").format(".2e") for n in ("twin", "flash"))],
            )
        )
        ends = part[["twin", "flash"]].to_numpy()
        diagonal = pd.DataFrame({"twin": [ends.min(), ends.max()], "flash": [ends.min(), ends.max()]})
        equal = alt.Chart(diagonal).mark_line(color="#888888", strokeDash=[4, 3], strokeWidth=1).encode(x, y)
        charts.append((equal + points).properties(width=260, height=230, title=precision.upper()))
        ratio = (part["flash"] / part["twin"]).groupby(part["part"]).median()
        words.append(f"{precision.upper()} " + ", ".join(f"{name} {value:.2f}" for name, value in ratio.items()))
    return _beside(charts, f"Drift of every tensor. Median ratio of Flash to the twin: {'; '.join(words)}.")

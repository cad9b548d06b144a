"""What the micro-benchmark's charts share: median over the seeds as a line, 5th to 95th percentile as a band."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from fa_study.figures.theme import log_y

FORMAT_NAMES = {"bf16": "BF16", "fp16": "FP16", "tf32": "TF32", "fp32": "FP32", "fp64": "FP64"}


def format_name(fmt: str) -> str:
    """How a reader knows a format: "BF16"."""
    return FORMAT_NAMES.get(fmt, fmt)


def seed_bands(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """Median, 5th and 95th percentile of `value` over the seeds, one row for each combination of `by`."""
    grouped = frame.groupby(list(by), sort=False)[value]
    return pd.DataFrame(
        {
            "median": grouped.median(),
            "low": grouped.quantile(0.05),
            "high": grouped.quantile(0.95),
            "seeds": grouped.count(),
        }
    ).reset_index()


def positive(shown: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a place on a logarithmic axis: a single zero would make a whole band disappear."""
    return shown[shown["low"] > 0]


def tooltips(*names: str, number: str = ".3e") -> list[alt.Tooltip]:
    """Tooltips of the named columns, then of the median and the band."""
    return [
        *(alt.Tooltip(f"{name}:N") for name in names),
        alt.Tooltip("median:Q").format(number),
        alt.Tooltip("low:Q").format(number).title("5th percentile"),
        alt.Tooltip("high:Q").format(number).title("95th percentile"),
        alt.Tooltip("seeds:Q"),
    ]


def powers_of_two(field: str, title: str) -> alt.X:
    """A logarithmic x axis in powers of two."""
    return alt.X(f"{field}:Q").scale(type="log", base=2, nice=False, padding=12).title(title).axis(labelOverlap=True)


def band_lines(
    shown: pd.DataFrame, x: alt.X, y_title: str, *, colour: str, series: str, legend: str | None, log: bool = True
) -> alt.LayerChart:
    """Lines with bands in one colour, told apart by dash and shape.

    Parameters
    ----------
    shown : rows of `seed_bands` with the column named by `series`.
    colour : of everything; meanings have colours, series of one meaning have dashes.
    legend : title of the legend; None for no legend.
    """
    order = list(dict.fromkeys(shown[series]))
    columns = 2 if max(map(len, order)) < 12 else 1
    axis = alt.Legend(title=legend, labelLimit=320, columns=columns) if legend is not None else None

    def y(field: str) -> alt.Y:
        return log_y(field, y_title) if log else alt.Y(f"{field}:Q").title(y_title)

    base = alt.Chart(shown).encode(x)
    band = base.mark_area(color=colour, opacity=0.2).encode(y("low"), alt.Y2("high:Q"), alt.Detail(f"{series}:N"))
    line = base.mark_line(color=colour).encode(y("median"), alt.StrokeDash(f"{series}:N", sort=order).legend(axis))
    points = base.mark_point(color=colour).encode(
        y("median"), alt.Shape(f"{series}:N", sort=order).legend(None), tooltip=tooltips(series, x.to_dict()["field"])
    )
    return band + line + points


def summary(shown: pd.DataFrame, name: str, number: str = ".2e") -> str:
    """The medians in words, for the text alternative."""
    return "; ".join(f"{row[name]}: {row['median']:{number}}" for _, row in shown.iterrows())

"""One look for every chart: the registered Altair theme, the colours by meaning, the renderer of the offline book."""

from __future__ import annotations

import hashlib
import html
import json
import re
from typing import TypeVar

import altair as alt
import vl_convert

# One colour per meaning through the whole book. The palette is that of Okabe and Ito (2008), which readers with any
# common colour blindness can tell apart; a second channel (dash or shape) always goes with it for print.
COLOURS = {
    "Flash": "#0072B2",
    "Baseline": "#D55E00",
    "golden": "#000000",
    "low precision": "#CC79A7",
    "initialisation": "#009E73",
    "repeat": "#999999",
    "ulp twins": "#56B4E9",
    "data order": "#E69F00",
    "tiled": "#7B3F00",
}

_THEME = {
    "config": {
        # A named font that a machine lacks prints no text at all in PNG; the generic family is always there.
        "font": "sans-serif",
        "background": "white",
        "view": {"continuousWidth": 280, "continuousHeight": 240, "stroke": None},
        "axis": {
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "gridColor": "#e6e6e6",
            "domainColor": "#666666",
            "tickColor": "#666666",
        },
        "legend": {
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "orient": "bottom",
            "columns": 1,
        },
        "title": {"fontSize": 13, "fontWeight": "normal", "anchor": "start"},
        "line": {"strokeWidth": 2},
        "point": {"size": 40, "filled": True},
    }
}

_Chart = TypeVar("_Chart", bound=alt.TopLevelMixin)


def register_theme() -> None:
    """Make the book's theme the active one."""
    alt.theme.register("fa_study", enable=True)(lambda: alt.theme.ThemeConfig(_THEME))


def _static_svg(spec: str) -> str:
    """The chart for readers without scripts, with names of its own: all charts of a page share one set of ids."""
    prefix = "s" + hashlib.sha256(spec.encode()).hexdigest()[:8]
    svg = vl_convert.vegalite_to_svg(spec, vl_version="6.4")
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", svg)


def _render_offline(spec: dict, **_: object) -> dict[str, str]:
    """A chart as HTML that needs no other host: drawn by the book's own Vega, or a static SVG without scripts.

    Switches are put beside the picture, not into it: what has the role of an image is one thing for a screen reader.
    """
    text = json.dumps(spec)
    label = html.escape(str(spec.get("usermeta", {}).get("alt", "")), quote=True)
    draw = (
        "(s => vegaEmbed(s.previousElementSibling, "
        + text
        + ", {mode: 'vega-lite', renderer: 'svg', actions: false, bind: s.parentElement.firstElementChild})"
        + ")(document.currentScript)"
    )
    # "</" inside a script element would end it early.
    script = draw.replace("</", "<\\/")
    picture = f'<div role="img" aria-label="{label}">'
    return {
        "text/html": f'<div class="fa-chart"><form class="fa-switches"></form>{picture}</div><script>{script}</script>'
        f"<noscript>{picture}{_static_svg(text)}</div></noscript></div>"
    }


def use_book_renderer() -> None:
    """Draw charts through the script that the book ships: the first call of every notebook."""
    register_theme()
    alt.renderers.register("fa_study", _render_offline)
    alt.renderers.enable("fa_study")


def describe(chart: _Chart, text: str) -> _Chart:
    """Give `chart` the text alternative that screen readers read."""
    return chart.properties(usermeta={"alt": text})


def log_y(field: str, title: str) -> alt.Y:
    """A logarithmic y axis labelled with powers of ten. Zeros have no place on it: leave them out first."""
    return alt.Y(field, type="quantitative").scale(type="log").title(title).axis(format=".0e", tickCount=5)


def switch(name: str, label: str, labels: dict[str, str]) -> alt.Parameter:
    """A drop-down list beside a chart, {value: what the reader sees}; the first value is chosen at the start."""
    options = list(labels)
    choice = alt.binding_select(options=options, labels=list(labels.values()), name=f"{label}: ")
    return alt.param(name=name, value=options[0], bind=choice)

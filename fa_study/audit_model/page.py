"""A model's audit as one HTML file that works offline, with charts in the book's theme."""

from __future__ import annotations

import html

import altair as alt
import pandas as pd

from fa_study.audit.page import offline_page, table
from fa_study.audit_model.report import layer_summary, verdict_line
from fa_study.audit_model.run import ModelReport
from fa_study.figures.theme import COLOURS, describe, log_y, register_theme

_X = (
    alt.X("number:Q")
    .title("attention layer, in the order of the calls")
    .axis(tickMinStep=1, format="d")
    .scale(zero=False)
)


def growth_chart(report: ModelReport) -> alt.VConcatChart | None:
    """Relative difference of B from A in every attention layer of the whole passes, and the twins'; None if none."""
    register_theme()
    rows = report.growth[report.growth.difference.gt(0) | report.growth.twins_high.gt(0)].copy()
    if rows.empty:
        return None
    rows["number"] = rows.depth + 1
    names = [f"{report.b} against {report.a}", f"twins of {report.a}"]
    colour = alt.Color("kind:N").title(None).scale(domain=names, range=[COLOURS["Flash"], COLOURS["ulp twins"]])
    colour = colour.legend(symbolOpacity=1, labelLimit=400)
    panels = []
    for direction, what in (("forward", "output"), ("backward", "gradient")):
        part = rows[rows.direction == direction]
        y = f"relative difference, {what}"
        own = part[part.difference > 0].assign(kind=names[0])
        twins = part[part.twins_low > 0].assign(kind=names[1])
        line = alt.Chart(own).mark_line(point=True).encode(_X, log_y("difference", y), colour)
        line = line.encode(tooltip=["layer:N", alt.Tooltip("difference:Q").format(".2e")])
        band = alt.Chart(twins).mark_area(opacity=0.5).encode(_X, log_y("twins_low", y), alt.Y2("twins_high"), colour)
        edge = alt.Chart(twins).mark_line(strokeDash=[4, 3]).encode(_X, alt.Y("twins_high:Q"), colour)
        panels.append((band + edge + line).properties(title=f"{direction} pass", width=280, height=220))
    text = " ".join(f.text + "." for f in report.findings if f.code.endswith("-growth"))
    return describe(alt.vconcat(*panels), text)


def ratio_chart(report: ModelReport) -> alt.LayerChart | None:
    """Error of B over error of A in every layer, from the same inputs, with the limits; None without any."""
    register_theme()
    rows = report.layers[report.layers.ratio.between(1e-6, 1e6)].copy()
    if rows.empty:
        return None
    rows["number"] = rows.layer.map({name: i + 1 for i, name in enumerate(dict.fromkeys(report.layers.layer))})
    rows["kind"] = rows.tensor.map({"out": "output (limit 2)", "gradient": "gradient (limit 3)"})
    kinds, colours = ["output (limit 2)", "gradient (limit 3)"], ["#333333", "#999999"]
    points = (
        alt.Chart(rows)
        .mark_point(filled=True)
        .encode(
            _X,
            log_y("ratio", f"error ratio, {report.b} / {report.a}").axis(format="~g"),
            alt.Color("kind:N").title(None).scale(domain=kinds, range=colours),
            alt.Shape("kind:N").title(None).scale(domain=kinds),
            tooltip=["layer:N", "tensor:N", alt.Tooltip("ratio:Q").format(".3g"), "verdict:N"],
        )
    )
    limits = pd.DataFrame({"ratio": [2.0, 3.0], "kind": kinds})
    rules = alt.Chart(limits).mark_rule(strokeDash=[4, 4]).encode(alt.Y("ratio:Q"), alt.Color("kind:N"))
    text = f"Error ratios of {len(rows)} results; {int((rows.verdict == 'fail').sum())} exceed their limit."
    return describe((rules + points).properties(width=420, height=240), text)


def to_html(report: ModelReport) -> str:
    """The whole report as one page with every script inside."""
    a, b = html.escape(report.a), html.escape(report.b)
    facts = pd.DataFrame(list(report.facts.items()))
    body = f"""<h2>Is every layer's error expected?</h2><p>Every attention layer gets the inputs that it has under {a},
whatever came out of the layers below. Largest error against float64, {b} as a multiple of {a}. Expected: up to 2 for
the output, up to 3 for the gradient by the layer's inputs (the rule of FlashAttention's authors).</p>
<div id="ratios"></div>{table(layer_summary(report))}
<h2>How does the difference grow?</h2><p>Whole passes: |{b} - {a}| / |{a}| in L2 at every attention layer, beside twins
of {a}, whose weights were all moved by at most one unit in the last place.</p><div id="growth"></div>
<h2>What comes out?</h2><p>Relative L2 differences, and errors against float64. The loss has no verdict: one number may
be right by luck.</p>{table(report.end_to_end)}
<h2>What ran?</h2>{table(facts, ("what", "value"))}{table(report.operators)}
<h2>Every number</h2>{table(report.layers)}{table(report.growth)}"""
    title = f"Audit of {report.facts['model']}: {report.a} and {report.b}"
    charts = {"ratios": ratio_chart(report), "growth": growth_chart(report)}
    return offline_page(title, verdict_line(report), report, body, charts)

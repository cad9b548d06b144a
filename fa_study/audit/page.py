"""An audit as one HTML file that works offline, with charts in the book's theme."""

from __future__ import annotations

import html

import altair as alt
import pandas as pd
import vl_convert

from fa_study.audit.report import accuracy_summary, number, verdict_line
from fa_study.audit.run import AuditReport
from fa_study.figures.theme import describe, log_y, register_theme

_STYLE = """body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#111}
table{border-collapse:collapse;display:block;overflow-x:auto;margin:1rem 0}
td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}
.pass{color:#00664b}.fail{color:#a33b00}h1,h2{line-height:1.2}code{background:#f2f2f2;padding:0 .2rem}"""


def error_chart(report: AuditReport) -> alt.LayerChart | None:
    """Ratio of each case's error to standard attention's, with the limits; None without cases."""
    register_theme()
    rows = report.accuracy[report.accuracy.ratio.between(1e-6, 1e6)].copy()
    if rows.empty:
        return None
    rows["kind"] = rows.tensor.where(rows.tensor == "out", "gradients").replace("out", "output")
    points = (
        alt.Chart(rows)
        .mark_point(filled=True, opacity=0.7)
        .encode(
            alt.X("dtype:N").title("dtype of the inputs"),
            log_y("ratio", "error / standard attention's error").axis(format="~g"),
            alt.Color("kind:N").title(None).scale(range=["#333333", "#999999"]),
            alt.Shape("kind:N").title(None),
            alt.XOffset("kind:N"),
            tooltip=["case:N", "tensor:N", alt.Tooltip("max_error:Q").format(".2e"), "verdict:N"],
        )
    )
    limits = alt.Chart(pd.DataFrame({"ratio": [2.0, 3.0]})).mark_rule(strokeDash=[4, 4]).encode(alt.Y("ratio:Q"))
    text = f"Error ratios of {len(rows)} results; {int((rows.verdict == 'fail').sum())} exceed their limit."
    return describe((points + limits).properties(width=420, height=260), text)


def policy_chart(report: AuditReport) -> alt.Chart | None:
    """R2 of the five best policies of each dtype; None without policies."""
    register_theme()
    if report.policies.empty:
        return None
    rows = report.policies[~report.policies.backward.astype(bool)].groupby("dtype", sort=False).head(5).copy()
    rows["shown"] = rows.r2.clip(lower=0)
    rows["answer"] = rows.chosen.map({True: "predicts it", False: "does not"})
    chart = (
        alt.Chart(rows)
        .mark_bar()
        .encode(
            alt.X("shown:Q").title("R2, below 0 shown as 0").scale(domain=[0, 1]),
            alt.Y("policy:N", sort=None).title(None).axis(labelLimit=380),
            alt.Color("answer:N").title(None).scale(domain=["predicts it", "does not"], range=["#333333", "#bbbbbb"]),
            tooltip=["policy:N", alt.Tooltip("r2:Q").format(".4f"), alt.Tooltip("r2_check:Q").format(".4f")],
        )
        .properties(width=280)
        .facet(row=alt.Row("dtype:N").title(None))
        .resolve_scale(y="independent")
    )
    return describe(chart, "R2 of the policies that come nearest, for each dtype.")


def to_html(report: AuditReport) -> str:
    """The whole report as one page with every script inside."""
    charts = {"errors": error_chart(report), "policies": policy_chart(report)}
    policies = "".join(f"<li><b>{d}</b>: {html.escape(t)}</li>" for d, t in report.best_policies().items())
    tried = pd.DataFrame([(t.what, t.setting, t.answer, t.detail) for t in report.tried])
    facts = pd.DataFrame(list(report.facts.items()))
    body = f"""<h2>Is the error expected?</h2><p>Largest error against float64, as a multiple of standard attention's in
the same format. Expected: up to 2 for the output, up to 3 for gradients (the rule of FlashAttention's authors).</p>
<div id="errors"></div>{table(accuracy_summary(report))}
<h2>Which rounding explains it?</h2><p>R2 = 1 - |theirs - emulation|<sup>2</sup> / |theirs - golden|<sup>2</sup>,
fitted on half of the cases and checked on the others.</p><ul>{policies}</ul><div id="policies"></div>
<h2>How does it behave at the edges?</h2>{table(facts, ("question", "answer"))}
<h2>What does it support?</h2>{table(tried, ("what", "setting", "works", "detail"))}
<h2>Every case</h2>{table(report.accuracy)}"""
    return offline_page(f"Audit of {report.name}", verdict_line(report), report, body, charts)


def offline_page(title: str, verdict: str, report, body: str, charts: dict[str, alt.TopLevelMixin | None]) -> str:
    """A report as HTML without any other file: verdict, findings, body, where it was made.

    Parameters
    ----------
    report : what has `passed`, `findings`, `origin` and `seconds`.
    body : HTML with a `<div id="NAME"></div>` where the chart NAME goes; charts that are None are left out.
    """
    charts = {name: chart for name, chart in charts.items() if chart is not None}
    bundle = vl_convert.javascript_bundle(vl_version="6.4") if charts else ""
    draw = "".join(
        f'vegaEmbed("#{name}",{_script(chart.to_json(indent=None))},{{mode:"vega-lite",renderer:"svg",actions:false}});'
        for name, chart in charts.items()
    )
    tone = "pass" if report.passed else "fail"
    findings = "".join(
        f"<li class={f.level}><b>{f.level}</b> <code>{html.escape(f.code)}</code> {html.escape(f.text)}</li>"
        for f in report.findings
    )
    title = html.escape(title)
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>{title}</h1><p class={tone}><b>{html.escape(verdict)}</b></p><ul>{findings}</ul>
{body}
<p>{html.escape(", ".join(f"{k} {v}" for k, v in report.origin.items()))}; {report.seconds:.0f} s.</p>
<script>{bundle};{draw}</script></body></html>
"""


def _script(text: str) -> str:
    # Text of the callable must not end the script element.
    return text.replace("</", "<\\/")


def table(frame: pd.DataFrame, columns: tuple[str, ...] = ()) -> str:
    """A frame as an HTML table; `columns` are other headings."""
    if frame.empty:
        return "<p>Nothing was measured.</p>"
    head = "".join(f"<th>{html.escape(str(c))}</th>" for c in columns or frame.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(number(value))}</td>" for value in row) + "</tr>"
        for row in frame.itertuples(index=False)
    )
    return f"<table><tr>{head}</tr>{rows}</table>"

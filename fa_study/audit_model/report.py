"""A model's audit as text for a terminal."""

from __future__ import annotations

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from fa_study.audit.report import number
from fa_study.audit_model.run import ModelReport

_MOST = 24


def verdict_line(report: ModelReport) -> str:
    """The answer in one sentence."""
    failures = sum(f.level == "fail" for f in report.findings)
    what = f"{report.facts['model']} with {report.b} in place of {report.a}"
    if failures:
        return f"FAIL: {failures} thing{'s' if failures > 1 else ''} wrong with {what}"
    return f"PASS: the difference of {what} is expected in {report.facts['dtype']}"


def layer_summary(report: ModelReport) -> pd.DataFrame:
    """A row per attention layer: error ratios B / A from the same inputs, and their verdict; relative differences of
    the whole passes, forward and backward, beside those of the farthest twin.
    """
    rows = []
    for layer, table in report.layers.groupby("layer", sort=False):
        of = table.set_index("tensor")
        row = {"layer": layer}
        for tensor in ("out", "gradient"):
            verdict = of.verdict[tensor]
            row[f"{tensor}_ratio"] = of.ratio[tensor] if verdict in ("pass", "fail") else verdict
        row["verdict"] = "pass" if set(of.verdict) <= {"pass", "as A"} else "fail"
        growth = report.growth[report.growth.layer == layer].set_index("direction")
        for direction in ("forward", "backward"):
            for field, name in (("difference", direction), ("twins_high", f"{direction}_twins")):
                row[name] = growth[field].get(direction, float("nan"))
        rows.append(row)
    return pd.DataFrame(rows)


def print_report(report: ModelReport, console: Console) -> None:
    """The readable summary."""

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    line(verdict_line(report))
    for finding in report.findings:
        line(f"  {finding.level}  {finding.code}: {finding.text}")
    line("; ".join(f"{name}: {value}" for name, value in report.facts.items()))
    for name, side in ((report.a, report.operators.a), (report.b, report.operators.b)):
        ran = "; ".join(dict.fromkeys(filter(None, side))) or "none that is known"
        line(f"attention operators of {name}: {ran}")
    summary = layer_summary(report)
    if len(summary):
        first = summary if len(summary) <= _MOST else _worst_first(summary)
        title = (
            f"Layers ({len(first)} of {len(summary)}): error of {report.b} / {report.a} from the same inputs (limit 2 "
            "for out, 3 for gradients); relative differences of the whole passes"
        )
        console.print(_table(title, first))
    if len(report.end_to_end):
        title = "End to end, relative L2: difference, that of the twins, errors against float64"
        console.print(_table(title, report.end_to_end))
    line(f"{report.seconds:.0f} s on {report.origin['machine']}, torch {report.origin['torch']}")


def _worst_first(summary: pd.DataFrame) -> pd.DataFrame:
    ratio = pd.to_numeric(summary.out_ratio, errors="coerce").fillna(float("inf"))
    order = pd.DataFrame({"pass": summary.verdict == "pass", "ratio": -ratio}).sort_values(["pass", "ratio"])
    return summary.loc[order.index[:_MOST]]


def _table(title: str, frame: pd.DataFrame) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in frame:
        left = column in ("layer", "quantity", "verdict")
        table.add_column(column.replace("_", " "), justify="left" if left else "right", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(number(value) for value in row))
    return table

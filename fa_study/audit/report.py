"""An audit as text for a terminal."""

from __future__ import annotations

import math

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from fa_study.audit.run import AuditReport


def verdict_line(report: AuditReport) -> str:
    """The answer in one sentence."""
    failures = sum(f.level == "fail" for f in report.findings)
    if not report.passed:
        return f"FAIL: {failures} thing{'s' if failures != 1 else ''} wrong with {report.name}"
    return f"PASS: the difference of {report.name} to the exact result is what its number format leads to expect"


def accuracy_summary(report: AuditReport) -> pd.DataFrame:
    """A row per dtype and tensor: cases, median and largest ratio to standard attention's error, failures."""
    groups = report.accuracy.groupby(["dtype", "tensor"], sort=False)
    return groups.agg(
        cases=("case", "size"),
        median_ratio=("ratio", "median"),
        largest_ratio=("ratio", "max"),
        rms_error=("rms_error", "median"),
        failed=("verdict", lambda v: int((v == "fail").sum())),
    ).reset_index()


def print_report(report: AuditReport, console: Console) -> None:
    """The readable summary."""

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    line(verdict_line(report))
    for finding in report.findings:
        line(f"  {finding.level}  {finding.code}: {finding.text}")
    for what in dict.fromkeys(t.what for t in report.tried):
        tried = [t for t in report.tried if t.what == what]
        works = ", ".join(t.setting for t in tried if t.answer == "yes")
        detail = ", ".join(t.detail for t in tried if what == "causal alignment" and t.answer == "yes")
        others = "; ".join(f"{t.setting} {t.answer}: {t.detail}".strip() for t in tried if t.answer != "yes")
        line(f"{what}: {'; '.join(part for part in (works, detail, others) if part)}")
    if len(report.accuracy):
        title = "Error as a multiple of standard attention's (limit 2 for out, 3 for gradients)"
        table = Table(title=title, title_justify="left", box=box.SIMPLE)
        summary = accuracy_summary(report)
        for column in summary:
            table.add_column(column.replace("_", " "), justify="left" if column in ("dtype", "tensor") else "right")
        for row in summary.itertuples(index=False):
            table.add_row(*(number(value) for value in row))
        console.print(table)
    for dtype, sentence in report.best_policies().items():
        line(f"predicted in {dtype} by: {sentence}")
    for question, answer in report.facts.items():
        line(f"{question}: {answer}")
    line(f"{report.seconds:.0f} s on {report.origin['machine']}, torch {report.origin['torch']}")


def number(value: object) -> str:
    """A cell: three digits for fractions."""
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3g}"
    return str(value)

"""What the tables of a model's audit say, in sentences."""

from __future__ import annotations

import math

import pandas as pd

from fa_study.audit.finding import Finding
from fa_study.audit_model.passes import Pass

_NAMED = 4


def findings_of(
    tables: dict[str, pd.DataFrame], passes: list[Pass], errors: list[str], a: str, b: str
) -> list[Finding]:
    """All findings, failures first. `errors` are those of the runs layer by layer: A, B and float64."""
    found = [
        *_raised(passes, errors, a, b),
        *_not_switched(tables["operators"], a, b),
        *_layers(tables["layers"], a, b),
        *_whole(tables["end_to_end"], a),
        *_growth(tables["growth"]),
        *_loss(tables["end_to_end"], passes, a, b),
    ]
    return sorted(found, key=lambda f: f.level != "fail")


def _raised(passes: list[Pass], errors: list[str], a: str, b: str) -> list[Finding]:
    """What the model raised, each reason once, and whether attention ran at all."""
    names = (a, b, "float64")
    if not passes[0].error and not passes[0].calls:
        return [Finding("fail", "no-attention", "the model ran to its end and called none of its attention layers")]
    found = [Finding("fail", "raises", f"{name}: {p.error}") for name, p in zip(names, passes) if p.error]
    for name, p, error in zip(names, passes, errors):
        if error and error not in p.error:
            found.append(Finding("fail", "raises", f"{name}, layer by layer: {error}"))
    return found


def _not_switched(operators: pd.DataFrame, a: str, b: str) -> list[Finding]:
    same = operators[operators.same_operators & operators.same_bits]
    if len(same) == 0:
        return []
    if len(same) == len(operators):
        text = f"{a} and {b} ran the same operators ({same.a.iloc[0]}) and gave the same bits in every layer"
        return [Finding("fail", "not-switched", f"{text}: nothing was switched, so nothing is audited")]
    return [Finding("note", "not-switched", f"the same operators and bits under both: {_names(same.layer)}")]


def _names(layers: pd.Series) -> str:
    names = list(dict.fromkeys(layers))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _layers(layers: pd.DataFrame, a: str, b: str) -> list[Finding]:
    found = []
    for tensor, code, limit in (("out", "layer-error", 2), ("gradient", "layer-gradient-error", 3)):
        rows = layers[layers.tensor == tensor]
        failed = rows[rows.verdict == "fail"]
        if len(failed):
            worst = failed.loc[failed.ratio.fillna(math.inf).idxmax()]
            text = (
                f"from the same inputs, the error of {tensor} exceeds {limit} x that of {a} in {len(failed)} of "
                f"{len(rows)} layers: {_names(failed.layer)}; most in {worst.layer}, "
            )
            found.append(Finding("fail", code, text + (worst.detail or f"{worst.ratio:.3g} x")))
        raised = rows[rows.verdict == "raises"]
        # A layer whose output is missing has no gradient for the same reason.
        if tensor == "gradient":
            raised = raised[raised.detail.str.startswith("backward: ")]
        if len(raised):
            text = f"{b} in {len(raised)} of {len(rows)} layers: {_names(raised.layer)}: {raised.detail.iloc[0]}"
            found.append(Finding("fail", "layer-raises", text))
        elsewhere = rows[rows.verdict == "as A"]
        if len(elsewhere):
            text = f"{tensor} is not finite under either in {_names(elsewhere.layer)}"
            found.append(Finding("note", "non-finite", text))
    return found


def _whole(table: pd.DataFrame, a: str) -> list[Finding]:
    found = []
    for row in table.itertuples():
        against = f"{row.ratio:.3g} x that of {a}" if math.isfinite(row.ratio) else "not finite"
        twins = f"the difference is {row.difference:.2g}, that of the twins {row.twins_low:.2g} to {row.twins_high:.2g}"
        if row.verdict == "fail":
            found.append(Finding("fail", "end-to-end-error", f"{row.quantity}: the error is {against}; {twins}"))
        elif row.verdict == "as twins":
            found.append(Finding("note", "as-twins", f"{row.quantity}: the error is {against}, and {twins}"))
    return found


def _growth(growth: pd.DataFrame) -> list[Finding]:
    found = []
    for direction, what in (("forward", "output"), ("backward", "gradient at the output")):
        rows = growth[growth.direction == direction]
        # The backward pass meets the last layer first.
        rows = rows if direction == "forward" else rows[::-1]
        apart = rows[rows.difference > 0]
        if rows.empty:
            continue
        if apart.empty:
            found.append(Finding("note", f"{direction}-growth", f"{direction}: no difference in any layer"))
            continue
        first, last, top = apart.iloc[0], rows.iloc[-1], apart.loc[apart.difference.idxmax()]
        text = (
            f"{direction}: the difference begins in {first.layer} (relative {first.difference:.2g} in the {what}), is "
            f"largest in {top.layer} ({top.difference:.2g}) and {last.difference:.2g} in {last.layer}, the "
            f"{'last' if direction == 'forward' else 'first'} layer; the twins' is up to {first.twins_high:.2g}, "
            f"{top.twins_high:.2g} and {last.twins_high:.2g} there"
        )
        found.append(Finding("note", f"{direction}-growth", text))
    return found


def _loss(table: pd.DataFrame, passes: list[Pass], a: str, b: str) -> list[Finding]:
    rows = table[table.quantity == "loss"]
    if rows.empty:
        return []
    row = rows.iloc[0]
    text = f"{passes[0].loss:.6g} with {a}, {passes[1].loss:.6g} with {b}"
    if row.difference == 0:
        text += f": no change at all; in the twins {row.twins_low:.2g} to {row.twins_high:.2g}"
    elif math.isfinite(row.difference):
        scale = "more than in any twin" if row.difference > row.twins_high else "not more than in a twin"
        text += f": it changed by {row.difference:.2g} of itself, {scale} ({row.twins_low:.2g} to {row.twins_high:.2g})"
    return [Finding("note", "loss", text)]

"""The charts of Figures 7 and 8: what is drawn, what the switches offer, what a reader without eyes is told."""

import itertools

import pandas as pd
import pytest

from fa_study import figures
from fa_study.experiments.drift_ratios import METRICS, PREDICTIONS, low_precision_ratios, relative_drift
from fa_study.figures.weights import KIND_COLOURS


def table(
    kinds=("Flash against Baseline", "ulp twin", "BF16 against FP32", "its own start"), level="model", name="model"
):
    """Distances that grow with the step, by factors between the kinds; 0 at the start of all but the twins."""
    rows = []
    for (i, kind), seed, step in itertools.product(enumerate(kinds), (0, 1), (0, 100, 200)):
        value = step * (i + 1) * (1 + 0.1 * seed) * 1e-6 + (1e-9 if kind == "ulp twin" else 0)
        rows.append(
            {"run": f"{kind}-s{seed}", "kind": kind, "seed": seed, "step": step, **dict.fromkeys(METRICS, value)}
        )
    return pd.DataFrame(rows).assign(variant="", precision="fp32", level=level, average="pooled", name=name)


def data_of(chart):
    """The rows of all data sets of a chart."""
    return [row for rows in chart.to_dict()["datasets"].values() for row in rows]


def test_figure_8_offers_metric_average_and_reference():
    chart = figures.relative_weights(relative_drift(table()))
    switches = {param["name"]: param["bind"]["options"] for param in chart.to_dict()["params"] if "bind" in param}
    assert switches["shown"] == ["raw", "relative", "minus_start"] and set(switches["metric"]) == {
        *METRICS,
        PREDICTIONS,
    }
    rows = {(row["kind"], row["step"]): row for row in data_of(chart) if row.get("metric") == "wasserstein"}
    assert rows["Flash against Baseline", 200]["raw_low"] == pytest.approx(2e-4)
    assert rows["Flash against Baseline", 200]["relative_mid"] == pytest.approx(0.25)
    assert rows["ulp twin", 200]["minus_start_high"] == pytest.approx(4.4e-4)
    assert "Flash against Baseline, FP32: 2.10e-04" in chart.to_dict()["usermeta"]["alt"]


def test_the_ratio_of_low_precision_stands_beside_the_papers():
    chart = figures.low_precision_ratio(low_precision_ratios(table()))
    rows = data_of(chart)
    assert any(row.get("low") == 2 and row.get("high") == 5 for row in rows)
    assert {row["centre"] for row in rows if row.get("metric") == "relative_l2"} == {3.0}
    assert "BF16 against FP32, Flash in FP32: 3 (3 to 3)" in chart.to_dict()["usermeta"]["alt"]


def test_no_two_kinds_of_pairs_look_alike():
    colours = list(KIND_COLOURS.values())
    assert len(set(colours)) == len(colours)


def test_a_group_is_chosen_by_name():
    frame = pd.concat([table(level="group", name=name) for name in ("a.block_1", "b")])
    chart = figures.group_differences(frame[frame["kind"].isin(["Flash against Baseline", "ulp twin"])])
    (group,) = [param for param in chart.to_dict()["params"] if param["name"] == "group"]
    assert group["bind"]["options"] == ["a.block_1", "b"] and group["bind"]["labels"] == ["a.block 1", "b"]
    assert all(row["low"] > 0 for row in data_of(chart))  # a zero on a log axis makes the band disappear


def test_the_systematic_share_marks_what_was_found():
    effects = pd.DataFrame({"space": ["weights", "predictions"], "step": 100, "share": [0.5, 0.0], "p": [0.001, 0.7]})
    chart = figures.systematic(effects.assign(precision="bf16", twins=8, detectable=0.1))
    assert {row["space"]: row["found"] for row in data_of(chart)} == {
        "weights": "p < 0.01",
        "predictions": "not told from zero",
    }
    assert "weights in BF16: 1 snapshots, the last at step 100" in chart.to_dict()["usermeta"]["alt"]

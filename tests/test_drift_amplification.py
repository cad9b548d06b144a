"""Growth, saturation and what twins explain, on curves whose factors are known."""

import numpy as np
import pandas as pd
import pytest

from fa_study import figures
from fa_study.experiments.amplification import beside_twins, drift_curves, growth, growth_intervals
from fa_study.tables import read_table
from fa_study.verdicts import explained_verdict, meeting_sentence

STEPS = np.arange(0, 1050, 50)
FLASH, TWIN = "Flash against Baseline", "ulp twin"


def exponential(start, factor, level, fork=0):
    """0 up to the fork, then start * factor per 100 steps, up to the level."""
    since = STEPS - fork
    return np.where(since > 0, np.minimum(start * factor ** (since / 100), level), 0.0)


def tables(series):
    """The two tables of a study from {(kind, variant, precision, seed): distances}; predictions are twice as far."""
    rows = pd.DataFrame(
        {"kind": kind, "variant": variant, "precision": precision, "seed": seed, "step": step, "relative_l2": distance}
        for (kind, variant, precision, seed), distances in series.items()
        for step, distance in zip(STEPS, distances)
    )
    rows["run"] = rows["kind"] + rows["variant"] + rows["precision"] + rows["seed"].astype(str)
    predictions = rows.rename(columns={"relative_l2": "relative"}).assign(relative=2 * rows["relative_l2"])
    weights = rows.assign(level="model", average="pooled", name="model", zero_gradient=False)
    distraction = weights.assign(level="group", name="a", relative_l2=99.0)
    return pd.concat([weights, distraction], ignore_index=True), predictions


def study(flash=1.0, rate=10.0, wobble=0.02):
    """Three seeds; Flash ends `flash` times as far as the twins and grows by `rate` per 100 steps, the twins by 10."""
    series = {}
    for seed in range(3):
        off = 1 + wobble * (seed - 1)
        series[FLASH, "", "fp32", seed] = exponential(1e-7, rate * off, 0.3 * flash * off)
        series[TWIN, "", "fp32", seed] = exponential(3e-7, 10.0, 0.3)
    series[TWIN, "from step 600", "fp32", 0] = exponential(1e-7, 100.0, 0.3, fork=600)
    return drift_curves(*tables(series))


def test_the_growth_of_an_exponential_is_its_factor():
    curves = study(wobble=0)
    assert curves["distance"].gt(0).all() and curves["step"].gt(curves["fork"]).all()
    growths = growth(curves).set_index(["kind", "fork", "space", "seed"])
    assert growths.loc[(FLASH, 0, "weights", 1), "factor"] == pytest.approx(10)
    assert growths.loc[(TWIN, 600, "predictions", 0), "factor"] == pytest.approx(100)
    # 1e-7 * 10^(step / 100) comes to a third of 0.3 at step 600; 1e-7 * 100^(since / 100) at 300 steps after the fork
    assert growths.loc[(FLASH, 0, "weights", 1), ["risen", "points"]].tolist() == [600, 11]
    assert growths.loc[(TWIN, 600, "weights", 0), "risen"] == 900
    assert growths.loc[(FLASH, 0, "predictions", 2), "level"] == pytest.approx(0.6)


def test_a_climb_that_the_snapshots_miss_has_no_factor():
    curves = drift_curves(*tables({(FLASH, "", "bf16", 0): exponential(1e-3, 1e3, 0.3)}))
    row = growth(curves).iloc[0]
    assert np.isnan(row["factor"]) and row["points"] == 1 and row["risen"] == 100
    assert growth_intervals(growth(curves)).empty and beside_twins(curves).empty


def test_intervals_leave_later_forks_out_and_cover_the_factor():
    table = growth_intervals(growth(study())).set_index(["space", "kind"])
    assert table.loc[("weights", TWIN), "seeds"] == 3
    assert table.loc[("weights", TWIN), "centre"] == pytest.approx(10)
    assert table.loc[("weights", FLASH), "low"] < 10 < table.loc[("weights", FLASH), "high"]


def test_beside_twins_tells_sizes_from_rates():
    beside = beside_twins(study(flash=2.0)).set_index(["space", "what"])["centre"]
    for space in ("weights", "predictions"):
        assert beside[space, "growth"] == pytest.approx(1, rel=1e-3)
        assert beside[space, "distance while growing"] == pytest.approx(1 / 3, rel=1e-2)
        assert beside[space, "distance at the end"] == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("flash", "rate", "holds", "words"),
    [
        (1.0, 10.0, "holds", "weights in FP32 100% (95% to 105%, 3 seeds"),
        (2.0, 10.0, "does not hold", "weights in FP32 50% (48% to 53%, 3 seeds; further"),
        (1.0, 20.0, "holds", "is 2.00 to 2.00 times the twins'; only a ratio of 1."),
    ],
)
def test_the_verdict_follows_sizes_and_rates(flash, rate, holds, words):
    verdict = explained_verdict(beside_twins(study(flash, rate)))
    assert verdict.holds == holds and words in verdict.text


def test_a_wide_interval_at_the_end_leaves_it_open():
    verdict = explained_verdict(beside_twins(study(1.0, 10.0, wobble=0.3)))
    assert verdict.holds == "undecided" and "3 seeds; undecided" in verdict.text


def test_low_precision_is_told_beside_the_fp32_twins():
    series = {("BF16 against FP32", "", "fp32", seed): exponential(1e-3, 10.0, 0.6) for seed in range(3)}
    series |= {(TWIN, "", "fp32", seed): exponential(1e-7, 10.0, 0.3) for seed in range(3)}
    beside = beside_twins(drift_curves(*tables(series)), "BF16 against FP32").assign(kind="BF16 against FP32")
    assert "BF16 against FP32, weights: 2.00 (2.00 to 2.00)" in meeting_sentence(beside)


def test_the_stored_tables_can_be_drawn():
    curves = drift_curves(read_table("weights.parquet"), read_table("predictions.parquet"))
    for space in ("weights", "predictions"):
        chart = figures.amplification(curves, space).to_dict()
        assert "Flash against Baseline, BF16: 0." in chart["usermeta"]["alt"]
    data = next(iter(figures.forks(study(), "weights").to_dict()["datasets"].values()))
    assert {row["parted"] for row in data} == {"step 0", "step 600"} and {row["since"] for row in data} >= {50, 400}

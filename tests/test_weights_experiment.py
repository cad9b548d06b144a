"""Figure 7's measurement and verdict, on run folders made by hand whose distances are known exactly."""

import numpy as np
import pandas as pd
import pytest
from made_runs import make_run

from fa_study.experiments.runs import TRAVELLED, pairs_in
from fa_study.experiments.weights import (
    drift_trend,
    ratio_to_twins,
    weight_differences,
    weight_trajectory,
    whole_model,
)
from fa_study.verdicts import (
    drift_verdict,
)


def test_a_trajectory_has_the_known_distances(tmp_path):
    flash, baseline = make_run(tmp_path, "flash"), make_run(tmp_path, "baseline", shifts=(0.0, 0.0, 0.0))
    frame = weight_trajectory(flash, baseline)
    model = frame[(frame["level"] == "model") & (frame["average"] == "pooled")].set_index("step")
    assert model["max_difference"].to_dict() == {0: 0, 100: 1, 200: 3}
    assert model["wasserstein"].to_dict() == {0: 0, 100: 1, 200: 3}


def test_a_run_beside_its_own_start_has_travelled(tmp_path):
    make_run(tmp_path, "baseline", shifts=(0.5, 1.5, 3.5))
    model = whole_model(weight_differences(tmp_path), TRAVELLED).set_index("step")
    assert model["max_difference"].to_dict() == {0: 0, 100: 1, 200: 3}


def test_known_pairs_are_not_measured_again(tmp_path):
    make_run(tmp_path, "flash"), make_run(tmp_path, "baseline")
    names = {pair.name for pair in pairs_in(tmp_path)}
    assert set(weight_differences(tmp_path)["run"]) == names and weight_differences(tmp_path, names).empty


def test_the_key_bias_is_shown_but_in_no_aggregate(tmp_path):
    make_run(tmp_path, "flash"), make_run(tmp_path, "baseline", shifts=(0.0, 0.0, 0.0))
    frame = weight_differences(tmp_path)
    last = frame[frame["step"] == 200]
    assert whole_model(last, "Flash against Baseline")["max_difference"].tolist() == [3]
    flash = (last["level"] == "model") & (last["kind"] == "Flash against Baseline")
    assert last.loc[flash, "max_difference"].eq(3).all()
    bias = last[(last["name"] == "a.0.to_k.bias") & (last["kind"] == "Flash against Baseline")]
    assert bias["max_difference"].tolist() == [30] and bias["zero_gradient"].all()


def test_pairs_differ_in_one_thing(tmp_path):
    for precision in ("fp32", "bf16"):
        make_run(tmp_path, "flash", precision), make_run(tmp_path, "baseline", precision)
    make_run(tmp_path, "baseline", seed=1), make_run(tmp_path, "baseline", seed=2, steps=900)
    make_run(tmp_path, "baseline", twin=1), make_run(tmp_path, "baseline", twin=2), make_run(tmp_path, "flash", twin=1)
    make_run(tmp_path, "flash", seed=3), make_run(tmp_path, "baseline", seed=3, state="interrupted")
    make_run(tmp_path, "baseline", seed=2, shifts=(0.0,))  # the start of the longer one, and no run of its own
    make_run(tmp_path, "baseline", twin=1, twin_step=100), make_run(tmp_path, "tiled", policy="uniform", format="e8m7")
    found = list(pairs_in(tmp_path))
    assert {pair.run.name for pair in found if pair.kind == TRAVELLED} == {
        *("baseline-bf16-dit-s0", "baseline-fp32-dit-s0", "baseline-fp32-dit-s1", "baseline-fp32-dit-s2-steps900"),
    }
    assert {(pair.variant, pair.run.name) for pair in found if pair.variant} == {
        ("from step 100", "baseline-fp32-dit-s0-twin1-twin_step100"),
        ("uniform e8m7", "tiled-fp32-dit-s0-policyuniform-formate8m7"),
    }
    pairs = {(pair.kind, pair.run.name, pair.reference.name) for pair in found if pair.kind != TRAVELLED}
    assert pairs == {
        ("ulp twin", "baseline-fp32-dit-s0-twin1-twin_step100", "baseline-fp32-dit-s0"),
        ("tiled against Baseline", "tiled-fp32-dit-s0-policyuniform-formate8m7", "baseline-fp32-dit-s0"),
        ("Flash against Baseline", "flash-bf16-dit-s0", "baseline-bf16-dit-s0"),
        ("Flash against Baseline", "flash-fp32-dit-s0", "baseline-fp32-dit-s0"),
        ("BF16 against FP32", "baseline-bf16-dit-s0", "baseline-fp32-dit-s0"),
        ("other initialisation", "baseline-fp32-dit-s1", "baseline-fp32-dit-s0"),
        ("other initialisation", "baseline-fp32-dit-s2-steps900", "baseline-fp32-dit-s1"),
        ("ulp twin", "baseline-fp32-dit-s0-twin1", "baseline-fp32-dit-s0"),
        ("ulp twin", "baseline-fp32-dit-s0-twin2", "baseline-fp32-dit-s0"),
    }


def test_ratio_to_twins(tmp_path):
    make_run(tmp_path, "baseline", shifts=(0.0, 0.0, 0.0)), make_run(tmp_path, "flash", shifts=(0.0, 1.0, 3.0))
    for twin, shift in ((1, 1.0), (2, 2.0), (3, 4.0)):
        make_run(tmp_path, "baseline", twin=twin, shifts=(0.1, shift, shift))
    make_run(tmp_path, "baseline", twin=4, twin_step=100, shifts=(0.0, 0.0, 9.0))  # a later fork is no such twin
    ratio = ratio_to_twins(weight_differences(tmp_path), "max_difference")
    assert ratio[["step", "ratio"]].to_numpy().tolist() == [[100, 0.5], [200, 1.5]]


def test_no_runs_give_an_empty_table(tmp_path):
    assert weight_differences(tmp_path).empty
    assert weight_differences(tmp_path / "nothing").empty


def test_runs_without_a_common_step_are_refused(tmp_path):
    flash, baseline = make_run(tmp_path, "flash", shifts=(0.0,)), make_run(tmp_path, "baseline", shifts=())
    with pytest.raises(ValueError, match="no snapshot of the same step"):
        weight_trajectory(flash, baseline)


def frame_of(*series):
    """One seed per series of distances, the same in both metrics."""
    return pd.DataFrame(
        {"precision": "bf16", "seed": seed, "step": 100 * i, "max_difference": value, "wasserstein": value}
        for seed, values in enumerate(series)
        for i, value in enumerate(values)
    )


def test_trend_counts_falls_and_growth():
    trend = drift_trend(frame_of([0, 1, 2, 4, 3, 8]), "wasserstein").iloc[0]
    assert (trend["falls"], trend["increments"], trend["growth"]) == (1, 4, 8)
    assert trend["tau"] == pytest.approx(0.8)  # 10 pairs, one in the wrong order
    with pytest.raises(ValueError, match="two snapshots"):
        drift_trend(frame_of([0, 1]), "wasserstein")


def test_the_verdict_follows_the_numbers():
    rising = np.arange(1.0, 11.0)
    noise = np.array([3.0, 1.0, 4.0, 1.5, 5.0, 2.0, 6.0, 1.0, 3.5, 2.5])
    assert drift_verdict(frame_of(rising, rising**2)).holds == "holds"
    assert drift_verdict(frame_of(rising, noise)).holds == "holds only where"
    assert drift_verdict(frame_of(rising[::-1], noise)).holds == "does not hold"
    text = drift_verdict(frame_of(rising, rising**2)).text
    assert "Max Difference fell in 0 of 18 and Wasserstein distance fell in 0 of 18 intervals" in text
    dented = np.array([1.0, 2.0, 3.0, 4.0, 3.9, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert (
        drift_verdict(frame_of(rising, dented)).holds == "holds only where"
    )  # a rising trend, but it does not only grow

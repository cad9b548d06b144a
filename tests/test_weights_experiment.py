"""Figure 7's measurement and verdict, on run folders made by hand whose distances are known exactly."""

import numpy as np
import pandas as pd
import pytest
from made_runs import make_run

from fa_study.experiments.drift_ratios import (
    at_the_end,
    low_precision_ratios,
    per_seed,
    relative_drift,
    scatter_ratios,
)
from fa_study.experiments.intervals import log_ratio_interval
from fa_study.experiments.runs import TRAVELLED, pairs_in
from fa_study.experiments.weights import (
    drift_trend,
    ratio_to_twins,
    weight_differences,
    weight_trajectory,
    whole_model,
)
from fa_study.verdicts import (
    amplification_verdict,
    drift_verdict,
    initialisation_verdict,
    low_precision_verdict,
    systematic_verdict,
    uniform_in_training,
)
from fa_study.verdicts.amplification import judged
from fa_study.verdicts.answer import short_answer


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


def table_of(*, seeds=(0, 1), **series):
    """Pooled rows of the whole model, FP32: {kind: distance at each step}, the same in every seed and metric."""
    return pd.DataFrame(
        {
            "run": f"{kind}-s{seed}",
            "kind": kind.replace("_", " "),
            "variant": "",
            "precision": "fp32",
            "seed": seed,
            "level": "model",
            "average": "pooled",
            "step": 100 * i,
            "max_difference": value,
            "wasserstein": value,
            "relative_l2": value,
        }
        for kind, values in series.items()
        for seed in seeds
        for i, value in enumerate(values)
    )


def test_initialisation_verdict():
    def verdict(other, wobble=0.0):
        table = table_of(seeds=range(4), Flash_against_Baseline=[0, 1, 2, 3], other_initialisation=other)
        names = ["max_difference", "wasserstein", "relative_l2"]
        table[names] = table[names].mul(1 + wobble * (table["seed"] // 2), axis=0).astype(float)
        return initialisation_verdict(table)

    slow = verdict([5, 7, 9, 11], wobble=0.01)
    assert slow.holds == "holds" and "more slowly than that of two initialisations in 3, faster in 0" in slow.text
    assert "Max Difference in FP32 10 beside 20" in slow.text
    assert "FP32: 4 pairs of Flash and Baseline, 2 of initialisations, no run of which is in two" in slow.text
    assert verdict([5, 5.5, 6, 6.5], wobble=0.01).holds == "does not hold"
    assert verdict([5, 6.1, 7.2, 8.3], wobble=1.0).holds == "undecided"


def test_low_precision_verdict():
    paper = table_of(Flash_against_Baseline=[0, 1, 2, 3], BF16_against_FP32=[0, 3, 6, 9])
    assert low_precision_verdict(paper).holds == "holds"
    same = table_of(Flash_against_Baseline=[0, 1, 2, 3], BF16_against_FP32=[0, 1, 2, 3])
    assert low_precision_verdict(same).holds == "does not hold"
    assert "0 of 9 combinations of metric, precision and step, with its whole interval in 0" in (
        text := low_precision_verdict(same).text
    )
    assert "At step 300, in relative L2, BF16 against FP32, Flash in FP32: 1.00 (1.00 to 1.00, 2 seeds)" in text
    passing = table_of(Flash_against_Baseline=[0, 1, 2, 3], BF16_against_FP32=[0, 3, 6, 3])
    assert low_precision_verdict(passing).holds == "holds only where"
    wide = table_of(Flash_against_Baseline=[0, 1, 2, 3], BF16_against_FP32=[0, 3, 6, 9])
    for name in ("max_difference", "wasserstein", "relative_l2"):
        wide[name] = wide[name].mul(1.0 + (wide["seed"] == 1) * (wide["kind"] == "BF16 against FP32"))
    assert low_precision_verdict(wide).holds == "undecided"  # 3 in one seed and 6 in the other


def test_uniform_bf16_in_training_stands_beside_the_twins_of_its_seed():
    table = table_of(tiled_against_Baseline=[0, 0.2, 0.3], ulp_twin=[0, 0.1, 0.2, 0.4]).assign(precision="bf16")
    table.loc[table["kind"] == "tiled against Baseline", "variant"] = "uniform bf16"
    farther = table[table["kind"] == "ulp twin"].assign(relative_l2=lambda twins: 2 * twins["relative_l2"])
    several = uniform_in_training(pd.concat([table, farther]))
    assert "seed 1 by 30.0% until step 200, 1.00 times the median of its 2 ulp twins" in several
    assert "1.50 times the distance of its ulp twin" in uniform_in_training(table)
    assert uniform_in_training(table[table["kind"] == "ulp twin"]) == ""


def test_short_answer():
    errors = {("kernel", "fa2"): 1.0, ("kernel", ""): 2.0, ("uniform", "fa1"): 9.0, ("uniform", ""): 3.0}
    formats = pd.DataFrame(
        {"distribution": "normal", "format": "bf16", "family": family, "seed": seed, "algorithm": algorithm, "rms": rms}
        for (family, algorithm), rms in errors.items()
        for seed in (0, 1)
    ).assign(against="golden", reference="rounded", N=1024, Bc=64)
    weights = table_of(Flash_against_Baseline=[0, 0.1, 0.2, 0.3], ulp_twin=[0.1, 0.1, 0.2, 0.4])
    text = short_answer(formats, weights.assign(precision="bf16"))
    assert (
        "At 1,024 keys in tiles of 64" in text
        and "errs 0.50 to 0.50 times as much" in text
        and "errs 3.0 to 3.0 times as much" in text
    )
    assert "30.0% in BF16" in text and "drift as far" in text and "0.75 [0.75, 0.75] in BF16" in text
    assert "a small model and 2 seeds" in text
    farther = table_of(Flash_against_Baseline=[0, 0.1, 0.2, 0.8], ulp_twin=[0.1, 0.1, 0.2, 0.4])
    assert "drift less far" in short_answer(formats, farther)
    assert "needs an explanation" in short_answer(formats, farther)


def test_amplification_verdict():
    same = table_of(Flash_against_Baseline=[0, 1, 2, 3], ulp_twin=[0.1, 1, 2, 3])
    assert amplification_verdict(same).holds == "holds"
    more = table_of(Flash_against_Baseline=[0, 5, 8, 9], ulp_twin=[0.1, 1, 2, 3])
    assert amplification_verdict(more).holds == "does not hold"
    text = amplification_verdict(more).text
    assert "in FP32 3.00 (3.00 to 3.00, 2 seeds) at step 300, at most 5.00 (5.00 to 5.00) on the way (step 100)" in text
    assert "of 3 snapshots, Flash is no further away at 0 (interval below 1.25), further at 3; 0 are open" in text
    on_the_way = table_of(Flash_against_Baseline=[0, 5, 2, 3], ulp_twin=[0.1, 1, 2, 3])
    assert amplification_verdict(on_the_way).holds == "holds only where"


def test_not_to_see_a_difference_is_no_proof_that_there_is_none():
    """Ratios of 0.5 and 2: the interval reaches from far below 1 to far above the margin."""
    loud = table_of(Flash_against_Baseline=[0, 1, 2, 4], ulp_twin=[0.1, 1, 2, 4])
    loud["relative_l2"] = loud["relative_l2"].mul(4.0 ** (loud["seed"] * (loud["kind"] == "ulp twin")) / 2)
    verdict = amplification_verdict(loud)
    assert verdict.holds == "undecided" and "further at 0; 3 are open" in verdict.text
    assert list(judged(pd.Series([0.9, 1.1, 0.9, 1.1]), pd.Series([1.1, 1.2, 1.4, 1.4]))) == [
        "no further",
        "no further",
        "undecided",
        "further",
    ]


def test_several_twins_of_a_seed_count_as_one():
    table = table_of(ulp_twin=[0.1, 0.2, 0.3], its_own_start=[0, 1, 1])
    more = table[(table["seed"] == 0) & (table["kind"] == "ulp twin")]
    others = [
        more.assign(run=f"ulp_twin{i}-s0").assign(relative_l2=more["relative_l2"] * factor)
        for i, factor in enumerate((10, 10, 10, 10))
    ]
    rows = relative_drift(pd.concat([table, *others])).query("metric == 'relative_l2'")
    assert len(rows) == 3 * 6 and not rows.duplicated(["run", "step"]).any()  # each pair beside its own start
    seeds = per_seed(rows[rows["step"] == 200], "raw", ["kind"]).set_index("seed")["raw"]
    assert seeds.to_dict() == pytest.approx({0: 3.0, 1: 0.3})


def test_the_end_stands_beside_the_twins_of_the_same_seed():
    table = table_of(Flash_against_Baseline=[0, 2, 4], ulp_twin=[0.1, 1, 2], its_own_start=[0, 1, 1])
    table = table.assign(mean_difference=10.0, wasserstein_floor=0.5)
    table.loc[table["seed"] == 1, "relative_l2"] *= 3
    predictions = table[["run", "step"]].assign(relative=table["relative_l2"] / 8)
    rows = at_the_end(table, predictions).set_index("pair")
    flash = rows.loc["Flash against Baseline"]
    assert (flash["seeds"], flash["weights"], flash["predictions"], flash["over twins"]) == (2, 8, 1, 2)
    assert (flash["W1 / mean |d|"], flash["W1 / floor"]) == (0.4, 8) and set(rows.index) == {
        "Flash against Baseline",
        "ulp twin",
    }


def test_the_predictions_are_one_more_metric():
    table = table_of(Flash_against_Baseline=[0, 1, 2], BF16_against_FP32=[0, 3, 6], its_own_start=[0, 1, 2])
    names = ["run", "kind", "variant", "precision", "seed", "step"]
    predictions = table[names].assign(rms=table["relative_l2"] * (1 + 4 * (table["kind"] == "BF16 against FP32")))
    rows = low_precision_ratios(table, predictions)
    assert rows.query("metric == 'prediction_rms' and step == 200")["centre"].tolist() == pytest.approx([15])
    assert "15.00 to 15.00 in the predictions" in low_precision_verdict(table, predictions).text


def test_scatter_over_the_seeds_is_told_with_its_interval():
    table = table_of(seeds=range(5), Flash_against_Baseline=[0, 1.0], FP16_against_FP32=[0, 1.0])
    for kind, power in (("Flash against Baseline", 1), ("FP16 against FP32", 2)):
        table.loc[table["kind"] == kind, "relative_l2"] *= 2.0 ** (power * table["seed"])
    (row,) = scatter_ratios(table, "relative_l2").to_dict("records")
    assert row["ratio"] == pytest.approx(2) and row["seeds"] == 5
    edge = 9.6045**0.5  # F of (4, 4) degrees of freedom at 97.5 %, from a printed table
    assert (row["low"], row["high"]) == pytest.approx((2 / edge, 2 * edge), rel=1e-3)


def test_relative_drift_divides_by_what_the_reference_has_travelled():
    table = table_of(Flash_against_Baseline=[0, 1, 2], other_initialisation=[5, 7, 9], its_own_start=[0, 4, 8])
    rows = relative_drift(table).query("metric == 'wasserstein' and seed == 0").set_index(["kind", "step"])
    assert rows.loc["Flash against Baseline", "relative"].dropna().to_dict() == {100: 0.25, 200: 0.25}
    assert rows.loc["other initialisation", "minus_start"].to_dict() == {0: 0, 100: 2, 200: 4}
    assert set(rows.index.get_level_values("kind")) == {"Flash against Baseline", "other initialisation"}


def test_low_precision_ratios_are_paired_by_seed():
    table = table_of(Flash_against_Baseline=[0, 1, 2], BF16_against_FP32=[0, 3, 6])
    table.loc[(table["seed"] == 1) & (table["kind"] == "Flash against Baseline"), "wasserstein"] *= 4
    rows = low_precision_ratios(table).query("metric == 'wasserstein'").set_index("step")
    centre, low, high = log_ratio_interval([3, 0.75])
    assert rows.loc[200, ["centre", "low_end", "high_end"]].tolist() == pytest.approx([centre, low, high])
    assert set(rows.index) == {100, 200} and set(rows["low"]) == {"BF16 against FP32"}


def effects(p):
    rows = {"precision": "bf16", "seed": 0, "space": "weights", "step": [100, 200], "twins": 8, "share": 0.02}
    return pd.DataFrame({**rows, "p": p, "detectable": 0.05})


def test_systematic_verdict_follows_the_permutation_test():
    assert systematic_verdict(effects([0.001, 0.002])).holds == "holds"
    assert systematic_verdict(effects([0.3, 0.9])).holds == "does not hold"
    early = systematic_verdict(effects([0.001, 0.4]))
    assert early.holds == "holds only where"
    assert "weights in BF16 at 1 of 2 snapshots, the last one at step 100 (at step 200 2.0%" in early.text
    with pytest.raises(ValueError, match=r"0\.12 is the smallest p that so few twins can give"):
        systematic_verdict(effects([0.2, 0.4]).assign(twins=4))

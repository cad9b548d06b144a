"""The verdicts on Figures 7 and 8, on made-up tables whose answers are known."""

import pandas as pd
import pytest

from fa_study.experiments.drift_ratios import (
    at_the_end,
    low_precision_ratios,
    per_seed,
    relative_drift,
    scatter_ratios,
)
from fa_study.experiments.intervals import log_ratio_interval
from fa_study.verdicts import (
    amplification_verdict,
    initialisation_verdict,
    low_precision_verdict,
    systematic_verdict,
    uniform_in_training,
)
from fa_study.verdicts.amplification import judged
from fa_study.verdicts.answer import short_answer


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

"""What W1 does not see: the measurements against their formulas, the verdicts and charts on made-up tables."""

import json

import numpy as np
import pandas as pd
import pytest
import vl_convert

from fa_study import figures
from fa_study.experiments.permutations import arrangements, kept_in_training, perturbed
from fa_study.figures import permutations
from fa_study.verdicts.permutations import blind_verdict, linearity_verdict


def test_a_permutation_has_no_w1_and_another_sample_has_the_floor():
    means = arrangements(n=4096, seeds=range(3)).groupby("beside").mean()
    permuted, other = means.loc["the same values in another order"], means.loc["other values"]
    assert permuted["wasserstein"] == 0 and permuted["relative_l2"] == pytest.approx(2**0.5, rel=0.05)
    assert other["wasserstein"] == pytest.approx(1.75 / 64, rel=0.5)
    assert other["mean_difference"] == pytest.approx(2 / np.pi**0.5, rel=0.05)  # E |N(0, 2)|
    shift = means.loc["a shift by 0.1"]
    assert shift["wasserstein"] == pytest.approx(0.1) and shift["mean_difference"] == pytest.approx(0.1)


def test_w1_of_noise_begins_as_the_mean_difference_and_ends_as_the_wider_distribution():
    frame = perturbed(numels=(64, 4096), sizes=(1e-6, 1e-2, 3.0), seeds=range(2))
    kept = frame.groupby(["n", "size"])["kept"].mean()
    assert kept[64, 1e-6] == 1 and kept[4096, 1e-6] == pytest.approx(1, abs=1e-3)
    assert kept[64, 1e-2] > 2 * kept[4096, 1e-2]
    # Normal with deviation sqrt(1 + 9) beside 1, over noise of deviation 3: the same constant E |N(0, 1)| in both.
    assert kept[4096, 3.0] == pytest.approx((10**0.5 - 1) / 3, rel=0.05)
    assert frame.loc[frame["size"] == 1e-2, "mean_difference"].to_numpy() == pytest.approx(
        0.01 * (2 / np.pi) ** 0.5, rel=0.3
    )


def weights_table(wasserstein, mean_difference, kinds=("Flash against Baseline", "other initialisation"), seeds=2):
    """A row per kind, seed and step, with the given distances at each step."""
    rows = [
        {"run": f"{kind} {seed}", "kind": kind, "precision": "bf16", "seed": seed, "step": 100 * i, "level": "model"}
        | {"average": "pooled", "wasserstein": w, "mean_difference": m, "wasserstein_floor": 0.01, "relative_l2": 2 * m}
        for kind in kinds
        for seed in range(seeds)
        for i, (w, m) in enumerate(zip(wasserstein, mean_difference))
    ]
    return pd.DataFrame(rows)


def test_equal_weights_have_no_ratio():
    assert kept_in_training(weights_table((0.0, 0.2), (0.0, 0.8)))["kept"].tolist() == [0.25] * 4


def test_the_verdict_on_initialisations_follows_the_numbers():
    blind = blind_verdict(weights_table((0.01, 0.02), (0.5, 0.6)))
    assert blind.holds == "does not hold"
    assert "W1 is 1.00 to 1.00 times what chance" in blind.text and "at most 2.0 times later" in blind.text
    assert "never exceeds 3.3%" in blind.text and "1.00 apart" in blind.text
    assert "relative L2 and W1 have changed by +20.0% and +100% in BF16 (2 pairs of runs) (medians)" in blind.text
    assert blind_verdict(weights_table((0.5, 0.02), (0.5, 0.6))).holds == "holds only where"
    assert blind_verdict(weights_table((0.5, 0.6), (0.5, 0.6))).holds == "holds"


def test_pairs_are_counted_by_precision_and_shared_initial_weights_once():
    bf16 = weights_table((0.01, 0.02), (0.5, 0.6))
    more = weights_table((0.01, 0.04), (0.5, 0.55), seeds=1).assign(precision="fp16_emulated")
    more["run"] = more["run"] + " again"
    text = blind_verdict(pd.concat([bf16, more], ignore_index=True)).text
    assert "(2 pairs of initial weights; the precisions start from the same)" in text
    assert "+20.0% and +100% in BF16 (2 pairs of runs), +10.0% and +300% in FP16 (emulated) (1 pair of runs)" in text
    assert "(2 pairs of initial weights)" in blind_verdict(bf16).text


def test_the_verdict_on_linearity_follows_the_numbers():
    noise = pd.DataFrame({"n": 4096, "size": [1e-4, 1e-2, 1e-1], "kept": [0.9, 0.5, 0.25]})
    falling = linearity_verdict(noise, weights_table((0.0, 0.1, 0.1), (0.0, 0.1, 0.8)))
    assert falling.holds == "holds only where"
    assert "4,096 normal values by a W1 of 0.90, 0.50, 0.25 times" in falling.text
    assert "1.00 at step 100 and 0.125 at step 200 in BF16 (2 seeds)" in falling.text
    both = [weights_table((0.0, 0.1), (0.0, 0.1)), weights_table((0.0, 0.2), (0.0, 0.4), seeds=1)]
    text = linearity_verdict(noise, pd.concat([both[0], both[1].assign(precision="fp32")], ignore_index=True)).text
    assert "in BF16 (2 seeds); 0.50 at step 100" in text and text.endswith("in FP32 (1 seed).")
    assert linearity_verdict(noise, weights_table((0.0, 0.1), (0.0, 0.1))).holds == "holds"
    assert linearity_verdict(noise, weights_table((0.0, 0.1), (0.0, 0.9))).holds == "does not hold"


def drawn(chart):
    figures.register_theme()
    spec = chart.to_dict()
    svg = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version="6.4")
    assert "NaN" not in svg and "undefined" not in svg
    return svg, spec["usermeta"]["alt"]


def test_the_yardstick_is_drawn_and_told():
    table = weights_table((0.02, 0.03), (0.5, 0.6))
    svg, words = drawn(permutations.beside_chance(table, "wasserstein"))
    assert "two samples of one distribution" in svg and "other initialisation" in svg
    assert "two samples of one distribution: 0.01. " in words and "other initialisation, step 100: 0.03" in words
    svg, words = drawn(permutations.beside_chance(table, "relative_l2"))
    assert "two independent sets of values: 1.41" in words
    with pytest.raises(ValueError, match="wasserstein, relative_l2, got 'max_difference'"):
        permutations.beside_chance(table, "max_difference")


def test_the_ratio_is_drawn_for_noise_and_for_training():
    noise = perturbed(numels=(64, 4096), sizes=(1e-4, 1e-2), seeds=range(2))
    training = kept_in_training(weights_table((0.0, 0.1), (0.0, 0.8), kinds=("Flash against Baseline",)))
    svg, words = drawn(permutations.order_kept(noise, training))
    assert "noise, 4,096 values" in svg and "Flash against Baseline, BF16" in svg
    assert "In training it falls from 0.12 to 0.125" in words

"""Dose and bias: the measurements on made-up tables whose answers are known, on run folders, and drawn."""

import json
from itertools import product

import numpy as np
import pandas as pd
import pytest
import vl_convert

from fa_study import figures
from fa_study.experiments import dose
from fa_study.figures.dose import dose_response as chart
from fa_study.verdicts.dose import bias_verdict, size_verdict

DOSES = {"uniform e8m4": 1e-2, "uniform e8m7": 1e-3, "uniform e8m10": 1e-4, "uniform e8m7:toward_zero": 2e-3}
TWINS = (0.5e-7, 1e-7, 2e-7)


def stored_errors():
    """RMS error by format and rounding: stochastic 1.5 times, toward zero twice that to nearest."""
    factors = {"nearest_even": 1.0, "stochastic": 1.5, "toward_zero": 2.0}
    return pd.DataFrame(
        {"format": f, "rounding": r, "seed": s, "rms": 2.0**-bits * factor}
        for (f, bits), (r, factor), s in product((("e8m4", 4), ("e8m7", 7)), factors.items(), range(3))
    )


def probe(arms, precision="fp32"):
    """The probe of runs whose attention has this error: {arm: (probed, rms of each layer)}."""
    return pd.DataFrame(
        {"arm": arm, "precision": precision, "probed": name, "rms": rms, "step": 0, "twin": 0}
        for arm, (probed, layers) in arms.items()
        for name, sizes in (("baseline", (1e-8,)), (probed, layers))
        for rms in sizes
    )


def test_the_dose_is_what_the_probe_found_or_scaled_from_it():
    found = probe({"uniform e8m7": ("tiled", (3.0, 4.0)), "flash": ("flash", (5e-8,))})
    twin = probe({"flash": ("flash", (1.0,))}).assign(twin=1)
    found = pd.concat([found, probe({"flash": ("flash", (1.0,))}, "bf16"), twin])
    table = dose.doses(found, stored_errors()).set_index("variant")
    assert table.loc["uniform e8m7", "dose"] == pytest.approx(12.5**0.5) and table.loc["uniform e8m7", "probed"]
    assert table.loc["", "dose"] == pytest.approx(5e-8)  # of the run in FP32
    stochastic = table.loc["uniform e8m7:stochastic"]
    assert stochastic["dose"] == pytest.approx(1.5 * 12.5**0.5) and not stochastic["probed"]
    assert not [variant for variant in table.index if "e8m4" in variant]  # never probed


def test_the_cell_measures_the_error_and_its_lean():
    nearest, zero = (dose.dose_cell(format="e8m7", rounding=r, N=128) for r in ("nearest_even", "toward_zero"))
    fine = dose.dose_cell(format="e8m14", rounding="nearest_even", N=128)
    assert len(nearest) == 20 and nearest["rms"].median() == pytest.approx(2**7 * fine["rms"].median(), rel=0.5)
    assert zero["lean"].median() < -0.5 < nearest["lean"].abs().median() - 0.3
    assert nearest["lean"].abs().median() < 0.2


def tables(power=1.0, bias=1.0, seeds=(0, 1), twins=TWINS, steps=dose.STEPS):
    """The study's tables where drift is 1e-7 (dose / 1e-4)^power, and `bias` times that toward zero."""
    drifts = {(dose.TILED, v): 1e-7 * (d / 1e-4) ** power * (bias if "zero" in v else 1) for v, d in DOSES.items()}
    rows = [(*key, "fp32", drift) for key, drift in drifts.items()]
    rows += [(dose.TWIN, "", "fp32", twin) for twin in twins]
    rows += [(dose.TWIN, "from step 100", "fp32", 1.0), (dose.FLASH, "", "bf16", 1.0), (dose.FLASH, "", "fp32", 0.0)]
    frame = pd.DataFrame(
        {"kind": k, "variant": v, "precision": p, "seed": seed, "step": step, "level": "model", "average": "pooled"}
        | {"relative_l2": drift * (1 + seed), "rms": 3 * drift * (1 + seed)}
        for (k, v, p, drift), seed, step in product(rows, seeds, steps)
    )
    given = pd.DataFrame(
        {"variant": v, "rounding": "toward_zero" if "zero" in v else "nearest_even", "dose": d, "probed": True}
        for v, d in DOSES.items()
    )
    return dose.dose_response(frame.drop(columns="rms"), frame.drop(columns="relative_l2"), given)


def test_drift_is_told_in_units_of_the_twins_of_its_seed():
    response = tables()
    assert set(response["space"]) == {"weights", "predictions"} and set(response["variant"]) == set(DOSES)
    medians = response.groupby("variant")["ratio"].agg(["min", "max"])
    assert medians.loc["uniform e8m10"].tolist() == pytest.approx([1, 1])
    assert medians.loc["uniform e8m7"].tolist() == pytest.approx([10, 10])


def test_only_seeds_with_tiled_arms_count():
    columns = {"precision": "fp32", "step": 100, "level": "model", "average": "pooled", "variant": ""}
    seeds = {0: (dose.FLASH, dose.TWIN, dose.TILED), 1: (dose.FLASH, dose.TWIN), 2: (dose.FLASH, dose.TILED)}
    rows = [
        {"kind": kind, "seed": seed, "relative_l2": 1.0, **columns} for seed, kinds in seeds.items() for kind in kinds
    ]
    given = pd.DataFrame({"variant": [""], "rounding": ["Flash"], "dose": [1e-8], "probed": [True]})
    response = dose.dose_response(pd.DataFrame(rows), pd.DataFrame(rows).head(0).assign(rms=1.0), given)
    assert set(response["seed"]) == {0}


def test_the_twins_factor_is_a_prediction_interval():
    scale = dose.twin_scale(small_drifts({0: TWINS}))
    assert scale["twin"].tolist() == pytest.approx([1e-7]) and scale["twins"].tolist() == [3]
    # Three logarithms with standard deviation log 2; t of 2 degrees of freedom at 97.5 % is 4.303.
    assert np.log(scale["factor"]).tolist() == pytest.approx([4.303 * np.log(2) * (4 / 3) ** 0.5], rel=1e-3)
    both = dose.twin_scale(small_drifts({0: TWINS, 1: TWINS}))
    assert (both["factor"] < scale["factor"].iloc[0]).all()  # the same scatter, known from twice as many twins
    assert dose.twin_scale(small_drifts({0: TWINS[:1], 1: TWINS[1:2]}))["factor"].isna().all()


def test_beside_flash_single_twins_tell_their_scatter_from_their_seeds_growth():
    drifts = {0: 1e-7, 1: 1e-5, 2: 1e-3}
    quiet = dose.twin_scale(
        small_drifts({s: [d] for s, d in drifts.items()}, flash={s: d / 3 for s, d in drifts.items()})
    )
    assert quiet["factor"].to_numpy() == pytest.approx(1) and quiet["twin"].tolist() == pytest.approx(
        list(drifts.values())
    )
    # Flash / twin = 1/2, 1, 2: logarithms with standard deviation log 2, of which the twin has its half in the square.
    flash = {seed: drift * 2.0 ** (seed - 1) for seed, drift in drifts.items()}
    loud = dose.twin_scale(small_drifts({s: [d] for s, d in drifts.items()}, flash=flash))
    assert np.log(loud["factor"]).to_numpy() == pytest.approx(4.303 * np.log(2), rel=1e-3)


def small_drifts(twins, flash=None):
    """Rows of `drifts` at one place: {seed: drifts of its twins}, {seed: drift of Flash}."""
    rows = [(dose.TWIN, seed, drift) for seed, drifts in twins.items() for drift in drifts]
    rows += [(dose.FLASH, seed, drift) for seed, drift in (flash or {}).items()]
    return pd.DataFrame(rows, columns=["kind", "seed", "drift"]).assign(space="weights", step=100)


def test_the_rank_test():
    test = dose.rank_test(tables()).set_index(["space", "step"]).loc[("weights", 100)]
    assert (test["arms"], test["seeds"], test["tau"]) == (4, 2, 1) and test["p"] == pytest.approx(1 / 24)
    assert test["exponent"] == pytest.approx(1) and test["rises"]
    factor = tables()["factor"].iloc[0]
    assert test["exceeds"] == min(d for d in DOSES.values() if d / 1e-4 > factor)
    flat = dose.rank_test(tables(power=-1.0)).iloc[0]
    assert flat["tau"] == -1 and not flat["rises"] and np.isnan(flat["exceeds"])


def test_the_other_rounding_is_held_against_nearest_at_the_same_size():
    excess = dose.beside_nearest(tables(power=0.7, bias=3.0))
    assert set(excess["rounding"]) == {"toward_zero"} and excess["excess"].to_numpy() == pytest.approx(3.0)
    few = tables()
    few = few[few["variant"] != "uniform e8m4"]  # now toward zero has the largest error of all
    assert dose.beside_nearest(few).empty


def test_the_verdicts_follow_the_numbers():
    rising, saturated = tables(), tables(power=-0.01)
    rising = pd.concat([rising[rising["step"] == 100], saturated[saturated["step"] > 100]])
    verdict = size_verdict(dose.rank_test(rising), rising)
    assert verdict.holds == "holds only where"
    assert "4 arms give attention an RMS error of 1e-04 to 1e-02 (2 seeds)" in verdict.text
    assert "1.00 at step 100 (τ = 1.00, p = 0.04), -0.01 at step 200 (τ = -1.00, p = 1)" in verdict.text
    assert "from an error of 1.0e-03 on at step 100; nowhere at steps 200, 400." in verdict.text
    assert size_verdict(dose.rank_test(tables()), tables()).holds == "holds"
    alone = tables(twins=TWINS[:1])
    assert "at an unknown error" in size_verdict(dose.rank_test(alone), alone).text
    assert bias_verdict(dose.beside_nearest(tables(bias=1e4))).holds == "holds"
    none = bias_verdict(dose.beside_nearest(tables(bias=1.1)))
    assert none.holds == "does not hold"
    assert "toward zero 1.1 at step 50, 1.1 at step 100, 1.1 at step 200, 1.1 at step 400 (widths: 1)" in none.text
    assert "in 0 of 16 cases" in none.text


@pytest.mark.parametrize("twins", [TWINS, (1e-7,)])
def test_the_chart_has_a_panel_per_step(twins):
    figures.register_theme()
    spec = chart(tables(twins=twins), "weights").to_dict()
    svg = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version="6.4")
    assert "NaN" not in svg and "undefined" not in svg
    assert all(f"step {step}" in svg for step in dose.STEPS) and "toward zero" in svg
    assert "to nearest uniform e8m7, error 1.0e-03: 10;" in spec["usermeta"]["alt"]

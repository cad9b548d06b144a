"""Where injected errors lead: twins of arms whose common displacement is known, measured, judged and drawn."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch
import vl_convert
from made_runs import make_run

from fa_study import figures
from fa_study.experiments.directions import arm_name, effects_of_doses
from fa_study.experiments.systematic import inner_products, paired_gram, systematic_effect
from fa_study.figures.directions import shared_effects
from fa_study.verdicts.dose import direction_verdict

AXES = 10.0 * np.eye(6)
# Toward zero, both widths lead to the same place; to nearest, one leads elsewhere and one nowhere; nor does Flash.
EFFECTS = {
    "e8m7:toward_zero": AXES[0],
    "e8m10:toward_zero": AXES[0],
    "e8m7": AXES[1],
    "e8m10": 0 * AXES[0],
    None: 0 * AXES[0],
}
GIVEN = pd.DataFrame(
    [
        ("", "Flash", 1e-8),
        ("uniform e8m10", "nearest_even", 1e-4),
        ("uniform e8m7", "nearest_even", 1e-3),
        ("uniform e8m10:toward_zero", "toward_zero", 2e-4),
        ("uniform e8m7:toward_zero", "toward_zero", 2e-3),
        ("uniform e8m4", "nearest_even", 1e-2),
    ],
    columns=["variant", "rounding", "dose"],
)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """(folder of runs, {format: displacements (8, 6)}): 8 twins of Baseline, of Flash and of four tiled arms."""
    folder, rng, twins = tmp_path_factory.mktemp("runs"), np.random.default_rng(1), 8
    moved = {}
    baseline = rng.normal(size=(twins, 6))
    for twin in range(twins):
        make_run(folder, "baseline", shifts=shifts(baseline[twin]), **nudge(twin))
    for format, effect in EFFECTS.items():
        moved[format] = rng.normal(size=(twins, 6)) + effect
        own = {"policy": "uniform", "format": format} if format else {}
        for twin in range(twins):
            make_run(folder, "tiled" if format else "flash", shifts=shifts(moved[format][twin]), **nudge(twin), **own)
        moved[format] = moved[format] - baseline
    return folder, moved


def nudge(twin):
    return {"twin": twin} if twin else {}


def shifts(vector):
    """Of steps 0 and 100."""
    return torch.zeros(2, 3), torch.from_numpy(vector.astype("float32")).reshape(2, 3)


def test_the_products_between_two_arms_are_those_of_their_differences(families):
    folder, moved = families
    table = inner_products(folder)
    part = table[(table["step"] == 100) & (table["space"] == "weights")]
    a, b = moved["e8m7"], moved["e8m7:toward_zero"]
    both = np.concatenate([a, b])
    assert paired_gram(part, "uniform e8m7", "uniform e8m7:toward_zero") == pytest.approx(both @ both.T, abs=1e-3)
    (row,) = systematic_effect(part, "uniform e8m7", "uniform e8m7:toward_zero").to_dict("records")
    by_hand = np.mean([a[i] @ b[j] for i in range(8) for j in range(8) if i != j])
    scale = ((a**2).sum(1).mean() * (b**2).sum(1).mean()) ** 0.5
    assert row["share"] == pytest.approx(by_hand / scale, rel=1e-4) and row["twins"] == 8


def test_what_two_arms_share_is_found_where_they_lead_to_the_same_place(families):
    effects = effects_of_doses(inner_products(families[0]), GIVEN)
    found = effects[effects["space"] == "weights"].set_index(["a", "b"])["p"] < 0.01
    zero, coarse = "uniform e8m7:toward_zero", "uniform e8m7"
    assert found[zero, zero] and found[coarse, coarse] and found["uniform e8m10:toward_zero", zero]
    assert not found["uniform e8m10", "uniform e8m10"] and not found["flash", "flash"]
    assert not found[coarse, zero]  # each has an effect of its own, and they have none in common
    assert len(found) == 5 * 6 // 2  # e8m4 was never trained
    assert list(dict.fromkeys(effects["a"]))[:3] == ["flash", "uniform e8m10", coarse]


def test_a_small_effect_is_not_lost_beside_large_ones():
    """Flash moves a ten-millionth as far as a tiled arm, in the same direction, and the table is stored in FP32."""
    rng, twins = np.random.default_rng(0), range(8)
    moved = {"baseline": 1e-8 * rng.normal(size=(8, 6)), "uniform e8m7": rng.normal(size=(8, 6)) + AXES[0]}
    moved["flash"] = 1e-7 * (rng.normal(size=(8, 6)) + AXES[0])
    moved["baseline"][0] = 0
    runs = [(arm, twin) for arm in sorted(moved) for twin in twins]
    rows = [
        (*a, *b, np.float32(moved[a[0]][a[1]] @ moved[b[0]][b[1]]))
        for a, b in itertools.combinations_with_replacement(runs, 2)
    ]
    table = pd.DataFrame(rows, columns=["arm", "twin", "other_arm", "other_twin", "inner"])
    table = table.assign(run="fp32-dit-s0", precision="fp32", seed=0, space="weights", step=100)
    (row,) = systematic_effect(table, "flash", "uniform e8m7").to_dict("records")
    assert row["share"] > 0.8 and row["p"] == 1 / 256


def test_without_twins_of_tiled_arms_there_is_nothing_to_say(tmp_path):
    for attn in ("flash", "baseline"):
        make_run(tmp_path, attn), make_run(tmp_path, attn, twin=1)
    make_run(tmp_path, "tiled", policy="uniform", format="e8m7")
    table = inner_products(tmp_path)
    assert set(table["arm"]) == {"flash", "baseline"}  # a single run is no family
    assert effects_of_doses(table, GIVEN).empty


def test_a_shorter_run_gives_way_to_the_longer_one(tmp_path):
    for twin in (0, 1):
        for attn in ("baseline", "flash"):
            make_run(tmp_path, attn, shifts=(0.0, 1.0, 2.0), **nudge(twin))
    short = make_run(tmp_path, "flash", shifts=(0.0, 9.0))
    short.rename(tmp_path / "a-shorter-flash")
    make_run(tmp_path, "flash", shifts=(0.0, 1.0, 2.0))
    assert set(inner_products(tmp_path)["step"]) == {0, 100, 200}


def test_the_verdict_counts_tiled_arms_and_tells_flash_beside_them(families):
    verdict = direction_verdict(effects_of_doses(inner_products(families[0]), GIVEN))
    assert verdict.holds == "holds only where"
    assert "Flash in 0 of 2 cases" in verdict.text and "toward zero in 4 of 4 cases" in verdict.text
    assert "to nearest in 2 of 4 cases" in verdict.text
    assert "both widths toward zero in 2 of 2 cases" in verdict.text
    assert "to nearest and toward zero in 0 of 8 cases" in verdict.text
    with pytest.raises(ValueError, match="twin=1, 2"):
        direction_verdict(effects_of_doses(inner_products(families[0]), GIVEN).query("rounding == 'Flash'"))


def test_the_chart_has_a_cell_for_every_two_arms(families):
    figures.register_theme()
    spec = shared_effects(effects_of_doses(inner_products(families[0]), GIVEN), "weights").to_dict()
    svg = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version="6.4")
    assert "NaN" not in svg and "undefined" not in svg and "weights, step 100" in svg
    assert svg.count("%</text>") == 15 and "10 bits toward zero" in svg
    assert "7 bits toward zero" in spec["usermeta"]["alt"]


@pytest.mark.parametrize(
    ("arm", "name"),
    [("flash", "Flash"), ("uniform e8m7", "7 bits to nearest"), ("uniform e8m10:stochastic", "10 bits stochastic")],
)
def test_arms_are_named_in_words(arm, name):
    assert arm_name(arm) == name

"""The systematic effect of Flash among twins, against sums written out and on data whose effect is known."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from made_runs import make_run

from fa_study.experiments.systematic import gram_matrix, inner_products, mean_effect, systematic_effect


def vectors(effect, twins=4, size=40, seed=0):
    """(2 * twins, size) displacements of Flash twins, then Baseline twins; `effect` is added to the former."""
    noise = np.random.default_rng(seed).normal(size=(2 * twins, size))
    noise[:twins] += effect
    return noise, np.arange(2 * twins) < twins


def test_mean_effect_is_the_sum_over_distinct_pairs_written_out():
    x, flash = vectors(0.5)
    ours, others = x[flash], x[~flash]
    terms = [
        (ours[i] - others[k]) @ (ours[j] - others[m])
        for i, j in itertools.permutations(range(4), 2)
        for k, m in itertools.permutations(range(4), 2)
    ]
    assert mean_effect(x @ x.T, flash[None])[0] == pytest.approx(np.mean(terms), rel=1e-12)


def test_mean_effect_is_unbiased_where_the_distance_is_not():
    """Over many draws it averages |E F - E B|^2, to which the squared distance adds the scatter of two twins."""
    effects = []
    for seed in range(400):
        x, flash = vectors(0.3, seed=seed)
        effects.append(mean_effect(x @ x.T, flash[None])[0])
    error = np.std(effects) / 20
    assert abs(np.mean(effects) - 40 * 0.3**2) < 4 * error < 40 * 0.3**2 / 2


def made_family(tmp_path, effect, twins=4):
    x, flash = vectors(effect, twins, size=6)
    for i, (vector, is_flash) in enumerate(zip(x, flash)):
        twin = i % twins
        shift = torch.from_numpy(vector).float().reshape(2, 3)
        make_run(
            tmp_path, "flash" if is_flash else "baseline", shifts=(shift * 0, shift), **({"twin": twin} if twin else {})
        )
    return torch.from_numpy(x).float().double().numpy(), flash


def test_stored_inner_products_are_those_of_the_displacements(tmp_path):
    x, flash = made_family(tmp_path, 1.0)
    make_run(tmp_path, "flash", "bf16"), make_run(tmp_path, "baseline", "bf16")  # no twins: no family
    table = inner_products(tmp_path)
    assert set(table["run"]) == {"fp32-dit-s0"} and set(table["space"]) == {"weights", "predictions"}
    part = table[(table["space"] == "weights") & (table["step"] == 100)]
    assert len(part) == 8 * 9 // 2
    gram, called_flash = gram_matrix(part)
    assert called_flash.sum() == 4
    moved = np.concatenate([x[~flash], x[flash]]) - x[~flash][0]  # the order of names: baseline, flash
    order = [int(i) for i in np.r_[0:4, 4:8]]
    assert gram == pytest.approx(moved[order] @ moved[order].T, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("effect", "found"), [(0.0, False), (3.0, True)])
def test_an_effect_is_found_where_there_is_one(tmp_path, effect, found):
    made_family(tmp_path, effect)
    result = systematic_effect(inner_products(tmp_path))
    assert set(result["step"]) == {100} and set(result["twins"]) == {4}  # all are equal at step 0
    assert (result["p"] <= 2 / 70).all() == found and (result["share"] > 0.5).all() == found
    # 2 of the C(8, 4) labellings are the true one and its mirror image
    assert result["p"].min() >= 2 / 70 - 1e-12
    assert ((result["share"] >= result["detectable"]) == (result["p"] <= 0.05 + 1e-12)).all()


def test_a_table_without_families_is_empty(tmp_path):
    assert inner_products(tmp_path).empty and systematic_effect(inner_products(tmp_path)).empty
    assert isinstance(systematic_effect(inner_products(tmp_path)), pd.DataFrame)

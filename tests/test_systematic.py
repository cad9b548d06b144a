"""The systematic effect of Flash among twins, against sums written out and on data whose effect is known."""

import itertools

import numpy as np
import pytest
import torch
from made_runs import make_run

from fa_study.experiments.systematic import inner_products, mean_effect, paired_gram, systematic_effect


def differences(effect, twins=8, size=40, seed=0):
    """(twins, size) differences between Flash and Baseline twins, with `effect` in common."""
    return np.random.default_rng(seed).normal(size=(twins, size)) + effect


def test_mean_effect_is_the_mean_over_distinct_pairs_written_out():
    d = differences(0.5)
    terms = [d[i] @ d[j] for i, j in itertools.permutations(range(8), 2)]
    assert mean_effect(d @ d.T, np.ones((1, 8)))[0] == pytest.approx(np.mean(terms), rel=1e-12)
    swapped = np.array([[-1, 1, 1, 1, 1, 1, 1, 1]])
    d[0] *= -1
    assert mean_effect(d @ d.T, swapped)[0] == pytest.approx(np.mean(terms), rel=1e-12)


def test_mean_effect_is_unbiased_where_the_distance_is_not():
    """Over many draws it averages |E d|^2, to which the squared distance adds the scatter of a twin."""
    effects = []
    for seed in range(400):
        d = differences(0.3, seed=seed)
        effects.append(mean_effect(d @ d.T, np.ones((1, 8)))[0])
    error = np.std(effects) / 20
    assert abs(np.mean(effects) - 40 * 0.3**2) < 4 * error < 40 * 0.3**2 / 4


def made_family(tmp_path, effect, twins=8):
    """Twins whose nudge both arms share; returns Flash minus Baseline, (twins, 6)."""
    rng = np.random.default_rng(1)
    noise = {arm: rng.normal(size=(twins, 6)).astype("float32") for arm in ("flash", "baseline")}
    noise["flash"] += np.float32(effect)
    for twin, (arm, vectors) in itertools.product(range(twins), noise.items()):
        shift = torch.from_numpy(vectors[twin]).reshape(2, 3)
        nudge = torch.full((2, 3), 0.5 * twin)
        settings = {"twin": twin} if twin else {}
        make_run(tmp_path, arm, shifts=(nudge, nudge + shift), **settings)
    return (noise["flash"] - noise["baseline"]).astype(float)


def test_stored_inner_products_give_those_of_the_differences(tmp_path):
    d = made_family(tmp_path, 1.0, twins=4)
    make_run(tmp_path, "flash", "bf16"), make_run(tmp_path, "baseline", "bf16")  # no twins: no family
    table = inner_products(tmp_path)
    assert set(table["run"]) == {"fp32-dit-s0"} and set(table["space"]) == {"weights", "predictions"}
    for space in ("weights", "predictions"):
        part = table[(table["space"] == space) & (table["step"] == 100)]
        assert len(part) == 8 * 9 // 2
        assert paired_gram(part, "flash") == pytest.approx(d @ d.T, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("effect", "found"), [(0.0, False), (3.0, True)])
def test_an_effect_is_found_where_there_is_one(tmp_path, effect, found):
    made_family(tmp_path, effect)
    result = systematic_effect(inner_products(tmp_path))
    assert set(result["step"]) == {100} and set(result["twins"]) == {8}  # the arms are equal at step 0
    # 2 of the 256 namings are the true one and its mirror image
    assert (result["p"] == 2 / 256).all() == found and (result["share"] > 0.5).all() == found
    assert result["p"].min() >= 2 / 256
    assert (result["p"][result["share"] >= result["detectable"]] < 0.01).all() and (result["detectable"] > 0).all()


def test_the_test_is_exact_where_there_is_no_effect():
    """p of 0.05 or less in about 5 of 100 draws without an effect, though the twins' noise is skewed."""
    signs = np.array(list(itertools.product((1, -1), repeat=6)))
    hits = 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        d = rng.exponential(size=(6, 5)) - rng.exponential(size=(6, 5))
        null = mean_effect(d @ d.T, signs)
        hits += (null >= null[0] - 1e-9).mean() <= 0.05
    assert hits / 1000 <= 0.05 + 4 * (0.05 * 0.95 / 1000) ** 0.5


def test_a_table_without_families_is_empty(tmp_path):
    assert inner_products(tmp_path).empty and systematic_effect(inner_products(tmp_path)).empty

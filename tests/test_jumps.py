"""Jumps of the loss: found where they are, counted once, and compared by a test that is exact."""

import itertools

import numpy as np
import pandas as pd
import pytest

from fa_study.experiments.jumps import beside_surroundings, detectable_excess, jump_tests, sign_flip_p
from fa_study.experiments.runs import PLAIN
from fa_study.verdicts import jumps_verdict

FLASH, TWIN = "Flash against Baseline", "ulp twin"


def loss_table(jumps, seeds=8, precisions=("bf16", "fp32")):
    """Losses that fall steadily, times `jumps`[arm, precision, seed, twin][step] where that is given.

    Runs that do not count (further twins, a fork, another data order) jump at step 700.
    """
    rows = []

    def add(arm, precision, seed, twin=0, **changed):
        name = "-".join(f"{key}{value}" for key, value in changed.items())
        about = {"run": f"{arm}-{precision}-s{seed}-twin{twin}{name}", "arm": arm, "precision": precision, "seed": seed}
        about |= PLAIN | {"twin": twin, "twin_step": 0} | changed
        for step in range(0, 1050, 50):
            loss = 0.5 - step / 4000
            own = {700: 9.0} if changed or twin > 1 else jumps.get((arm, precision, seed, twin), {})
            rows.append(about | {"step": step, "held_out_loss": np.float32(loss * own.get(step, 1))})

    for precision, seed in itertools.product(precisions, range(seeds)):
        for arm, twin in (("flash", 0), ("baseline", 0), ("baseline", 1)):
            add(arm, precision, seed, twin)
    for twin in (2, 3):
        add("baseline", precisions[0], 0, twin)
        add("flash", precisions[0], 0, twin)
    add("baseline", precisions[0], 0, data_seed=1)
    add("baseline", precisions[0], 0, 1, twin_step=300)
    return pd.DataFrame(rows)


def test_jumps_are_found_where_they_are():
    jumps = {
        ("flash", "bf16", 3, 0): {600: 1.4, 850: 1.28, 1000: 2.0},
        ("baseline", "fp32", 0, 0): {400: 5.0, 500: 1.4},
        ("baseline", "fp32", 1, 1): {900: 1.4},
    }
    ratios = beside_surroundings(loss_table(jumps))
    assert ratios["step"].min() == 500 and len(ratios) == 2 * 8 * 3 * 11  # no other twin, fork or data order
    found = ratios[ratios["ratio"] > 1.3]
    assert set(found[["arm", "precision", "seed", "twin", "step"]].itertuples(index=False, name=None)) == {
        *(("flash", "bf16", 3, 0, 600), ("flash", "bf16", 3, 0, 1000)),
        *(("baseline", "fp32", 0, 0, 500), ("baseline", "fp32", 1, 1, 900)),
    }
    # the largest of the five is the jump itself, and the third largest the loss of the snapshot before it
    near = found.set_index("step").loc[[600, 900], "ratio"]
    assert near.to_numpy() == pytest.approx([1.4 * 0.35 / 0.3625, 1.4 * 0.275 / 0.2875])
    tests = jump_tests(loss_table(jumps)).set_index(["kind", "precision"])
    told = ["ours", "theirs", "seeds", "runs"]
    assert tests.loc[(FLASH, "bf16"), told].tolist() == [2, 0, 8, 8]
    assert tests.loc[(FLASH, "fp32"), told].tolist() == [0, 1, 8, 8]
    assert tests.loc[(FLASH, "all"), told].tolist() == [2, 1, 8, 16]
    assert tests.loc[(TWIN, "fp32"), told].tolist() == [1, 1, 8, 8]
    assert jump_tests(loss_table(jumps), 1.2).query("kind == @FLASH")["ours"].tolist() == [3, 0, 3]


@pytest.mark.parametrize("differences", [(1, 1, 1, 0, 0, 2, 0, 0), (-1, 3, 2), (0, 0), (5,), (1, -1, 1, -1, 2)])
def test_p_counts_every_choice_of_signs(differences):
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    sums = np.abs(signs @ np.array(differences))
    assert sign_flip_p(differences)[0] == (sums >= abs(sum(differences))).mean()
    # under the null all choices are as likely: the share of them with so small a p is that p, exactly
    of_all = sign_flip_p(signs * np.array(differences))
    for p in set(of_all):
        assert (of_all <= p).mean() == p


def test_only_whole_numbers_can_be_counts():
    with pytest.raises(ValueError, match="counts jumps and takes whole numbers"):
        sign_flip_p([0.5, 1])
    with pytest.raises(ValueError, match=r"factor must be more than 1, got 0.9"):
        jump_tests(loss_table({}), 0.9)


def test_a_detectable_excess_is_found_in_four_cases_of_five():
    excess, generator = detectable_excess(0.5, (1,) * 8), np.random.default_rng(1)

    def power(more):
        ours, theirs = generator.poisson(0.5 + more, (2000, 8)), generator.poisson(0.5, (2000, 8))
        return (sign_flip_p(ours - theirs) < 0.05).mean()

    assert 0.75 < power(excess) < 0.87 and power(excess / 2) < 0.5 and power(0) <= 0.05
    assert detectable_excess(0.5, (2,) * 8) < excess  # two runs per seed say more than one
    assert detectable_excess(0.0, (1,) * 5) == float("inf")  # the smallest p of five seeds is 2 / 32


def with_jumps(flash, baseline=(), steps=(600, 800)):
    """Two jumps in each run of the named seeds."""
    sides = {"flash": flash, "baseline": baseline}
    return {
        (arm, precision, seed, 0): dict.fromkeys(steps, 2.0)
        for arm, parts in sides.items()
        for precision, seeds in parts
        for seed in seeds
    }


EVERY, TWO = range(8), range(2)


@pytest.mark.parametrize(
    ("flash", "baseline", "holds"),
    [
        ((("bf16", EVERY), ("fp32", EVERY)), (), "holds"),
        ((("bf16", EVERY), ("fp32", TWO)), (), "holds only where"),
        ((("bf16", TWO), ("fp32", TWO)), (), "undecided"),
        ((), (), "undecided"),
        ((), (("bf16", EVERY), ("fp32", EVERY)), "does not hold"),
        ((), (("bf16", EVERY), ("fp32", TWO)), "undecided"),
    ],
)
def test_the_verdict_on_the_jumps(flash, baseline, holds):
    verdict = jumps_verdict(loss_table(with_jumps(flash, baseline)))
    assert verdict.holds == holds
    assert "with Baseline nudged and with Baseline: BF16 0 and " in verdict.text


def test_fresh_seeds_of_fp32_alone_decide_where_there_are_some():
    first = jumps_verdict(loss_table(with_jumps((("fp32", EVERY),)), seeds=16))
    assert first.holds == "undecided"
    assert first.text.startswith("In the seeds from 8 on, which were trained to answer this, FP32 0 and 0 in 8 runs")
    assert "Over all seeds, with Flash and with Baseline: BF16 0 and 0 in 16 runs each" in first.text
    assert "FP32 16 and 0 in 16 runs each (p = 0.00781" in first.text
    assert jumps_verdict(loss_table(with_jumps((("fp32", range(8, 16)),)), seeds=16)).holds == "holds"


def test_the_verdict_tells_what_could_not_be_seen():
    text = jumps_verdict(loss_table(with_jumps((("bf16", EVERY), ("fp32", TWO))))).text
    assert "BF16 16 and 0 in 8 runs each (p = 0.00781; 1." in text
    assert "FP32 4 and 0 in 8 runs each (p = 0.5; so few jumps cannot give less than 0.5; 1." in text
    assert "both precisions together 20 and 0 in 16 runs each" in text
    alone = jumps_verdict(loss_table({}, seeds=5, precisions=("fp32",))).text
    assert "both precisions" not in alone and "no excess would have been found" in alone
    with pytest.raises(ValueError, match="at least one setting"):
        jumps_verdict(loss_table({}, seeds=1))

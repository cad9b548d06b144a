"""Names of runs, and what is said about options that do not exist or cannot be."""

import pytest
from tiny_runs import compose_settings, train_here

from train import Refusal
from train.settings import GROUPS, NATURAL, check_overrides, check_settings, run_name


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("attn=flash", "precision=bf16", "seed=2"), "flash-bf16-dit-s2"),
        (("model=unet",), "baseline-fp32-unet-s0"),
        (("steps=60",), "baseline-fp32-dit-s0-steps60"),
        (("experiment=demo",), "baseline-fp32-dit-s0-steps100-every20-size_tiny"),
        (("data_seed=3", "threads=2"), "baseline-fp32-dit-s0-data_seed3-threads2"),
        (("sampling.steps=5",), "baseline-fp32-dit-s0-sampling.steps5"),
        (("attn=tiled", "attn.format=e8m10:stochastic"), "tiled-fp32-dit-s0-format_e8m10_stochastic"),
        (("data=folder", "data.path=/some/where/cats"), "baseline-fp32-dit-s0-folder-path_cats"),
        # what changes no result changes no name
        (("logger.mode=disabled", "runs_dir=elsewhere", "finished=skip", "device=cpu"), "baseline-fp32-dit-s0"),
    ],
)
def test_name_follows_from_the_settings(overrides, name):
    assert run_name(compose_settings(*overrides)) == name


def test_the_demonstration_names_the_same_folder_by_experiment_or_by_hand():
    by_hand = compose_settings("model.size=tiny", "steps=100", "snapshots.every=20")
    assert run_name(compose_settings("experiment=demo")) == run_name(by_hand)


@pytest.mark.parametrize("words", ["stpes=60", "+stpes=60", "optimizer.learning_rate=1", "model.sise=tiny"])
def test_an_unknown_option_lists_the_known_ones(words):
    with pytest.raises(Refusal, match=r"there is no option .*optimizer\.lr.*snapshots\.every.*steps"):
        check_overrides(["attn=flash", words])


def test_an_unknown_option_suggests_the_nearest():
    with pytest.raises(Refusal, match=r"did you mean steps\?"):
        check_overrides(["stpes=60"])


def test_an_unknown_choice_lists_the_choices_also_within_a_sweep():
    with pytest.raises(Refusal, match=r"attn=flush is unknown; use .*baseline.*flash"):
        check_overrides(["-m", "attn=baseline,flush"])


def test_known_options_and_hydras_own_pass():
    check_overrides(["-m", "attn=baseline,flash", "optimizer.lr=0.1", "experiment=demo", "hydra.launcher.n_jobs=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=mps", "device=mps is unknown; use auto, cpu or cuda"),
        ("data.pixels=20", "data.pixels=20 is unknown; use 16, 32 or 64"),
        ("model.size=huge", "use tiny, small or base"),
        ("logger.mode=on", "use online, offline or disabled"),
        ("steps=0", "steps=0 is no count"),
        ("steps=1.5", "steps=1.5 is no count"),
        ("seed=-1", "seed=-1 is not allowed"),
        ("optimizer.lr=fast", "optimizer.lr=fast is not allowed"),
        ("optimizer.lr=nan", "optimizer.lr=nan is not allowed"),
        ("optimizer.clip=inf", "optimizer.clip=inf is not allowed"),
        ("data.caption_dropout=2", "is no probability"),
        ("data.caption_dropout=abc", "data.caption_dropout=abc is no probability"),
        ("data.caption_dropout=nan", "is no probability"),
        ("data.caption_dropout=true", "is no probability"),
        ("sampling.guidance=abc", "sampling.guidance=abc is no finite number"),
        ("sampling.guidance=inf", "is no finite number"),
        ("batch_split=9", "batch_split=9 is more than batch_size=8"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(override, message):
    with pytest.raises(Refusal, match=message) as caught:
        check_settings(compose_settings(override))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NATURAL)
def test_a_truth_value_is_no_whole_number(name):
    with pytest.raises(Refusal, match=f"{name}=True is not allowed; use a whole number"):
        check_settings(compose_settings(f"{name}=true"))


def test_values_at_the_edge_pass():
    check_settings(
        compose_settings("batch_split=8", "data.caption_dropout=1", "sampling.guidance=-1", "optimizer.lr=0")
    )


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "experiment"])
def test_only_the_experiment_may_be_null(group):
    check_overrides(["experiment=null"])
    with pytest.raises(Refusal, match=f"{group}=null is unknown; use "):
        check_overrides([f"{group}=null"])


@pytest.mark.parametrize("override", ["optimizer.lr=nan", "data.caption_dropout=abc", "sampling.guidance=abc"])
def test_a_bad_value_is_refused_before_a_run_folder_is_made(override, tmp_path):
    with pytest.raises(Refusal):
        train_here(tmp_path / "runs", "steps=1", override)
    assert not (tmp_path / "runs").exists()

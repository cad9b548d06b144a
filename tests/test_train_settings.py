"""Names of runs, and what is said about options that do not exist or cannot be."""

import pytest
from omegaconf import OmegaConf
from tiny_runs import compose_settings, train_here

from train import Refusal
from train.arms import check_arm
from train.command_line import check_overrides
from train.settings import GROUPS, NATURAL, check_settings, flat, run_name


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=["], r"steps=\[ cannot be read"),
        (["seed=é"], "seed=é cannot be read; .*\"seed='...'\""),
        (["steps"], "steps is no option; use option=value"),
        (["steps=1,2"], "steps=1,2 has several values; for a sweep over them add -m"),
        (["attn=flash,baseline"], "attn=flash,baseline has several values"),
        (["seed=range(0,3)"], "has several values"),
        (["~steps"], "~steps cannot be added or removed"),
        (["+steps=3"], r"\+steps cannot be added or removed; .* steps=value"),
        (["attn@x=flash"], "there is no option attn@x"),
        (["attn.format=bf16"], "attn.format is an option of attn=tiled, not of attn=baseline"),
        (["attn=flash", "attn.backend=math"], "attn.backend is an option of attn=sdpa, not of attn=flash"),
        (["-m", "attn=tiled,flash", "attn.format=bf16"], "not of attn=flash"),
        (["data.path=x"], "data.path is an option of data=folder, not of data=emoji"),
        (["hydra=3"], "hydra=3 is not allowed, as hydra has options of its own; they are hydra.run"),
        (["hydra.run=x"], r"hydra\.run has options of its own; they are hydra\.run\.dir"),
        (["hydra.callbacks.failures=3"], r"not allowed; leave hydra\.callbacks\.failures as it is"),
        (["hydra.launcher._target_=os.system"], "not allowed; choose with hydra/launcher=name"),
        (["hydra.callbacks.failures._target_=os.system"], "_target_=os.system is not allowed$"),
    ],
)
def test_words_that_hydra_would_answer_at_length_are_refused_in_a_sentence(words, message):
    with pytest.raises(Refusal, match=message) as caught:
        check_overrides(words)
    assert "\n" not in str(caught.value)


def test_flags_of_hydra_and_their_values_are_left_to_it():
    check_overrides(["--cfg", "job", "seed=range(0,3)", "-m", "attn.tile_rows=3", "attn=tiled", "data_seed='1'"])


def test_known_options_and_hydras_own_pass():
    check_overrides(["-m", "attn=baseline,flash", "optimizer.lr=0.1", "experiment=demo", "hydra.launcher.n_jobs=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=mps", "device=mps is unknown; use auto, cpu or cuda"),
        ("data.pixels=20", "data.pixels=20 is unknown; use 16, 32 or 64"),
        ("model.size=huge", "use tiny, small or base"),
        ("logger.mode=on", "use online, offline or disabled"),
        ("steps=0", "steps=0 is not allowed; use a whole number from 1"),
        ("steps=1.5", "steps=1.5 is not allowed"),
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
        ("runs_dir='~/runs'", "runs_dir=~/runs would make a folder called ~"),
        ("continue_from='~/runs/a'", "write the path out"),
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


@pytest.mark.parametrize("group", GROUPS)
def test_no_group_may_be_null(group):
    with pytest.raises(Refusal, match=f"{group}=null is unknown; use "):
        check_overrides([f"{group}=null"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.lr=nan",),
        ("sampling.guidance=abc",),
        ("attn=tiled", "attn.format=bf17"),
        ("continue_from=nosuch",),
        ("data=folder", "data.path=nosuch"),
    ],
)
def test_a_bad_value_is_refused_before_a_run_folder_is_made(overrides, tmp_path):
    with pytest.raises(Refusal):
        train_here(tmp_path / "runs", "steps=1", *overrides)
    assert not (tmp_path / "runs").exists()


GARBAGE = ["", " ", None, [], [1, 2], {"a": 1}, -1, 10**30, 2**31, float("nan"), -1e300, "abc", "é", "x" * 300]
ALLOWED = {  # the garbage that is a value after all
    "optimizer": [10**30, 2**31],
    "sampling.guidance": [-1, 10**30, 2**31, -1e300],
    "runs_dir": ["abc", "é", "x" * 300],
    "logger.project": ["abc", "é"],
    "continue_from": [None, "abc", "é", "x" * 300],
    "data.path": ["abc", "é", "x" * 300],
    "attn.sites": [None],
}


@pytest.mark.parametrize(
    ("base", "part"),
    [(("attn=tiled",), ""), (("attn=sdpa",), "attn."), (("data=folder", "data.path=pictures"), "data.")],
)
def test_garbage_in_any_option_is_refused_in_a_sentence(base, part):
    settings = compose_settings(*base, "device=cpu")
    keys = [key for key in flat(settings) if key.startswith(part) and not key.endswith(".name")]
    for key in keys:
        for value in GARBAGE:
            changed = settings.copy()
            OmegaConf.set_struct(changed, False)
            OmegaConf.update(changed, key, value, merge=False)
            try:
                check_settings(changed)
                check_arm(changed.attn, "fp32", "cpu")
            except Refusal as refusal:
                assert key in str(refusal) or key.partition(".")[2] in str(refusal), (key, value, refusal)
                assert "\n" not in str(refusal)
            else:
                expected = ALLOWED.get(key, ALLOWED.get(key.rpartition(".")[0], []))
                assert any(value is other or value == other for other in expected), (key, value)


@pytest.mark.parametrize("least", [1, 1.0])
def test_whole_numbers_and_fractions_of_the_same_value_are_one_run(least):
    assert run_name(compose_settings(f"optimizer.lr={least}")) == "baseline-fp32-dit-s0-lr1.0"


def test_a_name_too_long_for_a_folder_is_cut_and_stays_unique():
    sites = [f"attn.sites.{site}=e8m10:toward_zero" for site in compose_settings("attn=tiled").attn.sites]
    names = {run_name(compose_settings("attn=tiled", *sites[:-1], last)) for last in (sites[-1], sites[0])}
    assert len(names) == 2 and all(len(name) == 200 for name in names)

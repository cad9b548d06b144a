"""The study's driver: which runs it makes of a sweep, which pairs of them, and what it does with failures."""

import json

import pandas as pd
import pytest
from tiny_runs import TINY, compose_settings

import train.study as study
from train import Refusal
from train.settings import check_settings, choices_of


def test_every_sweep_expands_to_runs_that_exist():
    for sweep in choices_of("study"):
        for entry in study.entries(sweep, 3):
            run = study.expand({"seed": "3", **entry["run"]})[-1]
            other = study.partner(run, entry["against"])
            for options in (run, other):
                check_settings(compose_settings(*(f"{key}={value}" for key, value in options.items())))
            assert run != other
            assert entry["against"].items() - entry["run"].items()


def test_partner_changes_one_thing_and_drops_the_options_of_another_arm():
    run = {"attn": "tiled", "attn.format": "e8m10", "precision": "fp32"}
    assert study.partner(run, {"attn": "baseline"}) == {"attn": "baseline", "precision": "fp32"}
    assert study.partner(run, {"precision": "bf16"})["attn.format"] == "e8m10"


def test_expand_is_a_product_without_hydras_own_options():
    runs = study.expand({"attn": "a,b", "precision": "x,y", "hydra.launcher.n_jobs": "1"})
    assert len(runs) == 4 and {"attn": "b", "precision": "x"} in runs


def test_unknown_sweep_is_refused_with_the_list(capsys):
    assert study.main(["sweeps=papers"]) == 2
    assert "use controls, dose, first, fp16, paper" in capsys.readouterr().err
    with pytest.raises(Refusal):
        study.entries("papers", 0)


@pytest.fixture
def no_study(monkeypatch):
    """The words that would have started the study, instead of the study."""
    started = []
    monkeypatch.setattr(study, "study", lambda own, common: started.append((own, common)) or [])
    return started


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_prints_the_usage_and_starts_nothing(word, no_study, capsys):
    assert study.main([word]) == 0
    assert "python train/study.py seeds=0,1,2" in capsys.readouterr().out
    assert study.main(["steps=2", word]) == 0
    assert not no_study


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--hepl", "--hepl is no option; "),
        ("paper", "paper is no option; "),
        ("-m=1", "-m=1 is no option; "),
        ("stpes=2", "there is no option stpes; did you mean steps?"),
        ("attn=null", "attn=null is unknown"),
        ("seeds=a", "seeds=a is not allowed; use whole numbers of at least 0 with commas between them"),
        ("seeds=0,-1", "seeds=0,-1 is not allowed"),
        ("seeds=", "seeds= is not allowed"),
        ("drop_weights=yes", "drop_weights=yes is unknown; use true or false"),
        ("drop_weights=", "drop_weights= is unknown"),
    ],
)
def test_bad_words_are_refused_in_a_sentence(word, message, no_study, capsys):
    assert study.main(["sweeps=paper", word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not no_study


@pytest.mark.parametrize(("text", "value"), [("True", True), ("true", True), ("false", False), ("False", False)])
def test_words_are_read_as_what_they_mean(text, value, no_study):
    assert study.main([f"drop_weights={text}", "seeds=2,0", "steps=5", "sweeps=paper,dose"]) == 0
    ((own, common),) = no_study
    assert own == {"seeds": [2, 0], "sweeps": ["paper", "dose"], "runs_dir": "runs", "drop_weights": value}
    assert common == ["steps=5"]


def test_other_initialisation_is_the_next_seed_as_the_figures_expect():
    (entry,) = [entry for entry in study.entries("controls", 3) if entry["label"] == "init"]
    assert int(entry["run"]["seed"]) == int(entry["against"]["seed"]) + 1 == 4


@pytest.fixture
def in_process(monkeypatch):
    """Let the study train in this process, one run after the other; runs that contain `fail` fail."""
    from train.run import train

    def train_all(run, common):
        good = True
        for single in study.expand(run):
            if single.get("precision") == train_all.fail:
                good = False
                continue
            words = [f"{key}={value}" for key, value in single.items()]
            train(compose_settings("finished=skip", *common, *words), "python train/run.py", sweep=True)
        return good

    train_all.fail = None
    monkeypatch.setattr(study, "train_all", train_all)
    return train_all


def test_pairs_are_reduced_to_tables_and_weights_dropped_on_request(in_process, tmp_path, capsys):
    in_process.fail = "bf16"
    words = [*TINY, "logger.mode=disabled", "steps=2", "snapshots.every=1", f"runs_dir={tmp_path}"]
    code = study.main(["seeds=0", "sweeps=paper", "drop_weights=true", *words])
    assert code == 1  # the runs in bf16 failed, the others went on
    assert "paper flash seed 0: a run failed" in capsys.readouterr().err
    (table,) = tmp_path.glob("pairs/flash/*.parquet")
    frame = pd.read_parquet(table)
    assert sorted(frame["step"].unique()) == [0, 1, 2]
    model = frame[(frame["level"] == "model") & (frame["average"] == "mean")].set_index("step")["max_difference"]
    assert model[0] == 0 and model[2] > 0
    runs = [path.parent for path in tmp_path.glob("*/manifest.json")]
    assert len(runs) == 2
    assert all(json.loads((run / "manifest.json").read_text())["state"] == "finished" for run in runs)
    kept = {path.parent.parent.name[:18] for path in tmp_path.glob("*/weights/*")}
    assert kept == {"baseline-fp32-dit-"}  # its partner in bf16 is still to come
    before = table.stat().st_mtime_ns
    in_process.fail = None
    study.main(["seeds=0", "sweeps=paper", "drop_weights=true", *words])
    assert table.stat().st_mtime_ns == before
    assert len(list(tmp_path.glob("pairs/precision/*.parquet"))) == 1
    assert not list(tmp_path.glob("*/weights/*"))


def test_weights_that_a_later_seed_compares_with_are_kept_until_then(in_process, tmp_path, monkeypatch):
    """The other initialisation of seed 0 is seed 1's own run, in whichever order the seeds are given."""

    def entries(_, seed):
        run = {"precision": "fp32", "seed": str(seed + 1)}
        return [{"label": "init", "run": run, "against": {"seed": str(seed)}}]

    monkeypatch.setattr(study, "entries", entries)
    words = [*TINY, "logger.mode=disabled", "steps=1", "snapshots.every=1", f"runs_dir={tmp_path}"]
    assert study.main(["seeds=1,0", "sweeps=paper", "drop_weights=true", *words]) == 0
    assert len(list(tmp_path.glob("pairs/init/*.parquet"))) == 2
    kept = {path.parent.parent.name.split("-")[3] for path in tmp_path.glob("*/weights/*")}
    assert kept == {"s2"}  # that of the seed that a later study would begin with


def test_a_pair_without_weights_is_a_failure_in_a_sentence(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        run.mkdir()
        snapshot = {"step": 0, "file": "weights/step-000000.safetensors"}
        (run / "manifest.json").write_text(json.dumps({"state": "finished", "snapshots": [snapshot]}))
    table = tmp_path / "pairs" / "table.parquet"
    assert study.reduce_pair(*runs, table).endswith("step-000000.safetensors: no such file or folder")
    assert not table.parent.exists()

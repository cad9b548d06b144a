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
    assert not list(tmp_path.glob("*/weights/*"))
    before = table.stat().st_mtime_ns
    study.main(["seeds=0", "sweeps=paper", *words])
    assert table.stat().st_mtime_ns == before

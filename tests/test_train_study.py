"""The study's driver: which runs it makes of a sweep, which pairs of them, and what it does with failures."""

import pytest
from tiny_runs import TINY, compose_settings

import train.study as study
from fa_study.experiments.weights import whole_model
from fa_study.tables import read_table
from train import Refusal
from train.settings import check_settings, choices_of


def test_every_sweep_expands_to_runs_that_exist():
    for sweep in choices_of("study"):
        products = study.products(sweep, 0)
        assert products
        for run in (run for product in products for run in study.expand(product)):
            check_settings(compose_settings(*(f"{key}={value}" for key, value in run.items())))


def test_an_entry_for_some_seeds_is_for_no_other():
    assert study.products("systematic", 1) == [] and study.products("paper", 7)[0]["seed"] == "7"


def test_expand_is_a_product_without_hydras_own_options():
    runs = study.expand({"attn": "a,b", "precision": "x,y", "hydra.launcher.n_jobs": "1"})
    assert len(runs) == 4 and {"attn": "b", "precision": "x"} in runs


def test_unknown_sweep_is_refused_with_the_list(capsys):
    assert study.main(["sweeps=papers"]) == 2
    assert "use controls, dose, forks, fp16, fresh, paper, systematic, tiled, twins" in capsys.readouterr().err
    with pytest.raises(Refusal):
        study.products("papers", 0)


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
        ("plan=1", "plan=1 is unknown; use true or false"),
        ("drop_weights=yes", "drop_weights=yes is unknown; use true or false"),
        ("drop_weights=", "drop_weights= is unknown"),
        ("runs_dir=", "runs_dir= is empty"),
    ],
)
def test_bad_words_are_refused_in_a_sentence(word, message, no_study, capsys):
    assert study.main(["sweeps=paper", word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not no_study


@pytest.mark.parametrize("word", ["steps=-5", "steps=abc", "optimizer.lr=-1"])
def test_a_bad_value_is_refused_once_before_the_first_run(word, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "train_all", lambda *_: pytest.fail("a run was started"))
    assert study.main(["sweeps=paper,twins", f"runs_dir={tmp_path}", word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {word} is not allowed") and error.count("\n") == 1


@pytest.mark.parametrize(("text", "value"), [("True", True), ("true", True), ("false", False), ("False", False)])
def test_words_are_read_as_what_they_mean(text, value, no_study):
    assert study.main([f"drop_weights={text}", "seeds=2,0,2", "steps=5", "sweeps=paper,dose,paper"]) == 0
    ((own, common),) = no_study
    assert own == {
        "seeds": [2, 0],
        "sweeps": ["paper", "dose"],
        "runs_dir": "runs",
        "tables": "",
        "drop_weights": value,
        "plan": False,
    }
    assert common == ["steps=5"]


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


def test_after_each_seed_there_are_tables_and_weights_are_dropped_on_request(in_process, tmp_path, capsys):
    in_process.fail = "bf16"
    words = [*TINY, "logger.mode=disabled", "steps=2", "snapshots.every=1", f"runs_dir={tmp_path}"]
    code = study.main(["seeds=1,0", "sweeps=paper", "drop_weights=true", *words])
    assert code == 1  # the runs in bf16 failed, the others went on
    told = capsys.readouterr()
    assert told.err.count("paper seed 0: a run failed") == 1 and told.out.startswith("8 runs to do, 0 finished; about ")

    def table():
        return read_table("weights.parquet", tmp_path / "tables")

    kinds = {"Flash against Baseline", "its own start"}
    assert set(table()["kind"]) == kinds | {"other initialisation"} and set(table()["step"]) == {0, 1, 2}
    model = whole_model(table(), "Flash against Baseline").query("seed == 0").set_index("step")["max_difference"]
    assert model[0] == 0 and model[2] > 0
    between = read_table("lines.parquet", tmp_path / "tables")
    assert set(between["kind"]) == {"Flash against Baseline", "other initialisation"}
    kept = {path.parent.parent.name.split("-")[3] for path in tmp_path.glob("*/weights/*")}
    assert kept == {"s1"}  # the next seed is compared with it
    in_process.fail = None
    assert study.main(["seeds=1", "sweeps=paper", "drop_weights=true", *words]) == 0
    assert "2 runs to do, 2 finished" in capsys.readouterr().out
    # The pairs of seed 0, whose weights are gone, are still there.
    assert len(table()["run"].unique()) == 8 and "BF16 against FP32" in set(table()["kind"])


def test_the_plan_starts_nothing(in_process, tmp_path, capsys):
    assert study.main(["plan=true", "sweeps=paper,twins", f"runs_dir={tmp_path}", "model.size=base"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("6 runs to do, 0 finished; about 0.0 hours") and "whose pace is not known" in told
    assert not list(tmp_path.iterdir())

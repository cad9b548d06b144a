"""The command that turns training runs into tables."""

import json
import shutil

import pandas as pd
import pytest
from made_runs import make_run

from fa_study.experiments import reduce_runs
from fa_study.experiments.pace import run_records, seconds_per_step
from fa_study.tables import read_manifest, read_table


def test_the_help_of_the_reduction_ends_with_its_last_sentence(capsys):
    with pytest.raises(SystemExit) as stop:
        reduce_runs.main(["--help"])
    assert stop.value.code == 0
    assert "settings in the manifest." in " ".join(capsys.readouterr().out.split())


def test_the_tables_grow_seed_by_seed_and_keep_what_is_gone(tmp_path):
    runs, tables = tmp_path / "runs", tmp_path / "tables"
    for seed in (0, 1):
        make_run(runs, "flash", seed=seed), make_run(runs, "baseline", seed=seed)
        reduce_runs.reduce_runs(runs, tables)
        shutil.rmtree(runs / f"flash-fp32-dit-s{seed}")
    whole = read_table("weights.parquet", tables)
    flash = whole[whole["kind"] == "Flash against Baseline"]
    assert set(flash["seed"]) == {0, 1} and not whole.duplicated(["run", "step", "level", "name", "average"]).any()
    assert set(read_table("losses.parquet", tables)["run"]) == {
        f"{a}-fp32-dit-s{s}" for a in ("flash", "baseline") for s in (0, 1)
    }
    entry = read_manifest(tables)["weights.parquet"]
    assert len(entry["runs"]) == 4 and entry["run_commits"] == ["abc"]
    reduce_runs.reduce_runs(runs, tables, replace=True)
    assert set(read_table("weights.parquet", tables)["kind"]) == {"its own start", "other initialisation"}


def test_of_a_run_made_twice_the_version_that_tells_more_stays():
    stored = pd.DataFrame({"run": ["a", "a", "b"], "value": [1, 2, 3]})
    new = pd.DataFrame({"run": ["a", "a", "b", "b", "c"], "value": [10, 20, 30, 31, 40]})
    merged = reduce_runs.merged(new, stored)
    assert merged.groupby("run")["value"].apply(list).to_dict() == {"a": [1, 2], "b": [30, 31], "c": [40]}
    assert list(reduce_runs.merged(new, pd.DataFrame())["value"]) == [10, 20, 30, 31, 40]


def test_a_longer_run_takes_the_place_of_a_shorter_one():
    def table(run, **columns):
        return pd.DataFrame({"run": run, **columns})

    short, long = (
        "tiled-s0-steps400-tiny--baseline-s0-steps1000-tiny",
        "tiled-s0-steps1000-tiny--baseline-s0-steps1000-tiny",
    )
    stored = table([short] * 2 + ["other-s0"], step=[0, 400, 0])
    new = table([long] * 3, step=[0, 400, 1000])
    assert list(reduce_runs.merged(new, stored)["run"]) == ["other-s0", *[long] * 3]
    assert list(reduce_runs.merged(stored, new)["run"]) == [*[long] * 3, "other-s0"]
    short, long = table(["run-s0-steps400"], steps=[400]), table(["run-s0-steps1000"], steps=[1000])
    assert list(reduce_runs.merged(long, short)["steps"]) == list(reduce_runs.merged(short, long)["steps"]) == [1000]


def test_a_run_made_again_elsewhere_is_said_to_be_the_same_or_where_it_parted(tmp_path):
    runs, tables = tmp_path / "runs", tmp_path / "tables"
    arms = [make_run(runs, name) for name in ("flash", "baseline")]
    reduce_runs.reduce_runs(runs, tables)
    assert "runs_again.csv" not in read_manifest(tables)  # on the same machine there is nothing to tell
    pd.DataFrame({"step": [50, 100], "loss": [2.0, 1.0 + 1e-6]}).to_csv(arms[1] / "metrics.csv", index=False)
    for run in arms:
        about = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(about | {"device_name": "another CPU"}))
    for _ in range(2):
        reduce_runs.reduce_runs(runs, tables)
        again = read_table("runs_again.csv", tables).set_index("run")
        assert again[["steps", "equal", "until"]].loc["flash-fp32-dit-s0"].tolist() == [2, 2, 100]
        assert again[["steps", "equal", "until"]].loc["baseline-fp32-dit-s0"].tolist() == [2, 1, 50]
    assert set(again["first_device"]) == {"a CPU"} and set(again["device"]) == {"another CPU"}
    assert set(read_table("runs.csv", tables)["device_name"]) == {"a CPU"}  # the first ones stay


def on_another_machine(run, name, loss=1.0):
    """Change where a run says that it was made, and its last loss."""
    about = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(about | {"device_name": name}))
    pd.DataFrame({"step": [50, 100], "loss": [2.0, loss]}).to_csv(run / "metrics.csv", index=False)


def test_runs_of_one_seed_from_processors_with_other_bits_stand_in_no_table(tmp_path, capsys):
    runs, tables = tmp_path / "runs", tmp_path / "tables"
    (
        make_run(runs, "flash"),
        make_run(runs, "baseline"),
        make_run(runs, "baseline", seed=1),
        make_run(runs, "flash", seed=1),
    )
    reduce_runs.reduce_runs(runs, tables)
    before = read_table("runs.csv", tables)
    for run in runs.glob("*-s0"):
        shutil.rmtree(run)
    twin, baseline = make_run(runs, "baseline", twin=1), make_run(runs, "baseline")
    for run in (twin, baseline):
        on_another_machine(run, "other CPU", loss=0.5)
    with pytest.raises(ValueError, match="of the runs of seed 0, 2 on a CPU and 1 on other CPU, which have not shown"):
        reduce_runs.reduce_runs(runs, tables)
    pd.testing.assert_frame_equal(read_table("runs.csv", tables), before)  # nothing was written
    # Once a run that was made on both had equal losses, the two processors count as one.
    for run in (twin, baseline):
        on_another_machine(run, "other CPU", loss=1.0)
    reduce_runs.reduce_runs(runs, tables)
    assert set(read_table("runs.csv", tables)["device_name"]) == {"a CPU", "other CPU"}


def test_again_replaces_what_tells_as_much(tmp_path):
    runs, tables = tmp_path / "runs", tmp_path / "tables"
    make_run(runs, "flash", shifts=(0.0, 1.0, 3.0)), make_run(runs, "baseline", shifts=(0.0, 0.0, 0.0))
    reduce_runs.reduce_runs(runs, tables)
    for run in (make_run(runs, "flash", shifts=(0.0, 2.0, 5.0)), make_run(runs, "baseline", shifts=(0.0, 0.0, 0.0))):
        on_another_machine(run, "other CPU", loss=0.5)

    def drift():
        frame = read_table("weights.parquet", tables)
        chosen = (
            (frame["kind"] == "Flash against Baseline") & (frame["level"] == "model") & (frame["average"] == "pooled")
        )
        return frame[chosen].set_index("step")["max_difference"].to_dict()

    reduce_runs.reduce_runs(runs, tables)
    assert drift() == {0: 0, 100: 1, 200: 3}
    reduce_runs.reduce_runs(runs, tables, again=True)
    assert drift() == {0: 0, 100: 2, 200: 5} and set(read_table("runs.csv", tables)["device_name"]) == {"other CPU"}
    again = read_table("runs_again.csv", tables)
    assert len(again) == 2 and set(again["equal"]) == {1}  # what was replaced stays known
    shorter = pd.DataFrame({"run": ["a"], "value": [9]})
    stored = pd.DataFrame({"run": ["a", "a"], "value": [1, 2]})
    assert list(reduce_runs.merged(shorter, stored, again=True)["value"]) == [1, 2]


def test_losses_stand_beside_the_held_out_ones(tmp_path):
    make_run(tmp_path, "flash")
    frame = reduce_runs.loss_curves(tmp_path).set_index("step")
    assert frame["loss"].dropna().to_dict() == {50: 2.0, 100: 1.0}
    assert frame["held_out_loss"].dropna().to_dict() == pytest.approx({0: 1.0, 100: 0.9, 200: 0.8})
    assert set(frame["arm"]) == {"flash"}


def test_predictions_are_compared_by_their_root_mean_square(tmp_path):
    make_run(tmp_path, "flash"), make_run(tmp_path, "baseline", shifts=(0.0, 0.0, 0.0))
    frame = reduce_runs.prediction_differences(tmp_path)
    frame = frame[frame["kind"] == "Flash against Baseline"].set_index("step")
    assert frame["rms"].to_dict() == {0: 0, 100: 1, 200: 3}
    assert frame.loc[200, "relative"] == pytest.approx(3 / (55 / 6) ** 0.5)


def test_nothing_to_compare_is_said_in_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        reduce_runs.main([str(tmp_path)])
    assert stop.value.code == 2 and "`make demo` makes four" in capsys.readouterr().err
    assert isinstance(reduce_runs.merged(pd.DataFrame(), pd.DataFrame()), pd.DataFrame)


def test_the_pace_is_per_picture_and_by_kind_of_run(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path, "flash", seed=seed)
    records = run_records(tmp_path)
    assert list(records["seconds_per_step"]) == [0.4, 0.4] and set(records["commit"]) == {"abc"}
    assert seconds_per_step(records) == {("flash", "fp32", "dit", "tiny"): 0.1}

"""Run folders: what a run leaves, that it is the same twice, and what stops, refuses or resumes it."""

import csv
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import PROJECT, compose_settings, train_here

import train.folder
from train import Refusal
from train.folder import open_run, read_manifest
from train.metrics import COLUMNS, TableFile, read_rows
from train.snapshots import newest_checkpoint

LIKE_FLASH_RUN = ("attn=flash", "precision=bf16", "steps=6", "snapshots.every=2")


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def hashes(folder):
    return {line["step"]: line["sha256"] for line in manifest(folder)["snapshots"]}


def contents(folder):
    """Every file with its bytes and its time of change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_run_leaves_what_its_manifest_lists(flash_run):
    about = manifest(flash_run)
    assert about["state"] == "finished"
    assert [line["step"] for line in about["snapshots"]] == [0, 2, 4, 6]
    for line in about["snapshots"]:
        assert line["file"] == f"weights/step-{line['step']:06d}.safetensors"
        assert hashlib.sha256((flash_run / line["file"]).read_bytes()).hexdigest() == line["sha256"]
        assert line["dtype"] == "float32"
    assert about["device"] == "cpu" and about["threads"] == 1
    assert about["versions"]["torch"] == torch.__version__
    assert {"commit", "data_sha256", "seconds_per_step", "loss"} <= set(about)
    assert {row["kind"] for row in about["operators"]} == {"self", "cross"}
    assert (flash_run / "samples.png").stat().st_size > 0
    assert not list(flash_run.rglob("*.tmp"))
    assert not (flash_run / ".hydra").exists()


def test_snapshots_hold_every_parameter_and_nothing_else(flash_run):
    from train.data import load_data
    from train.module import TextToImage

    settings = compose_settings("model.size=tiny", "data.pixels=16", "device=cpu")
    module = TextToImage(settings, load_data(settings))
    first = load_file(flash_run / "weights" / "step-000000.safetensors")
    assert list(first) == sorted(name for name, _ in module.named_parameters())
    for name, parameter in module.named_parameters():
        assert torch.equal(first[name], parameter)  # seed 0 decides the initial weights, whatever the arm
    last = load_file(flash_run / "weights" / "step-000006.safetensors")
    moved = [name for name in first if not torch.equal(first[name], last[name])]
    assert len(moved) == len(first)


def test_metrics_have_a_row_per_logged_step(flash_run):
    rows = list(csv.DictReader((flash_run / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(0 < float(row["loss"]) < 3 and float(row["grad_norm"]) > 0 for row in rows)
    assert float(rows[0]["lr"]) == pytest.approx(0.001 / 50)


def test_the_same_settings_give_the_same_bits(flash_run, tmp_path):
    again = train_here(tmp_path, *LIKE_FLASH_RUN)
    assert hashes(again) == hashes(flash_run)
    assert (again / "metrics.csv").read_bytes() == (flash_run / "metrics.csv").read_bytes()
    assert (again / "samples.png").read_bytes() == (flash_run / "samples.png").read_bytes()


def test_arms_start_equal_and_drift_apart(flash_run, tmp_path):
    other = train_here(tmp_path, "attn=baseline", "precision=bf16", "steps=2", "snapshots.every=2")
    ours, theirs = hashes(flash_run), hashes(other)
    assert ours[0] == theirs[0]
    assert ours[2] != theirs[2]
    other_seed = train_here(tmp_path, "attn=flash", "precision=bf16", "seed=1", "steps=1", "snapshots.every=2")
    assert hashes(other_seed)[0] != ours[0]
    assert [line["step"] for line in manifest(other_seed)["snapshots"]] == [0, 1]  # the last step is always kept


def test_a_finished_run_is_refused_with_what_to_do_and_not_touched(flash_run):
    before = contents(flash_run)
    with pytest.raises(Refusal, match=r"is finished; .*steps=12 continue_from=.*rm -r ") as caught:
        train_here(flash_run.parent, *LIKE_FLASH_RUN)
    assert "\n" not in str(caught.value)
    assert contents(flash_run) == before


def test_a_finished_run_can_be_skipped_and_is_not_touched(flash_run, capsys):
    before = contents(flash_run)
    train_here(flash_run.parent, *LIKE_FLASH_RUN, "finished=skip")
    assert "is finished: skipped" in capsys.readouterr().out
    assert contents(flash_run) == before


def test_a_folder_made_with_other_settings_is_refused_with_the_difference(flash_run, tmp_path):
    copy = tmp_path / flash_run.name
    shutil.copytree(flash_run, copy)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("weight_decay: 0.01", "weight_decay: 0.5"))
    before = contents(copy)
    with pytest.raises(Refusal, match=r"optimizer.weight_decay is 0.5 there and 0.01 here"):
        train_here(tmp_path, *LIKE_FLASH_RUN, "finished=skip")
    assert contents(copy) == before


def test_a_folder_in_use_is_refused(tmp_path):
    settings = compose_settings("device=cpu")
    folder = open_run(tmp_path / "run", settings)
    with pytest.raises(Refusal, match="another process is training in"):
        open_run(tmp_path / "run", settings)
    folder.__exit__(None, None, None)
    open_run(tmp_path / "run", settings).__exit__(None, None, None)


def send_at_step(monkeypatch, step, number):
    """Make the process signal itself while it writes the metrics of `step`."""
    append = TableFile.append

    def append_and_signal(self, row):
        append(self, row)
        if row["step"] == step and "loss" in row:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(TableFile, "append", append_and_signal)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_an_interrupted_folder_that_resumes_to_the_same_bits(flash_run, tmp_path, monkeypatch, number):
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        send_at_step(patched, 3, number)
        folder = train_here(tmp_path, *LIKE_FLASH_RUN)
    about = manifest(folder)
    assert about["state"] == "interrupted" and about["reason"] == number.name
    assert [line["step"] for line in about["snapshots"]] == [0, 2]
    assert newest_checkpoint(folder).name.startswith("step-000003-")
    assert signal.getsignal(signal.SIGINT) is before
    train_here(tmp_path, *LIKE_FLASH_RUN)
    assert manifest(folder)["state"] == "finished"
    assert hashes(folder) == hashes(flash_run)
    assert (folder / "metrics.csv").read_bytes() == (flash_run / "metrics.csv").read_bytes()


def test_a_full_disk_leaves_the_earlier_snapshots_and_resumes(flash_run, tmp_path, monkeypatch):
    import train.snapshots

    def full(weights, path):
        if "step-000004" in str(path):
            path.write_bytes(b"half of")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save_file(weights, path)

    save_file = train.snapshots.save_file
    with monkeypatch.context() as patched:
        patched.setattr(train.snapshots, "save_file", full)
        with pytest.raises(Refusal, match=r"could not write step-000004.safetensors .*No space left.*intact"):
            train_here(tmp_path, *LIKE_FLASH_RUN)
    folder = tmp_path / flash_run.name
    assert manifest(folder)["state"] == "interrupted"
    assert sorted(path.name for path in (folder / "weights").iterdir()) == [
        "step-000000.safetensors",
        "step-000002.safetensors",
    ]
    train_here(tmp_path, *LIKE_FLASH_RUN)
    assert hashes(folder) == hashes(flash_run)
    assert (folder / "metrics.csv").read_bytes() == (flash_run / "metrics.csv").read_bytes()


@pytest.mark.parametrize(("most_bytes", "file"), [(10**6, "step-000000.safetensors"), (2 * 10**6, "step-000002.ckpt")])
def test_a_file_that_the_system_does_not_take_is_named_and_the_run_resumes(flash_run, tmp_path, most_bytes, file):
    """As on a full disk, with the system's own error in the library that writes: here the size of files is limited."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        with pytest.raises(Refusal, match=f"could not write {file} .*is intact"):
            train_here(tmp_path, *LIKE_FLASH_RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder = tmp_path / flash_run.name
    assert manifest(folder)["state"] == "interrupted"
    assert not list(folder.rglob("*.tmp"))
    train_here(tmp_path, *LIKE_FLASH_RUN)
    assert hashes(folder) == hashes(flash_run)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(flash_run, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(flash_run / "checkpoint", folder / "checkpoint")
    newest = newest_checkpoint(folder)
    assert newest.name.startswith("step-000006")
    newest.write_bytes(newest.read_bytes()[:-100])
    assert newest_checkpoint(folder).name.startswith("step-000004")
    assert "is damaged" in capsys.readouterr().out


def test_the_newest_checkpoint_is_that_of_the_last_step_also_behind_a_million(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    for step in (999900, 1000000, 1000100):
        content = str(step).encode()
        name = f"step-{step:06d}-{hashlib.sha256(content).hexdigest()[:16]}.ckpt"
        (tmp_path / "checkpoint" / name).write_bytes(content)
    assert newest_checkpoint(tmp_path).read_bytes() == b"1000100"


def test_a_signal_while_the_manifest_is_written_loses_neither_entry(tmp_path, monkeypatch):
    """The handler updates the manifest from within an update, between any two of its lines."""
    signals = [lambda: folder.update(state="interrupted", reason="SIGTERM")]
    write = train.folder.write_whole

    def write_with_signal(path, text):
        if signals:
            signals.pop()()
        write(path, text)

    with open_run(tmp_path / "run", compose_settings("device=cpu")) as folder:
        monkeypatch.setattr(train.folder, "write_whole", write_with_signal)
        folder.update(loss=0.5)
        about = manifest(tmp_path / "run")
    assert (about["state"], about["reason"], about["loss"]) == ("interrupted", "SIGTERM", 0.5)


def test_a_longer_run_can_continue_a_finished_one_and_equals_an_uninterrupted_one(flash_run, tmp_path):
    before = contents(flash_run)
    longer = ("attn=flash", "precision=bf16", "steps=8", "snapshots.every=2")
    continued = train_here(tmp_path / "a", *longer, f"continue_from={flash_run}")
    straight = train_here(tmp_path / "b", *longer)
    assert hashes(continued) == hashes(straight)
    assert (continued / "metrics.csv").read_bytes() == (straight / "metrics.csv").read_bytes()
    assert contents(flash_run) == before
    with pytest.raises(Refusal, match=r"precision.name is bf16 there and fp32 here"):
        train_here(tmp_path / "c", "attn=flash", "steps=8", "snapshots.every=2", f"continue_from={flash_run}")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"snapshots": []}', "[" * 100_000, "\u00e9t\u00e9"])
def test_a_damaged_manifest_is_refused_by_name(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(Refusal, match=r"manifest\.json (is damaged|says no state)"):
        read_manifest(tmp_path)


def test_rows_behind_the_checkpoint_and_half_written_ones_are_dropped(tmp_path):
    path = tmp_path / "metrics.csv"
    file = TableFile(path, COLUMNS, 0)
    for step in (1, 2, 3):
        file.append(dict.fromkeys(COLUMNS, 0.5) | {"step": step})
    file.close()
    with open(path, "a") as text:
        text.write("4,0.5")
    TableFile(path, COLUMNS, 2).close()
    assert [row["step"] for row in read_rows(path)] == ["1", "2"]


def test_memory_is_kept_by_the_process_on_linux():
    code = "from train.system import keep_freed_memory; print(keep_freed_memory())"
    answer = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == str(sys.platform.startswith("linux"))

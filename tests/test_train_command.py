"""The commands as people type them: the verbatim one, a sweep, Ctrl-C, and what W&B gets. One process start each."""

import base64
import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import PROJECT, TINY
from wandb_file import read_records

COMMAND = ("attn=flash", "precision=bf16", "seed=2")


def run(*words, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    command = [sys.executable, "train/run.py", *words]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, env=environment, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The README's command at a tiny size, with W&B offline as by default and no way to ask anything."""
    runs_dir, home = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("home")
    words = (*COMMAND, *TINY, "steps=3", "snapshots.every=2", f"runs_dir={runs_dir}")
    result = run(*words, stdin=subprocess.DEVNULL, env={"WANDB_API_KEY": "", "HOME": str(home)})
    assert result.returncode == 0, result.stderr
    (folder,) = runs_dir.iterdir()
    return result, folder, words, home


def test_command_prints_progress_folder_loss_and_picture(done):
    result, folder, *_ = done
    assert folder.name.startswith("flash-bf16-dit-s2-")
    assert f"folder:  {folder}" in result.stdout
    assert f"samples: {folder / 'samples.png'}" in result.stdout
    assert "loss:    " in result.stdout
    assert "3/3" in result.stderr and "step/s" in result.stderr  # the bar; time left stands before the rate
    assert "<" in result.stderr


def test_command_says_nothing_about_wandb_or_lightning(done):
    output = (done[0].stdout + done[0].stderr).lower()
    for noise in ("wandb:", "api key", "log in", "gpu available", "tip:", "warning"):
        assert noise not in output


def test_finished_run_is_refused_quickly_by_the_command(done):
    _, folder, words, _ = done
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    result = run(*words)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and "is finished" in result.stderr and "Traceback" not in result.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_unknown_option_exits_with_2_and_lists_the_options():
    result = run("attn=flash", "stpes=60")
    assert result.returncode == 2
    assert "did you mean steps?" in result.stderr and "snapshots.every" in result.stderr


@pytest.mark.parametrize(("word", "code"), [("attn=nosuch", 2), ("attn=null", 2), ("steps=0", 1)])
def test_exit_code_tells_an_unknown_choice_from_a_bad_value(word, code, tmp_path):
    result = run(word, f"runs_dir={tmp_path / 'runs'}")
    assert result.returncode == code
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_wandb_file_names_weights_relative_to_the_folder_only(done):
    _, folder, *_ = done
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data = file.read_bytes()
    assert b"weights/step-000002.safetensors" in data
    assert b"step-000002" in data and b"weights-" + folder.name.encode() in data
    for absolute in (str(folder), str(folder.resolve())):
        assert absolute.encode() + b"/weights" not in data


def test_a_folder_moved_elsewhere_holds_every_file_that_wandb_would_send(done, tmp_path):
    """As `cd runs/NAME && wandb sync wandb/offline-run-*` reads it: paths are relative to where it is called."""
    _, folder, *_ = done
    moved = Path(shutil.copytree(folder, tmp_path / "other" / "place", symlinks=True))
    (file,) = moved.glob("wandb/offline-run-*/*.wandb")
    records = read_records(file)
    entries = [entry for record in records for entry in record.artifact.manifest.contents]
    assert sorted(entry.path for entry in entries) == sorted(path.name for path in (folder / "weights").iterdir())
    for entry in entries:
        assert not os.path.isabs(entry.local_path)
        digest = hashlib.md5((moved / entry.local_path).read_bytes()).digest()
        assert entry.digest == base64.b64encode(digest).decode()
    others = [item.path for record in records for item in record.files.files]
    assert any(path.startswith("media/images/samples") for path in others)
    assert all((file.parent / "files" / path).is_file() for path in others)
    rows = [{"/".join(item.nested_key): item.value_json for item in record.history.item} for record in records]
    logged = {row["trainer/global_step"]: float(row["loss"]) for row in rows if "loss" in row}
    table = list(csv.DictReader((moved / "metrics.csv").open()))
    assert logged == {row["step"]: float(row["loss"]) for row in table} and len(logged) == 3


def test_wandb_keeps_no_second_copy_of_the_weights_anywhere(done):
    _, folder, _, home = done
    weights = {path.read_bytes() for path in (folder / "weights").iterdir()}
    files = [path for root in (folder, home) for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    copies = [path for path in files if path.read_bytes() in weights]
    assert len(copies) == len(weights)


def test_sweep_goes_on_after_a_failed_job_and_lists_it(done, tmp_path):
    """Two jobs: one is refused because its folder belongs to other settings, the other finishes."""
    _, folder, words, _ = done
    shutil.copytree(folder, tmp_path / folder.name)
    config = tmp_path / folder.name / "config.yaml"
    config.write_text(config.read_text().replace("weight_decay: 0.01", "weight_decay: 0.5"))
    swept = [word for word in words if not word.startswith(("seed=", "runs_dir="))]
    result = run("-m", *swept, "seed=2,3", f"runs_dir={tmp_path}", "logger.mode=disabled", "hydra.launcher.n_jobs=1")
    assert result.returncode == 1
    assert "failed: 0-flash-bf16-dit-s2" in result.stderr and "weight_decay is 0.5 there" in result.stderr
    other = tmp_path / folder.name.replace("-s2-", "-s3-")
    assert json.loads((other / "manifest.json").read_text())["state"] == "finished"
    logs = list((tmp_path / ".sweeps").glob("*/*.failed.log"))
    assert len(logs) == 1 and "Traceback" in logs[0].read_text()


def test_control_c_leaves_a_folder_that_says_so(tmp_path):
    words = ("attn=flash", *TINY, "steps=100000", "logger.mode=disabled", f"runs_dir={tmp_path}")
    process = subprocess.Popen(
        [sys.executable, "train/run.py", *words], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/weights/step-000000.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted; the same command resumes" in out
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "manifest.json").read_text())["state"] == "interrupted"

"""Sweeps whose jobs are killed, interrupted or refused: the others go on, and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import PROJECT, TINY

from train.snapshots import checkpoint_step, newest_checkpoint


class Sweep:
    """A sweep in the background, in a process group of its own as a terminal's foreground job is."""

    def __init__(self, runs_dir, *words, program=("train/run.py", "-m")):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *program, *TINY, "logger.mode=disabled", f"runs_dir={runs_dir}", *words]
        self.process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=-1, stderr=-1, text=True, start_new_session=True
        )
        self.runs_dir = runs_dir

    def wait_for_runs(self, count, settle=1):
        """Wait until `count` jobs train, and `settle` seconds more; return their folders, sorted."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and self.process.poll() is None:
            folders = sorted(path.parent.parent for path in self.runs_dir.glob("*/weights/step-000000.safetensors"))
            if len(folders) >= count:
                time.sleep(settle)
                return folders
            time.sleep(0.2)
        pytest.fail(f"no {count} runs: {self.process.communicate(timeout=10)}")

    def jobs(self):
        """The process numbers of the jobs."""
        answer = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
        return [int(line) for line in answer.stdout.split()]

    def end(self):
        """(exit code, output, errors) once it has ended by itself."""
        try:
            out, err = self.process.communicate(timeout=600)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def states(runs_dir):
    return {path.parent.name: json.loads(path.read_text())["state"] for path in runs_dir.glob("*/manifest.json")}


def test_a_killed_job_is_listed_with_its_log_and_the_others_finish(tmp_path):
    words = ("seed=0,1", "hydra.launcher.n_jobs=1", "steps=200", "snapshots.every=100", "finished=skip")
    sweep = Sweep(tmp_path, *words)
    (first,) = sweep.wait_for_runs(1, settle=0)  # seconds before its end on any machine
    (job,) = sweep.jobs()
    os.kill(job, signal.SIGKILL)
    code, out, err = sweep.end()
    assert code == 1
    (log,) = tmp_path.glob(".sweeps/*/*.failed.log")
    assert f"failed: 0-{first.name}: killed by SIGKILL, perhaps" in err and str(log) in err
    assert "Traceback" not in err
    (other,) = (path.parent for path in tmp_path.glob("*-s1-*/manifest.json"))
    assert states(tmp_path) == {first.name: "running", other.name: "finished"}
    code, out, err = Sweep(tmp_path, *words).end()
    assert code == 0 and f"{other} is finished: skipped" in out
    assert set(states(tmp_path).values()) == {"finished"}


def test_control_c_saves_every_job_of_a_sweep_and_starts_no_other(tmp_path):
    sweep = Sweep(tmp_path, "seed=0,1,2", "steps=100000")
    folders = sweep.wait_for_runs(2)
    os.killpg(sweep.process.pid, signal.SIGINT)
    code, out, err = sweep.end()
    assert code == 130
    assert "interrupted; the same command resumes the sweep" in out
    assert "failed" not in err and "Traceback" not in err
    assert states(tmp_path) == {folder.name: "interrupted" for folder in folders} and len(folders) == 2
    assert all(checkpoint_step(newest_checkpoint(folder)) > 0 for folder in folders)
    assert not list(tmp_path.glob(".sweeps/*/*.failed.log"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_passes_the_signal_on_and_waits_for_its_runs(number, tmp_path):
    sweep = Sweep(tmp_path, "sweeps=paper", "steps=100000", program=("train/study.py",))
    sweep.wait_for_runs(2)
    sweep.process.send_signal(number)
    code, out, err = sweep.end()
    assert code == 130 and "Traceback" not in err
    assert "interrupted; the same command goes on from here" in out
    assert set(states(tmp_path).values()) == {"interrupted"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_a_killed_sweep_leaves_no_job_behind(tmp_path):
    sweep = Sweep(tmp_path, "seed=0", "steps=100000")
    (folder,) = sweep.wait_for_runs(1)
    (job,) = sweep.jobs()
    sweep.process.kill()
    deadline = time.monotonic() + 300
    while os.path.exists(f"/proc/{job}") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not os.path.exists(f"/proc/{job}")
    sweep.end()
    assert states(tmp_path) == {folder.name: "interrupted"}
    assert checkpoint_step(newest_checkpoint(folder)) > 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("seed=0,-1",), 1, "seed=-1 is not allowed"),
        (("steps=${nosuch}",), 1, "nosuch"),
        (("hydra.launcher.n_jobs=0",), 2, "hydra.launcher.n_jobs=0 is no count"),
        (("seed=[",), 2, "seed=[ cannot be read"),
    ],
)
def test_a_sweep_with_a_bad_value_is_refused_as_a_whole_and_leaves_nothing(words, code, message, tmp_path):
    got, _, err = Sweep(tmp_path / "runs", *words).end()
    assert got == code
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()

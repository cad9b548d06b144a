"""A run that is killed and started again, as often as you like, ends with the bits of an undisturbed one."""

import json
import subprocess
import sys

import pytest
from tiny_runs import PROJECT, train_here


def killed(runs_dir, mode, seed, *overrides):
    """The folder of a run that tests/killed_runs.py killed and finished."""
    command = [sys.executable, "tests/killed_runs.py", str(runs_dir), mode, str(seed), *overrides]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    (folder,) = (path for path in runs_dir.iterdir() if not path.name.startswith("."))
    return folder


def assert_same_run(one, other):
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (one, other)]
    assert [manifest["state"] for manifest in manifests] == ["finished", "finished"]
    assert manifests[0]["snapshots"] == manifests[1]["snapshots"]
    for name in ("metrics.csv", "logits.csv", "samples.png"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    files = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")) for folder in (one, other)]
    assert files[0] == files[1]


def test_killed_while_writing_snapshot_checkpoint_and_samples(flash_run, tmp_path):
    folder = killed(tmp_path, "points", 0, "attn=flash", "precision=bf16", "steps=6", "snapshots.every=2")
    assert_same_run(folder, flash_run)
    assert len(json.loads((folder / "manifest.json").read_text())["resumed"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16_emulated"])
def test_killed_twenty_times_at_random_moments(precision, tmp_path):
    like = ("attn=flash", f"precision={precision}", "steps=60", "snapshots.every=5", "probe.deviation_every=7")
    folder = killed(tmp_path / "killed", "random", 1, *like)
    undisturbed = train_here(tmp_path / "undisturbed", *like)
    assert_same_run(folder, undisturbed)
    assert (folder / "deviation.csv").read_bytes() == (undisturbed / "deviation.csv").read_bytes()
    assert len(json.loads((folder / "manifest.json").read_text())["resumed"]) >= 18  # two may die before there is one

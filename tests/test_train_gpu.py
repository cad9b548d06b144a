"""Training on CUDA: the flash kernel that runs, and what the same command gives twice."""

import json

import pytest
from tiny_runs import train_here

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_flash_kernel_runs_in_every_layer(precision, tmp_path):
    folder = train_here(tmp_path, "device=cuda", "attn=flash", f"precision={precision}", "steps=3")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["device"] == "cuda" and manifest["state"] == "finished"
    for row in manifest["operators"]:
        assert any("flash" in name for name in row["forward"]), row
        assert any("flash" in name for name in row["backward"]), row


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_baseline_trains_in_every_precision(precision, tmp_path):
    folder = train_here(tmp_path, "device=cuda", "attn=baseline", f"precision={precision}", "steps=3")
    assert json.loads((folder / "manifest.json").read_text())["state"] == "finished"


def test_baseline_gives_the_same_bits_twice(tmp_path):
    words = ("device=cuda", "attn=baseline", "precision=bf16", "steps=3", "snapshots.every=3")
    runs = [train_here(tmp_path / name, *words) for name in ("a", "b")]
    hashes = [[line["sha256"] for line in json.loads((run / "manifest.json").read_text())["snapshots"]] for run in runs]
    assert hashes[0] == hashes[1]

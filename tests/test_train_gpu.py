"""Training on CUDA: the kernel that runs, and what the same command gives twice."""

import json

import pytest
from tiny_runs import train_here

pytestmark = pytest.mark.gpu


def manifest_of(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["device"] == "cuda" and manifest["state"] == "finished"
    return manifest


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_true"])
def test_flash_kernel_runs_in_every_layer(precision, tmp_path):
    folder = train_here(tmp_path, "device=cuda", "attn=flash", f"precision={precision}", "steps=3")
    for row in manifest_of(folder)["operators"]:
        assert any("flash" in name for name in row["forward"]), row
        assert any("flash" in name for name in row["backward"]), row
        assert row["key_tile"] in (128, 256)


@pytest.mark.parametrize("backend", ["math", "flash", "efficient", "cudnn"])
def test_backend_that_is_asked_for_runs(backend, tmp_path):
    words = ("device=cuda", "attn=sdpa", f"attn.backend={backend}", "precision=bf16", "steps=3")
    for row in manifest_of(train_here(tmp_path, *words))["operators"]:
        assert any(f"{backend}" in name for name in row["forward"]), row


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
def test_baseline_trains_in_every_precision(precision, tmp_path):
    manifest_of(train_here(tmp_path, "device=cuda", "attn=baseline", f"precision={precision}", "steps=3"))


# 1,024 keys: the gradient of a query is a sum over eight tiles of keys, in any order unless told otherwise.
@pytest.mark.parametrize(
    "words",
    [
        ("attn=baseline", "precision=bf16"),
        ("attn=flash", "precision=bf16"),
        ("attn=flash", "precision=bf16", "model=unet"),
        ("attn=sdpa", "attn.backend=efficient", "precision=bf16"),
        ("attn=tiled", "attn.format=e8m10:stochastic", "precision=fp32"),
    ],
)
def test_same_command_gives_the_same_bits_twice(words, tmp_path):
    words = ("device=cuda", "data.pixels=32", "steps=3", "snapshots.every=3", *words)
    runs = [manifest_of(train_here(tmp_path / name, *words)) for name in ("a", "b")]
    hashes = [[line["sha256"] for line in run["snapshots"]] for run in runs]
    assert hashes[0] == hashes[1]

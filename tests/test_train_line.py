"""The loss along the line between two runs' weights: its ends, its batches, what it refuses."""

import json
import shutil

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import TINY, compose_settings, train_here

from train import Refusal, line
from train.batches import TIMESTEPS
from train.data import load_data
from train.module import TextToImage


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A nudged BF16 Flash run, from before twins could fork later, and an FP32 Baseline run of another seed."""
    runs = tmp_path_factory.mktemp("line")
    words = ("steps=2", "snapshots.every=2")
    flash = train_here(runs, "attn=flash", "precision=bf16", "twin=1", *words)
    config = (flash / "config.yaml").read_text().splitlines(keepends=True)
    (flash / "config.yaml").write_text("".join(line for line in config if not line.startswith("twin_step")))
    return flash, train_here(runs, "attn=baseline", "precision=fp32", "seed=1", *words)


def loss_of(weights, batch):
    """The FP32 Baseline loss of given weights, computed without train/line.py."""
    settings = compose_settings(*TINY, "attn=baseline", "precision=fp32", "device=cpu")
    module = TextToImage(settings, load_data(settings))
    module.load_state_dict(weights)
    with torch.no_grad():
        predicted, noise = module.predict(batch)
    return float((predicted - noise).square().mean())


def test_the_line_leads_from_one_runs_weights_to_the_others(two_runs, monkeypatch, capsys):
    monkeypatch.setattr(line, "BATCHES", 2)
    assert line.main([str(run) for run in two_runs]) == 0
    table = pd.read_csv(two_runs[0].parent / "lines" / f"{two_runs[0].name}--{two_runs[1].name}.csv")
    assert len(table) == 11 * 2 and not list((two_runs[0].parent / "lines").glob(".*"))
    settings = compose_settings(*TINY)
    batch = line.held_out_batches(load_data(settings), 2)[1]
    a, b = (load_file(run / "weights" / "step-000002.safetensors") for run in two_runs)
    losses = table[table["batch"] == 1].set_index("alpha")["loss"]
    for alpha in (0.0, 0.3, 1.0):
        expected = loss_of({name: torch.lerp(a[name], b[name], alpha) for name in a}, batch)
        assert losses[alpha] == pytest.approx(expected, rel=1e-5)
    assert losses[0.0] != losses[1.0]
    assert f"{table.groupby('alpha')['loss'].mean().max():.4f} on the line" in capsys.readouterr().out


def test_held_out_batches_cover_the_schedule_with_noise_of_their_own():
    data = load_data(compose_settings(*TINY))
    batches = line.held_out_batches(data, 4)
    timesteps = torch.cat([batch.timesteps for batch in batches]).sort().values
    steps = timesteps.diff()
    assert timesteps[0] < TIMESTEPS / 32 and timesteps[-1] >= TIMESTEPS * 31 / 32
    assert steps.min() >= TIMESTEPS // 32 and steps.max() <= TIMESTEPS // 32 + 1
    assert not torch.equal(batches[0].noise, batches[1].noise)
    assert torch.equal(batches[0].pictures, data.held_out.pictures)
    assert torch.equal(line.held_out_batches(data, 4)[3].noise, batches[3].noise)


def test_what_makes_no_line_is_refused(two_runs, tmp_path, capsys):
    flash, other = two_runs
    assert line.main([str(flash)]) == 2 and "usage: python train/line.py RUN_A RUN_B" in capsys.readouterr().err
    assert line.main([str(flash), str(tmp_path)]) == 1
    assert f"{tmp_path} is not a finished run's folder; give two" in capsys.readouterr().err
    longer = shutil.copytree(other, tmp_path / "longer")
    (longer / "config.yaml").write_text((longer / "config.yaml").read_text().replace("steps: 2\n", "steps: 4\n", 1))
    with pytest.raises(Refusal, match="differ in steps: 2 and 4; give two runs that agree"):
        line.line_losses(flash, longer)
    manifest = json.loads((longer / "manifest.json").read_text()) | {"state": "interrupted"}
    (longer / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Refusal, match="not a finished run's folder"):
        line.line_losses(longer, flash)

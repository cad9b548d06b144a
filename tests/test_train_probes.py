"""Probes: they see what is there, and a run with them has the same bits as one without."""

import csv
import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import TINY, compose_settings, train_here

from train import Refusal
from train.attention import baseline, sdpa
from train.data import load_data
from train.module import TextToImage
from train.probes import attention_deviation
from train.watch import SPIKE_HISTORY, is_spike

LIKE_FLASH_RUN = ("attn=flash", "precision=bf16", "steps=6", "snapshots.every=2")


@pytest.fixture(scope="module")
def probed_run(tmp_path_factory):
    """As flash_run, with every probe switched on."""
    runs_dir = tmp_path_factory.mktemp("probed")
    return train_here(runs_dir, *LIKE_FLASH_RUN, "probe.deviation_every=3", "sampling.strip=true")


def rows_of(path):
    return list(csv.DictReader(path.open()))


def test_probes_change_no_bit_of_the_run(flash_run, probed_run, tmp_path):
    without = train_here(tmp_path, *LIKE_FLASH_RUN, "snapshots.predictions=false", "log_every=4")
    runs = [json.loads((run / "manifest.json").read_text())["snapshots"] for run in (flash_run, probed_run, without)]
    hashes = [[line["sha256"] for line in run] for run in runs]
    assert hashes[0] == hashes[1] == hashes[2]
    assert not (without / "predictions").exists() and not (flash_run / "deviation.csv").exists()


def test_deviation_has_a_row_per_step_layer_and_arm(probed_run):
    rows = rows_of(probed_run / "deviation.csv")
    layers = {f"transformer_blocks.{block}.attn{kind}" for block in (0, 1) for kind in (1, 2)}
    keys = {(int(row["step"]), row["layer"], row["arm"]) for row in rows}
    assert keys == {(step, layer, arm) for step in (0, 3) for layer in layers for arm in ("baseline", "flash")}
    assert len(rows) == len(keys)
    for row in rows:
        assert 0 < float(row["rms"]) <= float(row["max"])
        assert float(row["max_flash_baseline"]) > 0
        assert abs(float(row["delta_bias"])) < 1


def test_deviation_of_known_inputs():
    """Two keys with equal scores: P is 1/2 each, its entropy log 2, every row's maximum is repeated."""
    q, k = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 2, 16)
    v = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(1, 1, 2, 16).contiguous()
    dout = torch.ones(1, 1, 4, 16)
    arms = {"baseline": baseline, "flash": lambda q, k, v: baseline(q, k, v) + 0.25}
    first, second = attention_deviation(q, k, v, dout, arms)
    assert first["arm"] == "baseline" and first["max"] == 0 and first["mean"] == 0
    assert second["max"] == second["rms"] == second["mean"] == second["max_flash_baseline"] == 0.25
    assert second["delta_bias"] == pytest.approx(0.25 / 1.5)
    assert first["largest_logit"] == pytest.approx(4) and first["repeated_maxima"] == 1
    assert first["entropy"] == pytest.approx(0.6931, abs=1e-4)


def test_signed_mean_keeps_its_sign():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 32, generator=generator).bfloat16() for _ in range(3))
    down, _ = attention_deviation(q, k, v, None, {"baseline": lambda *x: baseline(*x) - 1, "flash": sdpa("flash")})
    assert down["mean"] == pytest.approx(-1, abs=0.01)


def test_prediction_of_every_snapshot_is_kept_with_its_loss(flash_run):
    lines = json.loads((flash_run / "manifest.json").read_text())["snapshots"]
    predicted = [load_file(flash_run / "predictions" / f"step-{line['step']:06d}.safetensors") for line in lines]
    assert all(each["predicted"].shape == (8, 3, 16, 16) for each in predicted)
    settings = compose_settings(*TINY, "device=cpu")
    held_out = load_data(settings).held_out
    for line, each in zip(lines, predicted):
        assert line["held_out_loss"] == pytest.approx(float((each["predicted"] - held_out.noise).square().mean()))
    assert not torch.equal(predicted[0]["predicted"], predicted[-1]["predicted"])


def test_held_out_pictures_are_in_no_batch():
    data = load_data(compose_settings(*TINY))
    assert all("skin tone" in caption for caption in data.held_out_captions) and len(data.held_out_captions) == 8
    for picture in data.held_out_pictures:
        assert not (data.pictures == picture).flatten(1).all(1).any()


def test_largest_logit_of_every_layer_and_update_norm(flash_run):
    logits = rows_of(flash_run / "logits.csv")
    metrics = rows_of(flash_run / "metrics.csv")
    for row in metrics:
        layers = [float(other["largest_logit"]) for other in logits if other["step"] == row["step"]]
        assert len(layers) == 4 and max(layers) == float(row["largest_logit"])
    first, second = (load_file(flash_run / "weights" / f"step-{step:06d}.safetensors") for step in (4, 6))
    moved = torch.stack([(second[name] - first[name]).norm() for name in first]).norm()
    updates = [float(row["update_norm"]) for row in metrics if row["step"] in ("5", "6")]
    assert max(updates) < moved <= sum(updates) * 1.0001


def test_strip_has_a_row_of_pictures_per_snapshot(probed_run):
    strip, row = Image.open(probed_run / "samples-strip.png"), Image.open(probed_run / "samples.png")
    assert strip.size == (row.width, 4 * row.height)


def test_a_spike_needs_history_and_five_times_the_median():
    history = [1.0] * (SPIKE_HISTORY - 1) + [3.0]
    assert not is_spike(history[1:], 100.0)
    assert is_spike(history, 5.1) and not is_spike(history, 4.9)
    assert is_spike(history, float("nan")) and is_spike(history, float("inf"))


def test_a_loss_that_is_no_number_names_step_layer_and_captions():
    settings = compose_settings(*TINY, "device=cpu")
    module = TextToImage(settings, load_data(settings))
    batch = module.batch(0)
    with torch.no_grad():
        module.denoiser.transformer_blocks[1].attn1.to_v.weight[0, 0] = float("nan")
    with pytest.raises(Refusal) as caught:
        module.refuse_non_finite_loss(batch, 41)
    text = str(caught.value)
    assert "step 42" in text and "denoiser.transformer_blocks.1.attn1.to_v" in text
    assert module.data.captions[int(batch.indices[0])] in text and "\n" not in text


@pytest.mark.parametrize("on_nan", ["stop", "continue"])
def test_training_stops_at_a_loss_that_is_no_number_unless_told_to_go_on(tmp_path, on_nan):
    words = ("optimizer.lr=1e30", "optimizer.warmup=0", "optimizer.clip=1e30", "steps=4", "snapshots.every=1")
    if on_nan == "continue":
        folder = train_here(tmp_path, *words, "on_nan=continue")
        text = (folder / "manifest.json").read_text()
        assert json.loads(text)["state"] == "finished" and "NaN" not in text and "Infinity" not in text
        return
    with pytest.raises(Refusal, match="is not a finite number, first in"):
        train_here(tmp_path, *words)
    (folder,) = tmp_path.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["state"] == "interrupted" and "not a finite number" in manifest["reason"]
    assert manifest["snapshots"]

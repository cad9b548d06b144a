"""One cell of each of the study's tables, computed again by hand from the snapshots of short runs."""

import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import TINY, compose_settings, train_here

from fa_study.experiments.matter import reduce_matter
from fa_study.experiments.pace import mixed_processors
from fa_study.experiments.reduce_runs import reduce_runs
from fa_study.tables import read_manifest, read_table
from train import line
from train.data import load_data
from train.module import TextToImage


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """({name: run folder}, {table: frame}) of Flash and Baseline with a twin each, two steps long."""
    runs_dir = tmp_path_factory.mktemp("runs")
    common = ("steps=2", "snapshots.every=1", "probe.deviation_every=1")
    runs = {
        f"{attn}{twin}": train_here(runs_dir, f"attn={attn}", f"twin={twin}", "precision=bf16", *common)
        for attn in ("baseline", "flash")
        for twin in (0, 1)
    }
    assert line.main([str(runs["flash0"]), str(runs["baseline0"])]) == 0
    reduce_runs(runs_dir, runs_dir / "tables")
    reduce_matter(runs_dir, runs_dir / "tables")
    return runs, {name: read_table(name, runs_dir / "tables") for name in read_manifest(runs_dir / "tables")}


def weights(run, step=2):
    return load_file(run / "weights" / f"step-{step:06d}.safetensors")


def test_the_weights_table(study):
    runs, tables = study
    a, b = weights(runs["flash0"]), weights(runs["baseline0"])
    names = [name for name in a if not name.endswith("to_k.bias") and not name.endswith("k_proj.bias")]
    difference = torch.cat([(a[name].double() - b[name].double()).ravel() for name in names])
    size = torch.cat([b[name].double().ravel() for name in names])
    frame = tables["weights.parquet"].query("kind == 'Flash against Baseline' and step == 2")
    (row,) = frame.query("level == 'model' and average == 'pooled'").to_dict("records")
    assert row["relative_l2"] == pytest.approx(float(difference.norm() / size.norm()), rel=1e-6)
    assert row["max_difference"] == pytest.approx(float(difference.abs().max()), rel=1e-6)
    name = "denoiser.proj_out.weight"
    (row,) = frame[frame["name"] == name].to_dict("records")
    by_hand = (np.sort(a[name].double().numpy().ravel()) - np.sort(b[name].double().numpy().ravel())).__abs__().mean()
    assert row["wasserstein"] == pytest.approx(by_hand, rel=1e-6)
    assert frame[frame["zero_gradient"].astype(bool)]["name"].str.endswith(".bias").all()


def test_the_predictions_and_losses(study):
    runs, tables = study
    a, b = (
        load_file(runs[name] / "predictions/step-000002.safetensors")["predicted"] for name in ("flash0", "baseline0")
    )
    row = tables["predictions.parquet"].query("kind == 'Flash against Baseline' and step == 2").iloc[0]
    assert row["rms"] == pytest.approx(float((a - b).double().square().mean().sqrt()), rel=1e-6)
    manifest = json.loads((runs["flash0"] / "manifest.json").read_text())
    frame = tables["losses.parquet"].query("arm == 'flash' and twin == 0").set_index("step")
    assert frame.loc[2, "held_out_loss"] == pytest.approx(manifest["snapshots"][-1]["held_out_loss"], rel=1e-6)
    metrics = pd.read_csv(runs["flash0"] / "metrics.csv").set_index("step")
    assert frame.loc[2, "loss"] == pytest.approx(metrics.loc[2, "loss"], rel=1e-6)


def test_the_inner_products(study):
    runs, tables = study
    names = [n for n in weights(runs["flash0"]) if not n.endswith("to_k.bias") and not n.endswith("k_proj.bias")]

    def moved(run):
        a, b = weights(runs[run]), weights(runs["baseline0"])
        return torch.cat([(a[name].double() - b[name].double()).ravel() for name in names])

    rows = tables["systematic.parquet"].query(
        "space == 'weights' and step == 2 and arm == 'flash' and other_arm == 'flash'"
    )
    (row,) = rows.query("twin == 0 and other_twin == 1").to_dict("records")
    assert row["inner"] == pytest.approx(float(moved("flash0") @ moved("flash1")), rel=1e-5)


def test_the_probe_and_the_record_of_the_runs(study):
    runs, tables = study
    probe = pd.read_csv(runs["flash1"] / "deviation.csv")
    frame = tables["deviations.parquet"].query("arm == 'flash' and twin == 1")
    assert len(frame) == len(probe) > 0
    theirs = probe.query("arm == 'flash'").set_index(["step", "layer"])["rms"]
    ours = frame.query("probed == 'flash'").set_index(["step", "layer"])["rms"]
    assert ours.to_numpy() == pytest.approx(theirs.to_numpy(), rel=1e-6)
    record = tables["runs.csv"].set_index("run").loc[runs["flash1"].name]
    assert (record["steps"], record["batch_size"], record["twin"], record["arm"]) == (2, 2, 1, "flash")


def test_a_place_on_the_line(study):
    runs, tables = study
    a, b = weights(runs["flash0"]), weights(runs["baseline0"])
    settings = compose_settings(*TINY, "attn=baseline", "precision=fp32", "device=cpu")
    module = TextToImage(settings, load_data(settings))
    module.load_state_dict({name: 0.7 * a[name] + 0.3 * b[name] for name in a})
    with torch.no_grad():
        predicted, noise = module.predict(line.held_out_batches(load_data(settings), line.BATCHES)[2])
    (row,) = tables["lines.parquet"].query("batch == 2 and alpha > 0.25 and alpha < 0.35").to_dict("records")
    assert row["kind"] == "Flash against Baseline"
    assert row["loss"] == pytest.approx(float((predicted - noise).square().mean()), rel=1e-5)


def test_a_pixel_of_the_samples(study):
    runs, tables = study
    frame = tables["samples.parquet"].query("arm == 'flash' and twin == 0")
    with Image.open(io.BytesIO(frame["png"].iloc[0])) as ours, Image.open(runs["flash0"] / "samples.png") as theirs:
        assert len(frame) == 1 and theirs.size == (2 * ours.width, 2 * ours.height)
        assert ours.convert("RGB").getpixel((5, 7)) == theirs.convert("RGB").getpixel((10, 14))


def test_every_table_of_the_study_has_a_cell_here(study):
    """runs_again.csv alone is missing: it takes two machines."""
    stored = {name for name, entry in read_manifest().items() if "runs" in entry and "run_commits" in entry}
    assert stored - {"runs_again.csv"} <= set(study[1])


def test_no_stored_table_mixes_processors_whose_runs_differ():
    assert mixed_processors(read_table("runs.csv"), read_table("runs_again.csv")) == []

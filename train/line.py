"""The held-out loss along the straight line between the last weights of two runs: `python train/line.py RUN_A RUN_B`.

Writes lines/<RUN_A>--<RUN_B>.csv beside the two run folders: a row per place on the line and held-out batch. Both are
computed in FP32 with the Baseline attention, whatever the runs were trained with, so that only their weights count. If
the loss rises between the ends there is a barrier, and the runs have come to different minima (arXiv 1912.05671).
Exit codes: 0 done, 1 refused, 2 the words are not two run folders.
"""

from __future__ import annotations

import sys
from pathlib import Path

if Path(sys.path[0]) == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import pandas as pd
import torch
from omegaconf import OmegaConf

from fa_study.snapshots import load_weights, snapshot_steps
from train import Refusal
from train.batches import TIMESTEPS, Batch, CaptionedPictures
from train.data import load_data
from train.folder import read_manifest
from train.module import TextToImage
from train.snapshots import write_then_rename
from train.system import set_up_torch

PLACES = 11
BATCHES = 4


def held_out_batches(data: CaptionedPictures, count: int) -> list[Batch]:
    """`count` batches of the held-out pictures, each with noise of its own.

    Their timesteps lie evenly between each other, so that all batches together cover the schedule `count` times as
    finely as one.
    """
    fixed, size, batches = data.held_out, len(data.held_out_captions), []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(fixed.noise.shape, generator=generator, dtype=torch.float32)
        shares = (torch.arange(size, dtype=torch.float64) + (number + 0.5) / count) / size
        batches.append(fixed._replace(noise=noise, timesteps=(shares * TIMESTEPS).long()))
    return batches


def line_losses(run_a: Path, run_b: Path) -> pd.DataFrame:
    """The held-out loss of (1 - alpha) A + alpha B, A and B the last weights of two runs, all in FP32.

    Returns
    -------
    DataFrame : a row per (alpha, batch): loss, the mean squared error of the predicted noise, in its variance.

    Raises
    ------
    Refusal
        If a run is not finished, or the two differ in model, data or number of steps.
    """
    settings = [_settings(run) for run in (run_a, run_b)]
    for name in ("model", "data", "steps"):
        a, b = (OmegaConf.to_container(each)[name] for each in settings)
        if a != b:
            raise Refusal(f"{run_a} and {run_b} differ in {name}: {a} and {b}; give two runs that agree in it")
    common = OmegaConf.merge(settings[0], {"device": "cpu", "precision": {"name": "fp32"}, "twin": 0})
    common.attn = {"name": "baseline"}
    module = TextToImage(common, load_data(common)).eval()
    ends = [load_weights(run, snapshot_steps(run)[-1]) for run in (run_a, run_b)]
    batches, rows = held_out_batches(module.data, BATCHES), []
    for place in range(PLACES):
        alpha = place / (PLACES - 1)
        # In FP64, rounded once by load_state_dict: the two ends are the runs' own weights, to the bit.
        between = {
            name: (1 - alpha) * ends[0][name].double() + alpha * ends[1][name].double() for name in module.state_dict()
        }
        module.load_state_dict(between)
        with torch.no_grad():
            losses = [float(module.loss(batch)) for batch in batches]
        rows += [{"alpha": alpha, "batch": number, "loss": loss} for number, loss in enumerate(losses)]
    return pd.DataFrame(rows)


def _settings(run: Path):
    manifest = read_manifest(run)
    if manifest is None or manifest["state"] != "finished":
        raise Refusal(f"{run} is not a finished run's folder; give two of those under runs/")
    return OmegaConf.load(run / "config.yaml")


def main(words: list[str]) -> int:
    if len(words) != 2 or any(word.startswith("-") for word in words):
        print("usage: python train/line.py RUN_A RUN_B (two finished runs' folders)", file=sys.stderr)
        return 2
    run_a, run_b = map(Path, words)
    set_up_torch(threads=1)
    try:
        table = line_losses(run_a, run_b)
        path = run_a.parent / "lines" / f"{run_a.name}--{run_b.name}.csv"
        path.parent.mkdir(exist_ok=True)
        write_then_rename(path, lambda temporary: table.to_csv(temporary, index=False))
    except (Refusal, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    means = table.groupby("alpha")["loss"].mean()
    print(f"{path}: {means.iloc[0]:.4f} and {means.iloc[-1]:.4f} at the ends, at most {means.max():.4f} on the line")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

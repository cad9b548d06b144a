"""Keep real attention inputs of a trained model for the micro-benchmark: `python train/attention_inputs.py RUN_FOLDER`.

Writes notebooks/data/trained_qkv.parquet: Q, K and V of the self-attention over a picture's pixels, in every layer and
for the pictures that would come next in training, rounded to BF16.

B pictures, H heads, L = S pixels, D head size.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch
from omegaconf import OmegaConf
from torch import Tensor

from fa_study.snapshots import load_weights, snapshot_steps
from fa_study.tables import write_table
from train.attention import observing
from train.data import load_data
from train.module import TextToImage

SAMPLES = 20
QUERIES = 32


def attention_inputs(run: Path) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v), each (S, D), of `SAMPLES` pairs of layer and picture: layers in turn, so that all are represented."""
    settings = OmegaConf.load(run / "config.yaml")
    settings.device = "cpu"  # where a run of a GPU can be read as well
    module = TextToImage(settings, load_data(settings))
    weights = load_weights(run, snapshot_steps(run)[-1])
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    seen: list[list[tuple[Tensor, ...]]] = []

    def keep(name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if q.shape[2] == k.shape[2]:  # not the cross-attention to the caption
            seen.append([(q[b, h], k[b, h], v[b, h]) for b in range(q.shape[0]) for h in range(q.shape[1])])

    module.eval()
    with torch.no_grad(), observing(module.denoiser, keep):
        module.predict(module.batch(settings.steps))
        module.predict(module.batch(settings.steps + 1))
    samples = [sample for group in zip(*seen) for sample in group]
    if len(samples) < SAMPLES:
        raise ValueError(
            f"{run} has {len(samples)} pairs of layer, head and picture: use a model with {SAMPLES} or more"
        )
    return samples[:SAMPLES]


def as_table(samples: list[tuple[Tensor, Tensor, Tensor]]) -> pd.DataFrame:
    """A row per sample, tensor ("q", "k", "v") and position; queries are `QUERIES` rows at even distances."""
    frames = []
    for number, tensors in enumerate(samples):
        for name, x in zip("qkv", tensors):
            rows = torch.arange(0, len(x), len(x) // QUERIES) if name == "q" else torch.arange(len(x))
            values = pd.DataFrame(x[rows].bfloat16().float().numpy(), columns=[f"d{i}" for i in range(x.shape[1])])
            values.insert(0, "position", rows.numpy())
            values.insert(0, "tensor", name)
            values.insert(0, "sample", number)
            frames.append(values)
    return pd.concat(frames, ignore_index=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "config.yaml").exists():
        sys.exit("usage: python train/attention_inputs.py RUN_FOLDER (a folder under runs/ that holds a config.yaml)")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    frame = as_table(attention_inputs(folder))
    path = write_table(frame, "trained_qkv.parquet", command=f"python train/attention_inputs.py runs/{folder.name}")
    print(f"{path}: {len(frame)} rows")

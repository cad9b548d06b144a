"""Probes that change nothing: what the model predicts at each snapshot, and how far attention deviates inside it.

B batch, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor

from train import Refusal
from train.arms import Tiled, attention_function, check_arm
from train.attention import Attend, baseline, observing
from train.metrics import TableFile
from train.module import TextToImage
from train.snapshots import write_then_rename
from train.tracker import Tracker

DEVIATION_COLUMNS = (
    *("step", "layer", "arm", "max", "rms", "mean"),
    *("largest_logit", "entropy", "repeated_maxima", "delta_bias", "max_flash_baseline"),
)


def write_prediction(module: TextToImage, folder: Path, step: int) -> float:
    """Keep the predicted noise of the held-out batch as predictions/step-<step>.safetensors; returns its loss.

    Must run inside the precision's forward context. Two runs compared by it are compared by what they compute, which
    two sets of weights that differ by a permutation, say, would not show.
    """
    path = folder / "predictions" / f"step-{step:06d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    batch = module.on_device(module.data.held_out)
    module.start_step(step)
    with torch.no_grad():
        predicted, noise = module.predict(batch)
    write_then_rename(path, lambda temporary: save_file({"predicted": predicted.cpu().contiguous()}, temporary))
    return float((predicted - noise).square().mean())


def attention_deviation(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, arms: dict[str, Attend]) -> list[dict]:
    """Compute attention by every arm and in FP64 on the same inputs; a row per arm.

    max, rms, mean: of out - exact, the mean signed. largest_logit, entropy: of the exact scores and probabilities (the
    entropy in nats, averaged over rows). repeated_maxima: share of rows whose largest score, rounded to the inputs'
    dtype, occurs more than once. delta_bias: mean of rowsum(dO (out - exact)) / mean |rowsum(dO exact)|, the signed
    error of the delta that the backward pass uses; NaN without dO. max_flash_baseline: max |flash - baseline|.
    """
    q64, k64, v64 = q.double(), k.double(), v.double()
    scores = torch.matmul(q64, k64.transpose(-1, -2)) * q.shape[-1] ** -0.5
    rounded = scores.to(q.dtype)
    repeated = ((rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1).double().mean()
    log_probabilities = torch.log_softmax(scores, -1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities).sum(-1).mean()
    exact = torch.matmul(probabilities, v64)
    shared = {"largest_logit": float(scores.amax()), "entropy": float(entropy), "repeated_maxima": float(repeated)}
    outs = {name: attend(q, k, v).double() for name, attend in arms.items()}
    apart = float((outs["flash"] - outs["baseline"]).abs().amax()) if "flash" in outs else float("nan")
    rows = []
    for name, out in outs.items():
        error = out - exact
        row = {"arm": name, "max": float(error.abs().amax()), "rms": float(error.square().mean().sqrt())}
        row |= {"mean": float(error.mean()), **shared, "delta_bias": float("nan"), "max_flash_baseline": apart}
        if dout is not None:
            delta = (dout.double() * exact).sum(-1)
            row["delta_bias"] = float((dout.double() * error).sum(-1).mean() / delta.abs().mean())
        rows.append(row)
    return rows


def probe_arms(module: TextToImage) -> dict[str, Attend]:
    """The arms that the probe compares: baseline, and the flash kernel where it takes this device and precision.

    A tiled arm comes on top, unless it rounds at random: it would use up the run's own random numbers.
    """
    settings = module.settings
    precision, device = settings.precision.name, settings.device
    arms: dict[str, Attend] = {"baseline": baseline}
    flash = DictConfig({"name": "flash"})
    with contextlib.suppress(Refusal):
        check_arm(flash, precision, device)
        arms["flash"] = attention_function(flash, precision, device)
    if isinstance(module.attend, Tiled) and not module.attend.random:
        arms["tiled"] = module.attend
    return arms


class DeviationProbe(pl.Callback):
    """At every `every`-th step, each attention call computes all arms and FP64 on its own inputs, the paper's method.

    A row of step s belongs to the weights s. The tensors are copies, taken in passing: the run's bits stay the same.
    """

    def __init__(self, table: TableFile, tracker: Tracker, every: int, arms: dict[str, Attend]) -> None:
        self.table, self.tracker, self.every, self.arms = table, tracker, every, arms
        self._calls: list[list] = []
        self._observation = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: TextToImage, batch, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            self._calls = []
            self._observation = observing(module.denoiser, self._observe)
            self._observation.__enter__()

    def _observe(self, name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        call = [name, *(x.detach().clone() for x in (q, k, v)), None]
        self._calls.append(call)
        if out.requires_grad:
            out.register_hook(lambda gradient: call.__setitem__(4, gradient.detach().clone()))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: TextToImage, optimizer) -> None:
        if self._observation is None:
            return
        self._observation.__exit__(None, None, None)
        self._observation = None
        step, report = trainer.global_step, {}
        with torch.no_grad():
            for name, q, k, v, dout in self._calls:
                for row in attention_deviation(q, k, v, dout, self.arms):
                    self.table.append({"step": step, "layer": name, **row})
                    report |= {f"deviation/{row['arm']}/{name}/{key}": row[key] for key in ("max", "rms", "mean")}
        self._calls = []
        self.tracker.log(step, report)

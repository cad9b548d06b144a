"""What is watched while training: norms and logits at the logged steps, spikes, and losses that are no number.

A spike is a step whose gradient norm is more than SPIKE_FACTOR times the median of the last SPIKE_HISTORY ones, once
there are that many. The loss itself is no good for the rule: with few pictures a batch its size depends mostly on the
timesteps that were drawn.
"""

from __future__ import annotations

import math
from statistics import median

import lightning.pytorch as pl
import torch
from torch import Tensor

from train.attention import attention_layers, observing
from train.folder import RunFolder
from train.metrics import TableFile
from train.module import TextToImage
from train.tracker import Tracker

SPIKE_FACTOR = 5.0
SPIKE_HISTORY = 50


class Metrics(pl.Callback):
    """A row of metrics.csv and one per layer of logits.csv at step 1, every `every` steps and the last; W&B gets both.

    A row of step s tells of the step that led from the weights s - 1 to the weights s; skipped_steps counts all so far.
    """

    def __init__(self, metrics: TableFile, logits: TableFile, tracker: Tracker, every: int) -> None:
        self.metrics, self.logits, self.tracker, self.every = metrics, logits, tracker, every
        self._before: list[Tensor] | None = None
        self._largest: dict[str, float] = {}
        self._observation = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: TextToImage, batch, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if step % self.every == 0 or step in (1, trainer.max_steps):
            self._before = [parameter.detach().clone() for parameter in module.parameters()]
            self._largest = dict.fromkeys(attention_layers(module.denoiser), -math.inf)
            self._observation = observing(module.denoiser, self._observe)
            self._observation.__enter__()

    def _observe(self, name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        with torch.no_grad():
            largest = float(torch.matmul(q, k.transpose(-1, -2)).amax()) * q.shape[-1] ** -0.5
        self._largest[name] = max(self._largest[name], largest)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: TextToImage, optimizer) -> None:
        if self._observation is not None:  # the forward pass is done
            self._observation.__exit__(None, None, None)
            self._observation = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: TextToImage, *_) -> None:
        if self._before is None:
            return
        step = trainer.global_step
        with torch.no_grad():
            moved = torch.stack([(new - old).norm() for new, old in zip(module.parameters(), self._before)]).norm()
        self._before = None
        row = {name: float(value) for name, value in module.measured.items()}
        row |= {"update_norm": float(moved), "largest_logit": max(self._largest.values())}
        row["skipped_steps"] = skipped_steps(trainer)
        self.metrics.append({"step": step, **row})
        for layer, largest in self._largest.items():
            self.logits.append({"step": step, "layer": layer, "largest_logit": largest})
        self.tracker.log(step, row | {f"largest_logit/{layer}": value for layer, value in self._largest.items()})


def skipped_steps(trainer: pl.Trainer) -> int:
    """How many steps so far the scaler of an FP16 run has left out; 0 in other precisions."""
    return getattr(trainer.precision_plugin, "skipped", 0)


class Spikes(pl.Callback):
    """Notes spikes in the manifest, with the snapshots before and after each."""

    def __init__(self, folder: RunFolder, every: int) -> None:
        self.folder, self.every = folder, every
        self.norms: list[float] = []

    def state_dict(self) -> dict:
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: dict) -> None:
        self.norms = list(state["norms"])

    def on_train_batch_end(self, trainer: pl.Trainer, module: TextToImage, *_) -> None:
        step, norm = trainer.global_step, float(module.measured["grad_norm"])
        if is_spike(self.norms, norm):
            before = (step - 1) // self.every * self.every
            spike = {"step": step, "loss": float(module.measured["loss"]), "grad_norm": norm}
            spike |= {"snapshot_before": before, "snapshot_after": min(before + self.every, trainer.max_steps)}
            earlier = [other for other in self.folder.manifest.get("spikes", []) if other["step"] < step]
            self.folder.update(spikes=[*earlier, spike])
        self.norms = [*self.norms[1 - SPIKE_HISTORY :], norm]


def is_spike(history: list[float], norm: float) -> bool:
    """Whether a gradient norm is a spike after this history: see the module's rule. A non-finite norm is one."""
    if len(history) < SPIKE_HISTORY:
        return False
    return not norm <= SPIKE_FACTOR * median(history)

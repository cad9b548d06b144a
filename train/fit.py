"""One run from its first or last checkpointed step to its end, inside its folder."""

from __future__ import annotations

import logging
import warnings

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment
from omegaconf import DictConfig

from train.callbacks import Metrics, Progress, StopOnSignal
from train.data import load_data
from train.folder import RunFolder
from train.metrics import MetricsFile, last_loss
from train.module import TextToImage
from train.operators import record_operators
from train.precision import precision_plugin
from train.sampling import CAPTIONS, sample, save_grid
from train.snapshots import Snapshots, checkpoint_step, newest_checkpoint
from train.tracker import Tracker


def make_trainer(settings: DictConfig, callbacks: list[pl.Callback]) -> pl.Trainer:
    """A Trainer that only trains: what it would log, save or print itself is done by our callbacks."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return pl.Trainer(
        accelerator="gpu" if settings.device == "cuda" else "cpu",
        devices=1,
        max_steps=settings.steps,
        max_epochs=-1,
        plugins=[LightningEnvironment(), precision_plugin(settings.precision.name, settings.device)],
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def fit(settings: DictConfig, folder: RunFolder, sweep: bool) -> tuple[int, float]:
    """Train; returns the signal's number (0 for none) and the mean loss of the last rows of metrics.csv.

    The working directory must be the run folder, and is where everything is written.
    """
    data = load_data(settings)
    module = TextToImage(settings, data)
    checkpoint = newest_checkpoint(folder.path)
    metrics = MetricsFile(folder.path, checkpoint_step(checkpoint))
    tracker = Tracker(settings, folder)
    progress = Progress(folder.name, settings.snapshots.every if sweep else None)
    stop = StopOnSignal(folder)
    snapshots = Snapshots(folder, settings.snapshots.every, tracker.weights)
    trainer = make_trainer(settings, [progress, Metrics(metrics, tracker, settings.log_every), snapshots, stop])
    finished = False
    try:
        trainer.precision_plugin.convert_module(module).to(settings.device)
        with trainer.precision_plugin.forward_context():
            operators = record_operators(module)
        folder.update(data_sha256=data.sha256(), operators=operators)
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        if trainer.global_step < settings.steps:
            return stop.received, float("nan")
        if settings.sampling.count:
            captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(settings.sampling.count)]
            module.to(settings.device)
            module.start_step(settings.steps)
            with trainer.precision_plugin.forward_context():
                pictures = sample(module, captions, settings.sampling.steps, settings.sampling.guidance)
            path = save_grid(pictures, folder.path / "samples.png")
            tracker.picture(settings.steps, path)
        finished = True
    finally:
        stop.restore()
        progress.close()
        metrics.close()
        tracker.close(failed=not finished)
    loss = last_loss(metrics.path)
    folder.update(state="finished", loss=loss, seconds_per_step=progress.seconds_per_step)
    return 0, loss

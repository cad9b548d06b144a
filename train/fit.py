"""One run from its first or last checkpointed step to its end, inside its folder."""

from __future__ import annotations

import contextlib
import logging
import warnings
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment
from omegaconf import DictConfig

from train import Refusal
from train.callbacks import Progress, StopOnSignal
from train.data import load_data
from train.folder import RunFolder
from train.metrics import COLUMNS, TableFile, last_loss
from train.module import TextToImage
from train.operators import record_operators
from train.precision import precision_plugin
from train.probes import DEVIATION_COLUMNS, DeviationProbe, probe_arms, write_prediction
from train.sampling import draw, join_strip
from train.snapshots import Snapshots, checkpoint_step, newest_checkpoint
from train.tracker import Tracker
from train.watch import Metrics, Spikes, skipped_steps


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
    data_sha256 = data.sha256()
    if folder.manifest.get("data_sha256", data_sha256) != data_sha256:
        raise Refusal(
            "the pictures or their captions are not those that the run began with (data_sha256 in its manifest.json): "
            "put them back, or train under another seed or runs_dir"
        )
    module = TextToImage(settings, data)
    checkpoint = newest_checkpoint(folder.path)
    done = checkpoint_step(checkpoint)
    every = settings.snapshots.every
    with contextlib.ExitStack() as stack:

        def table(name: str, columns, resume_at: int) -> TableFile:
            return stack.enter_context(contextlib.closing(TableFile(folder.path / name, columns, resume_at)))

        tracker = Tracker(settings, folder)
        stack.push(lambda kind, *_: tracker.close(failed=kind is not None))
        metrics = table("metrics.csv", COLUMNS, done)
        logits = table("logits.csv", ("step", "layer", "largest_logit"), done)
        progress = stack.enter_context(contextlib.closing(Progress(folder.name, every if sweep else None)))
        stop = stack.enter_context(contextlib.closing(StopOnSignal(folder)))

        def after_snapshot(step: int, path: Path) -> None:
            tracker.weights(step, path)
            with trainer.precision_plugin.forward_context():
                if settings.snapshots.predictions:
                    loss = write_prediction(module, folder.path, step)
                    folder.record_snapshot(**folder.snapshot(step) | {"held_out_loss": loss})
                if settings.sampling.strip:
                    draw(module, settings.sampling, folder.path / "samples" / f"step-{step:06d}.png")

        callbacks = [progress, Metrics(metrics, logits, tracker, settings.log_every), Spikes(folder, every)]
        if settings.probe.deviation_every:
            # a row of step s is written in the step behind it, which a run resumed at s repeats
            deviation = table("deviation.csv", DEVIATION_COLUMNS, done - 1)
            arms = probe_arms(module)
            callbacks.append(DeviationProbe(deviation, tracker, settings.probe.deviation_every, arms))
        trainer = make_trainer(settings, [*callbacks, Snapshots(folder, every, after_snapshot), stop])
        trainer.precision_plugin.convert_module(module).to(settings.device)
        with trainer.precision_plugin.forward_context():
            operators = record_operators(module)
        products = getattr(trainer.precision_plugin, "products", "native")
        if products != "native":
            print(f"{folder.name}: {products}", flush=True)
        folder.update(
            data_sha256=data_sha256, unreadable_pictures=data.unreadable, operators=operators, products=products
        )
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        if trainer.global_step < settings.steps:
            return stop.received, float("nan")
        if settings.sampling.count:
            module.to(settings.device)
            with trainer.precision_plugin.forward_context():
                path = draw(module, settings.sampling, folder.path / "samples.png")
            tracker.picture(settings.steps, path)
            if settings.sampling.strip:
                join_strip(folder.path / "samples", folder.path / "samples-strip.png")
    loss = last_loss(folder.path / "metrics.csv")
    skipped = skipped_steps(trainer)
    if skipped:
        print(f"{folder.name}: {skipped} of {settings.steps} steps skipped, as their gradients overflowed", flush=True)
    folder.update(state="finished", loss=loss, seconds_per_step=progress.seconds_per_step, skipped_steps=skipped)
    return 0, loss

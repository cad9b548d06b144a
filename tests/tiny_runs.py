"""Settings without the command line, and training runs of tiny sizes in this process, for the training's tests."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

PROJECT = Path(__file__).resolve().parent.parent
# 256 tokens instead of 1,024, one head, two blocks: about 0.05 s a step
TINY = ("model.size=tiny", "data.pixels=16", "batch_size=2", "sampling.count=1", "sampling.steps=2", "log_every=1")


def compose_settings(*overrides: str) -> DictConfig:
    """The settings that these words on the command line would give."""
    with initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def train_here(runs_dir: Path, *overrides: str) -> Path:
    """Train in this process with tiny sizes and without W&B; returns the run folder."""
    from train.run import train
    from train.settings import run_name

    settings = compose_settings(*TINY, "logger.mode=disabled", f"runs_dir={runs_dir}", *overrides)
    train(settings, "python train/run.py")
    return Path(runs_dir) / run_name(settings)

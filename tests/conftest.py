"""Fixtures shared by the training's tests: tiny runs made once per process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu` the tests are of the CPU, also on a machine with a GPU."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def flash_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: flash, BF16, 6 steps, snapshots every 2."""
    from tiny_runs import train_here

    runs_dir = tmp_path_factory.mktemp("runs")
    return train_here(runs_dir, "attn=flash", "precision=bf16", "steps=6", "snapshots.every=2")

"""Fixtures shared by the training's tests: tiny runs made once per process."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def flash_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: flash, BF16, 6 steps, snapshots every 2."""
    from tiny_runs import train_here

    runs_dir = tmp_path_factory.mktemp("runs")
    return train_here(runs_dir, "attn=flash", "precision=bf16", "steps=6", "snapshots.every=2")

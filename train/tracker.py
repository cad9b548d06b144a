"""Weights & Biases: offline unless asked otherwise, and never a login or a question.

The process works inside the run folder while it trains: files are added by relative paths under policy "immutable",
so that W&B neither copies them nor writes down where the folder lay, and a moved folder can still be synchronised by
`cd runs/NAME && wandb sync wandb/offline-run-*`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from train import Refusal
from train.folder import RunFolder

ONLINE_TIMEOUT = 60.0  # seconds that logger.mode=online waits for the server before it falls back to offline


class Tracker:
    """One W&B run, or nothing at all with logger.mode=disabled."""

    def __init__(self, settings: DictConfig, folder: RunFolder) -> None:
        self.name = folder.name
        self._run = None
        mode = settings.logger.mode
        if mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        identity = folder.manifest.get("wandb_id") or secrets.token_hex(4)
        options = {
            "project": settings.logger.project,
            "id": identity,
            "name": folder.name,
            "group": f"{settings.model.name}-{settings.data.name}",
            "job_type": f"{settings.attn.name}-{settings.precision.name}",
            "config": OmegaConf.to_container(settings, resolve=True),
            "dir": ".",
            "settings": wandb.Settings(
                console="off", silent=True, x_disable_meta=True, x_disable_stats=True, init_timeout=ONLINE_TIMEOUT
            ),
        }
        self._run = self._online(options) if mode == "online" else None
        if self._run is None:
            self._run = wandb.init(mode="offline", **options)
        folder.update(wandb_id=options["id"])
        self._run.define_metric("*", step_metric="trainer/global_step")

    def _online(self, options: dict):
        """A run that is sent to the server as it goes, or None, and a message, if the server cannot be had."""
        import wandb

        try:
            if not wandb.login(prompt=False):
                raise Refusal("logger.mode=online needs WANDB_API_KEY or a stored login; use logger.mode=offline")
            return wandb.init(mode="online", resume="allow", **options)
        except wandb.errors.Error as error:
            print(f"W&B cannot be reached ({str(error).splitlines()[0]}): logging offline", flush=True)
            options["id"] = secrets.token_hex(4)  # W&B's background process holds on to the first one
            return None

    def log(self, step: int, row: dict[str, float]) -> None:
        if self._run is not None:
            self._run.log({**row, "trainer/global_step": step})

    def weights(self, step: int, path: Path) -> None:
        """Log a snapshot as artifact weights-<run> with alias step-<step>."""
        if self._run is None:
            return
        import wandb

        artifact = wandb.Artifact(f"weights-{self.name}", type="weights", metadata={"step": step})
        artifact.add_file(os.path.relpath(path), name=path.name, policy="immutable")
        self._run.log_artifact(artifact, aliases=[f"step-{step:06d}"])

    def picture(self, step: int, path: Path) -> None:
        if self._run is not None:
            import wandb

            self._run.log({"samples": wandb.Image(os.path.relpath(path)), "trainer/global_step": step})

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))

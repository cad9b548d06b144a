"""Snapshots of the weights, and the checkpoints that a run resumes from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from train import Refusal
from train.folder import RunFolder

KEPT_CHECKPOINTS = 2  # the newest, and one before it in case the newest is damaged


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_then_rename(path: Path, write: Callable[[Path], None], final: Callable[[Path], Path] | None = None) -> Path:
    """Let `write` fill a temporary file, force it to the disk, and rename it to `path` (or to final(temporary)).

    Raises
    ------
    Refusal
        If the file cannot be written, as on a full disk; the temporary file is removed and no other file touched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        target = final(temporary) if final else path
        temporary.replace(target)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as torch.save and safetensors call it
        raise Refusal(
            f"could not write {path.name} ({error}); what was written before is intact: "
            "make room on the disk, then the same command resumes the run"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def write_weights(module: torch.nn.Module, folder: RunFolder, step: int) -> Path:
    """Write the parameters as weights/step-<step>.safetensors and their sha256 into the manifest.

    A resumed run writes the same bits again for a step that it repeats; anything else raises RuntimeError, since then
    the run is no longer the one that was interrupted.
    """
    path = folder.path / "weights" / f"step-{step:06d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    # No metadata: safetensors writes its entries in random order, and equal weights would get different hashes.
    weights = {name: parameter.detach().cpu().contiguous() for name, parameter in module.named_parameters()}
    write_then_rename(path, lambda temporary: save_file(weights, temporary))
    sha256 = file_sha256(path)
    for line in folder.manifest["snapshots"]:
        if line["step"] == step and line["sha256"] != sha256:
            raise RuntimeError(f"{path} has other bits than before the interruption: {sha256}, was {line['sha256']}")
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    folder.record_snapshot(step, file=f"weights/{path.name}", sha256=sha256, dtype="+".join(sorted(dtypes)))
    return path


def write_checkpoint(trainer: pl.Trainer, folder: Path, step: int) -> Path:
    """Write checkpoint/step-<step>-<sha256>.ckpt, whose name tells whether its content is whole, and drop old ones."""
    path = folder / "checkpoint" / f"step-{step:06d}.ckpt"
    path.parent.mkdir(exist_ok=True)
    state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)

    def named(temporary: Path) -> Path:
        return path.with_name(f"{path.stem}-{file_sha256(temporary)[:16]}.ckpt")

    target = write_then_rename(path, lambda temporary: torch.save(state, temporary), named)
    for old in _by_step(folder)[:-KEPT_CHECKPOINTS]:
        old.unlink()
    return target


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose content matches its name, or None; says so if a newer one is damaged."""
    for path in reversed(_by_step(folder)):
        if file_sha256(path).startswith(path.stem.rpartition("-")[2]):
            return path
        print(f"{path} is damaged; using the one before it", flush=True)
    return None


def checkpoint_step(path: Path | None) -> int:
    """The number of steps that a checkpoint stands for; 0 for None."""
    return int(path.name.split("-")[1]) if path else 0


def _by_step(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    return sorted((folder / "checkpoint").glob("step-*.ckpt"), key=lambda path: (checkpoint_step(path), path.name))


class Snapshots(pl.Callback):
    """Weights and a checkpoint every `every` steps, at step 0 and at the last one.

    `on_snapshot(step, path)` is called behind each set of weights, before its checkpoint.
    """

    def __init__(self, folder: RunFolder, every: int, on_snapshot: Callable[[int, Path], None]) -> None:
        self.folder = folder
        self.every = every
        self.on_snapshot = on_snapshot

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self._snapshot(trainer, module, 0)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_) -> None:
        step = trainer.global_step
        if step % self.every == 0 or step == trainer.max_steps:
            self._snapshot(trainer, module, step)
            write_checkpoint(trainer, self.folder.path, step)

    def _snapshot(self, trainer: pl.Trainer, module: pl.LightningModule, step: int) -> None:
        self.on_snapshot(step, write_weights(module, self.folder, step))

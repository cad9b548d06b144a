"""The run folder: who may write into it, and the manifest that says what it holds.

runs/<name>/
    config.yaml      the resolved settings
    manifest.json    state (running, interrupted, finished), versions, commit, device, operators, snapshots
    metrics.csv      loss and norms; logits.csv: the largest logit of each layer; deviation.csv: the deviation probe
    weights/         step-000100.safetensors
    predictions/     step-000100.safetensors: the output on a held-out batch
    checkpoint/      what resuming needs
    samples.png      pictures drawn at the end
    wandb/           Weights & Biases' own files

A folder whose manifest says "running" although no process holds its lock was left by a process that was killed: it
counts as interrupted. Use `open_run`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from train import Refusal
from train.settings import difference
from train.system import describe


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader or a crash meets the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _strict(value: object) -> object:
    """The value with None for floats that JSON has no text for (a loss that is NaN, the pace of a single step)."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunFolder:
    """An open run folder. Use `open_run`; as a context manager it records how the run ended and gives the lock back."""

    def __init__(self, path: Path, manifest: dict, lock: int) -> None:
        self.path = path.resolve()
        self.manifest = manifest
        self._lock = lock
        self._writing = self._outdated = False

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> str:
        return self.manifest["state"]

    def update(self, **entries: object) -> None:
        """Set entries of the manifest and write it. A signal's handler may call this while it is at work already."""
        self.manifest = self.manifest | entries
        self._outdated = True
        if self._writing:
            return
        self._writing = True
        try:
            while self._outdated:
                self._outdated = False
                write_whole(self.path / "manifest.json", json.dumps(_strict(self.manifest), indent=1) + "\n")
        finally:
            self._writing = False

    def snapshot(self, step: int) -> dict:
        """A snapshot's line of the manifest."""
        return next(line for line in self.manifest["snapshots"] if line["step"] == step)

    def record_snapshot(self, step: int, **about: object) -> None:
        """Add a snapshot's line to the manifest, in place of an older line for the same step."""
        lines = [line for line in self.manifest["snapshots"] if line["step"] != step]
        lines.append({"step": step, **about})
        self.update(snapshots=sorted(lines, key=lambda line: line["step"]))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if self.state == "running":
                reason = (
                    "interrupted by the user"
                    if error is None or kind in (KeyboardInterrupt, SystemExit)
                    else str(error)
                )
                with contextlib.suppress(OSError):  # a full disk, of which the error tells already
                    self.update(state="interrupted", reason=reason.splitlines()[0] if reason else kind.__name__)
        finally:
            os.close(self._lock)


def read_manifest(path: Path) -> dict | None:
    """A run folder's manifest, or None where there is none yet; Refusal for one that is damaged."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}/manifest.json is damaged ({error}); restore it, or `rm -r {path}`") from error
    if not isinstance(manifest, dict) or "state" not in manifest:
        raise Refusal(f"{path}/manifest.json says no state of a run; name another folder, or `rm -r {path}`")
    return manifest


def skip_finished(path: Path, settings: DictConfig, command: str = "python train/run.py ...") -> bool:
    """True if the run of these settings is finished and `finished=skip`; touches nothing.

    Raises
    ------
    Refusal
        If the run is finished and is not to be skipped, or if it was made with other settings.
    """
    manifest = read_manifest(path)
    if manifest is None or manifest["state"] != "finished":
        return False
    _refuse_other_settings(path, settings)
    if settings.finished == "skip":
        return True
    more = f"{command} steps={2 * settings.steps} continue_from={path}"
    raise Refusal(f"{path} is finished; train it further with `{more}`, or remove it with `rm -r {path}`")


def open_run(path: Path, settings: DictConfig) -> RunFolder:
    """Make the folder of a run, or open it again to resume.

    Raises
    ------
    Refusal
        If it was made with other settings, is being written by another process, was finished by one just now, or if
        `continue_from` is not a finished run of the same settings with fewer steps.
    """
    source = None
    if settings.continue_from is not None and read_manifest(path) is None:
        source = _shorter_run(Path(settings.continue_from), settings)
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refusal(f"another process is training in {path}; wait for it, or choose another seed") from None
        manifest = read_manifest(path)
        about = describe(settings.device, settings.threads)
        if manifest is None:
            manifest = {"name": path.name, "state": "running", "started": _now()}
            manifest |= {**about, "resumed": [], "snapshots": []}
            if source is not None:
                manifest |= _take_over(Path(settings.continue_from), source, path)
        else:
            _refuse_other_settings(path, settings)
            if manifest["state"] == "finished":
                raise Refusal(f"{path} has just been finished by another process")
            manifest["resumed"].append({"at": _now(), **about})
            manifest.pop("reason", None)
        write_whole(path / "config.yaml", OmegaConf.to_yaml(settings, resolve=True))
        folder = RunFolder(path, manifest, lock)
        folder.update(state="running")
        return folder
    except BaseException:
        os.close(lock)
        raise


def _refuse_other_settings(path: Path, settings: DictConfig) -> None:
    differs = difference(path, settings)
    if differs:
        raise Refusal(f"{path} was made with other settings: {differs}; remove it with `rm -r {path}` or set runs_dir")


def _shorter_run(source: Path, settings: DictConfig) -> dict:
    """The manifest of a finished run that one of these settings can go on from."""
    manifest = read_manifest(source)
    if manifest is None or manifest["state"] != "finished":
        raise Refusal(f"continue_from={source} is not a finished run's folder; give one")
    differs = difference(source, settings, ignore=("steps",))
    if differs:
        raise Refusal(f"continue_from={source} was made with other settings: {differs}; only steps may differ")
    steps = max(line["step"] for line in manifest["snapshots"])
    if steps >= settings.steps:
        raise Refusal(f"continue_from={source} has {steps} steps; ask for more than steps={settings.steps}")
    return manifest


def _take_over(source: Path, manifest: dict, target: Path) -> dict:
    """Copy a run into the new folder, where it is then resumed; returns what the new manifest takes from the old."""
    for part in source.iterdir():
        if part.name in ("weights", "checkpoint", "predictions", "samples"):
            shutil.copytree(part, target / part.name, dirs_exist_ok=True)
        elif part.suffix == ".csv":
            shutil.copy2(part, target / part.name)
    kept = {key: manifest[key] for key in ("snapshots", "spikes", "data_sha256") if key in manifest}
    return {"continued_from": source.name, **kept}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

"""Open any checkpoint as a lazy mapping from plain parameter names to tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fa_study.names import plain_names


class Weights(Mapping):
    """Weights that are read when they are asked for, one tensor at a time.

    Attributes
    ----------
    source
        Where they come from, for messages.
    tied
        {further name: first name} of weights that are one tensor in the checkpoint.
    """

    def __init__(self, source: str, readers: Mapping[str, Callable[[], torch.Tensor]], tied: Mapping[str, str] = ()):
        self.source = source
        self._readers = {plain: readers[name] for plain, name in plain_names(readers, source).items()}
        self.tied = dict(tied)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __repr__(self) -> str:
        return f"<Weights of {self.source}: {len(self)} tensors>"


def load_weights(source: str | Path, step: int | None = None, *, verify: bool = False) -> Weights:
    """Open a checkpoint; nothing but names is read until a tensor is asked for.

    Parameters
    ----------
    source
        A run folder (with manifest.json) or a .safetensors file.
    step
        Which snapshot of a run folder; the last one by default.
    verify
        Compare the snapshot's sha256 with the run's manifest first (reads the whole file).

    Raises
    ------
    ValueError
        The source is missing, damaged or of an unknown kind, or the run has no such step.
    """
    path = Path(source)
    if (path / "manifest.json").is_file():
        return load_weights(_snapshot_file(path, step, verify))
    if step is not None:
        raise ValueError(f"step={step} needs a run folder with a manifest.json, {path} is none")
    if path.suffix == ".safetensors":
        return Weights(str(path), _safetensors(path))
    raise ValueError(f"{path}: not a checkpoint that is known here")


def snapshot_steps(run: str | Path) -> list[int]:
    """The steps at which a run folder holds snapshots, ascending."""
    return sorted(entry["step"] for entry in _snapshots(Path(run)))


def _snapshots(run: Path) -> list[dict]:
    try:
        manifest = json.loads((run / "manifest.json").read_text())
        return [{"step": int(entry["step"]), **entry} for entry in manifest["snapshots"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run}: its manifest.json lists no snapshots that can be read ({error!r})") from error


def _snapshot_file(run: Path, step: int | None, verify: bool) -> Path:
    snapshots = {entry["step"]: entry for entry in _snapshots(run)}
    if not snapshots:
        raise ValueError(f"{run}: the run has no snapshot yet")
    if step is None:
        step = max(snapshots)
    if step not in snapshots:
        raise ValueError(f"{run}: no snapshot at step {step}; there are {sorted(snapshots)}")
    path = run / snapshots[step]["file"]
    if verify:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != snapshots[step]["sha256"]:
            raise ValueError(f"{path}: sha256 is {found}, the manifest says {snapshots[step]['sha256']}; file damaged?")
    return path


def _safetensors(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    return {name: lambda name=name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

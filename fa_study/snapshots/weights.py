"""Which files a checkpoint consists of, and its tensors under plain names, read when they are asked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fa_study.names import plain_names
from fa_study.snapshots.distributed import distributed_tensors
from fa_study.snapshots.regions import Region
from fa_study.snapshots.safetensors_files import safetensors_regions
from fa_study.snapshots.torch_files import torch_object, weights_in

_TORCH = (".pt", ".pth", ".ckpt", ".bin")


class Weights(Mapping):
    """Weights that are read when they are asked for, one tensor at a time.

    Attributes
    ----------
    source
        Where they come from, for messages.
    tied
        {further name: first name} of weights that are one tensor in the checkpoint.
    """

    def __init__(self, source: str, regions: Mapping[str, Region]):
        self.source = source
        self._regions = {plain: regions[name] for plain, name in plain_names(regions, source).items()}
        first: dict[Region, str] = {}
        self.tied = {}
        for name, region in self._regions.items():
            if isinstance(region, Region) and first.setdefault(region, name) != name and 0 not in region.shape:
                self.tied[name] = first[region]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._regions[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def __repr__(self) -> str:
        return f"<Weights of {self.source}: {len(self)} tensors>"


def load_weights(source: str | Path, step: int | None = None, *, verify: bool = False) -> Weights:
    """Open a checkpoint of any usual kind; no values are read until a tensor is asked for.

    Parameters
    ----------
    source
        * a run folder (with manifest.json; `step` chooses the snapshot),
        * a .safetensors file, an index (....safetensors.index.json) or a folder of shards with or without one,
        * a file of torch.save (.pt, .pth, .ckpt, .bin): a state dict, or a checkpoint of Lightning and others that
          holds one; optimizer state is ignored, and nothing is ever unpickled but numbers, names and tensors,
        * a folder of torch.distributed.checkpoint,
        * a W&B artifact, "wandb:entity/project/name:alias": the folder artifacts/name:alias here (or in
          $WANDB_ARTIFACT_DIR) if there is one, otherwise downloaded through W&B's public API.
    step
        Which snapshot of a run folder; the last one by default.
    verify
        Compare the snapshot's sha256 with the run's manifest first, which reads the whole file.

    Returns
    -------
    Weights
        A lazy mapping from names, without the prefixes of DDP, FSDP, torch.compile and activation checkpointing, to
        tensors mapped from the file.

    Raises
    ------
    ValueError
        The source is missing, damaged, contradicts itself or is of an unknown kind; or the run has no such step.
    """
    if not str(source).strip():
        # Path("") is the current folder, which nobody named.
        raise ValueError("the source of the weights is empty: name a file, a folder or a W&B artifact")
    if str(source).startswith("wandb:"):
        return load_weights(_artifact(str(source)), step, verify=verify)
    path = Path(source)
    if (path / "manifest.json").is_file():
        return load_weights(_snapshot_file(path, step, verify))
    if step is not None:
        raise ValueError(f"step={step} needs a run folder with a manifest.json, {path} is none")
    if path.is_dir():
        return Weights(str(path), _folder(path))
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    return Weights(str(path), _file(path))


def _file(path: Path) -> dict[str, Region]:
    if path.name.endswith(".index.json"):
        return _indexed(path)
    if path.suffix == ".safetensors":
        return safetensors_regions(path)
    if path.suffix in _TORCH:
        return weights_in(torch_object(path), str(path))
    raise ValueError(f"{path}: expected .safetensors, .index.json, {', '.join(_TORCH)} or a folder")


def _folder(path: Path) -> dict[str, Region]:
    if (path / ".metadata").is_file():
        return weights_in(distributed_tensors(path), str(path))
    # A folder in safetensors and in torch's format holds the same weights twice: the former is read.
    for suffix in (".safetensors", *_TORCH):
        if indices := sorted(path.glob(f"*{suffix}.index.json")):
            if len(indices) > 1:
                raise ValueError(f"{path}: several indices ({', '.join(i.name for i in indices)}); name one of them")
            return _indexed(indices[0])
        if files := sorted(path.glob(f"*{suffix}")):
            if suffix != ".safetensors" and len(files) > 1:
                raise ValueError(f"{path}: {len(files)} files *{suffix} and no index; name one of them")
            return _joined({file: _file(file) for file in files})
    raise ValueError(f"{path}: no manifest.json, .metadata, index, .safetensors or {', '.join(_TORCH)} in this folder")


def _indexed(path: Path) -> dict[str, Region]:
    """The shards of an index, which must hold exactly the tensors that it names, each where it says."""
    try:
        index = json.loads(path.read_text())["weight_map"]
        shards = {name: path.parent / name for name in sorted(set(index.values()))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not an index of shards ({error!r:.200})") from error
    outside = [name for name, shard in shards.items() if shard.parent != path.parent]
    missing = [name for name, shard in shards.items() if name not in outside and not shard.is_file()]
    if outside or missing:
        raise ValueError(f"{path}: shards outside its folder {outside}, shards that do not exist {missing}")
    contents = {name: _file(shard) for name, shard in shards.items()}
    lost = sorted(tensor for tensor, shard in index.items() if tensor not in contents[shard])
    extra = sorted(t for shard, tensors in contents.items() for t in tensors if index.get(t) != shard)
    if lost or extra:
        raise ValueError(
            f"{path}: the index does not fit its shards; named but not in the shard it says: {lost or 'none'}; "
            f"in a shard but not named for it: {extra or 'none'}"
        )
    return _joined({shards[name]: tensors for name, tensors in contents.items()})


def _joined(contents: Mapping[Path, Mapping[str, Region]]) -> dict[str, Region]:
    regions, origin = {}, {}
    for file, tensors in contents.items():
        for name, region in tensors.items():
            if name in regions:
                raise ValueError(f"{name!r} is in {origin[name]} and in {file}; remove one of them")
            regions[name], origin[name] = region, file
    return regions


def _artifact(source: str) -> Path:
    name = source.removeprefix("wandb:")
    local = Path(os.environ.get("WANDB_ARTIFACT_DIR", "artifacts")) / name.rpartition("/")[2]
    if local.is_dir():
        return local
    if name.count("/") != 2 or ":" not in name:
        raise ValueError(f"{source}: expected wandb:entity/project/name:alias, or a folder {local}")
    try:
        import wandb  # slow to import, and needed for nothing else

        return Path(wandb.Api().artifact(name).download())
    except Exception as error:  # the API raises errors of the network, of its own and of the operating system
        raise ValueError(
            f"{source}: not to be had from W&B ({error!r:.200}), and there is no folder {local}"
        ) from error


def snapshot_steps(run: str | Path) -> list[int]:
    """The steps at which a run folder holds snapshots, ascending."""
    return sorted(entry["step"] for entry in _snapshots(Path(run)))


def _snapshots(run: Path) -> list[dict]:
    try:
        manifest = json.loads((run / "manifest.json").read_text())
        return [{**entry, "step": int(entry["step"]), "file": Path(entry["file"])} for entry in manifest["snapshots"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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
        if found != snapshots[step].get("sha256"):
            said = snapshots[step].get("sha256")
            raise ValueError(f"{path}: sha256 is {found}, the manifest says {said}; file damaged?")
    return path

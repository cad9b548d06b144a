"""Read a torch.distributed.checkpoint folder: a .metadata pickle that says which file holds which part of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fa_study.snapshots.pickles import Stub, read_pickle
from fa_study.snapshots.regions import Region
from fa_study.snapshots.torch_files import torch_object


@dataclass(frozen=True)
class DistributedTensor:
    """A tensor in parts, each a torch.save file within a file: (offsets in the tensor, sizes, path, start, length)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], Path, int, int], ...]

    def read(self) -> torch.Tensor:
        """The whole tensor; mapped if one part is all of it, put together otherwise."""
        if len(self.parts) == 1 and self.parts[0][1] == self.shape:
            return self._part(*self.parts[0])
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part in self.parts:
            place = tuple(slice(o, o + n) for o, n in zip(part[0], part[1]))
            whole[place] = self._part(*part)
        return whole

    def _part(self, offsets: tuple, sizes: tuple, path: Path, start: int, length: int) -> torch.Tensor:
        region = torch_object(path, start, length)
        if not isinstance(region, Region) or region.shape != sizes or region.dtype != self.dtype:
            raise ValueError(
                f"{path}: the part of {self.name!r} at {start} is not the {self.dtype} of {sizes} expected"
            )
        return region.read()


def distributed_tensors(folder: Path) -> dict:
    """The checkpoint as the nested mappings that were saved, with a `DistributedTensor` for each tensor.

    ValueError where the metadata cannot be read or does not fit together.
    """
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = read_pickle(file, str(path))[0].state
        places = {}
        for index, info in metadata["storage_data"].items():
            key = index.state["fqn"], tuple(index.state.get("offset") or ())
            if key in places:
                raise ValueError(f"two parts of {key[0]!r} at {key[1]}")
            places[key] = info.state
        tree: dict = {}
        for name, description in metadata["state_dict_metadata"].items():
            if isinstance(description, Stub) and isinstance(description.state, dict) and "chunks" in description.state:
                _insert(
                    tree,
                    (metadata["planner_data"] or {}).get(name, (name,)),
                    name,
                    _tensor(folder, name, description.state, places),
                )
        return tree
    except (OSError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{path}: not the whole metadata of a distributed checkpoint ({error!r:.300})") from error


def _tensor(folder: Path, name: str, description: dict, places: dict) -> DistributedTensor:
    properties = description["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    shape = tuple(description["size"])
    if not isinstance(dtype, torch.dtype) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name!r} has dtype {dtype!r} and shape {shape}")
    parts, volume = [], 0
    for chunk in description["chunks"]:
        offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        inside = len(offsets) == len(sizes) == len(shape) and all(
            min(o, n) >= 0 and o + n <= total for o, n, total in zip(offsets, sizes, shape)
        )
        if not inside or (name, offsets) not in places:
            raise ValueError(f"no file holds the part of {name!r} at {offsets}")
        place = places[name, offsets]
        if place.get("transform_descriptors"):
            raise ValueError(f"{name!r} was transformed by {place['transform_descriptors']}; save it without")
        file = folder / place["relative_path"]
        if file.parent != folder:
            raise ValueError(f"{name!r} lies in {place['relative_path']!r}, outside the folder")
        parts.append((offsets, sizes, file, int(place["offset"]), int(place["length"])))
        volume += math.prod(sizes)
    if volume * dtype.itemsize > sum(length for *_, length in parts):
        raise ValueError(f"the files of {name!r} are too short for {volume} values")
    if volume != math.prod(shape):
        raise ValueError(f"the parts of {name!r} hold {volume} values, its shape {shape} needs {math.prod(shape)}")
    if _overlap([(offsets, sizes) for offsets, sizes, *_ in parts if math.prod(sizes)]):
        raise ValueError(f"the parts of {name!r} overlap, so that others of its values are missing")
    return DistributedTensor(name, dtype, shape, tuple(parts))


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two boxes, each (offsets, sizes), share a place."""
    starts = np.array([offsets for offsets, _ in boxes])
    ends = starts + np.array([sizes for _, sizes in boxes])
    return any(((starts[:i] < ends[i]) & (starts[i] < ends[:i])).all(axis=1).any() for i in range(1, len(boxes)))


def _insert(tree: dict, path: tuple, name: str, tensor: DistributedTensor) -> None:
    if ".".join(map(str, path)) != name or len(path) > 64:
        raise ValueError(f"{name!r} has the path {path}")
    for part in path[:-1]:
        tree = tree.setdefault(str(part), {})
    tree[str(path[-1])] = tensor

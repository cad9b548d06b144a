"""Small checkpoints of every kind, for the tests."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


def state_dict(seed: int = 0) -> dict[str, torch.Tensor]:
    """Floats of several formats, a buffer, a 0-d, an empty and a strided tensor, and odd names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "blocks.0.to_q.weight": normal(6, 4),
        "blocks.0.to_k.bias": normal(6),
        "blocks.1.weight": normal(5, 3).bfloat16(),
        "blocks.1.scale": normal(7).half(),
        "head.weight": normal(4, 4).double().t().contiguous(),
        "head.fp8": normal(9).to(torch.float8_e4m3fn),
        "steps": torch.tensor(12),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 3),
        'odd "name"\n[x]/é': normal(2),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same dtype, shape and bits."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).contiguous().view(torch.uint8).equal(b.reshape(-1).contiguous().view(torch.uint8))
    )


def save_sharded(folder: Path, weights: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """A folder of safetensors shards with an index; returns the index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i in range(shards):
        part = dict(list(weights.items())[i::shards])
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def save_run(folder: Path, snapshots: dict[int, dict[str, torch.Tensor]]) -> Path:
    """A run folder as training writes it."""
    import hashlib

    (folder / "weights").mkdir(parents=True)
    lines = []
    for step, weights in snapshots.items():
        file = f"weights/step-{step:06d}.safetensors"
        save_file(weights, folder / file)
        digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        lines.append({"step": step, "file": file, "sha256": digest, "dtype": "float32"})
    (folder / "manifest.json").write_text(json.dumps({"snapshots": lines}))
    return folder


def save_as(kind: str, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write weights as a kind of checkpoint below a folder; returns what load_weights is to open."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors":
        save_file(weights, folder / "model.safetensors")
        return folder / "model.safetensors"
    if kind == "index":
        return save_sharded(folder / "sharded", weights)
    if kind == "shards":
        save_sharded(folder / "shards", weights).unlink()
        return folder / "shards"
    if kind == "run":
        return save_run(folder / "run", {0: weights})
    if kind == "distributed":
        dcp.save(
            {"model": weights, "optimizer": {"state": {"x": torch.ones(3)}}, "epoch": 3}, checkpoint_id=folder / "dcp"
        )
        return folder / "dcp"
    lightning = {"state_dict": weights, "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(5)}}}], "epoch": 1}
    path = folder / ("model.ckpt" if kind.endswith("lightning") else "model.pt")
    content = lightning if kind.endswith("lightning") else weights
    torch.save(content, path, _use_new_zipfile_serialization=not kind.startswith("legacy"))
    return path


KINDS = (
    "safetensors", "index", "shards", "run", "distributed", "torch", "torch-lightning", "legacy", "legacy-lightning",
)  # fmt: skip

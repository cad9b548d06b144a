"""Distances against SciPy, against one pass over the memory, and against counting alone.

python tests/benchmarks/bench_distance.py [millions of parameters of the checkpoint, default 500]
"""

from __future__ import annotations

import sys
import tempfile
import tracemalloc
from pathlib import Path

import joblib
import numpy as np
import torch
from harness import ratio, show
from safetensors.torch import save_file
from scipy import stats

from fa_study.distance import tensor_distance, wasserstein_distance, weight_distances
from fa_study.snapshots import load_weights

SHARDS = 16


def measure(millions: int = 500) -> list[dict]:
    """Rows of the harness, plus one of memory (in bytes instead of seconds)."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(10_000_000, generator=generator)
    b = a + 1e-3 * torch.randn(10_000_000, generator=generator)
    rows = []
    for dtype, bar in ((torch.float32, "at most 1/25 = 0.04"), (torch.bfloat16, "at most 1/80 = 0.0125")):
        x, y = a.to(dtype), b.to(dtype)
        u, v = x.float().numpy(), y.float().numpy()  # SciPy knows no BF16
        rows.append(
            ratio(
                f"W1, 10 million {dtype}, against SciPy",
                lambda x=x, y=y: wasserstein_distance(x, y),
                lambda u=u, v=v: stats.wasserstein_distance(u, v),
                bar=bar,
                rounds=3,
            )
        )
    x, y = a.bfloat16(), b.bfloat16()
    codes = x.view(torch.int16).numpy(), y.view(torch.int16).numpy()
    rows.append(
        ratio(
            "W1, 10 million torch.bfloat16, against one pass over the memory (sum)",
            lambda: wasserstein_distance(x, y),
            lambda: [np.add.reduce(side, dtype=np.int16) for side in codes],
            bar="at most 30",
        )
    )
    rows.append(
        ratio("every metric, 10 million torch.bfloat16, against W1 alone", lambda: tensor_distance(x, y),
              lambda: wasserstein_distance(x, y), bar="none")
    )  # fmt: skip
    tracemalloc.start()
    wasserstein_distance(a, b)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = 2 * a.nbytes
    rows.append({"benchmark": "memory of W1, 10 million torch.float32, in bytes, against the inputs", "ours_s": peak,
                 "peer_s": size, "ratio": peak / size, "bar": "at most 2"})  # fmt: skip
    return [*rows, checkpoint(millions)]


def checkpoint(millions: int) -> dict:
    """Two checkpoints in shards, read from files with every metric, against bincount over the codes in memory."""
    generator = torch.Generator().manual_seed(1)
    n = millions * 1_000_000 // SHARDS // 2
    with tempfile.TemporaryDirectory() as folder:
        arrays = []
        for side in "ab":
            (Path(folder) / side).mkdir()
            for shard in range(SHARDS):
                part = {f"layers.{shard}.{i}": torch.randn(n, generator=generator).bfloat16() for i in range(2)}
                save_file(part, Path(folder) / side / f"shard-{shard}.safetensors")
                arrays += [w.view(torch.int16).numpy().view(np.uint16) for w in part.values()]

        def count() -> None:
            tasks = (joblib.delayed(np.bincount)(codes, minlength=65536) for codes in arrays)
            joblib.Parallel(n_jobs=2, backend="threading")(tasks)

        def compare() -> None:
            weight_distances(*(load_weights(Path(folder) / side) for side in "ab"), n_jobs=2)

        name = f"two checkpoints of {millions} million bfloat16, all metrics, against np.bincount on two cores"
        return ratio(name, compare, count, bar="at most 3", rounds=3)


if __name__ == "__main__":
    show(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 500))

"""Run folders made by hand, whose distances are known exactly."""

import json

import pandas as pd
import torch
import yaml
from safetensors.torch import save_file

ATTN = ("policy", "format")


def make_run(folder, attn, precision="fp32", seed=0, shifts=(0.0, 1.0, 3.0), state="finished", **settings):
    """A run whose weights and predictions are moved by `shifts` at steps 0, 100, ...; its key bias by ten times that.

    A shift is a number, or a tensor of the shape of the predictions (2, 3).
    """
    run = folder / "-".join([attn, precision, "dit", f"s{seed}", *(f"{k}{v}" for k, v in settings.items())])
    snapshots = []
    for step, shift in zip(range(0, 1000, 100), shifts):
        base = torch.arange(6.0).reshape(2, 3)
        weights = {"a.0.to_q.weight": base + shift, "a.0.to_k.bias": torch.ones(2, 3) + 10 * shift}
        for kind, tensors in (("weights", weights), ("predictions", {"predicted": base + shift})):
            (run / kind).mkdir(parents=True, exist_ok=True)
            save_file(tensors, run / kind / f"step-{step:06d}.safetensors")
        file = f"weights/step-{step:06d}.safetensors"
        snapshots.append({"step": step, "file": file, "dtype": "float32", "held_out_loss": 1.0 - step / 1000})
    own = {key: settings.pop(key) for key in ATTN if key in settings}
    config = {"attn": {"name": attn, **own}, "precision": {"name": precision}, "seed": seed, "steps": 200, **settings}
    config |= {"model": {"name": "dit", "size": "tiny"}, "batch_size": 4}
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    about = {"commit": "abc", "threads": 1, "device_name": "a CPU", "seconds_per_step": 0.4}
    (run / "manifest.json").write_text(json.dumps({"state": state, "snapshots": snapshots, **about}))
    pd.DataFrame({"step": [50, 100], "loss": [2.0, 1.0]}).to_csv(run / "metrics.csv", index=False)
    return run

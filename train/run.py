"""Train one text-to-image model, or a sweep of them.

    python train/run.py attn=flash precision=bf16 seed=2

trains 2,000 steps and leaves weights, metrics and sample pictures in runs/flash-bf16-dit-s2. Every option and its
default stand in conf/config.yaml and the files beside it. The demonstration is a sweep of four short runs,
two at a time:

    python train/run.py -m experiment=demo attn=baseline,flash precision=fp32,bf16

Finished runs of the demonstration are skipped, so the same command again is quick, and resumes what was interrupted.
Exit codes: 0 done; 1 failed or refused, also for a value that is not allowed; 2 for an option, or a choice of a group
such as attn, that does not exist; 130 or 143 interrupted (the same command then resumes).
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

# `python train/run.py` puts train/ first on the path, where modules such as data.py could hide others of that name.
if Path(sys.path[0]) == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from train import Refusal
from train.arms import check_arm
from train.folder import open_run, skip_finished
from train.settings import check_overrides, check_settings, run_name
from train.sweeps import keep_failure
from train.system import choose_device, set_up_torch


def train(settings: DictConfig, command: str, sweep: bool = False) -> int:
    """Train until the last step or a signal; returns 0, or the number of the signal."""
    check_settings(settings)
    if settings.data.get("path"):
        settings.data.path = str(Path(settings.data.path).resolve())
    shown = Path(settings.runs_dir) / run_name(settings)
    if skip_finished(shown, settings, command):  # before anything slow is imported
        print(f"{shown} is finished: skipped", flush=True)
        return 0
    settings.device = choose_device(settings.device)
    check_arm(settings.attn, settings.precision.name, settings.device)
    set_up_torch(settings.threads)
    folder = open_run(shown, settings)
    with folder, contextlib.chdir(folder.path):
        from train.fit import fit  # imports Lightning and diffusers: seconds that a refusal should not cost

        stopped, loss = fit(settings, folder, sweep)
    if stopped:
        print(f"interrupted; the same command resumes {shown}", flush=True)
        return stopped
    samples = shown / "samples.png" if settings.sampling.count else "none (sampling.count=0)"
    print(f"folder:  {shown}\nloss:    {loss:.4f}\nsamples: {samples}", flush=True)
    return 0


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def main(settings: DictConfig) -> None:
    job = HydraConfig.get()
    words = [word for word in job.overrides.task if not word.startswith(("steps=", "continue_from=", "finished="))]
    command = " ".join(["python train/run.py", *words])
    if job.mode == RunMode.MULTIRUN:
        try:
            number = train(settings, command, sweep=True)
            if number:
                raise InterruptedError("interrupted; the same command resumes it")
        except (Exception, KeyboardInterrupt) as error:
            keep_failure(Path(job.sweep.dir), job.job.num, run_name(settings), error)
        return
    try:
        number = train(settings, command)
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")
    except KeyboardInterrupt:
        sys.exit(130)
    if number:
        sys.exit(128 + number)


if __name__ == "__main__":
    try:
        check_overrides(sys.argv[1:])
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
    main()

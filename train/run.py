"""Train one text-to-image model, or a sweep of them.

    python train/run.py attn=flash precision=bf16 seed=2

trains 2,000 steps and leaves weights, metrics and sample pictures in runs/flash-bf16-dit-s2. Every option and its
default stand in conf/config.yaml and the files beside it. The demonstration is a sweep of four short runs,
two at a time:

    python train/run.py -m experiment=demo attn=baseline,flash precision=fp32,bf16

Finished runs of the demonstration are skipped, so the same command again is quick, and resumes what was interrupted. A
sweep lists at its end the jobs that failed or were killed, with their logs in runs/.sweeps.
Exit codes: 0 done; 1 failed or refused, also for a value that is not allowed; 2 for an option, or a choice of a group
such as attn, that does not exist; 130 or 143 interrupted (the same command then resumes).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

# `python train/run.py` puts train/ first on the path, where modules such as data.py could hide others of that name.
if Path(sys.path[0]) == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from train import Refusal
from train.arms import check_arm
from train.command_line import check_overrides, one_line
from train.folder import open_run, skip_finished
from train.settings import check_settings, run_name
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
    set_up_torch(settings.threads, settings.device)
    if settings.data.name == "folder":
        from train.picture_folder import read_metadata

        read_metadata(Path(settings.data.path) / "metadata.jsonl")
    folder = open_run(shown, settings)
    with folder, contextlib.chdir(folder.path):
        from train.fit import fit  # imports Lightning and diffusers: seconds that a refusal should not cost

        try:
            stopped, loss = fit(settings, folder, sweep)
        except (MemoryError, RuntimeError) as error:
            if not any(words in str(error) for words in ("allocate memory", "out of memory")):
                raise
            sizes = f"model.size={settings.model.size} with batch_size={settings.batch_size}"
            raise Refusal(
                f"not enough memory for {sizes}; use smaller ones, or parts of a batch, batch_split=2"
            ) from error
    if stopped:
        print(f"interrupted; the same command resumes {shown}", flush=True)
        return stopped
    samples = shown / "samples.png" if settings.sampling.count else "none (sampling.count=0)"
    print(f"folder:  {shown}\nloss:    {loss:.4f}\nsamples: {samples}", flush=True)
    return 0


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def main(settings: DictConfig) -> None:
    job = HydraConfig.get()
    number = 0
    try:
        words = [word for word in job.overrides.task if not word.startswith(("steps=", "continue_from=", "finished="))]
        command = " ".join(["python train/run.py", *words])
        number = train(settings, command, sweep=job.mode == RunMode.MULTIRUN)
    except KeyboardInterrupt:
        number = signal.SIGINT
    except Exception as error:
        if job.mode == RunMode.MULTIRUN:
            keep_failure(Path(job.sweep.dir), job.job.num, run_name(settings), error)
        elif isinstance(error, Refusal | OmegaConfBaseException | OSError):  # OSError: a full disk, for one
            sys.exit(f"error: {one_line(error)}")
        else:
            raise
    if number:
        sys.exit(128 + number)


def command_line(words: list[str]) -> None:
    """Check the words, and let Hydra call `main` with the settings that they give."""
    try:
        check_overrides(words)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra passes exceptions on
        main()
    except (Refusal, HydraException, OmegaConfBaseException) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # such as a sweep's folder that cannot be made
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command_line(sys.argv[1:])

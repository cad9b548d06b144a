"""Hydra's launcher for sweeps on this machine, which Hydra looks for in a folder of this name.

Every job has a process of its own, so that one that is killed, as for want of memory, ends alone. Ctrl-C or SIGTERM is
passed on to the jobs, which save themselves as single runs do; a second Ctrl-C stops them at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from multiprocessing.connection import wait
from pathlib import Path

from hydra.core.utils import run_job
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict

from train import Refusal
from train.settings import is_whole, run_name
from train.sweeps import keep_failure, list_failures
from train.system import end_with_parent


class LocalLauncher(Launcher):
    """Up to `n_jobs` jobs at a time; see conf/hydra/launcher/local.yaml."""

    def __init__(self, n_jobs: int) -> None:
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context, task_function, config: DictConfig) -> None:
        if not is_whole(self.n_jobs) or self.n_jobs < 1:
            raise Refusal(f"hydra.launcher.n_jobs={self.n_jobs} is no count; use a whole number of at least 1")
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx: int) -> list:
        folder = Path(self.config.hydra.sweep.dir)
        waiting = deque(self._config(*job) for job in enumerate(job_overrides, initial_job_idx))
        running: dict[int, tuple] = {}
        received: list[int] = []
        handlers = {n: signal.signal(n, lambda n, _: received.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
        passed_on = 0
        try:
            while running or (waiting and not received):
                while waiting and len(running) < self.n_jobs and not received:
                    config = waiting.popleft()
                    process = multiprocessing.get_context("fork").Process(target=self._job, args=(config,))
                    process.start()
                    running[process.sentinel] = process, config
                for sentinel in wait(list(running), timeout=0.2):
                    process, config = running.pop(sentinel)
                    process.join()
                    if process.exitcode and not received:
                        error = ChildProcessError(f"{ending(process.exitcode)}; the same command resumes it")
                        keep_failure(folder, config.hydra.job.num, config.hydra.job.id, error)
                for number in received[passed_on:]:
                    passed_on += 1
                    for process, _ in running.values():
                        os.kill(process.pid, number)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if received:
            list_failures(folder)
            print("interrupted; the same command resumes the sweep", flush=True)
            sys.exit(128 + received[0])
        return []

    def _config(self, number: int, overrides) -> DictConfig:
        config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        settings = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, run_name(settings)
        return config

    def _job(self, config: DictConfig) -> None:
        """What the process of a job does: the task, in a process group that the terminal's Ctrl-C does not reach."""
        os.setpgid(0, 0)
        end_with_parent()
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            directories = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
            run_job(task_function=self.task, config=config, hydra_context=self.context, **directories)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


def ending(code: int) -> str:
    """How a process with this exit code ended; one above 128 is that of a run which a signal stopped."""
    if code > 128:
        return f"interrupted by {signal.Signals(code - 128).name}"
    if code < 0:
        why = ", perhaps by the system for want of memory" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{why}"
    return f"ended with exit code {code}"

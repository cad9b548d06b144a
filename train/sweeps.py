"""Sweeps: all settings are checked first; failures are kept while the other jobs go on, and listed at the end."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from train import Refusal
from train.settings import check_settings


def keep_failure(sweep_folder: Path, job: int, name: str, error: BaseException) -> None:
    """Write a failed job's error, sentence first, to <sweep folder>/<job>-<name>.failed.log."""
    sweep_folder.mkdir(parents=True, exist_ok=True)
    text = f"{error or type(error).__name__}\n\n" + "".join(traceback.format_exception(error))
    (sweep_folder / f"{job}-{name}.failed.log").write_text(text, encoding="utf-8")


def list_failures(sweep_folder: Path) -> bool:
    """Print a line per job that failed, with its log; True if there is one."""
    logs = sorted(sweep_folder.glob("*.failed.log"))
    for log in logs:
        sentence = log.read_text(encoding="utf-8").splitlines()[0]
        print(f"failed: {log.name.removesuffix('.failed.log')}: {sentence} ({log})", file=sys.stderr)
    return bool(logs)


class CheckAndReport(Callback):
    """Hydra's callback: refuse a sweep with a value that is not allowed; list its failures, exit code 1 if any."""

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        loader = GlobalHydra.instance().config_loader()
        try:
            words = OverridesParser.create(config_loader=loader).parse_overrides(list(config.hydra.overrides.task))
            (jobs,) = BasicSweeper.split_arguments(words, max_batch_size=None)
            for overrides in jobs:
                check_settings(loader.load_sweep_config(config, overrides))
        except (Refusal, OmegaConfBaseException) as error:
            sys.exit(f"error: {str(error).splitlines()[0]}")

    def on_multirun_end(self, config: DictConfig, **_) -> None:
        if list_failures(Path(config.hydra.sweep.dir)):
            sys.exit(1)

"""Failures of a sweep's jobs: kept in files while the other jobs go on, listed at its end, and its exit code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from hydra.experimental.callback import Callback


def keep_failure(sweep_folder: Path, job: int, name: str, error: BaseException) -> None:
    """Write a failed job's error, sentence first, to <sweep folder>/<job>-<name>.failed.log."""
    sweep_folder.mkdir(parents=True, exist_ok=True)
    text = f"{error or type(error).__name__}\n\n" + "".join(traceback.format_exception(error))
    (sweep_folder / f"{job}-{name}.failed.log").write_text(text, encoding="utf-8")


class ReportFailures(Callback):
    """Hydra's callback: at the end of a sweep, list the jobs that failed and leave with exit code 1 if any did."""

    def on_multirun_end(self, config, **_) -> None:
        logs = sorted(Path(config.hydra.sweep.dir).glob("*.failed.log"))
        for log in logs:
            sentence = log.read_text(encoding="utf-8").splitlines()[0]
            print(f"failed: {log.name.removesuffix('.failed.log')}: {sentence} ({log})", file=sys.stderr)
        if logs:
            sys.exit(1)

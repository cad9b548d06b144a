"""Tables of a run, a row per logged step. Nothing in them depends on the clock: equal runs have equal files."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

COLUMNS = ("step", "loss", "grad_norm", "lr", "update_norm", "largest_logit", "skipped_steps")


class TableFile:
    """A CSV file of a run folder, opened for appending behind the rows of step `resume_at`.

    Rows of later steps, written before an interruption, are dropped: the resumed run writes them again.
    """

    def __init__(self, path: Path, columns: Sequence[str], resume_at: int) -> None:
        self.path = path
        rows = [row for row in read_rows(path) if int(row["step"]) <= resume_at]
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)
        self._file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")

    def append(self, row: dict[str, object]) -> None:
        """Write a row at once, so that a killed run keeps it."""
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, str]]:
    """The complete rows of a table; none if there is no file. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole_lines = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in csv.DictReader(whole_lines) if None not in row.values() and None not in row]


def last_loss(path: Path, rows: int = 10) -> float:
    """Mean loss of the last rows of a metrics.csv, NaN without rows."""
    losses = [float(row["loss"]) for row in read_rows(path)[-rows:]]
    return sum(losses) / len(losses) if losses else float("nan")

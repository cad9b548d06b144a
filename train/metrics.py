"""metrics.csv: one row per logged step. It holds nothing that depends on the clock, so equal runs have equal files."""

from __future__ import annotations

import csv
import os
from pathlib import Path

COLUMNS = ("step", "loss", "grad_norm", "lr")


class MetricsFile:
    """metrics.csv of a run folder, opened for appending behind the row of step `resume_at`.

    Rows of later steps, written before an interruption, are dropped: the resumed run writes them again.
    """

    def __init__(self, folder: Path, resume_at: int = 0) -> None:
        self.path = folder / "metrics.csv"
        rows = [row for row in read_rows(self.path) if int(row["step"]) <= resume_at]
        temporary = self.path.with_name(".metrics.csv.tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)
        self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")

    def append(self, row: dict[str, float]) -> None:
        """Write a row at once, so that a killed run keeps it."""
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, str]]:
    """The complete rows of a metrics.csv; none if there is no file. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole_lines = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in csv.DictReader(whole_lines) if None not in row.values() and None not in row]


def last_loss(path: Path, rows: int = 10) -> float:
    """Mean loss of the last rows of a metrics.csv, NaN without rows."""
    losses = [float(row["loss"]) for row in read_rows(path)[-rows:]]
    return sum(losses) / len(losses) if losses else float("nan")

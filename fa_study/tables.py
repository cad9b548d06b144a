"""The stored result tables in notebooks/data: written once by a long computation, read by the notebooks.

Every table has an entry in manifest.json that says where its numbers come from: sha256, command, commit, machine,
threads, seeds, date. A table whose bytes no longer match its entry is refused, so that a page can never show numbers
that nobody computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "notebooks" / "data"


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary name, so that a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def commit() -> str:
    """The commit of this checkout, with "-dirty" behind it if tracked files differ; "unknown" outside git.

    The tables themselves do not count: writing one must not make the next one's origin unclean.
    """
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!notebooks/data")
    return f"{head}-dirty" if changed else head or "unknown"


def _git(*arguments: str) -> str:
    """What git says about this checkout, "" if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> str:
    """Processor and instructions: what decides the bits of a CPU result besides the thread count.

    A virtual machine's model name says little, so family, model and the matrix instructions are told as well.
    """
    name, matrix = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text().split("\n\n")[0].splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
        if "model name" in facts:
            name = f"{facts['model name']}, family {facts['cpu family']} model {facts['model']}"
        matrix = ", AMX" if "amx_bf16" in facts.get("flags", "") else ""
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}{matrix})"


def provenance(command: str, **more: object) -> dict[str, object]:
    """What has to stand beside a number so that someone else can get it again."""
    return {
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "torch": version("torch"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **more,
    }


def read_manifest(folder: Path = DATA) -> dict[str, dict]:
    path = folder / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_table(frame: pd.DataFrame, name: str, *, command: str, folder: Path = DATA, **more: object) -> Path:
    """Store `frame` as `folder/name` (.csv or .parquet) and enter it in the manifest.

    Parameters
    ----------
    command : what a reader types to get this table again.
    more : further facts for the manifest, such as seeds or the configuration.
    """
    path = folder / name
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"a table's name ends in .csv or .parquet, got {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{name}")
    if path.suffix == ".csv":
        frame.to_csv(temporary, index=False)
    else:
        frame.to_parquet(temporary, index=False)
    with FileLock(str(folder / ".manifest.lock")):
        os.replace(temporary, path)
        entries = read_manifest(folder)
        entries[name] = {"sha256": sha256(path), "rows": len(frame), **provenance(command, **more)}
        replace_file(folder / "manifest.json", json.dumps(dict(sorted(entries.items())), indent=2) + "\n")
    return path


def read_table(name: str, folder: Path = DATA) -> pd.DataFrame:
    """Read a stored table, after checking it against the manifest.

    Raises
    ------
    ValueError : the table is not in the manifest, is missing, or differs from its recorded sha256.
    """
    entry = read_manifest(folder).get(name)
    if entry is None:
        raise ValueError(f"{name} is not in {folder / 'manifest.json'}; the tables there are made by `make tables`")
    path = folder / name
    if not path.exists():
        raise ValueError(f"{path} is missing although the manifest lists it; restore it with `git checkout -- {path}`")
    if sha256(path) != entry["sha256"]:
        raise ValueError(
            f"{path} differs from the sha256 in the manifest; restore it, or make it again: {entry['command']}"
        )
    return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)


def source_line(name: str, folder: Path = DATA) -> str:
    """One line of Markdown that says where a table comes from, for the foot of a figure.

    What counts for a table of training runs are the machines that trained.
    """
    entry = read_manifest(folder)[name]
    machines = " and ".join(entry.get("run_devices", [entry["machine"]]))
    return (
        f"Table `{name}`: `{entry['command']}`, commit {entry['commit']}, {machines}, "
        f"{entry['threads']} thread{'s' if entry['threads'] != 1 else ''}, torch {entry['torch']}, {entry['date']}."
    )


def manifest_table(folder: Path = DATA) -> pd.DataFrame:
    """The manifest as a table: a row per stored table, in the order of their names.

    Returns
    -------
    DataFrame : `table`, `rows`, `command`, `seconds` (NaN where it was not measured), `commit`, `date`, `machine`,
        `threads` and `torch`.
    """
    columns = ["table", "rows", "command", "seconds", "commit", "date", "machine", "threads", "torch"]
    rows = [{"table": name, **entry} for name, entry in read_manifest(folder).items()]
    return pd.DataFrame(rows).reindex(columns=columns)

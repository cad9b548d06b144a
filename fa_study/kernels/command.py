"""Measure the real kernels of this machine: error, verdict, the rounding that predicts them, behaviour.

  python -m fa_study kernels                     what there is, and a table of the kernels that need no compiling
  python -m fa_study kernels --list              only what there is
  python -m fa_study kernels --all --out FILE    everything that can run here, into a table (.csv or .parquet)

On a GPU, no kernel is begun after four minutes; those that are left out are named.
Exit codes: 0 measured, 1 user error.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from fa_study.kernels.measure import measure_kernels
from fa_study.kernels.registry import KERNELS, available_kernels, kernel
from fa_study.tables import write_table

GPU_SECONDS = 240.0  # of a rented machine, and a minute for what has begun by then


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--list", action="store_true", help="say what there is and measure nothing")
    parser.add_argument("--all", action="store_true", help="also kernels that compile or are interpreted")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="only kernels of this device (default: the GPU's if there is one)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table: .csv or .parquet, and manifest.json")


def run(args: argparse.Namespace) -> int:
    """List, measure, write; returns the exit code."""
    if args.out and args.out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--out {args.out}: a table's name ends in .csv or .parquet")
    console = Console()
    console.width = console.width if console.is_terminal else 200
    if args.list:
        _show(console, "Kernels", available_kernels(args.device), ("name", "version", "device", "dtypes", "reason"))
        return 0
    names = [kernel(n).name for n in args.kernel or KERNELS]
    # The kernels of the CPU are the same on every machine: a machine with a GPU is asked for those of its GPU.
    usual = None if args.kernel or KERNELS["torch-math-cuda"].reason() else "cuda"
    names = [n for n in names if (args.device or usual) in (None, KERNELS[n].device)]
    left_out = [] if args.all or args.kernel else [n for n in names if KERNELS[n].slow and not KERNELS[n].reason()]
    names = [n for n in names if n not in left_out]
    running = [n for n in names if not KERNELS[n].reason()]
    plan = [f"{n} ({', '.join(KERNELS[n].dtypes)})" for n in running]
    gpu = {"gpu": torch.cuda.get_device_name()} if any(KERNELS[n].device == "cuda" for n in running) else {}
    where = "".join(f" on {name}" for name in gpu.values())
    print(f"measuring {', '.join(plan) or 'nothing'}{where} with {torch.get_num_threads()} thread(s)", flush=True)
    if slow := [n for n in running if KERNELS[n].slow]:
        print(f"a minute or more for each format, to compile or interpret: {', '.join(slow)}", flush=True)
    if left_out:
        print(f"left out, since they are compiled or interpreted (--all measures them): {', '.join(left_out)}")
    limit = GPU_SECONDS if gpu and not args.kernel else math.inf
    frame = measure_kernels(names, lambda text: print(text, flush=True), limit)
    shown = ("kernel", "dtype", "max_error", "ratio", "verdict", "gradient_ratio", "r2", "equal", "policies")
    ran = frame.runs.astype(bool)
    _show(console, "Measured", frame[ran], shown)
    _show(console, "Cannot run here", frame[~ran], ("kernel", "dtype", "reason"))
    if args.out:
        options = " --all" if args.all else "".join(f" --kernel {n}" for n in args.kernel or [])
        command = f"python -m fa_study kernels{options} --out FILE"
        write_table(frame, args.out.name, command=command, folder=args.out.parent, **gpu)
    return 0


def _show(console: Console, title: str, frame: pd.DataFrame, columns: tuple[str, ...]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for values in frame[list(columns)].itertuples(index=False):
        table.add_row(*("" if v is None or v != v else f"{v:.3g}" if isinstance(v, float) else str(v) for v in values))
    console.print(table)

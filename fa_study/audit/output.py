"""What the two audits' commands have in common: which options are refused, and how a report is shown and written."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console

from fa_study.audit.run import device_error


def check_options(args: argparse.Namespace) -> None:
    """Refuse a device or a file that cannot be used.

    Raises
    ------
    ValueError
        args.device cannot be used, or args.report or args.json is a folder or has none.
    """
    problem = device_error(args.device)
    if problem:
        raise ValueError(f"device {args.device} cannot be used here: {problem}")
    for path in (args.report, args.json):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.resolve().parent}")
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder: name a file in it")


def show_report(report, args: argparse.Namespace, show: Callable, to_html: Callable, width: int) -> int:
    """Write the files asked for, print a report, `width` characters wide where there is no terminal; the exit code."""
    console = Console()
    if not console.is_terminal:
        console.width = width
    # Written first: who reads the text may stop reading before its end, which ends the command.
    if args.report:
        args.report.write_text(to_html(report), encoding="utf-8")
    if args.json:
        args.json.write_text(report.to_json() + "\n", encoding="utf-8")
    show(report, console)
    return 0 if report.passed else 2

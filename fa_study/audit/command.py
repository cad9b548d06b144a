"""Audit an attention of your own: is its difference expected, which rounding explains it, how does it behave.

  python -m fa_study audit my_kernels:attention --quick
  python -m fa_study audit path/to/file.py:attention --device cuda --report audit.html

The callable takes (q, k, v), each (batch, heads, length, size) or (batch, length, heads, size), and returns the output.
Which dtypes, sizes and features it supports is found out by trying, in a process of its own.
Exit codes: 0 pass, 1 user error, 2 fail.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fa_study.audit.output import check_options, show_report
from fa_study.audit.probe import ORDER
from fa_study.audit.report import print_report
from fa_study.audit.run import audit_subject
from fa_study.audit.subject import Subject
from fa_study.audit.worker import Worker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION")
    parser.add_argument("--quick", action="store_true", help="fewer cases: under a minute on a CPU")
    parser.add_argument("--device", default="cpu", help="where the inputs lie, such as cuda (default cpu)")
    parser.add_argument("--dtypes", default=",".join(ORDER), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--causal", choices=("top_left", "bottom_right"), help="the alignment to insist on")
    parser.add_argument("--limit", type=_seconds, metavar="SECONDS", help="for each call (default 60, quick 20)")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write everything as one offline page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything for programs")


def run(args: argparse.Namespace) -> int:
    """Audit, print, write; returns the exit code."""
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    check_options(args)
    worker = Worker(args.target, args.limit or (20.0 if args.quick else 60.0))
    try:
        subject = Subject(worker, args.target, *worker.start(), args.device)
        report = audit_subject(
            subject,
            quick=args.quick,
            causal=args.causal,
            dtypes=tuple(args.dtypes.split(",")),
            say=lambda text: print(f"trying {text} ...", file=sys.stderr),
        )
    finally:
        worker.close()
    return show_report(report, args, print_report, _page, width=120)


def _page(report) -> str:
    from fa_study.audit.page import to_html  # altair takes a second to import

    return to_html(report)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value

"""Compare two checkpoints, or two series of them: did the weights move, by how much, and where.

  python -m fa_study compare A B                     two checkpoints of any kind that load_weights opens
  python -m fa_study compare runs/one runs/two       the trajectory over the steps that both runs have
  python -m fa_study compare 'A/*.pt' 'B/*.pt'       the same for files; the last number in a name is its step
  python -m fa_study compare A B --twins T1 T2 T3    is it more than a perturbation of A would have given?

Exit codes: 0 compared, 1 user error, 2 a --fail-above threshold was exceeded.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from fa_study.compare.trajectories import pair_distances, paired_sources
from fa_study.distance import METRICS
from fa_study.distance.metrics import COUNT_METRICS
from fa_study.names import ZERO_GRADIENT

_SHOWN = ("numel", "max_difference", "mean_difference", "wasserstein", "wasserstein_floor", "relative_l2", "max_ulp")
_HEADS = {
    "numel": "values",
    "max_difference": "max diff",
    "mean_difference": "mean diff",
    "wasserstein": "W1",
    "wasserstein_floor": "W1 floor",
    "relative_l2": "rel L2",
    "max_ulp": "max ULPs",
}
_CHARTS = (".html", ".svg", ".png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="A and B, or two series of checkpoints")
    parser.add_argument("--step", type=int, help="compare run folders at this step only")
    parser.add_argument(
        "--by", choices=("tensor", "layer"), default="tensor", help="rows of the table (all are written)"
    )
    parser.add_argument("--top", type=_positive, default=20, metavar="N", help="rows shown, largest first (default 20)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every row")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="write every row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row, as a list of records")
    parser.add_argument("--chart", type=_chart_path, metavar="FILE", help="draw a chart: .html (offline), .svg or .png")
    parser.add_argument("--strict", action="store_true", help="names on one side, or other shapes, are an error")
    parser.add_argument(
        "--fail-above",
        type=_threshold,
        action="append",
        default=[],
        metavar="METRIC=VALUE",
        help="exit with 2 where a tensor's metric is larger, or unknown: values not finite, ULPs of unlike dtypes",
    )
    parser.add_argument(
        "--zero-gradient",
        type=_expression,
        default=ZERO_GRADIENT,
        metavar="REGEX",
        help="parameters whose exact gradient is zero: shown apart, in no aggregate (default: key-projection biases)",
    )
    for option, what in (("--twins", "perturbed by a unit in the last place"), ("--low-precision", "in low precision")):
        parser.add_argument(
            option, nargs="+", default=[], metavar="RUN", help=f"runs like A, {what}: the scale to read by"
        )
    parser.add_argument("--workers", type=_workers, default=-1, metavar="N", help="threads (default: -1, one per core)")


def run(args: argparse.Namespace) -> int:
    """Compare, print, write; returns the exit code."""
    _check_before(args)
    pairs, notes = paired_sources(args.sources, args.step)

    def progress(step: int | None, results: Iterable, total: int) -> Iterable:
        label = "comparing" if step is None else f"step {step}"
        return tqdm(results, total=total, desc=label, unit="tensor", leave=False)

    options = {"n_jobs": args.workers, "zero_gradient": args.zero_gradient}
    frame = pair_distances(pairs, progress=progress, strict=args.strict, **options)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width: nothing is to be folded
    for note in notes:
        console.print(note, markup=False, highlight=False)
    _show(console, frame, args.by, args.top)
    context = None
    if args.twins or args.low_precision:
        from fa_study.compare.context import context_distances, context_sentences  # brings altair

        runs = (*args.sources, args.twins, args.low_precision)
        context = context_distances(*runs, step=args.step, compared=frame, **options)
        for sentence in context_sentences(context):
            console.print(sentence, markup=False, highlight=False)
    _write(frame, args, context)
    return _failures(console, frame, args.fail_above)


def _check_before(args: argparse.Namespace) -> None:
    """Refuse before the comparison, which may take an hour, what would fail after it."""
    if (args.twins or args.low_precision) and (n := len(args.sources)) != 2:
        raise ValueError(f"--twins and --low-precision need A and B alone, got {n} sources: quote patterns")
    if len({Path(run).resolve() for run in args.twins}) < len(args.twins):
        raise ValueError("--twins names a run twice: each has to be another draw of what chance does")
    if args.step is not None and not any((Path(source) / "manifest.json").is_file() for source in args.sources):
        raise ValueError(f"--step {args.step} chooses a snapshot of a run folder, and no source is one: name the files")
    for option in ("csv", "parquet", "json", "chart"):
        path = getattr(args, option)
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{option} {path}: there is no folder {path.parent}; create it or name another")
        if path is not None and path.is_dir():
            raise ValueError(f"--{option} {path} is a folder; name a file in it")


def _show(console: Console, frame: pd.DataFrame, by: str, top: int) -> None:
    series = "step" in frame
    if series:
        pooled = frame[(frame.level == "model") & (frame.average == "pooled")]
        console.print(_table("All values pooled, step by step", pooled, ("step", *_SHOWN)))
        frame = frame[frame.step == frame.step.max()]
    suffix = f" at step {frame.step.iloc[0]}" if series else ""
    tensors = frame[(frame.level == "tensor") & ~frame.zero_gradient]
    groups = frame[(frame.level == "group") & (frame.average == "pooled")]
    rows, what = (tensors, "Tensors") if by == "tensor" else (groups, "Layers, values pooled")
    largest = rows.sort_values("max_difference", ascending=False).head(top)
    title = f"{what}{suffix}, largest difference first ({len(largest)} of {len(rows)})"
    console.print(_table(title, largest, ("name", *_SHOWN)))
    apart = frame[(frame.level == "tensor") & frame.zero_gradient]
    if len(apart):
        apart = apart.sort_values("max_difference", ascending=False).head(top)
        console.print(_table("Exact gradient zero: in no aggregate", apart, ("name", *_SHOWN)))
    model = frame[frame.level == "model"]
    if len(model):
        console.print(_table(f"Model{suffix}", model, ("average", *_SHOWN)))
    for level, what in (("only_a", "in A only"), ("only_b", "in B only"), ("shape_differs", "of another shape")):
        names = list(frame[frame.level == level].name)
        if names:
            rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
            console.print(f"{len(names)} {what}: {', '.join(names[:10])}{rest}", markup=False, highlight=False)
    for row in frame[frame.tied != ""].itertuples():
        console.print(f"tied: {row.name} = {row.tied}", markup=False, highlight=False)
    nonfinite = tensors[tensors[list(COUNT_METRICS[:4])].sum(axis=1) > 0]
    if len(nonfinite):
        counts = ("name", "numel", *COUNT_METRICS[:4], "nonfinite", "equal_fraction")
        console.print(_table("Values that are not finite: left out, counted", nonfinite.head(top), counts))


def _table(title: str, rows: pd.DataFrame, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        text = column in ("name", "average")
        table.add_column(_HEADS.get(column, column), justify="left" if text else "right", overflow="fold")
    for row in rows[list(columns)].itertuples(index=False):
        table.add_row(*(_cell(value) for value in row))
    return table


def _cell(value: object) -> str:
    if isinstance(value, str):
        # A name may hold anything: brackets must not become markup, control characters not reach the terminal.
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value).replace("[", r"\[")
    if pd.isna(value):
        return "-"
    return f"{int(value):,}" if 0 < abs(value) < 1e15 and value == int(value) else f"{value:.4g}"


def _write(frame: pd.DataFrame, args: argparse.Namespace, context: pd.DataFrame | None) -> None:
    if args.csv:
        frame.to_csv(args.csv, index=False)
    if args.parquet:
        frame.to_parquet(args.parquet, index=False)
    if args.json:
        # pandas' own writer rounds to 15 digits; JSON knows neither NaN nor infinity.
        records = frame.astype(object).where(frame.notna() & ~frame.isin([float("inf"), float("-inf")]), None)
        args.json.write_text(json.dumps(records.to_dict("records"), indent=1, allow_nan=False))
    if args.chart:
        from fa_study.compare.chart import comparison_chart, save_chart  # altair takes a second to import

        chart = comparison_chart(frame)
        if context is not None:
            from fa_study.compare.context import context_chart

            chart = context_chart(context)
        save_chart(chart, args.chart)


def _failures(console: Console, frame: pd.DataFrame, thresholds: list[tuple[str, float]]) -> int:
    tensors = frame[(frame.level == "tensor") & ~frame.zero_gradient & (frame.numel > 0)]
    if thresholds and tensors.empty:
        raise ValueError("--fail-above judges nothing: no tensor with values has its name and shape on both sides")
    failed = False
    for metric, limit in thresholds:
        above = tensors[metric] > limit
        if metric == "max_ulp":
            above |= (tensors.dtype_a != tensors.dtype_b) & (tensors.equal_fraction < 1)
        if metric not in COUNT_METRICS:
            above |= (tensors.nonfinite > 0) & (tensors.equal_fraction < 1)
        for row in tensors[above].itertuples():
            at = f" at step {row.step}" if "step" in frame else ""
            unknown = f" ({int(row.nonfinite)} pairs not finite)" if row.nonfinite else ""
            text = f"above {metric}={limit:g}: {row.name}{at} has {getattr(row, metric):.6g}{unknown}"
            console.print(text, markup=False, highlight=False)
            failed = True
    return 2 if failed else 0


def _threshold(text: str) -> tuple[str, float]:
    metric, _, value = text.partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = float("nan")
    if metric not in METRICS or limit != limit:
        raise argparse.ArgumentTypeError(f"expected METRIC=VALUE with a metric of {', '.join(METRICS)}, got {text!r}")
    return metric, limit


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _workers(text: str) -> int:
    return -1 if text == "-1" else _positive(text)


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r} ({error})") from error
    return text


def _chart_path(text: str) -> Path:
    if Path(text).suffix not in _CHARTS:
        raise argparse.ArgumentTypeError(f"expected a file ending in {', '.join(_CHARTS)}, got {text!r}")
    return Path(text)

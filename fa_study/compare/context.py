"""Is the distance of two runs more than a perturbation would have given? The scale that it is read on.

Training amplifies any perturbation. Runs that started one unit in the last place from A (twins) say how far two runs
come apart for no reason at all, and runs in low precision how far for a reason that everybody accepts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import altair as alt
import pandas as pd

from fa_study.compare.trajectories import pair_distances, paired_sources
from fa_study.figures.theme import COLOURS, describe, log_y, register_theme
from fa_study.names import ZERO_GRADIENT

METRICS = {"max_difference": "Max Difference", "wasserstein": "Wasserstein distance"}
PAIR, TWIN, LOW = "A against B", "A against a twin", "A against low precision"


def context_distances(
    a: str,
    b: str,
    twins: Sequence[str] = (),
    low_precision: Sequence[str] = (),
    *,
    step: int | None = None,
    zero_gradient: str = ZERO_GRADIENT,
    n_jobs: int = -1,
    compared: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Distances of run `a` to `b`, to its twins and to runs in low precision, all weights pooled.

    Parameters
    ----------
    a, b, twins, low_precision : checkpoints, or run folders, of which all common steps are compared.
    step : compare run folders at this step only.
    zero_gradient, n_jobs : as in `weight_distances`.
    compared : what `pair_distances` gave for `a` and `b`, where that is known already.

    Returns
    -------
    DataFrame
        A row per run and step: kind, run, step (NaN for single checkpoints), and the metrics of `weight_distances`.

    Raises
    ------
    ValueError
        As `compare` does, for each pair; no float tensor in common; or steps in some comparisons only.

    Warns
    -----
    UserWarning
        Other tensors are compared with one of the runs than with `b`, so that the distances pool other values.
    """
    others = [(PAIR, b), *((TWIN, t) for t in twins), *((LOW, r) for r in low_precision)]
    rows, first = [], None
    for kind, run in others:
        frame = compared if kind == PAIR else None
        if frame is None:
            frame = pair_distances(paired_sources([a, run], step)[0], zero_gradient=zero_gradient, n_jobs=n_jobs)
        first = frame if first is None else first
        if ("step" in frame) != ("step" in first):
            raise ValueError(f"{a} against {b} or against {run} has steps, the other has none: give --step or one kind")
        _warn_of_other_tensors(first, frame, run)
        pooled = frame[(frame.level == "model") & (frame.average == "pooled")]
        if pooled.empty:
            raise ValueError(f"{a} and {run} have no float tensor in common outside of zero_gradient: nothing to pool")
        steps = pooled["step"] if "step" in frame else [math.nan if step is None else step]
        for at, (_, row) in zip(steps, pooled.iterrows()):
            rows.append({"kind": kind, "run": run, "step": at, **{m: row[m] for m in METRICS}})
    return pd.DataFrame(rows)


def _warn_of_other_tensors(first: pd.DataFrame, frame: pd.DataFrame, run: str) -> None:
    pair, other = (set(f[(f.level == "tensor") & ~f.zero_gradient].name) for f in (first, frame))
    for names, which in ((pair - other, "without"), (other - pair, "also with")):
        if names:
            some = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            warnings.warn(
                f"{run} is compared with A {which} {some}, unlike B: its distances pool other values", stacklevel=3
            )


def context_sentences(frame: pd.DataFrame) -> list[str]:
    """What the distances of `context_distances` say at the last step that A and B have, a sentence per metric."""
    last = frame[frame.kind == PAIR].step.max()
    at = frame if pd.isna(last) else frame[frame.step == last]
    when = "" if pd.isna(last) else f" at step {int(last)}"
    return [_sentence(at, metric, f"{title}{when}") for metric, title in METRICS.items()]


def _sentence(at: pd.DataFrame, metric: str, title: str) -> str:
    d = float(at[at.kind == PAIR][metric].iloc[0])
    twins, low = at[at.kind == TWIN][metric], at[at.kind == LOW][metric]
    text = f"{title}: {d:.3g}"
    if len(twins):
        low_end, high, n = float(twins.min()), float(twins.max()), len(twins)
        spread = f"{n} twin{'s' if n > 1 else ''} of A ({low_end:.3g} to {high:.3g})"
        if math.isnan(d) or twins.isna().any():
            text += f", not to be read by {n} twin{'s' if n > 1 else ''} of A: where no value is finite, none is known"
        elif high == 0:
            text += f", and 0 for {n} twin{'s' if n > 1 else ''} of A: no scale to read it by"
        elif d > high:
            text += (
                f", {d / high:.3g} times the farthest of {spread}: more than these perturbations gave; by chance "
                f"alone a run is the farthest of {n + 1} once in {n + 1}"
            )
        else:
            text += f", not beyond {spread}: a perturbation would have given as much"
    if len(low):
        scale = float(low.median())
        if scale == 0:
            text += "; low precision gives a distance of 0: no scale to read it by"
        else:
            text += f"; {d / scale:.3g} times the distance that low precision gives ({scale:.3g})"
    return text + "."


def context_chart(frame: pd.DataFrame) -> alt.VConcatChart:
    """Distances over the steps: A against B, the twins, low precision. Zeros have no place on a log axis."""
    register_theme()
    sentences = context_sentences(frame)
    kinds = [k for k in (PAIR, TWIN, LOW) if k in set(frame.kind)]
    colours = {PAIR: COLOURS["Flash"], TWIN: COLOURS["ulp twins"], LOW: COLOURS["low precision"]}
    x, told = alt.X("step:Q").title("training step"), ["kind:N", "run:N", "step:Q"]
    if frame.step.isna().all():
        # Single checkpoints have no step: points above each other, and no axis that would name one.
        frame, x = frame.assign(step=0), alt.X("step:Q", axis=None)
        told.remove("step:Q")
    charts = []
    for metric, title in METRICS.items():
        shown = frame[frame[metric] > 0]
        charts.append(
            alt.Chart(shown)
            .mark_line(point=True)
            .encode(
                x,
                log_y(metric, f"{title} of the weights"),
                alt.Color("kind:N").title(None).scale(domain=kinds, range=[colours[k] for k in kinds]),
                alt.StrokeDash("kind:N").title(None).scale(domain=kinds),
                alt.Detail("run:N"),
                tooltip=[*told, alt.Tooltip(f"{metric}:Q").format(".3e")],
            )
        )
    return describe(alt.vconcat(*charts), " ".join(sentences))

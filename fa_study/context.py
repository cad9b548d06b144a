"""Is the distance of two runs more than a perturbation would have given? The scale that it is read on.

Training amplifies any perturbation. Runs that started one unit in the last place from A (twins) say how far two runs
come apart for no reason at all, and runs in low precision how far for a reason that everybody accepts.
"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from fa_study.distance import weight_distances
from fa_study.figures.theme import COLOURS, describe, log_y, register_theme
from fa_study.names import ZERO_GRADIENT
from fa_study.trajectories import load_pair, paired_sources

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
) -> pd.DataFrame:
    """Distances of run `a` to `b`, to its twins and to runs in low precision, all weights pooled.

    Parameters
    ----------
    a, b, twins, low_precision : checkpoints, or run folders, of which all common steps are compared.
    step : compare run folders at this step only.

    Returns
    -------
    DataFrame
        A row per run and step: kind, run, step (0 for single checkpoints), and the metrics of `weight_distances`.

    Raises
    ------
    ValueError
        As `compare` does, for each pair.
    """
    others = [(PAIR, b), *((TWIN, t) for t in twins), *((LOW, r) for r in low_precision)]
    rows = []
    for kind, run in others:
        pairs, _ = paired_sources([a, run], step)
        for at, pair in pairs.items():
            frame = weight_distances(*load_pair(pair), zero_gradient=zero_gradient)
            pooled = frame[(frame.level == "model") & (frame.average == "pooled")].iloc[0]
            rows.append({"kind": kind, "run": run, "step": at or 0, **{m: pooled[m] for m in METRICS}})
    return pd.DataFrame(rows)


def context_sentences(frame: pd.DataFrame) -> list[str]:
    """What the distances of `context_distances` say at the last step that A and B have, a sentence per metric."""
    pair = frame[frame.kind == PAIR]
    last = pair.step.max()
    return [_sentence(frame, metric, last) for metric in METRICS]


def _sentence(frame: pd.DataFrame, metric: str, step: int) -> str:
    at = frame[frame.step == step]
    d = float(at[at.kind == PAIR][metric].iloc[0])
    twins, low = at[at.kind == TWIN][metric], at[at.kind == LOW][metric]
    text = f"{METRICS[metric]} at step {step}: {d:.3g}"
    if len(twins):
        low_end, high, n = float(twins.min()), float(twins.max()), len(twins)
        spread = f"{n} twin{'s' if n > 1 else ''} of A ({low_end:.3g} to {high:.3g})"
        if d > high:
            text += (
                f", {d / high:.3g} times the farthest of {spread}: more than these perturbations gave; by chance "
                f"alone a run is the farthest of {n + 1} once in {n + 1}"
            )
        else:
            text += f", not beyond {spread}: a perturbation would have given as much"
    if len(low):
        text += f"; {d / float(low.median()):.3g} times the distance that low precision gives ({low.median():.3g})"
    return text + "."


def context_chart(frame: pd.DataFrame) -> alt.HConcatChart:
    """Distances over the steps: A against B, the twins, low precision. Zeros have no place on a log axis."""
    register_theme()
    kinds = [k for k in (PAIR, TWIN, LOW) if k in set(frame.kind)]
    colours = {PAIR: COLOURS["Flash"], TWIN: COLOURS["ulp twins"], LOW: COLOURS["low precision"]}
    charts = []
    for metric, title in METRICS.items():
        shown = frame[frame[metric] > 0]
        charts.append(
            alt.Chart(shown)
            .mark_line(point=True)
            .encode(
                alt.X("step:Q").title("training step"),
                log_y(metric, f"{title} of the weights"),
                alt.Color("kind:N").title(None).scale(domain=kinds, range=[colours[k] for k in kinds]),
                alt.StrokeDash("kind:N").title(None).scale(domain=kinds),
                alt.Detail("run:N"),
                tooltip=["kind:N", "run:N", "step:Q", alt.Tooltip(f"{metric}:Q").format(".3e")],
            )
        )
    return describe(alt.hconcat(*charts), " ".join(context_sentences(frame)))

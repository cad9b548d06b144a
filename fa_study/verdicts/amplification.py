"""The verdicts on the question whether Flash's drift is more than what training makes of any difference.

Not to see a difference is no proof that there is none. Flash counts as no further away than a nudged run only where the
whole interval of the ratio lies below `MARGIN`.
"""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.drift_ratios import twin_intervals
from fa_study.experiments.weights import whole_model
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Holds, Verdict

MARGIN = 1.25


def judged(low: pd.Series, high: pd.Series) -> pd.Series:
    """Of ratios with these ends of their intervals: "no further", "further" (above 1 as a whole) or "undecided"."""
    words = pd.Series("undecided", index=low.index)
    return words.mask(low > 1, "further").mask(high <= MARGIN, "no further")


def _holds(found: pd.Series) -> Holds:
    decided = found[found != "undecided"]
    return answer(int((decided == "no further").sum()), len(decided)) if len(decided) else "undecided"


def amplification_verdict(table: pd.DataFrame) -> Verdict:
    """Is the drift between Flash and Baseline no more than training makes of a unit in the last place?

    It is no more at a snapshot if the 95 % interval over seeds of the ratio of relative L2 distances (Flash over ulp
    twin) ends below `MARGIN`, and more if it begins above 1 and ends above `MARGIN`.
    """
    intervals = twin_intervals(table)
    found, words = judged(intervals["low_end"], intervals["high_end"]), []
    for precision, rows in intervals.groupby("precision"):
        last, top = rows.loc[rows["step"].idxmax()], rows.loc[rows["centre"].idxmax()]
        counts = found[rows.index].value_counts()
        words.append(
            f"in {precision.upper()} {last['centre']:.2f} ({last['low_end']:.2f} to {last['high_end']:.2f}, "
            f"{last['seeds']} seeds) at step {last['step']}, at most {top['centre']:.2f} ({top['low_end']:.2f} to "
            f"{top['high_end']:.2f}) on the way (step {top['step']}); of {len(rows)} snapshots, Flash is no further "
            f"away at {counts.get('no further', 0)} (interval below {MARGIN:g}), further at "
            f"{counts.get('further', 0)}; {counts.get('undecided', 0)} are open"
        )
    text = (
        "Relative L2 distance of Flash from Baseline over that of a run nudged by one unit in the last place of FP32: "
        + "; ".join(words)
        + "."
    )
    return Verdict("'the drift is amplification'", _holds(found), text)


def explained_verdict(beside: pd.DataFrame) -> Verdict:
    """Does a nudge of one unit in the last place explain the drift of Flash?

    It does where Flash ends no further away: the 95 % interval of the ratio over the last quarter ends below `MARGIN`,
    in weights and in predictions of each precision. How fast the distances grow is told, but with few snapshots before
    the end of the climb it decides nothing.

    Parameters
    ----------
    beside : `experiments.amplification.beside_twins`, of Flash.
    """
    growth = beside[beside["what"] == "growth"]
    ends = beside[beside["what"] == "distance at the end"]
    found = judged(ends["low"], ends["high"])
    words = [
        f"{row.space} in {row.precision.upper()} {1 / row.centre:.0%} ({1 / row.high:.0%} to {1 / row.low:.0%}, "
        f"{row.seeds} seeds; {word})"
        for row, word in zip(ends.itertuples(), found.replace("no further", "Flash no further"))
    ]
    text = (
        "In the last quarter of the training, a run with Baseline that was nudged shows of Flash's distance: "
        f"{'; '.join(words)}. Before, the factor by which Flash's distance grows in 100 steps is "
        f"{growth['centre'].min():.2f} to {growth['centre'].max():.2f} times the twins'; only a ratio of "
        f"{growth['detectable'].min():.1f} to {growth['detectable'].max():.1f} would have been seen in 4 cases of 5."
    )
    return Verdict("'one unit in the last place explains the drift'", _holds(found), text)


def meeting_sentence(beside: pd.DataFrame) -> str:
    """Where low precision ends, beside the nudged runs of FP32.

    Parameters
    ----------
    beside : `experiments.amplification.beside_twins`, of low precision: {kind: table} put below each other, with kind.
    """
    ends = beside[beside["what"] == "distance at the end"]
    words = "; ".join(
        f"{row.kind}, {row.space}: {row.centre:.2f} ({row.low:.2f} to {row.high:.2f})" for row in ends.itertuples()
    )
    return f"Over the last quarter, the distance of low precision over that of the FP32 twins is: {words}."


def uniform_in_training(table: pd.DataFrame) -> str:
    """How far attention with every intermediate in BF16 moves the weights, beside the ulp twins of the same seeds.

    Each seed at the last step that both have; "" if the table holds no such run with its twins.
    """
    tiled, twins = (
        whole_model(table, kind).astype({"variant": str}) for kind in ("tiled against Baseline", "ulp twin")
    )
    tiled = tiled[tiled["variant"].eq("uniform bf16") & tiled["precision"].eq("bf16")]
    twins = twins[twins["variant"].eq("") & twins["precision"].eq("bf16")]
    seeds = []
    for seed, rows in tiled[tiled["step"].isin(twins["step"])].groupby("seed"):
        last = rows.loc[rows["step"].idxmax()]
        floor = twins[twins["seed"].eq(seed) & twins["step"].eq(last["step"])]["relative_l2"]
        if len(floor):
            ratio = last["relative_l2"] / floor.median()
            seeds.append(
                f"those of seed {seed} by {last['relative_l2']:.1%} until step {last['step']}, {ratio:.2f} times the "
                + (f"median of its {len(floor)} ulp twins" if len(floor) > 1 else "distance of its ulp twin")
            )
    if not seeds:
        return ""
    return (
        "With every intermediate of attention in BF16, as in the paper's re-implementation, weights move away from "
        f"Baseline's: {'; '.join(seeds)}."
    )


def systematic_verdict(effects: pd.DataFrame, *, level: float = 0.01) -> Verdict:
    """Does Flash move weights or predictions to somewhere of its own?

    It does so at a snapshot if the permutation test among the twins of one initialisation has p below `level`.

    Parameters
    ----------
    effects : `fa_study.experiments.systematic.systematic_effect`; families with too few twins for `level` are left out.

    Raises
    ------
    ValueError : no family has enough twins.
    """
    smallest = 2.0 ** (1 - effects["twins"])
    effects = effects[smallest < level]
    if effects.empty:
        raise ValueError(f"{smallest.min():.2g} is the smallest p that so few twins can give; use 8 or more per arm")
    words = []
    for (precision, space), rows in effects.groupby(["precision", "space"], observed=True):
        last, found = rows.loc[rows["step"].idxmax()], rows[rows["p"] < level]
        words.append(
            f"{space} in {precision.upper()} at {len(found)} of {len(rows)} snapshots"
            + (f", the last one at step {found['step'].max()}" if len(found) else "")
            + f" (at step {last['step']} {last['share']:.1%} of the squared distance, p = {last['p']:.2g}; "
            f"{last['detectable']:.1%}, an effect of {last['detectable'] ** 0.5:.0%} of the distance itself, would "
            "have been found in about 4 cases of 5)"
        )
    text = (
        f"Among {effects['twins'].max()} Flash and as many Baseline twins of one initialisation and one order of the "
        f"data, what the Flash twins have in common is found at p < {level:g} in {'; '.join(words)}."
    )
    return Verdict("'Flash has an effect of its own'", answer(int((effects["p"] < level).sum()), len(effects)), text)

"""Do the numbers that others published come out? One verdict per source, computed from its table."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.published import accumulation, biased_rounding, fa3_errors, lazy_rescaling, sinks, stalled_sum
from fa_study.verdicts.microbenchmark import answer, weaker
from fa_study.verdicts.verdict import Verdict


def fa3_verdict(frame: pd.DataFrame, *, tolerance: float = 0.15) -> Verdict:
    """Do the ratios 1.7 (FP16) and 2.6 (FP8) of FlashAttention-3 come out, and where?

    A ratio comes out in a setting of N, D and true value if that of our pooled errors lies within `tolerance` of it.
    """
    table = fa3_errors.ratios(frame)
    table["hit"] = (table["ratio"] / table["published"] - 1).abs() <= tolerance
    parts = []
    for (fmt, reference), part in table.groupby(["format", "reference"], sort=False):
        where = ", ".join(f"N = {r.N:,} with D = {r.D}" for r in part[part["hit"]].itertuples())
        when = "before" if reference == "original" else "after"
        parts.append(
            f"{fmt} with the true value from the inputs {when} their rounding: {part['ratio'].min():.2g} to "
            f"{part['ratio'].max():.2g}, published {part['published'].iloc[0]:g}, met "
            + (f"at {where}" if where else "nowhere")
        )
    return Verdict("the ratios 1.7 and 2.6", answer(table["hit"].sum(), len(table)), "; ".join(parts) + ".")


def rescaling_verdict(frame: pd.DataFrame, *, tolerance: float = 0.1) -> Verdict:
    """Do the errors measured on a GPU under lazy rescaling come out within `tolerance`, for both offsets?

    Which relative error was measured is not said: the better of the two usual ones, `l1` and `l2`, decides.
    """
    table = lazy_rescaling.beside_published(frame)
    off = table[["l1", "l2"]].div(table["published"], axis=0).sub(1).abs()
    near = (off <= tolerance).sum()
    best = near.idxmax()
    lazy = table[table["offset"] == 8].set_index("std")[best]
    always = lazy_rescaling.relative(frame[(frame["offset"] == 8) & (frame["threshold"] == 0)])
    always = always.groupby("std")[best].median()
    names = {"l1": "mean |error| over mean |output|", "l2": "RMS error over RMS of the output"}
    text = (
        f"As {names['l1']}, {near['l1']} of {len(off)} published errors are met within {tolerance:.0%} (the worst is "
        f"off by {off['l1'].max():.1%}); as {names['l2']}, {near['l2']} of {len(off)}. With P × 256 and a threshold of "
        f"4 the error grows from {lazy.iloc[0]:.3f} to {lazy.iloc[-1]:.3f} with the spread of the logits; with a "
        f"threshold of 0 it falls from {always.iloc[0]:.3f} to {always.iloc[-1]:.3f}."
    )
    return Verdict("the GPU's errors", answer(near[best], len(off)), text)


def bias_verdict(frame: pd.DataFrame, *, small: float = 1e-2) -> Verdict:
    """Is the error biased where the maximum occurs twice, and does the shift remove the bias?

    Biased: the mean over the seeds lies more than four standard errors from 0. The settings are the weights of the
    other keys below `small`; values of one sign.
    """
    part = frame[(frame["values"] == "one sign") & (frame["repeats"] == 2) & (frame["rest"] < small)]
    grouped = part.groupby(["arm", "rest"])["mean"]
    mean, error = grouped.mean(), grouped.sem()
    biased = (mean.abs() > 4 * error).unstack("rest")
    size = mean.unstack("rest")
    names = list(biased_rounding.ARMS)
    plain, shifted, stochastic, wide = (size.loc[name] for name in names)
    right = biased.loc[names[0]] & ~biased.loc[names[1]]
    delta = part[part["arm"] == names[0]][["delta_output", "delta_probabilities"]].mean()
    text = (
        f"Where the other keys weigh less than {small:g} and the values are negative, the mean error of an output with "
        f"O in BF16 is {plain.min():.2f} to {plain.max():.2f} units of u; with their shift its size is at most "
        f"{shifted.abs().max():.3f}, with stochastic rounding {stochastic.abs().max():.3f}; with O in FP32 it is "
        f"{wide.min():+.2f} to {wide.max():+.2f}. The error enters delta = rowsum(dO O), by "
        f"{delta['delta_output']:+.2f} u, and not rowsum(P dP): {delta['delta_probabilities']:+.0e} u."
    )
    return Verdict("the biased rounding", answer(right.sum(), len(right)), text)


def stalled_verdict(frame: pd.DataFrame) -> Verdict:
    """Does a sum of equal weights stop at 256 in BF16 and at 2,048 in FP16, key by key, and not tile by tile?"""
    equal = frame[(frame["scores"] == "equal") & (frame["site"] == "sum")]
    reached = (equal["sum"] * equal["N"]).groupby([equal["rounding"], equal["Bc"], equal["N"]]).median()
    exact = [abs(reached[fmt, 1, 4096] - stop) < 0.5 for fmt, stop in stalled_sum.STOPS.items()]
    tiles = equal[(equal["Bc"] > 1) & (equal["rounding"] == "bf16")]
    stopped = tiles[(tiles["sum"] - 1).abs() > 0.25]
    words = "; ".join(f"{fmt.upper()} reaches {reached[fmt, 1, 4096]:,.0f}" for fmt in stalled_sum.STOPS)
    later = ", ".join(
        f"tiles of {r.Bc} keys stop at {r.sum * r.N:,.0f}" for r in stopped.drop_duplicates(["Bc", "N"]).itertuples()
    )
    text = (
        f"After 4,096 equal keys one by one, {words}; with stochastic rounding BF16 reaches "
        f"{reached['bf16:stochastic', 1, 4096]:,.0f}. Tiles only move the stop to 256 times "
        f"their keys: {later}."
    )
    return Verdict("the stalled sum", answer(sum(exact), len(exact)), text)


def sinks_verdict(frame: pd.DataFrame, *, floor: float = 1.25) -> Verdict:
    """Do reverse order and P x 256 each help 3 to 10 times at moderate sinks, and do both together reach one floor?

    Which sinks are moderate is not published. Here they are those at which the published formula lets between 5 and
    95 % of the weights underflow: with weaker sinks there is nothing to mend, with stronger ones nothing else is left.
    The floor: with P x 256, reverse order changes the error by less than the factor `floor`. The claim holds as far as
    the weaker of the two parts.
    """
    table = sinks.factors(frame).groupby(["sink_values", "change", "delta"])["factor"].median()
    deltas = sorted(frame["delta"].unique())
    moderate = [d for d in deltas if 0.05 <= sinks.predicted_flush(d, 1)[0] <= 0.95]
    table = table[table.index.get_level_values("delta").isin(moderate)]
    low, high = sinks.PUBLISHED_FACTOR
    single = table[table.index.get_level_values("change") != "rest"]
    rest = table.xs("rest", level="change")
    inside, level = single.between(low, high), rest.between(1 / floor, floor)
    parts = []
    for values, words in (("ordinary", "values like other keys'"), ("zero", "no values")):
        order, scale = single[values, "order"], single[values, "scale"]
        parts.append(
            f"for sinks with {words} {_span(order)} times by reverse order and {_span(scale)} times by P × 256"
        )
    text = (
        f"At moderate sinks, Δ = {', '.join(map(str, moderate))}, the mean squared error falls "
        + ", ".join(parts)
        + f"; from {low:g} to {high:g} times in {inside.sum()} of {len(inside)} cases. With both changes the floor is "
        f"the same in {level.sum()} of {len(level)} cases: given P × 256, reverse order changes the error by at most a "
        f"factor of {rest.max():.2g}."
    )
    holds = (answer(inside.sum(), len(inside)), answer(level.sum(), len(level)))
    return Verdict("the factor of 3 to 10", weaker(*holds), text)


def _span(values: pd.Series) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"


def products_verdict(frame: pd.DataFrame) -> Verdict:
    """Is the largest error of 14-bit sums nearly 2 % at K = 4,096, and does promotion remove it?"""
    part = frame[frame["K"] == accumulation.PUBLISHED_K]
    table = part.groupby(["how", "inputs", "promotion"])["scaled"].median()
    plain = table.xs(0, level="promotion").drop("FP32")
    left = {p: table.xs(p, level="promotion").max() for p in (128, 32)}
    words = "; ".join(f"{how}, {inputs} inputs {value:.2%}" for (how, inputs), value in plain.items())
    near = plain.between(accumulation.PUBLISHED_ERROR / 2, accumulation.PUBLISHED_ERROR * 2)
    text = (
        f"Within a factor of two in {near.sum()} of {len(near)} ways. Largest error over the RMS of the product at "
        f"K = {accumulation.PUBLISHED_K:,}: {words}; published nearly {accumulation.PUBLISHED_ERROR:.0%}. Promotion "
        f"every 128 terms leaves at most {left[128]:.3%}, every 32 terms {left[32]:.3%}."
    )
    return Verdict("'nearly 2 %'", answer(near.sum(), len(near)), text)

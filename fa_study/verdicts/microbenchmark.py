"""The verdicts on Figures 3 to 6: one forward pass of attention, Flash beside Baseline."""

from __future__ import annotations

from typing import get_args

import pandas as pd

from fa_study.experiments.blocks import paired_ratios
from fa_study.experiments.formats import WIDTHS, width_slopes
from fa_study.experiments.inputs import LABELS
from fa_study.experiments.slopes import log_slopes
from fa_study.verdicts.verdict import Holds, Verdict

PAPER_FORMATS = ("bf16", "fp16", "fp32", "fp64")
_SETTING = ["distribution", "family"]
_FAMILIES = {"uniform": "with every intermediate in BF16", "kernel": "with the rounding of real kernels"}


def answer(part: int, whole: int, *, nearly: float = 0.95) -> Holds:
    """Whether a claim that is true in `part` of `whole` settings holds: in nearly all, in some, in nearly none."""
    if whole == 0:
        raise ValueError("a verdict needs at least one setting, got an empty table")
    return (
        "holds" if part >= nearly * whole else "does not hold" if part <= (1 - nearly) * whole else "holds only where"
    )


def weaker(*parts: Holds) -> Holds:
    """The answer to a claim of several parts: it holds as far as the weakest of them."""
    return min(parts, key=get_args(Holds)[::-1].index)


def format_verdict(frame: pd.DataFrame) -> Verdict:
    """C1: does the deviation between Flash and Baseline shrink as the format gets more mantissa bits?

    It does in a setting if the medians of the max difference fall from BF16 to FP16, FP32 and FP64.

    Parameters
    ----------
    frame : rows of Flash against Baseline of Figure 3's table.
    """
    medians = frame.groupby([*_SETTING, "algorithm", "format"])["max"].median().unstack("format")
    falls = (medians[list(PAPER_FORMATS)].diff(axis=1).iloc[:, 1:] < 0).all(axis=1)
    slopes = width_slopes(frame[frame["format"].isin(WIDTHS) & (frame["algorithm"] == "fa1")])["slope"]
    text = (
        f"The median deviation falls with every step from BF16 to FP16, FP32 and FP64 in {falls.sum()} of {len(falls)} "
        f"settings of inputs, algorithm and rounding; over all widths from 2 to 24 fraction bits, one more bit "
        f"multiplies it by {2 ** slopes.median():.2f}."
    )
    return Verdict("C1", answer(falls.sum(), len(falls)), text)


def ten_times_verdict(ratios: pd.DataFrame, *, low: float = 5.0, high: float = 20.0) -> Verdict:
    """C2: is Flash's deviation from the golden value about ten times Baseline's at BF16?

    "About ten" is a median ratio of the RMS errors between `low` and `high`.

    Parameters
    ----------
    ratios : rows of `experiments.ten_times.ratios` in BF16, of both families of policies.
    """
    keys = ["family", "distribution", "N", "D", "algorithm", "Bc"]
    medians = ratios.groupby(keys)["ratio"].median().reset_index()
    ten = medians["ratio"].between(low, high)
    above = medians["ratio"] > high
    parts = []
    for family, words in _FAMILIES.items():
        part = medians[medians["family"] == family]
        if len(part):
            parts.append(f"{words} it runs from {part['ratio'].min():.2g} to {part['ratio'].max():.2g}")
    text = (
        f"Flash's error is {low:g} to {high:g} times Baseline's in {ten.sum()} of {len(medians)} settings"
        + (f", and more in {above.sum()}" if above.any() else "")
        + ": "
        + "; ".join(parts)
        + "."
    )
    medians["T"] = medians["N"] // medians["Bc"]
    where = {}
    for (family, distribution), part in medians.groupby(["family", "distribution"]):
        tiles = part.loc[part["ratio"].between(low, high), "T"]
        if len(tiles):
            alike = part["T"].between(tiles.min(), tiles.max()).sum()
            span = f"from {tiles.min()} to {tiles.max()}" if tiles.min() < tiles.max() else f"= {tiles.min()}"
            words = f"{LABELS[distribution]}, {len(tiles)} of the {alike} settings with N / Bc {span}"
            where.setdefault(family, []).append((-len(tiles), words))
    for family, found in where.items():
        text += (
            f" Where it is {low:g} to {high:g}, {_FAMILIES[family]}: " + "; ".join(w for _, w in sorted(found)) + "."
        )
    return Verdict("C2", answer(ten.sum(), len(medians)), text)


def length_trends(frame: pd.DataFrame) -> pd.DataFrame:
    """Exponents of deviation ~ N^exponent for maximum, mean and standard deviation, absolute and relative.

    Parameters
    ----------
    frame : rows of Flash against Baseline of Figure 5's table.
    """
    parts = []
    for relative in (False, True):
        for statistic in ("max", "mean_abs", "std_abs"):
            value = frame[statistic] / frame["output_rms"] if relative else frame[statistic]
            slopes = log_slopes(frame.assign(value=value), "N", "value", [*_SETTING, "algorithm", "format"])
            slopes.insert(0, "unit", "relative to the output" if relative else "absolute")
            slopes.insert(0, "statistic", statistic)
            parts.append(slopes)
    return pd.concat(parts, ignore_index=True)


def length_verdict(frame: pd.DataFrame) -> Verdict:
    """C3: does the deviation grow with the sequence length, in maximum and in mean and standard deviation?

    It grows if the whole 95 % interval of the exponent of N lies above 0. The paper's numbers are absolute, so those
    decide; what is relative to the output is told besides.
    """
    trends = length_trends(frame)
    grows = trends["low"] > 0
    absolute, relative = trends["unit"] == "absolute", trends["unit"] != "absolute"
    text = (
        f"In absolute numbers it grows in {(grows & absolute).sum()} of {absolute.sum()} combinations of inputs, "
        f"format, rounding and statistic; relative to the size of the output, in {(grows & relative).sum()} of "
        f"{relative.sum()}."
    )
    where = trends[grows & absolute]
    if len(where) and not grows[absolute].all():
        counts = trends[absolute].assign(grows=grows).groupby("distribution")["grows"].agg(["sum", "count"])
        text += (
            " Absolute, by inputs: "
            + ", ".join(f"{LABELS[d]} {r['sum']} of {r['count']}" for d, r in counts.iterrows())
            + "."
        )
    return Verdict("C3", answer((grows & absolute).sum(), absolute.sum()), text)


def swap_verdict(frame: pd.DataFrame, *, share: float = 0.95) -> Verdict:
    """C4: does swapping the block dimensions make the deviation larger?

    Larger in a setting: the RMS difference from Baseline grows in at least `share` of the seeds. Settings in which the
    swap does not change Bc are counted apart.

    Parameters
    ----------
    frame : rows of Flash against Baseline of Figure 6's table.
    """
    ratios = paired_ratios(frame, "swapped")
    changed = ratios[ratios["Bc"] != ratios["Bc_published"]]
    same = ratios[ratios["Bc"] == ratios["Bc_published"]]
    by = [*_SETTING, "format", "M"]
    larger = changed.assign(larger=changed["ratio"] > 1).groupby(by)["larger"].mean() >= share
    medians = changed.groupby(by)["ratio"].median()
    families = larger.groupby("family").agg(["sum", "count"])
    text = (
        f"Where the swap makes the key tiles narrower, it grows in {larger.sum()} of {len(larger)} settings ("
        + ", ".join(f"{_FAMILIES[family]} {row['sum']} of {row['count']}" for family, row in families.iterrows())
        + f"), the ratio being {medians.min():.2g} to {medians.max():.2g} over all; where it leaves Bc alone, it has "
        + ("no effect." if (same["ratio"] == 1).all() else "an effect, which it should not.")
    )
    return Verdict("C4", answer(larger.sum(), len(larger)), text)


def square_verdict(frame: pd.DataFrame, *, little: float = 1.5) -> Verdict:
    """C5: do square tiles change nothing much?

    Nothing much: a median ratio of the RMS differences between 1 / `little` and `little`. What the paper's squares keep
    is unknown, so both readings count: the same Bc, and the same area.
    """
    by = [*_SETTING, "format", "M"]
    medians = {
        v: paired_ratios(frame, v).groupby(by)["ratio"].median() for v in ("square, same Bc", "square, same area")
    }
    small = {v: m.between(1 / little, little) for v, m in medians.items()}
    part, whole = sum(s.sum() for s in small.values()), sum(len(s) for s in small.values())
    text = "; ".join(
        f"{v}: within a factor of {little:g} in {small[v].sum()} of {len(m)} settings ("
        + ("no difference at all" if m.eq(1).all() else f"from {m.min():.2g} to {m.max():.2g}")
        + ")"
        for v, m in medians.items()
    )
    return Verdict("C5", answer(part, whole), text + ".")


def block_size_verdict(frame: pd.DataFrame, shares: pd.DataFrame) -> Verdict:
    """C6: do larger blocks make the deviation smaller, because there are fewer rescalings?

    Smaller in a setting: the whole 95 % interval of the exponent of Bc lies below 0. Because of the rescalings: without
    them, less than half of what Flash adds to Baseline's squared error is left. The claim holds if both do.

    Parameters
    ----------
    frame : rows of Flash against Baseline of Figure 6's table.
    shares : `experiments.control.rescaling_share`.
    """
    slopes = log_slopes(frame, "Bc", "rms", [*_SETTING, "format"])
    smaller = slopes["high"] < 0
    left = shares.groupby([name for name in shares if name not in ("seed", "share")])["share"].median()
    because = left < 0.5
    falling = ", ".join(
        f"{_FAMILIES[family]} {row['sum']} of {row['count']}"
        for family, row in slopes.assign(smaller=smaller).groupby("family")["smaller"].agg(["sum", "count"]).iterrows()
    )
    text = (
        f"The deviation falls with Bc in {smaller.sum()} of {len(slopes)} settings ({falling}; exponents from "
        f"{slopes['exponent'].min():.2f} to {slopes['exponent'].max():.2f}). But rescaling explains it in "
        f"{because.sum()} of {len(left)}: an algorithm that never rescales and only keeps its sums in the tested "
        f"format from tile to tile has {left.min():.0%} to {left.max():.0%} of what Flash adds to Baseline's squared "
        "error."
    )
    # The claim is an observation and a reason.
    parts = (answer(smaller.sum(), len(slopes)), answer(because.sum(), len(left)))
    return Verdict("C6", weaker(*parts), text)

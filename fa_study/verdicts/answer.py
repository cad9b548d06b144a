"""The book's short answer: what the forward pass, the training and their amplification say together."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.drift_ratios import twin_intervals
from fa_study.experiments.weights import whole_model
from fa_study.verdicts.amplification import judged


def error_ratio(formats: pd.DataFrame, family: str, algorithm: str) -> tuple[float, float]:
    """Smallest and largest median ratio, over the inputs, of Flash's RMS error to Baseline's at BF16.

    Parameters
    ----------
    formats : Figure 3's table.
    family : "uniform" (every intermediate in BF16) or "kernel" (what real kernels round).
    """
    rows = formats[
        (formats["against"] == "golden")
        & (formats["reference"] == "rounded")
        & (formats["format"] == "bf16")
        & (formats["family"] == family)
    ]
    # Baseline has no algorithm.
    errors = rows.pivot_table(index=["distribution", "seed"], columns="algorithm", values="rms")
    medians = (errors[algorithm] / errors[""]).groupby("distribution").median()
    return float(medians.min()), float(medians.max())


def short_answer(formats: pd.DataFrame, weights: pd.DataFrame) -> str:
    """Three sentences of Markdown, each with its numbers.

    Parameters
    ----------
    formats, weights : the tables of Figure 3 and of Figures 7 and 8.
    """
    kernel, uniform = error_ratio(formats, "kernel", "fa2"), error_ratio(formats, "uniform", "fa1")
    keys, tile = int(formats["N"].max()), int(formats["Bc"].max())
    ratios = twin_intervals(weights)
    ratios = ratios[ratios["step"] == ratios["step"].max()]
    flash = whole_model(weights, "Flash against Baseline")
    flash = flash[flash["step"] == flash["step"].max()].groupby("precision")["relative_l2"].median()
    drift = ", ".join(f"{value:.1%} in {precision.upper()}" for precision, value in flash.items())
    twins = ", ".join(
        f"{row.centre:.2f} [{row.low_end:.2f}, {row.high_end:.2f}] in {row.precision.upper()}"
        for row in ratios.itertuples()
    )
    found = set(judged(ratios["low_end"], ratios["high_end"]))
    drifts = "further" if "further" in found else "open" if "undecided" in found else "no further"
    so = {
        "no further": "So the drift of the weights, which the paper measured, does not tell Flash Attention from any "
        "other perturbation; a fault of an attention kernel has to be looked for in the kernel's own error.",
        "further": "So the drift of the weights is more than training makes of any perturbation; it needs an "
        "explanation.",
        "open": "Whether the drift of the weights is more than training makes of any perturbation is open: more seeds "
        "would tell.",
    }
    return (
        f"1. At {keys:,} keys in tiles of {tile} and with the rounding of real kernels, Flash Attention in BF16 errs "
        f"{kernel[0]:.2f} to {kernel[1]:.2f} times "
        "as much as attention written out in BF16; with every intermediate forced into BF16, which no kernel we know "
        f"of does, it errs {uniform[0]:.1f} to {uniform[1]:.1f} times as much, and more with more tiles.\n"
        "2. Weights trained with it drift away from those trained without it, here by a relative distance of "
        f"{drift}, and those of a run without Flash Attention that is nudged by one unit in the last place drift "
        + {"no further": "as far", "further": "less far", "open": "about as far"}[drifts]
        + f" by the end (Flash over twin, with the 95 % interval: {twins}).\n3. {so[drifts]}"
        f" (Sentences 2 and 3 rest on a small model and {' or '.join(map(str, sorted(set(ratios['seeds']))))} seeds.)"
    )

"""The verdict on the question whether the weights drift where Flash deviates, and what key biases do instead."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from fa_study.experiments.layers import (
    attention_layers,
    decayed,
    drift_correlations,
    key_bias_moves,
    self_over_cross,
    smallest_p,
    tensor_drift,
    yardstick_correlations,
)
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Verdict, precision_name

ADAM_EPSILON = 1e-8  # PyTorch's default, which the runs use


def location_verdict(weights: pd.DataFrame, deviations: pd.DataFrame) -> Verdict:
    """Do the weights drift apart where Flash deviates?

    They do in a precision if, over the attention layers, Flash's deviation from Baseline goes with the drift of the
    weights more than with the drift of the ulp twins, in which no attention differs: if the 95 % interval over seeds of
    the difference of the two rank correlations lies above 0.

    Parameters
    ----------
    weights, deviations : the study's tables.
    """
    drift = tensor_drift(weights)
    layers = attention_layers(drift, deviations)
    words, found = [], []
    ratios = self_over_cross(layers).set_index(["precision", "what"])
    alike = drift_correlations(drift).groupby("precision")["rho"].min()
    correlations = yardstick_correlations(layers)
    for row in correlations[correlations["yardstick"] == "deviation"].itertuples():
        found.append(row.more_low > 0)
        spans = {
            ratio.Index: f"{ratio.centre:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) times as"
            for ratio in ratios.loc[row.precision].itertuples()
        }
        words.append(
            f"In {precision_name(row.precision)} ({row.seeds} seeds) the rank correlation of the largest |Flash − "
            f"Baseline| is {row.flash:.2f} ({row.low:.2f} to {row.high:.2f}) with the drift of Flash and "
            f"{row.twin:.2f} with that of the nudged twins (they differ by {row.more_low:+.2f} to "
            f"{row.more_high:+.2f}); self-attention deviates {spans['deviation']} much as cross-attention and drifts "
            f"{spans['flash']} far. Over all tensors Flash's drift and the twins' have a rank correlation of "
            f"{alike[row.precision]:.3f} or more."
        )
    count = layers["layer"].nunique()
    words.append(
        f"There are only {count} attention layers: in one seed even a perfect rank correlation has a two-sided p of "
        f"{smallest_p(count):.3f}, and more seeds add no layers."
    )
    return Verdict("'the weights drift where Flash deviates'", answer(sum(found), len(found)), " ".join(words))


def key_bias_sentence(weights: pd.DataFrame, optimizer: Mapping[str, float]) -> str:
    """What became of the key projections' biases, whose exact gradient is zero, by precision.

    Parameters
    ----------
    weights : table of `weight_differences`. optimizer : lr, warmup and weight_decay of the runs, as in
        conf/config.yaml.
    """
    moves = key_bias_moves(weights)
    if moves.empty:
        raise ValueError("the table has no parameters with a zero gradient that are compared with their own start")
    moves["rates"] = moves["moved"] / optimizer["lr"]
    step = int(moves["step"].max())
    parts = []
    for precision, part in moves.groupby("precision"):
        spans = part.groupby("model")["rates"].agg(["min", "max"])
        told = " and ".join(f"{_span(row)} ({model})" for model, row in spans.iterrows())
        parts.append(f"in {precision_name(precision)} {told}")
    denoiser = moves[moves["model"] == "denoiser"].groupby("precision")["relative"].agg(["min", "max"])
    shares = ", ".join(f"{_span(100 * row)} % in {precision_name(precision)}" for precision, row in denoiser.iterrows())
    epsilon = f"{ADAM_EPSILON:g}".replace("e-0", "e-")
    return (
        f"Softmax is blind to a shift of all scores, so the exact gradient of a key projection's bias is zero, and the "
        f"optimiser sees rounding noise. Adam divides it by its own running size plus {epsilon}: noise well above that "
        f"becomes full steps, noise far below next to nothing. How far such a bias is from its start at step {step:,}, "
        f"in learning rates of {optimizer['lr']:g}: {'; '.join(parts)}. (Mean |change| of a tensor, median over the "
        f"seeds; smallest to largest tensor.) Weight decay alone takes {100 * decayed(optimizer, step):.2g} % of a "
        f"weight that has no gradient; the denoiser's changed by {shares}. The text encoder's start at zero, where "
        f"nothing decays."
    )


def _span(row: pd.Series) -> str:
    low, high = (f"{value:.2g}" if value < 100 else f"{value:,.0f}" for value in (row["min"], row["max"]))
    return f"{low} to {high}"

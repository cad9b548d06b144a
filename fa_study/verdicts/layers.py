"""The verdict on the question whether the weights drift where Flash deviates."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.layers import (
    attention_layers,
    drift_correlations,
    mean_interval,
    rank_correlations,
    self_over_cross,
    tensor_drift,
)
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Verdict


def location_verdict(weights: pd.DataFrame, deviations: pd.DataFrame) -> Verdict:
    """Do the weights drift apart where Flash deviates?

    They do in a precision if, over the attention layers, Flash's deviation goes with the drift of the weights more
    than with the drift of the ulp twins, in which no attention differs: if the 95 % interval over seeds of the
    difference of the two rank correlations lies above 0.

    Parameters
    ----------
    weights, deviations : the study's tables.
    """
    drift = tensor_drift(weights)
    layers = attention_layers(drift, deviations)
    words, found = [], []
    ratios = self_over_cross(layers).set_index(["precision", "what"])
    alike = drift_correlations(drift).groupby("precision")["rho"].min()
    for precision, rho in rank_correlations(layers).groupby("precision"):
        if len(rho) < 2:
            continue
        flash = mean_interval(rho["flash"])
        more = mean_interval(rho["flash"] - rho["twin"])
        found.append(more[1] > 0)
        low, high = max(-1, flash[1]), min(1, flash[2])
        spans = {
            row.Index: f"{row.centre:.2f} ({row.low:.2f} to {row.high:.2f}) times as"
            for row in ratios.loc[precision].itertuples()
        }
        words.append(
            f"In {precision.upper()} ({len(rho)} seeds) the rank correlation is {flash[0]:.2f} ({low:.2f} to "
            f"{high:.2f}) with the drift of Flash and {rho['twin'].mean():.2f} with that of the nudged twins (they "
            f"differ by {more[1]:+.2f} to {more[2]:+.2f}); self-attention deviates {spans['deviation']} much as "
            f"cross-attention and drifts {spans['flash']} far. Over all tensors Flash's drift and the twins' have a "
            f"rank correlation of {alike[precision]:.3f} or more."
        )
    return Verdict("'the weights drift where Flash deviates'", answer(sum(found), len(found)), " ".join(words))

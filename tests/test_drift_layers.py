"""Deviation beside drift by layer, on tables whose ranks and ratios are known."""

import numpy as np
import pandas as pd
import pytest

from fa_study import figures
from fa_study.experiments.layers import (
    attention_layers,
    drift_by_part,
    drift_correlations,
    mean_interval,
    part_of,
    rank_correlations,
    self_over_cross,
    tensor_drift,
)
from fa_study.tables import read_table
from fa_study.verdicts import location_verdict

LAYERS = [f"transformer_blocks.{block}.attn{kind}" for block in (0, 1) for kind in (1, 2)]
FLASH, TWIN = "Flash against Baseline", "ulp twin"


def drifts(rank):
    """{tensor: drift} where the layers drift as far as `rank` says, and the tensors around them by 9 and 20."""
    values = {}
    for layer, drift in zip(LAYERS, rank):
        values[f"denoiser.{layer}.to_q.weight"] = values[f"denoiser.{layer}.to_v.weight"] = drift
        values[f"denoiser.{layer}.to_q.bias"] = 77.0
        values[f"denoiser.{layer}.to_k.bias"] = 1000.0 * drift
    return values | {"denoiser.transformer_blocks.0.ff.net.2.weight": 9.0, "text_encoder.a.q_proj.weight": 20.0}


def study(flash, twin, *, seeds=3):
    """Seeds whose layers drift by flash and twin; there Flash errs by 1 to 4, Baseline by twice that."""
    rows, probes = [], []
    for seed in range(seeds):
        for step in (0, 200, 400):
            for kind, variant, ranks in ((FLASH, "", flash), (TWIN, "", twin), (TWIN, "from step 100", [50.0] * 4)):
                for name, drift in drifts(ranks).items():
                    size = 0.0 if step == 0 else drift * (1 + 0.1 * seed)
                    row = {"kind": kind, "variant": variant, "precision": "bf16", "seed": seed, "step": step}
                    row |= {"level": "tensor", "name": name, "zero_gradient": name.endswith("to_k.bias")}
                    rows.append(row | {"relative_l2": size})
            for place, layer in enumerate(LAYERS):
                for arm, nudge, factor in (("flash", 0, 1.0), ("flash", 1, 99.0), ("baseline", 0, 77.0)):
                    for probed, twice in (("flash", 1), ("baseline", 2)):
                        probe = {"arm": arm, "twin": nudge, "precision": "bf16", "seed": seed, "step": step}
                        probes.append(probe | {"layer": layer, "probed": probed, "rms": factor * twice * (place + 1.0)})
    return pd.DataFrame(rows), pd.DataFrame(probes)


def both(flash, twin, **options):
    weights, deviations = study(flash, twin, **options)
    drift = tensor_drift(weights)
    return drift, attention_layers(drift, deviations)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("denoiser.transformer_blocks.0.attn1.to_q.weight", "self-attention"),
        ("denoiser.mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0.bias", "cross-attention"),
        ("denoiser.transformer_blocks.1.ff.net.0.proj.weight", "feed-forward"),
        ("text_encoder.encoder.layers.0.self_attn.q_proj.weight", "text encoder"),
        ("denoiser.proj_out.bias", "other"),
    ],
)
def test_parts(name, part):
    assert part_of(name) == part


def test_layers_join_the_flash_runs_probe_with_their_weight_matrices():
    _, layers = both([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])
    assert set(layers["step"]) == {200, 400}  # nothing has moved at step 0
    row = layers[(layers["layer"] == LAYERS[2]) & (layers["seed"] == 1) & (layers["step"] == 400)].iloc[0]
    assert row[["flash", "twin", "deviation", "baseline"]].tolist() == pytest.approx([3.3, 7.7, 3, 6])
    assert row["part"] == "self-attention"


def test_rank_correlations_are_those_of_the_ranks():
    _, layers = both([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0])
    rho = rank_correlations(layers)
    assert rho["flash"].tolist() == pytest.approx([1] * 3) and rho["twin"].tolist() == pytest.approx([-1] * 3)
    swapped = rank_correlations(both([2.0, 1.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])[1])
    assert swapped["flash"].tolist() == pytest.approx([0.8] * 3)  # 1 - 6 * 2 / (4 * 15)


def test_all_tensors_but_key_biases_enter_the_correlation_of_drifts():
    rho = drift_correlations(both([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])[0])
    assert rho["rho"].tolist() == pytest.approx([1] * 3) and set(rho["tensors"]) == {14}


def test_self_over_cross_and_parts():
    drift, layers = both([6.0, 2.0, 6.0, 2.0], [3.0, 2.0, 3.0, 2.0])
    ratios = self_over_cross(layers).set_index("what")["centre"]
    assert ratios.to_dict() == pytest.approx({"deviation": (1 * 3 / 2 / 4) ** 0.5, "flash": 3, "twin": 1.5})
    parts = drift_by_part(drift).set_index("part")
    assert parts.loc["key biases", "tensors"] == 4 and parts.loc["self-attention", "tensors"] == 6
    assert parts.loc["key biases", "centre"] == pytest.approx(2**0.5)
    assert parts.loc["self-attention", "centre"] == pytest.approx(2 ** (2 / 3))  # two matrices of three tensors
    assert parts.loc["text encoder", ["centre", "flash"]].tolist() == pytest.approx([1, 22])


def test_an_interval_of_means_is_students():
    assert mean_interval(pd.Series([1.0, 2.0, 3.0])) == pytest.approx((2, 2 - 2.484, 2 + 2.484), abs=1e-3)
    with pytest.raises(ValueError, match="two or more values, one per seed"):
        mean_interval(pd.Series([1.0]))


def test_the_verdict_asks_for_more_than_the_twins_show():
    up, down = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
    assert location_verdict(*study(up, down)).holds == "holds"
    same = location_verdict(*study(up, up, seeds=2))
    assert same.holds == "does not hold"
    assert "In BF16 (2 seeds) the rank correlation is 1.00 (1.00 to 1.00) with the drift of Flash and 1.00" in same.text


def test_the_stored_tables_can_be_drawn():
    drift = tensor_drift(read_table("weights.parquet"))
    layers = attention_layers(drift, read_table("deviations.parquet"))
    assert not layers.isna().any(axis=None) and np.isfinite(drift[["flash", "twin"]]).all(axis=None)
    for chart in (figures.flash_against_twin(drift), figures.deviation_and_drift(layers)):
        spec = chart.to_dict()
        assert {part["title"] for part in spec["concat"]} == {"BF16", "FP32"}
        assert sum(map(len, spec["datasets"].values())) <= 5000

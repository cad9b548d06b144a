"""Deviation beside drift by layer, on tables whose ranks and ratios are known, and what becomes of key biases."""

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy import stats
from tiny_runs import TINY, compose_settings

from fa_study import figures
from fa_study.experiments.intervals import mean_interval
from fa_study.experiments.layers import (
    attention_layers,
    decayed,
    drift_by_part,
    drift_correlations,
    key_bias_moves,
    part_of,
    rank_correlations,
    self_over_cross,
    smallest_p,
    tensor_drift,
    yardstick_correlations,
)
from fa_study.tables import ROOT, read_table
from fa_study.verdicts import location_verdict
from fa_study.verdicts.layers import ADAM_EPSILON, key_bias_sentence
from train.data import load_data
from train.module import TextToImage

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
    """Seeds whose layers drift by flash and twin; there the two deviate by 1 to 4 and err by 4 to 1, Baseline twice."""
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
                        probe |= {"layer": layer, "probed": probed, "rms": factor * twice * (4.0 - place)}
                        probes.append(probe | {"max_flash_baseline": factor * (place + 1.0), "entropy": np.log(16.0)})
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
    assert row[["flash", "twin", "deviation"]].tolist() == pytest.approx([3.3, 7.7, 3])
    assert row[["flash_error", "baseline_error", "keys"]].tolist() == pytest.approx([2, 4, 16])
    assert row["part"] == "self-attention"


def test_rank_correlations_are_those_of_the_ranks():
    _, layers = both([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0])
    rho = rank_correlations(layers)
    assert rho["flash"].tolist() == pytest.approx([1] * 3) and rho["twin"].tolist() == pytest.approx([-1] * 3)
    swapped = rank_correlations(both([2.0, 1.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])[1])
    assert swapped["flash"].tolist() == pytest.approx([0.8] * 3)  # 1 - 6 * 2 / (4 * 15)
    assert set(rho["probes"]) == {2}


def test_each_yardstick_has_its_own_correlation():
    _, layers = both([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0])
    table = yardstick_correlations(layers).set_index("yardstick")
    assert table["flash"].to_dict() == pytest.approx({"deviation": 1, "flash_error": -1, "baseline_error": -1})
    assert table["twin"].to_dict() == pytest.approx({"deviation": -1, "flash_error": 1, "baseline_error": 1})
    assert table.loc["deviation", ["seeds", "probes", "high", "more_low"]].tolist() == pytest.approx([3, 6, 1, 2])
    with pytest.raises(ValueError, match="deviation, flash_error, baseline_error, got 'rms'"):
        rank_correlations(layers, "rms")


def test_a_probe_with_one_value_in_all_layers_is_left_out():
    _, layers = both([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0])
    layers.loc[(layers["step"] == 400) | (layers["seed"] == 2), "deviation"] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rho = rank_correlations(layers)
    assert rho[["seed", "probes"]].to_numpy().tolist() == [[0, 1], [1, 1]]
    assert rho["flash"].tolist() == pytest.approx([1, 1])


def test_the_smallest_p_is_that_of_all_orders():
    extreme = [abs(stats.spearmanr(range(4), order).statistic) > 0.999 for order in itertools.permutations(range(4))]
    assert smallest_p(4) == np.mean(extreme) == 1 / 12


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
    assert "of the largest |Flash − Baseline| is 1.00 (1.00 to 1.00) with the drift of Flash and 1.00 with" in same.text
    assert same.text.startswith("In BF16 (2 seeds) the rank")
    assert (
        "only 4 attention layers: in one seed even a perfect rank correlation has a two-sided p of 0.083" in same.text
    )


OPTIMIZER = {"lr": 1e-3, "warmup": 50, "weight_decay": 0.01}


def own_starts():
    """Key biases of two models, three seeds and two precisions, and a weight; FP32 moves a thousandth of BF16."""
    moved = {"denoiser.a.to_k.bias": 0.02, "denoiser.b.to_k.bias": 0.2, "text_encoder.a.k_proj.bias": 0.01, "w": 9.0}
    rows = [
        {"kind": kind, "precision": precision, "seed": seed, "step": step, "level": "tensor", "name": name}
        | {"zero_gradient": name != "w", "mean_difference": far * size * seed, "relative_l2": size * seed}
        for kind, far in (("its own start", 1), ("ulp twin", 99))
        for precision, factor in (("fp16_emulated", 1.0), ("fp32", 1e-3))
        for seed in range(3)
        for step in (500, 1000)
        for name, size in ((name, factor * size * step / 1000) for name, size in moved.items())
    ]
    return pd.DataFrame(rows)


def test_key_biases_are_told_by_precision_in_learning_rates():
    moves = key_bias_moves(own_starts()).set_index(["precision", "name"])
    assert len(moves) == 6 and set(moves["step"]) == {1000}
    assert moves.loc[("fp32", "denoiser.a.to_k.bias"), "moved"] == pytest.approx(2e-5)
    text = key_bias_sentence(own_starts(), OPTIMIZER)
    assert "at step 1,000, in learning rates of 0.001: in FP16 (emulated) 20 to 200 (denoiser) and 10 to 10 (" in text
    assert "; in FP32 0.02 to 0.2 (denoiser) and 0.01 to 0.01 (text encoder)." in text
    assert "plus 1e-8: noise" in text and "takes 0.98 % of" in text
    assert "the denoiser's changed by 2 to 20 % in FP16 (emulated), 0.002 to 0.02 % in FP32." in text
    with pytest.raises(ValueError, match="no parameters with a zero gradient"):
        key_bias_sentence(own_starts().query("kind == 'ulp twin'"), OPTIMIZER)


def after_training(size, *, start=0.0, steps=300):
    """Weights that AdamW was given normal noise of that size as gradients for."""
    weight = torch.full((64,), start, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], weight_decay=OPTIMIZER["weight_decay"])
    assert optimizer.defaults["eps"] == ADAM_EPSILON
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = OPTIMIZER["lr"] * min(1, (step + 1) / OPTIMIZER["warmup"])
        weight.grad = size * torch.randn(64, generator=generator)
        optimizer.step()
    return weight.detach()


def test_adam_makes_steps_of_noise_above_its_epsilon_only():
    far = {size: float(after_training(size).abs().mean()) / OPTIMIZER["lr"] for size in (1e-11, 1e-7, 1e-3)}
    assert far[1e-11] < 0.1 and far[1e-7] > 5
    assert far[1e-3] == pytest.approx(far[1e-7], rel=0.2)  # far above it the size of the noise does not count


def test_weight_decay_alone():
    end = after_training(0.0, start=0.1)
    assert decayed(OPTIMIZER, 300) == pytest.approx(float((0.1 - end[0]) / end[0]), rel=1e-3)


def test_the_noise_in_key_biases_lies_below_adams_epsilon_in_fp32_alone():
    noise = {}
    for precision in ("fp32", "bf16"):
        settings = compose_settings(*TINY, "device=cpu", f"precision={precision}")
        module = TextToImage(settings, load_data(settings))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            module.loss(module.batch(0)).backward()
        names = [name for name, _ in module.named_parameters() if name.endswith(("to_k.bias", "k_proj.bias"))]
        noise[precision] = {name: float(module.get_parameter(name).grad.square().mean().sqrt()) for name in names}
    assert len(noise["fp32"]) == 6 and max(noise["fp32"].values()) < ADAM_EPSILON / 10
    assert all(noise["bf16"][name] > 100 * size for name, size in noise["fp32"].items())
    assert max(noise["bf16"].values()) > ADAM_EPSILON


def test_the_stored_tables_can_be_drawn():
    drift = tensor_drift(read_table("weights.parquet"))
    layers = attention_layers(drift, read_table("deviations.parquet"))
    assert not layers.isna().any(axis=None) and np.isfinite(drift[["flash", "twin"]]).all(axis=None)
    for chart in (figures.flash_against_twin(drift), figures.deviation_and_drift(layers)):
        spec = chart.to_dict()
        assert {part["title"] for part in spec["concat"]} == {"BF16", "FP32"}
        assert sum(map(len, spec["datasets"].values())) <= 5000


def test_the_stored_key_biases_make_steps_in_bf16_and_not_in_fp32():
    weights = read_table("weights.parquet")
    optimizer = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["optimizer"]
    rates = key_bias_moves(weights).groupby("precision")["moved"].agg(["min", "max"]) / optimizer["lr"]
    assert rates.loc["bf16", "min"] > 3 and rates.loc["fp32", "max"] < 3
    assert f"{weights['step'].max():,}" in key_bias_sentence(weights, optimizer)

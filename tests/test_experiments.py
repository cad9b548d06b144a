"""The micro-benchmark's parts: inputs, statistics, exponents, sweeps, and the arithmetic of each measurement."""

import math
import random

import numpy as np
import pandas as pd
import pytest
import torch

from fa_study.attention import flash_attention, golden_attention
from fa_study.experiments import __main__ as command
from fa_study.experiments import attribution, blocks, compare, control, exact, formats, fp8, law, ten_times
from fa_study.experiments.errors import error_rows
from fa_study.experiments.inputs import DISTRIBUTIONS, draw
from fa_study.experiments.slopes import log_slopes
from fa_study.experiments.sweep import Sweep, forget_cells, run_sweep
from fa_study.rounding import RoundingPolicy


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_inputs_are_a_function_of_the_seed_alone(distribution):
    both, one = draw(distribution, [3, 7], L=4, S=8, D=5), draw(distribution, [7], L=4, S=8, D=5)
    assert [tuple(x.shape) for x in both] == [(2, 1, 4, 5), (2, 1, 8, 5), (2, 1, 8, 5)]
    assert all(torch.equal(a[1], b[0]) for a, b in zip(both, one))
    assert not torch.equal(both[0][0], both[0][1])


def test_the_trained_models_inputs_are_bf16_and_all_different():
    q, k, v = draw("trained", range(20), L=32, S=1024, D=64)
    assert (tuple(q.shape), tuple(k.shape), tuple(v.shape)) == ((20, 1, 32, 64), (20, 1, 1024, 64), (20, 1, 1024, 64))
    assert all(torch.equal(x, x.bfloat16().double()) for x in (q, k, v))
    assert len({float(x.sum()) for x in k}) == 20


def test_inputs_have_the_moments_that_their_names_promise():
    values = {name: draw(name, [0], L=1, S=20_000, D=8)[1] for name in DISTRIBUTIONS}
    moments = {"normal": (0, 1), "uniform": (0.5, 1 / 12), "symmetric": (0, 1 / 3), "outliers": (0, 1.1)}
    for name, (mean, variance) in moments.items():
        assert abs(values[name].mean() - mean) < 0.02
        assert values[name].var() == pytest.approx(variance, rel=0.1)
    assert values["uniform"].min() >= 0 and values["uniform"].max() < 1
    assert values["outliers"].abs().max() > 15


def test_inputs_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="distribution='cauchy' is unknown: use one of normal"):
        draw("cauchy", [0], L=1, S=1, D=1)
    with pytest.raises(ValueError, match="heads of 64, got D=32"):
        draw("trained", [0], L=1, S=1, D=32)
    with pytest.raises(ValueError, match="has 1024 rows in k, got 2048"):
        draw("trained", [0], L=1, S=2048, D=64)
    with pytest.raises(ValueError, match="positive"):
        draw("normal", [], L=1, S=1, D=1)


def test_extended_precision_agrees_with_hand_and_golden():
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)
    q[..., 0], k[..., 0, 0] = 2.0, math.log(3.0)  # scores 2 log(3) / 2 and 0: weights 3/4 and 1/4
    v = torch.tensor([[[[4.0], [8.0]]]])
    assert exact.extended_attention(q.double(), k.double(), v.double())[0, 0, 0, 0] == pytest.approx(5.0)
    for distribution in DISTRIBUTIONS:
        qkv = draw(distribution, [0, 1], L=8, S=256, D=64)
        assert 0 < exact.golden_error(*qkv, golden_attention(*qkv).out) < 1e-14


def test_statistics_of_a_known_difference():
    row = error_rows(torch.tensor([[[3.0, -1.0, 0.0, 0.0]]]), [5], arm="x").iloc[0]
    assert (row["seed"], row["arm"], row["max"], row["mean"], row["mean_abs"]) == (5, "x", 3, 0.5, 1)
    assert row["rms"] == pytest.approx(math.sqrt(2.5)) and row["std_abs"] == pytest.approx(math.sqrt(2))


def small(**settings):
    defaults = {"distribution": "normal", "N": 96, "format": "bf16", "family": "uniform", "seeds": (0, 1), "rows": 16}
    return compare.compare(**(defaults | settings))


def test_a_cell_holds_every_pair_and_obeys_the_triangle():
    frame = small(tiles=(16, 32), algorithms=("fa1", "fa2"), references=("rounded", "original"))
    # Baseline and 4 Flash settings against 2 golden values, and these 4 against Baseline, for each of 2 seeds.
    assert len(frame) == 2 * (5 * 2 + 4) and not frame.isna().any().any()
    one = frame[(frame["reference"] == "rounded") & (frame["seed"] == 1)]
    golden = one[one["against"] == "golden"].set_index(["algorithm", "Bc"])["rms"]
    between = one[one["against"] == "Baseline"].set_index(["algorithm", "Bc"])["rms"]
    for setting, distance in between.items():
        assert abs(golden[setting] - golden["", 0]) <= distance <= golden[setting] + golden["", 0]
    counted = one.set_index(["against", "algorithm", "Bc"])["rescalings"]
    assert 5 >= counted["golden", "fa1", 16] > counted["golden", "fa1", 32] > 0


def test_one_tile_of_fa2_without_narrow_sites_is_baseline():
    frame = small(format="fp32", family="kernel", tiles=(96,))
    assert frame.loc[frame["against"] == "Baseline", "max"].max() < 1e-6


def test_wider_formats_leave_no_difference_between_the_families():
    assert compare.policies("kernel", "fp64") == compare.policies("uniform", "fp64")
    assert compare.policies("kernel", "fp16") == (RoundingPolicy.kernel("fp16"), RoundingPolicy.eager("fp16"))
    with pytest.raises(ValueError, match="family='mixed' is unknown: use one of uniform, kernel"):
        compare.policies("mixed", "bf16")


def test_the_real_kernel_is_as_close_to_the_truth_as_its_emulation():
    frame = small(family="kernel", N=600, algorithms=("fa2",), kernel=True)
    errors = frame[frame["against"] == "golden"].groupby("algorithm")["rms"].mean()
    assert errors["torch"] == pytest.approx(errors["fa2"], rel=0.1) and errors["torch"] < errors[""]


def test_fp64_is_judged_in_extended_precision_unless_told_otherwise():
    judged, blind = small(format="fp64"), small(format="fp64", extended=False)
    errors = [frame.loc[frame["method"] == "Baseline", "rms"].tolist() for frame in (judged, blind)]
    assert min(errors[0]) > 0 and errors[0] != errors[1]


def test_exponents_of_exact_power_laws():
    frame = pd.DataFrame(
        [
            {"seed": s, "x": x, "kind": kind, "y": 0.1 * (1 + s) * x**power}
            for kind, power in (("root", 0.5), ("inverse", -1.0), ("constant", 0.0))
            for s in range(3)
            for x in (1, 2, 4, 8)
        ]
    )
    slopes = log_slopes(frame, "x", "y", ["kind"]).set_index("kind")
    assert slopes["exponent"].to_dict() == pytest.approx({"root": 0.5, "inverse": -1.0, "constant": 0.0})
    assert (slopes.loc["constant", ["exponent", "low", "high"]] == 0).all()  # not what rounding leaves of it
    assert (slopes["seeds"] == 3).all() and np.allclose(slopes["low"], slopes["high"])
    with pytest.raises(ValueError, match="two seeds"):
        log_slopes(frame[frame["seed"] == 0], "x", "y", ["kind"])


def test_a_sweep_goes_on_where_it_stopped(tmp_path):
    measured = []

    def measure(n, limit=[2]):  # noqa: B006  (the default is the state of this fake)
        if len(measured) == limit[0]:
            limit[0] = 99
            raise KeyboardInterrupt
        measured.append(n)
        return pd.DataFrame({"seed": [0], "square": [n * n]})

    sweep = Sweep(measure, [{"n": n} for n in range(4)])
    with pytest.raises(KeyboardInterrupt):
        run_sweep("t.csv", sweep, tmp_path)
    frame, seconds = run_sweep("t.csv", sweep, tmp_path)
    assert measured == [0, 1, 2, 3] and frame["n"].tolist() == [0, 1, 2, 3] and frame["square"].tolist() == [0, 1, 4, 9]
    assert seconds > 0 and "seconds" not in frame.attrs
    forget_cells("t.csv", tmp_path)
    run_sweep("t.csv", sweep, tmp_path)
    assert measured == [0, 1, 2, 3] * 2


def test_the_command_stores_a_table_with_its_manifest(tmp_path, monkeypatch, capsys):
    sweep = Sweep(lambda n: pd.DataFrame({"x": [n]}), [{"n": 1}])
    monkeypatch.setattr(command, "TABLES", {"t.csv": sweep})
    monkeypatch.setattr(command, "DATA", tmp_path / "notebooks" / "data")
    for name in ("write_table", "run_sweep", "forget_cells"):
        plain = getattr(command, name)
        monkeypatch.setattr(
            command, name, lambda *a, plain=plain, **k: plain(*a, **k, folder=tmp_path / "notebooks" / "data")
        )
    assert command.main(["t.csv"]) == 0
    assert "unknown: t.csv" in capsys.readouterr().out
    assert (tmp_path / "notebooks/data/t.csv").read_text() == "n,x\n1,1\n"
    assert not list((tmp_path / "notebooks/data/.cells").iterdir())
    with pytest.raises(SystemExit) as stopped:
        command.main(["nothing.csv"])
    assert stopped.value.code == 2 and "use t.csv" in capsys.readouterr().err


def test_every_table_has_distinct_cells():
    for name, sweep in command.TABLES.items():
        assert len({tuple(cell.items()) for cell in sweep.cells}) == len(sweep.cells) > 0, name


def test_block_variants_follow_the_published_formula():
    table = blocks.block_variants().set_index(["variant", "M"])
    assert table.loc[("as published", 65536)].tolist() == [64, 256, 64 * 256]
    assert table.loc[("swapped", 65536)].tolist() == [256, 64, 64 * 256]
    assert table.loc[("square, same Bc", 65536)].tolist() == [256, 256, 65536]
    assert table.loc[("square, same area", 65536)].tolist() == [128, 128, 64 * 256]


def test_rows_of_a_tile_change_no_bit():
    """What lets one measurement per Bc stand for every Br of Figure 6."""
    q, k, v = draw("normal", [0], L=48, S=96, D=16)
    policy = RoundingPolicy.uniform("bf16")
    outs = [flash_attention(q, k, v, policy=policy, algorithm="fa1", tile=(Br, 32)).out for Br in (1, 16, 48)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_blocks_are_paired_by_memory_and_seed():
    flash = [
        {"distribution": "d", "N": 2048, "family": "uniform", "format": "bf16", "seed": s, "against": "Baseline"}
        | {"method": "Flash", "Bc": Bc, "rms": (1 + s) / Bc, "max": 1.0}
        for s in (0, 1)
        for Bc in blocks.TILES
    ]
    ratios = blocks.paired_ratios(pd.DataFrame(flash), "swapped")
    widened = ratios[ratios["M"] == 65536]
    assert widened["ratio"].tolist() == pytest.approx([4.0, 4.0]) and set(widened["Bc"]) == {64}
    assert (ratios.loc[ratios["M"] <= 16384, "ratio"] == 1).all()


def test_ratios_divide_by_the_baseline_of_the_same_inputs():
    keys = {"study": "grid", "distribution": "normal", "N": 256, "format": "bf16", "D": 64}
    frame = pd.DataFrame(
        [keys | {"seed": s, "method": "Baseline", "algorithm": "", "Bc": 0, "rms": 1.0 + s} for s in (0, 1)]
        + [keys | {"seed": s, "method": "Flash", "algorithm": "fa1", "Bc": 16, "rms": 6.0} for s in (0, 1)]
    )
    result = ten_times.ratios(frame)
    assert result["ratio"].tolist() == [6.0, 3.0] and set(result["family"]) == {"uniform"}
    with pytest.raises(ValueError, match="study='none' is unknown"):
        ten_times.ten_times_cell(study="none", distribution="normal", N=256, format="bf16", D=64)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_control_never_rescales_and_is_right(normalised):
    q, k, v = draw("normal", [0, 1], L=compare.ROWS, S=64, D=16)
    policy = RoundingPolicy.uniform("fp64")
    golden = golden_attention(q, k, v)
    result = control.without_rescaling(q, k, v, policy=policy, Bc=16, normalised=normalised, largest=golden.max_scores)
    assert result.counts["rescalings"] == 0
    assert torch.allclose(result.out, golden.out, atol=1e-14)


def test_the_rescaling_share_of_a_made_up_table():
    rms = {"Baseline": 1.0, "slabs": 2.0, "slabs, normalised": 3.0, "fa2": 2.0, "fa1": 5.0, "fa4": 2.0}
    frame = pd.DataFrame(
        [{"distribution": "d", "N": 1, "Bc": 1, "format": "f", "seed": 0, "arm": a, "rms": r} for a, r in rms.items()]
    )
    shares = control.rescaling_share(frame).set_index("algorithm")["share"]
    assert shares["fa2"] == pytest.approx(1.0) and shares["fa1"] == pytest.approx((9 - 1) / (25 - 1))


def test_the_prediction_against_simulated_roundings():
    """The constants: relative errors of single roundings, from numbers whose logarithm is uniform."""
    x = torch.exp2(torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    u, step = 2.0**-8, 2.0**-7
    nearest = ((x / step).round() * step - x) / x
    cut = (x - (x / step).floor() * step) / x
    stochastic_square = (step - cut * x) * cut * x / x**2
    T = 48
    assert law.prediction([T], "nearest_even")[0] == pytest.approx(
        float((4 / 3 * T * nearest.square().mean()).sqrt() / u), rel=0.01
    )
    assert law.prediction([T], "stochastic")[0] == pytest.approx(
        float((4 / 3 * T * stochastic_square.mean()).sqrt() / u), rel=0.01
    )
    assert law.prediction([T], "toward_zero")[0] == pytest.approx(float(T * cut.mean() / u), rel=0.01)
    with pytest.raises(ValueError, match="rounding='up' is unknown"):
        law.prediction([1], "up")


def test_exponents_and_bias_of_a_made_up_law():
    frame = pd.DataFrame(
        [
            {"algorithm": "fa1", "distribution": "d", "varied": "N", "rounding": "stochastic", "T": T, "seed": s}
            | {"unit": 2.0, "rms": 2.0 * math.sqrt(T), "mean": math.sqrt(T)}
            for T in (4, 16, 64)
            for s in range(2)
        ]
    )
    assert law.fitted_exponents(frame, T_from=4, T_to=64)["exponent"].item() == pytest.approx(0.5)
    assert law.bias_share(frame)["share"].tolist() == pytest.approx([0.25] * 3)


def test_shapley_values_of_known_games():
    def game(value):
        sites = ("a", "b", "c")
        return {
            frozenset(s for s, on in zip(sites, bits) if on): value(*bits)
            for bits in [(i & 1, i >> 1 & 1, i >> 2) for i in range(8)]
        }

    assert attribution.shapley_values(game(lambda a, b, c: 3 * a + 2 * b + 1)) == pytest.approx(
        {"a": 3, "b": 2, "c": 0}
    )
    # An interaction is shared equally among those that take part in it.
    assert attribution.shapley_values(game(lambda a, b, c: 6 * a * b * c)) == pytest.approx({"a": 2, "b": 2, "c": 2})
    numbers = random.Random(0)
    drawn = game(lambda a, b, c: numbers.random())
    total = drawn[frozenset("abc")] - drawn[frozenset()]
    assert sum(attribution.shapley_values(drawn).values()) == pytest.approx(total)
    del drawn[frozenset("a")]
    with pytest.raises(ValueError, match="all 8 subsets, got 7"):
        attribution.shapley_values(drawn)


def made_up_attribution(squares):
    """A table whose mean squared errors add up over the sites; `squares` is {algorithm: {site: square}}."""
    cells = {(c["sites"], c["stochastic"]) for c in attribution.ATTRIBUTION.cells}
    return pd.DataFrame(
        [
            {
                "distribution": "uniform",
                "algorithm": a,
                "sites": sites,
                "stochastic": st,
                "seed": 0,
                "unit": 1.0,
                "mean": 0.0,
            }
            | {"rms": math.sqrt(1e-9 + sum(values.get(s, 0) * (2 if s == st else 1) for s in sites.split("+")))}
            for a, values in squares.items()
            for sites, st in sorted(cells)
        ]
    )


def test_attribution_of_a_made_up_table():
    flash = {"accumulator": 9.0, "sum": 2.0, "output": 1.0}
    table = made_up_attribution({"fa1": flash, "fa2": flash, "fa4": flash, "Baseline": {"scores": 3.0, "output": 1.0}})
    values = attribution.shapley_table(table).set_index(["algorithm", "site"])["shapley"]
    assert values["fa1", "accumulator"] == pytest.approx(9) and values["fa1", "rescale"] == pytest.approx(0, abs=1e-6)
    singles = attribution.single_sites(table).set_index(["algorithm", "site"]).loc[("fa1", "sum")]
    assert (singles["alone"], singles["all but"], singles["all"]) == pytest.approx((2**0.5, 10**0.5, 12**0.5))
    ratio = attribution.stochastic_ratios(table).set_index(["algorithm", "context", "site"])["ratio"]
    assert ratio["fa1", "alone", "sum"] == pytest.approx(2**0.5)
    assert ratio["fa1", "all", "sum"] == pytest.approx((14 / 12) ** 0.5)
    cheapest = attribution.cheapest_policies(table).set_index(["algorithm", "goal"])["in FP32"]
    assert cheapest["fa1", "Baseline"] == "accumulator"
    assert cheapest["fa1", "FP32 within the output"] == "sum, accumulator"


def test_attribution_refuses_unknown_sites():
    with pytest.raises(ValueError, match=r"unknown sites \['moon'\]"):
        attribution.attribution_cell(distribution="normal", algorithm="fa1", sites="moon", stochastic="")


def test_fp8_flushes_what_is_half_a_step_or_less():
    # e4m3's smallest number is 2^-9; half of it is a tie, which goes to the even neighbour 0.
    assert fp8.flushed(torch.tensor([[0.0, 2.0**-9, 2.0**-10, 2.0**-10 * 1.01]])) == [0.25]


def test_paper_matches_counts_exact_powers_of_two():
    rows = [
        {"distribution": d, "N": 128, "format": f, "max": value * factor, "seed": 0}
        for d, factor in (("uniform", 1.0), ("normal", 0.7))
        for f, value in formats.PAPER_FIGURE_3.items()
    ]
    shares = formats.paper_matches(pd.DataFrame(rows)).set_index("distribution").drop(columns="N")
    assert (shares.loc["uniform"] == 1).all() and (shares.loc["normal"] == 0).all()

"""The charts of the micro-benchmark: drawn from their tables, with a text alternative and no zero on a log axis."""

import json
from itertools import product

import numpy as np
import pandas as pd
import pytest
import vl_convert

from fa_study import figures
from fa_study.experiments import attribution, blocks, control, design, law
from fa_study.figures import answer
from fa_study.figures import design as drawing
from fa_study.figures.bands import positive, seed_bands
from fa_study.figures.ten_times import contour

FORMATS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}


def drawn(chart):
    """The chart's SVG, once it is certain that it has a text alternative."""
    figures.register_theme()
    spec = chart.to_dict()
    assert len(spec["usermeta"]["alt"]) > 40
    svg = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version="6.4")
    assert "NaN" not in svg and "undefined" not in svg
    return svg


def deviations(**more):
    rows = [
        {"distribution": d, "N": N, "format": f, "family": "uniform", "seed": s, "against": "Baseline", "Bc": Bc}
        | {"method": "Flash", "algorithm": "fa1", "output_rms": 0.5, "rescalings": 3.0}
        | {"max": u * (1 + s / 10) * N / Bc, "mean_abs": u * N, "std_abs": u / 2, "rms": u}
        for d, N, (f, u), Bc, s in product(("normal", "uniform"), (128, 256), FORMATS.items(), (64,), range(3))
    ]
    return pd.DataFrame(rows).assign(**more)


def test_bands_are_percentiles_of_the_seeds():
    frame = pd.DataFrame({"seed": range(21), "N": 1, "x": np.arange(21.0)})
    band = seed_bands(frame, "x", ["N"]).iloc[0]
    assert (band["median"], band["low"], band["high"], band["seeds"]) == (10, 1, 19, 21)


def test_zeros_have_no_place_on_a_log_axis():
    shown = pd.DataFrame({"low": [0.0, 1.0], "median": [1.0, 2.0]})
    assert positive(shown)["median"].tolist() == [2.0]


def test_every_output_is_compared_in_the_drawing_of_the_design():
    drawn(figures.micro_benchmark())
    compared = {start for start, end in drawing._ARROWS if end == "distance"}
    assert compared == {end for start, end in drawing._ARROWS if start == "qkv"}


def test_rounding_sites_are_those_of_the_policies():
    table = design.policy_table(design.presets("bf16"))
    svg = drawn(figures.rounding_sites(table))
    formats = table[list(design.PRESETS)].to_numpy().ravel().tolist()
    assert set(formats) == {"bf16", "fp32"}
    assert (svg.count(">BF16<"), svg.count(">FP32<")) == (formats.count("bf16"), formats.count("fp32"))
    # FlashAttention 2 rounds what enters its products and what leaves it.
    narrow = table.loc[table["kernel"] == "bf16", "site"]
    assert narrow.tolist() == ["inputs", "probabilities", "output", "grad_scores"]


def test_the_answer_in_one_picture(tmp_path):
    rows = [
        {"family": f, "distribution": "normal", "N": 64 * T, "D": 64, "algorithm": "fa1", "Bc": 64, "ratio": size * T}
        for f, size in (("uniform", 1.0), ("kernel", 0.5))
        for T in (1, 4, 16)
    ]
    drift = [
        {"kind": k, "precision": "bf16", "seed": 0, "step": s, "relative_l2": 1e-3 * (s + 1)}
        for k in ("Flash against Baseline", "ulp twin")
        for s in (0, 100)
    ]
    chart = answer.answer_picture(pd.DataFrame(rows), pd.DataFrame(drift))
    answer.write_svg(chart, tmp_path / "x.svg", sources={"a.parquet": "12ab"})
    svg = (tmp_path / "x.svg").read_text()
    assert "<!--\na.parquet 12ab\n-->" in svg
    assert "as in the paper 16 at 16 tiles" in svg and "ulp twin, BF16: 1.01e-01" in svg
    assert vl_convert.svg_to_png(svg)


def test_figure_3_draws_the_papers_points():
    svg = drawn(figures.by_format(deviations(), "title"))
    assert svg.count("the paper&#39;s Figure 3") + svg.count("the paper's Figure 3") >= 4
    assert all(name in svg for name in ("BF16", "TF32", "FP64", "uniform [0, 1)"))


def test_figure_3_draws_every_width():
    widths = [
        {"distribution": d, "format": f"e11m{bits}", "seed": s, "max": 2.0**-bits}
        for d, bits, s in product(("normal", "uniform"), range(2, 25), range(2))
    ]
    chart = figures.by_width(pd.DataFrame(widths))
    assert "2 bits: 2.50e-01" in chart.to_dict()["usermeta"]["alt"]
    assert "halved by each bit" in drawn(chart)


@pytest.mark.parametrize("statistic", ["max", "rms"])
def test_figure_4_prints_the_ratio(statistic):
    flash = deviations(against="golden")
    baseline = flash.assign(method="Baseline", max=flash["max"] / 4, rms=flash["rms"] / 4)
    chart = figures.against_golden(pd.concat([flash, baseline]), statistic, "title")
    assert drawn(chart).count(">× 4<") == len(FORMATS)
    with pytest.raises(ValueError, match="statistic is one of max, rms, got 'mode'"):
        figures.against_golden(flash, "mode", "")


def test_fp8_panels():
    frame = pd.DataFrame(
        [
            {"arm": arm, "N": N, "seed": s, "rms": 0.1, "output_rms": 1.0, "flushed": 0.5}
            for arm, N, s in product(("Baseline, no scales", "Flash, no scales"), (128, 256), range(2))
        ]
    )
    assert "share of P" in drawn(figures.fp8(frame, "flushed")) and "RMS error" in drawn(figures.fp8(frame, "error"))
    with pytest.raises(ValueError, match="value is one of"):
        figures.fp8(frame, "size")


def test_figure_5_absolute_and_relative_differ_by_the_output():
    frame = deviations()
    absolute = figures.lengths(frame, "mean_abs", relative=False).to_dict()["usermeta"]["alt"]
    relative = figures.lengths(frame, "mean_abs", relative=True).to_dict()["usermeta"]["alt"]
    assert "BF16 from 5.00e-01 to 1.00e+00" in absolute and "BF16 from 1.00e+00 to 2.00e+00" in relative
    drawn(figures.lengths(frame, "max", relative=True, title="title"))
    with pytest.raises(ValueError, match="statistic is one of max, mean_abs, std_abs"):
        figures.lengths(frame, "rms", relative=False)


def test_figure_6_draws_variants_and_counts():
    frame = pd.concat([deviations(N=2048).assign(Bc=Bc, max=1e-3 / Bc, rms=1e-3 / Bc) for Bc in blocks.TILES])
    svg = drawn(figures.blocks(frame[frame["distribution"] == "normal"], blocks.VARIANTS[:2], "(a)"))
    assert "swapped" in svg and "BF16" in svg
    ratios = figures.block_ratios(frame[frame["distribution"] == "normal"], "swapped", "title")
    assert "BF16 16.00" in ratios.to_dict()["usermeta"]["alt"]  # Bc falls from 1,024 to 64, and the error is 1 / Bc
    drawn(ratios)
    chart = figures.rescalings(frame)
    assert "a row has 255 tiles after the first and its maximum grows 3.0 times" in chart.to_dict()["usermeta"]["alt"]
    drawn(chart)


def test_the_contour_lies_between_the_cells_that_differ():
    table = pd.DataFrame([[20.0, 5.0], [5.0, 5.0]])
    assert contour(table, 10).to_numpy().tolist() == [[1, 0, 1, 1], [0, 1, 1, 1]]
    assert contour(table, 100).empty


@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_the_heat_map_counts_what_lies_within_the_contour(factor):
    frame = pd.DataFrame(
        [
            {"N": N, "Bc": Bc, "seed": s, "ratio": factor * N / Bc / 16}
            for N, Bc, s in product((256, 1024, 4096), (16, 64), range(3))
        ]
    )
    chart = figures.heat_map(frame, "title")
    expected = 1 if factor == 1 else 6
    assert f"at least 10 in {expected} of 6 cells" in chart.to_dict()["usermeta"]["alt"]
    assert "4k" in drawn(chart)


def test_the_control_names_every_arm():
    frame = pd.DataFrame(
        [{"arm": arm, "seed": s, "rms": 1.0 + s, "unit": 0.5} for arm in control.ARMS for s in range(3)]
    )
    svg = drawn(figures.control(frame, "title"))
    assert all(arm in svg for arm in control.ARMS)


@pytest.mark.parametrize("predicted", [True, False])
def test_the_law_shows_its_prediction(predicted):
    frame = pd.DataFrame(
        [
            {"algorithm": "fa1", "distribution": "d", "varied": "N", "rounding": mode, "T": T, "seed": s}
            | {"rms": T**0.5, "unit": 1.0, "mean": 0.1}
            for mode, T, s in product(law.MODES, (4, 16), range(2))
        ]
    )
    assert ("nothing fitted" in drawn(figures.law(frame, "title", predicted=predicted))) == predicted
    drawn(figures.bias(law.bias_share(frame), "title"))


def test_site_bars_order_their_text_by_size():
    frame = pd.DataFrame(
        [{"site": site, "seed": s, "x": float(i)} for i, site in enumerate(attribution.SITES) for s in range(2)]
    )
    chart = figures.site_bars(frame, "x", "error", "title", mark_at=2**0.5)
    assert chart.to_dict()["usermeta"]["alt"].startswith("error: output 6; accumulator 5")
    drawn(chart)

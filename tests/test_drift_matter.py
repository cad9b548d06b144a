"""Losses, lines and samples: ratios and barriers that are known, and the tables they are stored in."""

import io
import re

import numpy as np
import pandas as pd
import pytest
import vl_convert
from made_runs import make_run
from PIL import Image
from scipy import stats

from fa_study import figures
from fa_study.experiments import matter
from fa_study.experiments.matter import (
    barriers,
    flash_losses,
    last_losses,
    lines,
    loss_ratios,
    reduce_matter,
    sample_strips,
)
from fa_study.experiments.runs import PLAIN
from fa_study.tables import read_manifest, read_table
from fa_study.verdicts import barrier_verdict, loss_verdict
from fa_study.verdicts.matter import combined

FLASH, TWIN, OTHER = "Flash against Baseline", "ulp twin", "other initialisation"


def loss_table(flash=1.0, seeds=3, low=None):
    """Baseline ends at 0.2 * 1.1^seed in both precisions, Flash at `flash` times that, twins near it.

    flash: a number, or a function of the seed; low: the same for BF16, if it is another one there.
    """
    rows = []

    def add(arm, precision, seed, end, *, twin=0, name="", last=1000, **changed):
        run = f"{arm}-{precision}-s{seed}-twin{twin}{name}"
        about = {"run": run, "arm": arm, "precision": precision, "seed": seed, **PLAIN, "twin": twin, "twin_step": 0}
        for step in range(0, last + 50, 50):
            loss = 5.0 if step < 800 else end * (1.5 if step % 100 else 2 / 3 * 1.0)
            rows.append(about | {"step": step, "held_out_loss": loss} | changed)
        rows.append(about | {"step": 10, "held_out_loss": float("nan")} | changed)

    for seed in seeds if isinstance(seeds, range) else range(seeds):
        end, off = 0.2 * 1.1**seed, 1 + 0.001 * (seed - 1)
        for precision in ("bf16", "fp32"):
            add("baseline", precision, seed, end)
            ratio = flash if low is None or precision == "fp32" else low
            add("flash", precision, seed, end * (ratio(seed) if callable(ratio) else ratio) * off)
            add("baseline", precision, seed, end * off, twin=1)
            add("baseline", precision, seed, 99.0, twin=1, name="-twin_step100", twin_step=100)
            add("baseline", precision, seed, 99.0, name="-data_seed1", data_seed=1)
        for control in ("threads", "repeat", "batch_split"):
            add("baseline", "bf16", seed, 99.0, name=f"-{control}2", **{control: 2})
        add("baseline", "bf16", seed, 99.0, name="-steps400", last=400)
        add("baseline", "fp16_emulated", seed, end * 1.2 * off)
    return pd.DataFrame(rows)


def line_table(flash=0.0, other=1.0):
    """Lines between 0.2 and 0.4 that rise by the share flash, or other, over the straight line in the middle."""
    rows = []
    for kind, rise in ((FLASH, flash), (TWIN, -0.1), (OTHER, other)):
        for precision, seed, place, batch in np.ndindex(2, 2, 11, 2):
            alpha = place / 10
            loss = (0.2 + 0.2 * alpha) * (1 + 4 * alpha * (1 - alpha) * rise) * (1 + 0.5 * (-1) ** batch)
            row = {"kind": kind, "precision": ("bf16", "fp32")[precision], "seed": seed, "alpha": np.float32(alpha)}
            rows.append(row | {"batch": batch, "loss": loss})
    return pd.DataFrame(rows)


def test_last_losses_are_of_plain_runs_and_of_the_last_snapshots():
    final = last_losses(loss_table())
    # of 800, 850, ..., 1000 three are 2/3 and two 3/2 of the end
    assert final["baseline", "bf16", 1, 0] == pytest.approx(0.22 * (3 * 2 / 3 + 2 * 1.5) / 5)
    assert last_losses(loss_table(), average="median")["baseline", "bf16", 1, 0] == pytest.approx(0.22 * 2 / 3)
    assert final.max() < 1  # no later fork, other data order or control


def test_ratios_are_paired_by_seed():
    ratios = loss_ratios(loss_table(flash=1.3)).set_index(["kind", "precision"])
    for precision in ("bf16", "fp32"):
        row = ratios.loc[(FLASH, precision)]
        assert row["centre"] == pytest.approx(1.3, rel=1e-4) and row["low"] > 1.29 and row["seeds"] == 3
        assert 1 < row["detectable"] < 1.01
        # two initialisations have no order, hence no mean; the logarithms of two independent losses differ by sqrt(2)
        # times the standard deviation of one, here of 0, log 1.1 and 2 log 1.1
        other = ratios.loc[(OTHER, precision)]
        assert other["spread"] == pytest.approx(2**0.5 * np.log(1.1)) and other["seeds"] == 3
        assert other[["centre", "low", "high", "detectable", "t", "wilcoxon"]].isna().all()
    assert ratios.loc[("FP16 against FP32", "fp32"), "centre"] == pytest.approx(1.2, rel=1e-4)
    assert ratios.loc[("BF16 against FP32", "fp32"), ["centre", "spread"]].tolist() == pytest.approx([1, 0], abs=1e-6)


def test_a_barrier_is_the_rise_over_the_straight_line():
    rises = barriers(line_table(flash=0.05, other=2.0)).set_index(["kind", "precision", "seed"])
    assert rises.loc[(FLASH, "bf16", 0), ["barrier", "alpha"]].tolist() == pytest.approx([0.05, 0.5])
    assert rises.loc[(OTHER, "fp32", 1), "barrier"] == pytest.approx(2) and not rises.loc[OTHER, "connected"].any()
    twin = rises.loc[(TWIN, "bf16", 1)]
    assert twin[["barrier", "dip"]].tolist() == pytest.approx([0, -0.1], abs=1e-6) and twin["connected"]


def scattered(seed):
    """Ratios whose interval over the seeds 0 to 2 is wide and holds 1."""
    return (0.8, 1.0, 1.25)[seed % 3]


def test_a_finding_is_equal_different_or_undecided():
    def finding(flash):
        rows = flash_losses(loss_table(flash)).query("precision == 'fp32' and average == 'mean'")
        assert rows["which"].tolist() == ["all"] and rows["primary"].all()
        return rows["finding"].item()

    assert [finding(flash) for flash in (1.0, 1.02, 1.3, 0.7, scattered)] == [
        *("equal", "equal", "differs", "differs", "undecided")
    ]
    # 1.02 leaves 1 out, but within the margin no difference counts
    assert flash_losses(loss_table(1.02))["low"].gt(1).all()
    with pytest.raises(ValueError, match="takes plain Flash and Baseline runs of two or more seeds"):
        flash_losses(loss_table(seeds=1))


def test_the_tests_of_the_losses_are_those_of_scipy():
    row = flash_losses(loss_table(lambda seed: 1 + seed / 10, seeds=6)).query("precision == 'fp32'").iloc[0]
    logs = np.log([(1 + seed / 10) * (1 + 0.001 * (seed - 1)) for seed in range(6)])
    t = logs.mean() / logs.std(ddof=1) * 6**0.5
    assert row["t"] == pytest.approx(2 * stats.t.sf(t, 5), rel=1e-4)
    assert row["wilcoxon"] == pytest.approx(2 * 2 / 2**6)  # only seed 0 is below, with the smallest rank: 1 + 1 of 64


@pytest.mark.parametrize(
    ("low", "flash", "holds"),
    [
        (1.0, 1.0, "does not hold"),
        (1.3, 1.3, "holds"),
        (1.3, 1.0, "holds only where"),
        (scattered, scattered, "undecided"),
        (1.0, scattered, "undecided"),  # what is undecided is no evidence against
        (1.3, scattered, "holds only where"),
    ],
)
def test_the_verdict_on_the_loss(low, flash, holds):
    verdict = loss_verdict(loss_table(flash, low=low))
    assert verdict.holds == holds
    assert ("FP32: undecided, 1.000 (" in verdict.text) == (flash is scattered)
    assert "3 seeds, none of them fresh; they would tell" in verdict.text
    assert "Two initialisations differ by 13.5% in BF16" in verdict.text


def test_fresh_seeds_decide():
    table = loss_table(lambda seed: 1.3 if seed < 8 else 1.0, seeds=range(5, 11))
    found = flash_losses(table).query("average == 'mean'").set_index(["precision", "which"])
    assert found.loc[("bf16", "fresh"), "finding"] == "equal" and found.loc[("bf16", "first"), "finding"] == "differs"
    assert found["primary"].loc[["bf16", "fp32"]].groupby(level="which").all().to_dict() == {
        "all": False,
        "first": False,
        "fresh": True,
    }
    verdict = loss_verdict(table)
    assert verdict.holds == "does not hold"
    assert "over 3 fresh seeds (from seed 8 on)" in verdict.text
    assert "because of the 3 seeds before: 1.3" in verdict.text and "All 6 together: 1.14" in verdict.text
    older = table["precision"].eq("fp32") & table["seed"].ge(8)
    assert "seeds, none of them fresh" in loss_verdict(table[~older]).text


def test_a_loss_may_differ_where_lines_connect():
    losses = loss_table(1.3)
    assert loss_verdict(losses).holds == "holds"
    verdict = barrier_verdict(line_table(0.0), losses)
    assert verdict.holds == "does not hold"
    # with 0 of 2 pairs, a barrier in a share s of them goes unseen with probability (1 - s)^2: 5 % at 1 - sqrt(0.05)
    words = "0 of 2 pairs in BF16 (lines of 2 of 3 seeds were measured; a barrier in up to 78% of such pairs remains"
    assert words in verdict.text and "in 4 of 4, by 100% to 100%" in verdict.text


def test_the_verdict_on_the_barrier():
    losses = loss_table()
    raised = barrier_verdict(line_table(0.5), losses)
    assert raised.holds == "holds" and "rises by at most 50.0%" in raised.text and "2 of 2 pairs in FP32" in raised.text
    assert "up to 100%" in raised.text
    low, high = line_table(0.0).query("precision == 'bf16'"), line_table(0.5).query("precision == 'fp32'")
    assert barrier_verdict(pd.concat([low, high]), losses).holds == "holds only where"
    alone = barrier_verdict(line_table().query("kind == @FLASH"), losses)
    assert "two initialisations" not in alone.text
    for none in (line_table().query("kind == @TWIN"), line_table().iloc[:0]):
        with pytest.raises(ValueError, match="at least one setting"):
            barrier_verdict(none, losses)


def test_undecided_settings_decide_nothing():
    told = [[True], [True, True], [True, False], [True, None], [None], [None, False], [False, False]]
    assert [combined(part) for part in told] == [
        *("holds", "holds", "holds only where", "holds only where", "undecided", "undecided", "does not hold")
    ]
    with pytest.raises(ValueError, match="at least one setting"):
        combined([])


def study(folder):
    """Four runs, of which Flash and the twin have samples, and a line for the pair of Flash and Baseline."""
    red = Image.new("RGB", (8, 4), (255, 0, 0))
    alone = make_run(folder, "baseline", "fp16_emulated")
    for run in (
        alone,
        make_run(folder, "flash"),
        make_run(folder, "baseline", twin=1),
        make_run(folder, "flash", seed=9),
    ):
        red.save(run / "samples.png")
    baseline = make_run(folder, "baseline")
    repeated = make_run(folder, "baseline", repeat=1)
    red.save(repeated / "samples.png")
    (folder / "lines").mkdir()
    line = pd.DataFrame({"alpha": [0.0, 1.0], "batch": 0, "loss": [0.1, 0.2]})
    line.to_csv(folder / "lines" / f"flash-fp32-dit-s0--{baseline.name}.csv", index=False)


def test_lines_and_samples_become_tables_that_keep_what_is_gone(tmp_path, monkeypatch, capsys):
    study(tmp_path / "a")
    assert (
        set(lines(tmp_path / "a")["kind"]) == {FLASH}
        and lines(tmp_path / "a", {"flash-fp32-dit-s0--baseline-fp32-dit-s0"}).empty
    )
    strips = sample_strips(tmp_path / "a")
    assert set(strips["run"]) == {"flash-fp32-dit-s0", "baseline-fp32-dit-s0-twin1"}
    picture = Image.open(io.BytesIO(strips["png"].iloc[0]))
    assert picture.size == (4, 2) and picture.convert("RGB").getpixel((3, 1)) == (255, 0, 0)
    tables = tmp_path / "tables"
    told = reduce_matter(tmp_path / "a", tables)
    assert told == ["lines.parquet: 2 rows", "samples.parquet: 2 rows"]
    make_run(tmp_path / "b", "baseline")
    assert reduce_matter(tmp_path / "b", tables) == told
    assert read_table("samples.parquet", tables)["png"].iloc[0] == strips["png"].iloc[0]
    entry = read_manifest(tables)["lines.parquet"]
    assert entry["run_commits"] == ["abc"] and "flash-fp32-dit-s0" in entry["runs"]  # whose row is still there
    with pytest.raises(SystemExit) as stop:
        matter.main([str(tmp_path)])
    assert stop.value.code == 2 and "holds no finished run; give a folder" in capsys.readouterr().err


def test_the_charts_draw_every_pair():
    chart = figures.loss_ratio(loss_ratios(loss_table())).to_dict()
    assert (
        f"{FLASH}, BF16: 1.000" in chart["usermeta"]["alt"] and "FP16 against FP32: 1.200" in chart["usermeta"]["alt"]
    )
    emulated = figures.loss_ratio(loss_ratios(loss_table()).assign(precision="fp16_emulated"))
    text = emulated.to_dict()["usermeta"]["alt"]
    assert f"{OTHER}, FP16: spread 13.5%" in text  # a reader knows the format, not our name for it
    losses = loss_table(seeds=range(6, 10))
    fresh = flash_losses(losses).query("which == 'fresh' and average == 'mean'")
    svg = vl_convert.vegalite_to_svg(figures.loss_ratio(pd.concat([fresh, loss_ratios(losses)])).to_json())
    assert svg.count(">Flash against Baseline, BF16, fresh<") == 1 and "NaN" not in svg
    # a mean and an interval for each ratio, none for other initialisations: 2 fresh, 2 Flash, 2 twins, 2 formats
    assert len(re.findall(r'aria-roledescription="point"', svg)) == 8
    text = figures.line_losses(line_table(other=1.0)).to_dict()["usermeta"]["alt"]
    assert f"{OTHER}, BF16: 0.600" in text and f"{TWIN}, FP32: 0.270" in text


def test_samples_are_shown_with_their_arm(tmp_path):
    study(tmp_path)
    shown = figures.sample_rows(sample_strips(tmp_path)).data
    assert (
        shown.count("<img") == 2 and 'alt="Samples of Flash in FP32, seed 0"' in shown and "Baseline, nudged" in shown
    )

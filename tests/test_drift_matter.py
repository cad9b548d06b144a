"""Losses, lines and samples: ratios and barriers that are known, and the tables they are stored in."""

import io

import numpy as np
import pandas as pd
import pytest
from made_runs import make_run
from PIL import Image

from fa_study import figures
from fa_study.experiments import matter
from fa_study.experiments.matter import barriers, last_losses, lines, loss_ratios, reduce_matter, sample_strips
from fa_study.experiments.runs import PLAIN
from fa_study.tables import read_manifest, read_table
from fa_study.verdicts import matter_verdict

FLASH, TWIN, OTHER = "Flash against Baseline", "ulp twin", "other initialisation"


def loss_table(flash=1.0, seeds=3):
    """Baseline ends at 0.2 * 1.1^seed in both precisions, Flash at `flash` times that, twins near it."""
    rows = []

    def add(arm, precision, seed, end, *, twin=0, name="", last=1000, **changed):
        run = f"{arm}-{precision}-s{seed}-twin{twin}{name}"
        about = {"run": run, "arm": arm, "precision": precision, "seed": seed, **PLAIN, "twin": twin, "twin_step": 0}
        for step in range(0, last + 50, 50):
            loss = 5.0 if step < 800 else end * (1.5 if step % 100 else 2 / 3 * 1.0)
            rows.append(about | {"step": step, "held_out_loss": loss} | changed)
        rows.append(about | {"step": 10, "held_out_loss": float("nan")} | changed)

    for seed in range(seeds):
        end, off = 0.2 * 1.1**seed, 1 + 0.001 * (seed - 1)
        for precision in ("bf16", "fp32"):
            add("baseline", precision, seed, end)
            add("flash", precision, seed, end * flash * off)
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
        assert ratios.loc[(OTHER, precision), "centre"] == pytest.approx(1.1, rel=1e-5)
    assert ratios.loc[("FP16 against FP32", "fp32"), "centre"] == pytest.approx(1.2, rel=1e-4)
    assert ratios.loc[("BF16 against FP32", "fp32"), ["centre", "spread"]].tolist() == pytest.approx([1, 0], abs=1e-6)


def test_a_barrier_is_the_rise_over_the_straight_line():
    rises = barriers(line_table(flash=0.05, other=2.0)).set_index(["kind", "precision", "seed"])
    assert rises.loc[(FLASH, "bf16", 0), ["barrier", "alpha"]].tolist() == pytest.approx([0.05, 0.5])
    assert rises.loc[(OTHER, "fp32", 1), "barrier"] == pytest.approx(2) and not rises.loc[OTHER, "connected"].any()
    twin = rises.loc[(TWIN, "bf16", 1)]
    assert twin[["barrier", "dip"]].tolist() == pytest.approx([0, -0.1], abs=1e-6) and twin["connected"]


@pytest.mark.parametrize(
    ("flash", "rise", "holds"), [(1.0, 0.0, "does not hold"), (1.3, 0.0, "holds only where"), (1.3, 0.5, "holds")]
)
def test_the_verdict_follows_losses_and_barriers(flash, rise, holds):
    verdict = matter_verdict(loss_table(flash), line_table(rise))
    assert verdict.holds == holds
    assert f"rises by at most {rise:.1%}" in verdict.text and "in 4 of 4, by 100% to 100%" in verdict.text
    assert f"{flash:.3f} in BF16 (" in verdict.text and "3 seeds" in verdict.text
    two = matter_verdict(loss_table(flash, seeds=2), line_table(rise).query("kind == @FLASH"))
    assert "2 seeds" in two.text and "two initialisations in" not in two.text


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
    assert f"{OTHER}, FP16: " in emulated.to_dict()["usermeta"]["alt"]  # a reader knows the format, not our name for it
    text = figures.line_losses(line_table(other=1.0)).to_dict()["usermeta"]["alt"]
    assert f"{OTHER}, BF16: 0.600" in text and f"{TWIN}, FP32: 0.270" in text


def test_samples_are_shown_with_their_arm(tmp_path):
    study(tmp_path)
    shown = figures.sample_rows(sample_strips(tmp_path)).data
    assert (
        shown.count("<img") == 2 and 'alt="Samples of Flash in FP32, seed 0"' in shown and "Baseline, nudged" in shown
    )

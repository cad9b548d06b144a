"""The page on speed: bars read from their text, and a picture that says which are missed."""

import pandas as pd
import pytest

from fa_study.figures.speed import beside_bars, speed
from fa_study.tables import read_table


def measured(**bars):
    """A row per bar, each measured at a ratio of 0.5."""
    rows = [{"topic": "t", "benchmark": name, "ours_s": 1.0, "peer_s": 2.0, "ratio": 0.5, "bar": bar}
            for name, bar in bars.items()]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("bar", "limit", "share", "result"),
    [
        ("at most 2", 2.0, 0.25, "met"),
        ("at most 1/4 = 0.25", 0.25, 2.0, "missed"),
        ("at most 0.5", 0.5, 1.0, "met"),
        ("at least 1.5 (100 x per row)", 1.5, 3.0, "missed"),
        ("at least 0.25", 0.25, 0.5, "met"),
    ],
)
def test_a_bar_is_read_from_its_text(bar, limit, share, result):
    (row,) = beside_bars(measured(a=bar, b="none: the bits, not the speed")).itertuples()
    assert (row.benchmark, row.limit, row.share, row.result) == ("a", limit, pytest.approx(share), result)


def test_every_stored_bar_is_understood():
    table = read_table("speed.csv")
    without = table[~table["benchmark"].isin(beside_bars(table)["benchmark"])]
    assert without["bar"].str.startswith("none").all()


def test_the_chart_says_what_is_missed_and_leaves_out_a_zero():
    bars = beside_bars(
        pd.concat([measured(fast="at most 1", slow="at most 0.25"), measured(nothing="at most 1").assign(ratio=0.0)])
    )
    spec = speed(bars, "t").to_dict()
    assert "slow 2.00, missed" in spec["usermeta"]["alt"] and "fast 0.50, met" in spec["usermeta"]["alt"]
    drawn = {row["benchmark"] for rows in spec["datasets"].values() for row in rows if "benchmark" in row}
    assert drawn == {"fast", "slow"}

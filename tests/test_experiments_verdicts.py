"""The verdicts on C1 to C6 and the open questions, on made-up tables: claims true, partly true and false."""

from itertools import product

import pandas as pd
import pytest

from fa_study import verdicts
from fa_study.experiments import blocks, law
from fa_study.experiments.attribution import SITES
from fa_study.verdicts.microbenchmark import answer

ANSWERS = ("holds", "holds only where", "does not hold")


def test_a_claim_may_fail_in_one_setting_of_twenty():
    assert [answer(part, 20) for part in (20, 19, 18, 2, 1, 0)] == [
        *("holds", "holds", "holds only where", "holds only where", "does not hold", "does not hold")
    ]
    with pytest.raises(ValueError, match="empty table"):
        answer(0, 0)


def formats(values):
    """`values`: {distribution: max difference per paper format}; the widths halve with every bit."""
    rows = [
        {"distribution": d, "family": "uniform", "algorithm": "fa1", "format": f, "seed": s, "max": value}
        for d, four in values.items()
        for f, value in zip(("bf16", "fp16", "fp32", "fp64"), four)
        for s in range(3)
    ]
    rows += [
        {
            "distribution": "normal",
            "family": "uniform",
            "algorithm": "fa1",
            "format": f"e11m{b}",
            "seed": s,
            "max": 2.0**-b,
        }
        for b in range(2, 25)
        for s in range(3)
    ]
    return pd.DataFrame(rows)


def test_c1():
    falling, flat = (8, 4, 2, 1), (8, 4, 4, 1)
    assert [
        verdicts.format_verdict(formats({"normal": a, "uniform": b})).holds
        for a, b in ((falling, falling), (falling, flat), (flat, flat))
    ] == list(ANSWERS)
    assert "multiplies it by 0.50" in verdicts.format_verdict(formats({"normal": falling})).text


def ratio_table(uniform, kernel):
    rows = [
        {
            "family": family,
            "distribution": "normal",
            "N": N,
            "D": 64,
            "algorithm": "fa1",
            "Bc": 16,
            "seed": s,
            "ratio": r,
        }
        for family, values in (("uniform", uniform), ("kernel", kernel))
        for N, r in zip((256, 1024, 4096, 16384), values)
        for s in range(3)
    ]
    return pd.DataFrame(rows)


def test_c2():
    tables = (ratio_table((6, 12), (5, 20)), ratio_table((2, 12), (0.3, 0.5)), ratio_table((2, 3), (0.3, 40)))
    found = [verdicts.ten_times_verdict(table) for table in tables]
    assert [v.holds for v in found] == list(ANSWERS)
    assert (
        "1 of 4 settings" in found[1].text
        and "1 of the 1 settings with N / Bc = 64" in found[1].text
        and "0.3 to 0.5" in found[1].text
    )
    assert "more in 1" in found[2].text
    # Of settings with as many tiles as those that have it, some have it and some do not.
    table = ratio_table((6, 12, 3, 7), (1, 1, 1, 1))
    assert "normal N(0, 1), 3 of the 4 settings with N / Bc from 16 to 1024" in verdicts.ten_times_verdict(table).text


def length_table(exponents, output_exponent=0.0):
    rows = [
        {"distribution": d, "family": "uniform", "algorithm": "fa1", "format": "bf16", "N": N, "seed": s}
        | dict.fromkeys(("max", "mean_abs", "std_abs"), (1 + s) * N**e)
        | {"output_rms": N**output_exponent}
        for d, e in exponents.items()
        for N in (128, 256, 512)
        for s in range(3)
    ]
    return pd.DataFrame(rows)


def test_c3():
    growing, mixed, falling = ({"normal": a, "uniform": b} for a, b in ((0.5, 0.2), (-0.5, 0.2), (-0.5, -0.1)))
    assert [verdicts.length_verdict(length_table(e)).holds for e in (growing, mixed, falling)] == list(ANSWERS)
    # Absolute it falls; relative to an output that falls faster it grows, and both are told.
    text = verdicts.length_verdict(length_table(falling, output_exponent=-0.6)).text
    assert "absolute numbers it grows in 0 of 6" in text and "in 6 of 6" in text


def block_table(powers):
    """`powers`: {distribution: exponent of Bc}."""
    rows = [
        {"distribution": d, "family": "uniform", "format": "bf16", "N": 2048, "against": "Baseline", "method": "Flash"}
        | {"Bc": Bc, "seed": s, "rms": (1 + s) * float(Bc) ** power}
        for d, power in powers.items()
        for Bc in blocks.TILES
        for s in range(3)
    ]
    return pd.DataFrame(rows)


SHARES = pd.DataFrame({"algorithm": "fa1", "seed": range(4), "share": 1.0})


def test_c4():
    tables = [block_table({"normal": a, "uniform": b}) for a, b in ((-1, -0.5), (-1, 0.5), (0.5, 0.0))]
    found = [verdicts.swap_verdict(table) for table in tables]
    assert [v.holds for v in found] == list(ANSWERS)
    assert "it has no effect" in found[0].text


def test_c5():
    tables = [block_table({"normal": a, "uniform": b}) for a, b in ((-0.1, 0.0), (-3, 0.0))]
    assert [verdicts.square_verdict(table).holds for table in tables] == ["holds", "holds only where"]


def test_c6():
    falling, rising = block_table({"normal": -0.5}), block_table({"normal": 0.5})
    because = SHARES.assign(share=0.1)
    assert verdicts.block_size_verdict(falling, because).holds == "holds"
    assert verdicts.block_size_verdict(falling, SHARES).holds == "does not hold"  # smaller, but for another reason
    assert verdicts.block_size_verdict(rising, SHARES).holds == "does not hold"
    assert "rescaling explains it in 0 of 1" in verdicts.block_size_verdict(falling, SHARES).text


def law_table(nearest):
    """Stochastic and toward zero as predicted; to nearest the prediction times `nearest`(T)."""
    rows = [
        {"algorithm": "fa1", "distribution": "uniform", "varied": "N", "rounding": mode, "T": T, "seed": s, "unit": 1.0}
        | {"rms": law.prediction([T], mode)[0] * (nearest(T) if mode == "nearest_even" else 1.0)}
        for mode, T, s in product(law.MODES, (4, 16, 64, 128, 512), range(3))
    ]
    frame = pd.DataFrame(rows)
    return frame.assign(mean=frame["rms"] * (frame["T"] > 100))


def test_the_law():
    assert verdicts.law_verdict(law_table(lambda T: 1.0)).holds == "holds"
    verdict = verdicts.law_verdict(law_table(lambda T: max(1.0, (T / 16) ** 0.5)))
    assert verdict.holds == "holds only where"
    assert "2 of 4 cases to nearest" in verdict.text and "0.50 up to T = 16, 1.00 beyond" in verdict.text
    assert "from T = 128 on" in verdict.text


def test_the_blame():
    def table(worst):
        shares = {site: 0.9 if site == worst else 0.01 for site in SITES}
        rows = [
            {"distribution": "normal", "algorithm": "fa1", "seed": 0, "site": s, "share": x} for s, x in shares.items()
        ]
        return pd.DataFrame(rows)

    assert verdicts.blame_verdict(table("rescale")).holds == "holds"
    verdict = verdicts.blame_verdict(table("accumulator"))
    assert verdict.holds == "does not hold" and "accumulator 90%, rescale 1.0%" in verdict.text


def test_the_rescaling():
    keys = {"distribution": "normal", "format": "bf16", "N": 1024, "Bc": 16, "seed": 0}
    shares = pd.DataFrame([keys | {"algorithm": a, "share": x} for a, x in (("fa1", 0.9), ("fa2", 0.2))])
    assert verdicts.rescaling_verdict(shares).holds == "holds only where"
    assert verdicts.rescaling_verdict(shares[shares["algorithm"] == "fa1"]).holds == "does not hold"


def test_an_empty_table_gives_no_verdict():
    with pytest.raises((ValueError, KeyError)):
        verdicts.ten_times_verdict(ratio_table((), ()))

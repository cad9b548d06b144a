"""Interleaved timing of two functions, so that a ratio holds while the machine's speed drifts."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratio(name: str, ours: Callable[[], object], peer: Callable[[], object], *, bar: str, rounds: int = 5) -> dict:
    """Time `ours` and `peer` in turn (A B A B ...) after one warm-up each.

    Returns a row: the name, the median seconds of both, the median of ours / peer pair by pair, and the bar that the
    project set itself, as text. The bar is never asserted: timings on shared machines are noisy.
    """
    ours(), peer()
    pairs = [(seconds(ours), seconds(peer)) for _ in range(rounds)]
    return {
        "benchmark": name,
        "ours_s": median(a for a, _ in pairs),
        "peer_s": median(b for _, b in pairs),
        "ratio": median(a / b for a, b in pairs),
        "bar": bar,
    }


def show(rows: list[dict]) -> None:
    for row in rows:
        print(
            f"{row['benchmark']:60s} ours {row['ours_s']:.4g} s  peer {row['peer_s']:.4g} s  "
            f"ratio {row['ratio']:.3g}  (bar: {row['bar']})"
        )

"""Which rounding policy predicts an attention: presets and single-site changes, scored by the error they explain.

    R2 = 1 - |theirs - emulation|^2 / |theirs - golden|^2

1: the emulation is theirs to the bit; 0: it predicts no better than the exact result. Policies are fitted on half of
the cases and checked on the other half; those within 0.01 of the best are all listed: they cannot be told apart.

Shape letters: B batch, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import functools
import math

import pandas as pd
from torch import Tensor

from fa_study.audit.accuracy import truth
from fa_study.audit.candidates import Candidate, candidates
from fa_study.audit.cases import Case
from fa_study.audit.finding import Finding
from fa_study.audit.subject import Subject

# Policies this close to the best cannot be told from it; below FITS, the best explains too little to be named.
TIE, FITS = 0.01, 0.9
COLUMNS = ("dtype", "backward", "policy", "r2", "r2_check", "equal", "chosen", "fault")


def r_squared(theirs: Tensor, emulation: Tensor, golden: Tensor) -> float:
    """``1 - |theirs - emulation|^2 / |theirs - golden|^2``: the share of their error that the emulation has too.

    1 where theirs is the emulation to the bit, NaN where theirs has no error to explain, -inf if values are not finite.
    """
    theirs, emulation, golden = theirs.double(), emulation.double(), golden.double()
    left, error = (theirs - emulation).square().sum(), (theirs - golden).square().sum()
    if error == 0:
        return math.nan
    share = float(1 - left / error)
    return share if math.isfinite(share) else -math.inf


def policy_cases(dtype: str, pairs: list[tuple[int, int]], head_size: int) -> list[Case]:
    """Four cases, fitted on the first and third: long rows where the callable takes them, half of them ragged."""
    shapes = [pair for pair in ((64, 512), (64, 500)) if any(a != b for a, b in pairs)] or [pairs[-1]] * 2
    start = Case(dtype, D=head_size, B=1, H=2, Hkv=2)
    (L, S), (L2, S2) = shapes
    return [
        start.replace(L=L, S=S, seed=11),
        start.replace(L=L, S=S, seed=12, logits=2.0),
        start.replace(L=L2, S=S2, seed=13, distribution="positive"),
        start.replace(L=L2, S=S2, seed=14),
    ]


def fit(subject: Subject, cases: list[Case]) -> tuple[pd.DataFrame, list[Finding]]:
    """The table of policies for one dtype, best first, and what the best of them means.

    Columns: r2 over the cases of even index, r2_check over the others for those within TIE of the best (NaN else),
    equal (share of bit-equal outputs in the checked half), chosen, fault.
    """
    data = []
    for case in cases:
        outcome = subject.run(case)
        if not outcome.error and outcome.out.isfinite().all():
            data.append((case, outcome.out, truth(case, "top_left")))
    if len(data) < 2:
        return pd.DataFrame(columns=COLUMNS), []
    return score(data[::2], data[1::2])


@functools.lru_cache(maxsize=512)
def _emulated(case: Case, dtype: str, keys: int, name: str) -> Tensor:
    candidate = next(c for c in candidates(dtype, keys) if c.name == name)
    return candidate.emulate(*case.inputs())


def score(fitted: list[tuple], checked: list[tuple]) -> tuple[pd.DataFrame, list[Finding]]:
    """As `fit`, from (case, output, golden output) triples."""
    dtype, keys = fitted[0][0].dtype, min(case.S for case, _, _ in fitted)

    def r2(candidate: Candidate, data: list[tuple]) -> float:
        pairs = ((_emulated(case, dtype, keys, candidate.name), out, golden) for case, out, golden in data)
        return mean_of_known([r_squared(out, emulation, golden) for emulation, out, golden in pairs])

    # The first case sorts out those that are far off.
    first = {c: r2(c, fitted[:1]) for c in candidates(dtype, keys)}
    near = max(first.values(), default=math.nan) - 0.2
    rows = [
        (dtype, False, c.name, r2(c, fitted) if value >= near else value, math.nan, math.nan, False, c.fault)
        for c, value in first.items()
    ]
    table = pd.DataFrame(rows, columns=COLUMNS).sort_values("r2", ascending=False, kind="stable", ignore_index=True)
    best = table.r2.iloc[0]
    for i in table.index[table.r2 >= best - TIE]:
        emulations = [(_emulated(case, dtype, keys, table.policy[i]), out, golden) for case, out, golden in checked]
        table.loc[i, "r2_check"] = mean_of_known([r_squared(out, e, golden) for e, out, golden in emulations])
        table.loc[i, "equal"] = mean_of_known([float((e == out).double().mean()) for e, out, _ in emulations])
        table.loc[i, "chosen"] = bool(table.r2_check[i] >= FITS and best >= FITS)
    return table, _meaning(table, dtype)


def mean_of_known(values: list[float]) -> float:
    """The mean of the values that are not NaN."""
    known = [x for x in values if not math.isnan(x)]
    return sum(known) / len(known) if known else math.nan


def _meaning(table: pd.DataFrame, dtype: str) -> list[Finding]:
    """A failure if only unsound policies predict it, or if one comes much nearer than every sound one."""
    sound = table[table.fault == ""].r2.max()
    first = (table[table.chosen] if table.chosen.any() else table).iloc[0]
    if not first.fault or first.r2 - sound < (TIE if first.chosen else 0.3):
        return []
    how = "predicts it" if first.chosen else "comes nearest to it"
    text = f"{dtype}: the rounding that {how} is not sound: {first.policy} (R2 {first.r2:.3f}; sound ones {sound:.3f})"
    return [Finding("fail", first.fault, text)]

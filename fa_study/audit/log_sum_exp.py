"""Is the second output of an attention its log-sum-exp, and how exact is it?

The backward pass and whoever merges results over parts of the keys rely on it, although no output shows its error.

Shape letters: B batch, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import math

from torch import Tensor

from fa_study.attention import AttentionResult, baseline_attention, golden_attention
from fa_study.audit.accuracy import FLOOR, OUTPUT_FACTOR, against_golden, eager_policy
from fa_study.audit.cases import Case
from fa_study.audit.faults import ROUNDING, distance
from fa_study.audit.finding import Finding
from fa_study.audit.probe import Support
from fa_study.audit.subject import Subject

NATURAL = "the natural logarithm"


def meanings(case: Case) -> dict[str, Tensor]:
    """What a second output (B, H, L) may be, by name, in float64."""
    q, k, v = case.inputs()
    golden: AttentionResult = golden_attention(q, k, v)
    return {
        NATURAL: golden.lse,
        "its logarithm to base 2": golden.lse / math.log(2),
        "that of scores without their scale": golden_attention(q, k, v, scale=1.0).lse,
        "the largest score instead": golden.max_scores,
        "the row sum instead": (golden.lse - golden.max_scores).exp(),
    }


def check_log_sum_exp(subject: Subject, support: Support, facts: dict[str, str]) -> None:
    """Name what is returned beside the output, and judge a log-sum-exp by the rule for outputs.

    Near to the natural logarithm but beyond twice standard attention's error is a failure; another quantity is a note,
    since nobody says that a second output must be this one.
    """
    head_size = 64 if 64 in support.head_sizes else support.head_sizes[0]
    length = (113, 203) if (113, 203) in support.lengths else support.lengths[0]
    for dtype in support.dtypes:
        case = Case(dtype, *length, D=head_size, seed=7)
        outcome = subject.run(case)
        if outcome.error or outcome.lse is None:
            continue
        question, known = f"log-sum-exp, {dtype}", meanings(case)
        away = {name: distance(outcome.lse, value) for name, value in known.items()}
        nearest = min(away, key=away.get)
        if nearest != NATURAL or not away[nearest] <= ROUNDING:
            facts[question] = nearest if away[nearest] <= ROUNDING else "none, or a wrong one"
            text = f"the second output in {dtype} is no natural log-sum-exp: {facts[question]}"
            support.findings.append(Finding("note", "second-output", text))
            continue
        standard = baseline_attention(*case.inputs(), policy=eager_policy(dtype)).lse
        row = against_golden(outcome.lse, known[NATURAL], standard, OUTPUT_FACTOR, FLOOR[dtype])
        facts[question] = f"right, error {row['max_error']:.1e}"
        if row["verdict"] == "fail":
            facts[question] = f"wrong, error {row['max_error']:.1e}"
            text = (
                f"the error of the log-sum-exp in {dtype} is {row['max_error']:.1e}, {row['ratio']:.3g} x standard "
                f"attention's: more than {OUTPUT_FACTOR:g} x"
            )
            support.fail("log-sum-exp", text)

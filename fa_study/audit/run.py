"""The audit of an attention: what it supports, how large its error is, which rounding predicts it, how it behaves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pandas as pd
import torch

from fa_study.audit.accuracy import COLUMNS as ACCURACY_COLUMNS
from fa_study.audit.accuracy import accuracy_cases, measure
from fa_study.audit.behaviour import check_behaviour
from fa_study.audit.calls import Attention
from fa_study.audit.finding import Finding, Tried
from fa_study.audit.gradient_policies import fit_gradients
from fa_study.audit.log_sum_exp import check_log_sum_exp
from fa_study.audit.policies import COLUMNS as POLICY_COLUMNS
from fa_study.audit.policies import FITS, fit, policy_cases
from fa_study.audit.probe import ORDER, Support, probe
from fa_study.audit.subject import Subject
from fa_study.tables import provenance

QUICK_SECONDS = 20.0  # what a quick audit spends on accuracy at most


@dataclass(frozen=True)
class AuditReport:
    """Everything an audit found out.

    Attributes
    ----------
    passed : no finding is a failure.
    findings : what is wrong, then notes.
    tried : a line for each dtype, head size, length and feature.
    accuracy : a row per case and tensor: errors against float64, ratio to standard attention's, verdict.
    policies : a row per dtype, direction and policy: R2 on both halves, share of equal bits, chosen.
    facts : short answers about behaviour, by question.
    """

    name: str
    device: str
    passed: bool
    findings: list[Finding]
    tried: list[Tried]
    accuracy: pd.DataFrame
    policies: pd.DataFrame
    facts: dict[str, str]
    origin: dict[str, object]
    seconds: float

    def best_policies(self) -> dict[str, str]:
        """In one sentence for each dtype, which policies predict it."""
        sentences = {}
        for (dtype, backward), table in self.policies.groupby(["dtype", "backward"], sort=False):
            dtype += ", backward" if backward else ""
            chosen, best = table[table.chosen], table.iloc[0]
            if len(chosen):
                names = "; ".join(f"{row.policy} (R2 {row.r2_check:.4f})" for row in chosen.itertuples())
                sentences[dtype] = f"{names}; {chosen.equal.max():.2%} of the outputs equal to the bit"
            else:
                sentences[dtype] = f"none fits (R2 {FITS:g} or more); the nearest is {best.policy} (R2 {best.r2:.2f})"
        return sentences

    def to_dict(self) -> dict[str, object]:
        """Plain values only; infinities and NaN become None."""
        report = {
            "name": self.name,
            "device": self.device,
            "passed": self.passed,
            "findings": [asdict(f) for f in self.findings],
            "tried": [asdict(t) for t in self.tried],
            "accuracy": self.accuracy.to_dict("records"),
            "policies": self.policies.to_dict("records"),
            "facts": self.facts,
            "origin": self.origin,
            "seconds": self.seconds,
        }
        return plain(report)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def plain(value: object) -> object:
    """`value` with nothing in it that JSON lacks: infinities and NaN become None, NumPy's numbers Python's."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else value.item()


def audit(
    function: Attention,
    *,
    name: str = "",
    device: str = "cpu",
    quick: bool = True,
    causal: str | None = None,
    dtypes: tuple[str, ...] = ORDER,
    limit: float = 20.0,
) -> AuditReport:
    """Audit a callable ``function(q, k, v, **features)`` in this process.

    q (B, H, L, D), k and v (B, Hkv, S, D), or all with heads before the last dimension; it returns the output, or a
    tuple that begins with it. Features are found by the names that libraries give them (`is_causal`, `attn_mask`, ...).

    Parameters
    ----------
    device : where the inputs are put.
    quick : under a minute on a CPU; otherwise more shapes, scales and dtypes.
    causal : the alignment to insist on, "top_left" or "bottom_right"; by default either is fine.
    limit : seconds for each call.

    Raises
    ------
    ValueError
        If an option is unknown. Whatever the callable does is in the report.
    """
    return audit_subject(
        Subject.of(function, device=device, limit=limit, name=name), quick=quick, causal=causal, dtypes=dtypes
    )


def audit_subject(
    subject: Subject,
    *,
    quick: bool = True,
    causal: str | None = None,
    dtypes: tuple[str, ...] = ORDER,
    say: Callable[[str], None] = lambda text: None,
) -> AuditReport:
    """As `audit`, for a subject made by hand; `say` gets a line for each stage."""
    if causal not in (None, "top_left", "bottom_right"):
        raise ValueError(f"causal={causal!r} is unknown: use 'top_left' or 'bottom_right', or None for either")
    unknown = [d for d in dtypes if d not in ORDER]
    if unknown or not dtypes:
        raise ValueError(f"dtype {unknown[0] if unknown else ''!r} is unknown: use {', '.join(ORDER)}")
    start = time.perf_counter()
    say("what it supports")
    support = probe(subject, quick=quick, causal=causal, dtypes=dtypes)
    accuracy, policies = pd.DataFrame(columns=ACCURACY_COLUMNS), pd.DataFrame(columns=POLICY_COLUMNS)
    facts: dict[str, str] = {}
    findings = support.findings
    if support.dtypes and support.head_sizes and support.lengths:
        say("how it behaves")
        facts = check_behaviour(subject, support)
        check_log_sum_exp(subject, support, facts)
        say("its error against float64")
        accuracy, found = _accuracy(subject, support, quick)
        findings += found
        say("which rounding predicts it")
        tables = []
        for dtype in (d for d in support.dtypes if d != "fp64"):
            head_size = 64 if 64 in support.head_sizes else support.head_sizes[0]
            table, found = fit(subject, policy_cases(dtype, support.lengths, head_size))
            tables += [table] if len(table) else []
            findings += found
            if dtype in support.gradients:
                pair = policy_cases(dtype, support.lengths, head_size)[::3]
                tables.append(fit_gradients(subject, pair))
        policies = pd.concat(tables, ignore_index=True) if tables else policies
    findings = _merged(findings)
    return AuditReport(
        subject.name,
        subject.device,
        not any(f.level == "fail" for f in findings),
        findings,
        support.tried,
        accuracy,
        policies,
        facts,
        provenance(f"audit of {subject.name}"),
        time.perf_counter() - start,
    )


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding for each code, failures first; the others of its kind are counted."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(dict.fromkeys(findings), key=lambda f: f.level != "fail"):
        groups.setdefault((finding.level, finding.code), []).append(finding)
    return [
        Finding(level, code, group[0].text + (f"; and {len(group) - 1} more of this kind" if len(group) > 1 else ""))
        for (level, code), group in groups.items()
    ]


def _accuracy(subject: Subject, support: Support, quick: bool) -> tuple[pd.DataFrame, list[Finding]]:
    cases = list(
        accuracy_cases(support.dtypes, support.head_sizes, support.lengths, support.features, support.grouped, quick)
    )
    deadline = time.perf_counter() + QUICK_SECONDS if quick else math.inf
    return measure(subject, cases, support.gradients, deadline)


def device_error(device: str) -> str:
    """Why a device cannot be used here, "" if it can."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return ""

"""What the table says of a real kernel: error, verdict, the rounding that predicts it, behaviour."""

from __future__ import annotations

import math
import time
import warnings

import pandas as pd
import torch

from fa_study.audit.accuracy import eager, gradient_references, judge, truth
from fa_study.audit.behaviour import (
    check_behaviour,
    check_empty_rows,
    check_hidden_nan,
    check_nan_in_query,
    check_padding,
    check_repeats,
)
from fa_study.audit.calls import Direct
from fa_study.audit.cases import Case
from fa_study.audit.gradient_policies import fit_gradients
from fa_study.audit.policies import score
from fa_study.audit.probe import Support, try_feature
from fa_study.audit.subject import Subject, parameters_of
from fa_study.kernels.registry import FIRST_CALL, WITH_LSE, Kernel, installed_version, kernel

# Behaviour, as the audit words its questions -> column.
FACTS = {
    "empty row, by mask": "empty_row_mask",
    "empty row, causal": "empty_row_causal",
    "lse of an empty row": "empty_row_lse",
    "NaN in a hidden key's K": "hidden_nan_k",
    "NaN in a hidden key's V": "hidden_nan_v",
    "NaN in a query": "nan_query",
    "run to run": "run_to_run",
    "batch size": "batch_size",
    "padded and hidden keys": "padded_keys",
    "no keys": "no_keys",
}
COLUMNS = (
    *("kernel", "package", "version", "device", "dtype", "runs", "reason"),
    *("max_error", "rms_error", "ratio", "verdict", "gradient_error", "gradient_ratio", "gradient_verdict"),
    *("policies", "r2", "equal", "gradient_policies", "gradient_r2", "alignment", *FACTS.values(), "seconds"),
)


def kernel_cases(k: Kernel, dtype: str) -> list[Case]:
    """Four cases to fit and check policies on; one shape for kernels that compile for each.

    256 keys on CUDA: FlashAttention 2 shares more of them among thread blocks where rows are so few, as no policy does.
    """
    start = Case(dtype, L=64, S=256 if k.device == "cuda" else 512, B=1, H=2, Hkv=2)
    start = start.replace(L=256, S=256) if k.slow else start
    return [
        start.replace(seed=11),
        start.replace(seed=12, logits=2.0),
        start.replace(seed=13, distribution="positive"),
        start.replace(seed=14),
    ]


def measure_kernel(k: Kernel, dtype: str) -> dict[str, object]:
    """A row of the table for one kernel and dtype."""
    start = time.perf_counter()
    if k.slow == "compiled":
        torch._dynamo.reset()  # every dtype has the whole number of recompilations
    row = dict.fromkeys(COLUMNS) | {
        "kernel": k.name,
        "package": k.package,
        "version": installed_version(k),
        "device": k.device,
        "dtype": dtype,
        "runs": False,
    }
    named, _ = parameters_of(k.function)
    subject = Subject(Direct(k.function, FIRST_CALL), k.name, named, False, k.device)
    cases, data = kernel_cases(k, dtype), []
    for case in cases:
        outcome = subject.run(case)
        if outcome.error:
            return row | {"reason": outcome.error}
        data.append((case, outcome.out, truth(case, "top_left")))
    row["runs"] = True
    judged = [judge(case, "out", out, golden, eager(case, "top_left")) for case, out, golden in data]
    row |= _worst(judged)
    row |= _gradients(subject, cases[0])
    table, _ = score(data[::2], data[1::2])
    row["policies"], row["r2"], row["equal"] = _named(table)
    row["gradient_policies"], row["gradient_r2"], _ = _named(fit_gradients(subject, cases[:: 3 if k.slow else 1]))
    row |= _behaviour(subject, k, dtype)
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _named(table: pd.DataFrame) -> tuple[str, float, float]:
    """The policies that predict, or the nearest: names, R2 and share of equal bits of the best of them."""
    if table.empty:
        return "", math.nan, math.nan
    chosen = table[table.chosen]
    best = chosen.iloc[0] if len(chosen) else table.iloc[0]
    names = "; ".join(chosen.policy) if len(chosen) else f"none fits; nearest: {best.policy}"
    return names, best.r2_check, best.equal


def _worst(judged: list[dict]) -> dict[str, object]:
    worst = max(judged, key=lambda j: j["ratio"] if j["ratio"] == j["ratio"] else math.inf)
    return {
        "max_error": worst["max_error"],
        "rms_error": worst["rms_error"],
        "ratio": worst["ratio"],
        "verdict": "fail" if any(j["verdict"] == "fail" for j in judged) else "pass",
    }


def _gradients(subject: Subject, case: Case) -> dict[str, object]:
    outcome = subject.run(case, gradients=True)
    if outcome.error:
        return {"gradient_verdict": f"none: {outcome.error}"}
    golden, standard = gradient_references(case, "top_left")
    worst = _worst([judge(case, *parts) for parts in zip(("dq", "dk", "dv"), outcome.gradients, golden, standard)])
    return {f"gradient_{name}": worst[old] for name, old in (("error", "max_error"), ("ratio", "ratio"))} | {
        "gradient_verdict": worst["verdict"]
    }


def _behaviour(subject: Subject, k: Kernel, dtype: str) -> dict[str, object]:
    L = 128 if k.slow else 64
    support = Support(dtypes=[dtype], head_sizes=[64], lengths=[(128, 128)])
    case = Case(dtype, L=L, S=L, seed=5)
    try_feature(subject, support, case.replace(features=("causal",)), "causal")
    unknown = "only where L = S" if "causal" in support.features else "no causal of its own"
    row: dict[str, object] = {"alignment": subject.alignment or unknown}
    if k.slow:
        facts = _slow_behaviour(subject, support, case)
    else:
        try_feature(subject, support, case.replace(features=("mask",)), "mask")
        facts = check_behaviour(subject, support)
        if k.device == "cuda":
            # Long rows, whose keys FlashAttention 2 shares among as many thread blocks as the batch leaves idle.
            check_repeats(subject, Case(dtype, S=1024, seed=5), facts)
    if k.name in WITH_LSE:
        subject.call = Direct(WITH_LSE[k.name], FIRST_CALL)
        check_empty_rows(subject, support, facts)
    has_empty = facts.keys() & {"empty row, by mask", "empty row, causal"}
    row |= {column: facts.get(question, "") for question, column in FACTS.items()}
    return row | ({"empty_row_lse": row["empty_row_lse"] or "not returned"} if has_empty else {})


def _slow_behaviour(subject: Subject, support: Support, case: Case) -> dict[str, str]:
    """What the table needs of `check_behaviour`, in few shapes, since every shape is compiled anew."""
    facts: dict[str, str] = {}
    check_repeats(subject, case, facts)
    check_nan_in_query(subject, case, facts)
    if "mask" in subject.parameters:
        # Not tried with a random mask, as `try_feature` does: some take none but whole keys and whole queries.
        subject.keywords["mask"] = ("mask", None)
        support.features.append("mask")
        check_padding(subject, support, case.replace(S=2 * case.S), facts, live=case.S)
    check_hidden_nan(subject, support, case, facts)
    check_empty_rows(subject, support, facts)
    return facts


def measure_kernels(names: list[str], say=print, seconds: float = math.inf) -> pd.DataFrame:
    """A row per kernel and dtype; a single row with the reason for a kernel that cannot run here.

    No row is begun after `seconds`.
    """
    rows, end = [], time.perf_counter() + seconds
    for name in names:
        k = kernel(name)
        reason = k.reason()
        about = {"kernel": name, "package": k.package, "version": installed_version(k), "device": k.device}
        if reason:
            rows.append(dict.fromkeys(COLUMNS) | about | {"runs": False, "reason": reason})
            continue
        for dtype in k.dtypes:
            if time.perf_counter() > end:
                reason = f"left out after {seconds / 60:.0f} minutes: --kernel {name} measures it"
                rows.append(dict.fromkeys(COLUMNS) | about | {"dtype": dtype, "runs": False, "reason": reason})
                say(f"{name} {dtype}: {reason}")
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a dozen of each call that a kernel of CUDA refuses
                row = measure_kernel(k, dtype)
            rows.append(row)
            say(f"{name} {dtype}: {row['reason'] or row['verdict']}, {row['seconds'] or 0} s")
    return pd.DataFrame(rows, columns=COLUMNS)

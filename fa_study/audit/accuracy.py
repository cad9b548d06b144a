"""Error against float64, and the FlashAttention authors' rule for which error is expected.

Their rule (hopper/test_flash_attn.py and tests/test_flash_attn.py): the largest error of the output may be twice that
of standard attention in the same format, both against the result in high precision from the same inputs; the largest
error of a gradient three times.

Shape letters: B batch, H query heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import baseline_attention, golden_attention
from fa_study.audit.calls import Outcome
from fa_study.audit.cases import Case
from fa_study.audit.finding import Finding
from fa_study.audit.subject import Subject
from fa_study.rounding import RoundingPolicy

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
# Added to the limit, relative to the largest value: a few units in the last place, since the largest error of standard
# attention can be small by luck, and 1e-5 where the authors add it too.
FLOOR = {"fp64": 2e-6, "fp32": 2e-6, "bf16": 1e-5, "fp16": 1e-5}
COLUMNS = ("case", "dtype", "tensor", "max_error", "rms_error", "eager_max_error", "ratio", "row_share", "verdict")


def golden_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **values: object) -> tuple[Tensor, ...]:
    """dq, dk, dv in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = golden_attention(*leaves, **values).out
        return torch.autograd.grad(out, leaves, dout.double())


def eager_policy(dtype: str) -> RoundingPolicy:
    """Standard attention in a dtype: what the error is measured with. For FP64 it is that of FP32.

    Many an implementation has its softmax in FP32 for any input; that is said in a note and is no failure.
    """
    return RoundingPolicy.eager(dtype) if dtype in ("bf16", "fp16") else RoundingPolicy.uniform("fp32")


def eager_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **values: object) -> tuple[Tensor, ...]:
    """dq, dk, dv of standard attention in the inputs' dtype: written out, softmax in FP32, gradients by autograd."""
    q, k, v, dout = (x.detach().float() if x.dtype == torch.float64 else x.detach() for x in (q, k, v, dout))
    q, k, v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    G = q.shape[1] // k.shape[1]
    with torch.enable_grad():
        scale = q.shape[-1] ** -0.5 if values.get("scale") is None else values["scale"]
        s = (q @ k.repeat_interleave(G, 1).mT) * scale
        if values.get("softcap") is not None:
            s = values["softcap"] * torch.tanh(s / values["softcap"])
        s = s.to(torch.promote_types(s.dtype, torch.float32))
        if values.get("bias") is not None:
            s = s + values["bias"].to(s.dtype)
        if "causal" in values:
            offset = s.shape[-1] - s.shape[-2] if values["causal"] == "bottom_right" else 0
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + offset), -math.inf)
        if "mask" in values:
            s = s.masked_fill(~values["mask"], -math.inf)
        p = torch.softmax(s, -1).to(v.dtype)
        return torch.autograd.grad(p @ v.repeat_interleave(G, 1), leaves, dout)


@functools.lru_cache(maxsize=64)
def truth(case: Case, alignment: str) -> Tensor:
    """The float64 output of a case."""
    return golden_attention(*case.inputs(), **case.values(alignment)).out


@functools.lru_cache(maxsize=64)
def eager(case: Case, alignment: str) -> Tensor:
    """Standard attention's output of a case."""
    policy = eager_policy(case.dtype)
    return baseline_attention(*case.inputs(), policy=policy, **case.values(alignment)).out


@functools.lru_cache(maxsize=16)
def gradient_references(case: Case, alignment: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(float64's, standard attention's) dq, dk, dv of a case."""
    inputs, dout, values = case.inputs(), case.dout(), case.values(alignment)
    return golden_gradients(*inputs, dout, **values), eager_gradients(*inputs, dout, **values)


def row_share(theirs: Tensor, golden: Tensor) -> float:
    """The share of the squared error that scales whole rows, as an error of the row sum does; 1/D by chance."""
    theirs, golden = theirs.double(), golden.double()
    factor = (theirs * golden).sum(-1, keepdim=True) / golden.square().sum(-1, keepdim=True)
    error = (theirs - golden).square().sum()
    return float(((factor - 1) * golden).square().sum() / error) if error > 0 else math.nan


def against_golden(
    theirs: Tensor, golden: Tensor, standard: Tensor, factor: float, floor: float
) -> dict[str, float | str]:
    """Largest errors of two results against float64, their ratio, and the verdict by the authors' rule.

    The verdict is "pass" where theirs <= factor * standard + floor * max |golden|, else "fail", or "as eager" where the
    standard is not finite either.
    """
    largest, standard_largest = (float((x.double() - golden).abs().max()) for x in (theirs, standard))
    limit = factor * standard_largest + floor * float(golden.abs().max())
    if math.isfinite(largest):
        verdict = "pass" if not math.isfinite(standard_largest) or largest <= limit else "fail"
    else:
        verdict = "fail" if math.isfinite(standard_largest) else "as eager"
    ratio = largest / standard_largest if standard_largest > 0 else math.nan
    return {"max_error": largest, "eager_max_error": standard_largest, "ratio": ratio, "verdict": verdict}


def judge(case: Case, tensor: str, theirs: Tensor, golden: Tensor, standard: Tensor) -> dict[str, object]:
    """A row of the accuracy table: errors, their ratio to standard attention's, verdict."""
    factor = OUTPUT_FACTOR if tensor == "out" else GRADIENT_FACTOR
    return {
        "case": str(case),
        "dtype": case.dtype,
        "tensor": tensor,
        **against_golden(theirs, golden, standard, factor, FLOOR[case.dtype]),
        "rms_error": float((theirs.double() - golden).square().mean().sqrt()),
        "row_share": row_share(theirs, golden) if tensor == "out" else math.nan,
    }


def accuracy_cases(
    dtypes: list[str],
    head_sizes: list[int],
    pairs: list[tuple[int, int]],
    features: list[str],
    grouped: bool,
    quick: bool,
) -> Iterator[Case]:
    """The cases of an audit among what a callable supports; the dtypes take turns."""
    long = [pair for pair in pairs if max(pair) >= 128] or pairs
    L, S = max(long, key=lambda pair: pair[0] * pair[1])
    square = 128 if (128, 128) in pairs else 64
    variants: list[dict] = [{"logits": x} for x in ((1.0, 8.0) if quick else (0.25, 1.0, 4.0, 16.0, 64.0))]
    variants += [{"distribution": x} for x in ("outliers", "positive")]
    # Errors of a running sum grow with the number of keys.
    variants += [{"L": 64, "S": 2048}] if any(a != b for a, b in pairs) else []
    variants += [{"L": a, "S": b, "seed": 1} for a, b in (long[:2] if quick else long)]
    variants += [{"D": d, "seed": 2} for d in (head_sizes[:1] + head_sizes[-1:] if quick else head_sizes)]
    variants += [{"L": square, "S": square, "features": (feature,), "seed": 3} for feature in features]
    variants += [{"H": 4, "Hkv": 2, "seed": 4}] if grouped else []
    common = {"L": L, "S": S, "D": 64 if 64 in head_sizes else head_sizes[0], "B": 1, "H": 2, "Hkv": 2}
    for variant in variants:
        for dtype in dtypes:
            yield Case(dtype, **{**common, **variant})


def measure(
    subject: Subject, cases: list[Case], gradients: set[str], deadline: float = math.inf
) -> tuple[pd.DataFrame, list[Finding]]:
    """The accuracy table of a subject, with gradients for the dtypes named, and what it gives rise to.

    Cases are left out, with a note, once ``time.perf_counter()`` is past the deadline.
    """
    rows, findings = [], []
    alignment = subject.alignment or "top_left"
    cases = list(dict.fromkeys(cases))
    for i, case in enumerate(cases):
        if time.perf_counter() > deadline:
            findings.append(
                Finding("note", "time", f"{len(cases) - i} of {len(cases)} cases left out for want of time")
            )
            break
        outcome = subject.run(case)
        if outcome.error:
            findings.append(_raised(str(case), outcome))
            continue
        rows.append(judge(case, "out", outcome.out, truth(case, alignment), eager(case, alignment)))
        if case.dtype in gradients and case.L * case.S <= 2**17 and "window" not in case.features:
            rows += _gradient_rows(subject, case, alignment, findings)
    table = pd.DataFrame(rows, columns=COLUMNS)
    if (table[(table.dtype == "fp64") & (table.verdict == "pass")].rms_error > 1e-11).any():
        findings.append(Finding("note", "fp64-in-fp32", "inputs in fp64 are computed in FP32, at least in part"))
    outputs, gradients_table = table[table.tensor == "out"], table[table.tensor != "out"]
    for part, factor, code in ((outputs, OUTPUT_FACTOR, "error"), (gradients_table, GRADIENT_FACTOR, "gradient-error")):
        failed = part[part.verdict == "fail"]
        if len(failed):
            worst = failed.loc[failed.ratio.fillna(math.inf).idxmax()]
            text = (
                f"the error of {worst.tensor} exceeds {factor:g} x standard attention's in {len(failed)} of "
                f"{len(part)} results, at most {worst.ratio:.3g} x, at {worst.case}"
            )
            findings += [Finding("fail", code, text), *(_cause(failed, worst) if code == "error" else [])]
    return table, findings


def _raised(where: str, outcome: Outcome) -> Finding:
    """A note for a call that raised, a failure for one that hung or took its process with it."""
    code = "hangs" if outcome.hung else "crashes" if outcome.died else "raises"
    return Finding("note" if code == "raises" else "fail", code, f"{where}: {outcome.error}")


def _cause(failed: pd.DataFrame, worst: pd.Series) -> list[Finding]:
    """What the error looks like: rows scaled as a whole."""
    share = failed.row_share.median()
    if not share > 0.8:
        return []
    text = f"{share:.0%} of the squared error scales whole rows: the row sum is wrong or kept in too narrow a format"
    return [Finding("fail", "row-sum", text)]


def _gradient_rows(subject: Subject, case: Case, alignment: str, findings: list[Finding]) -> list[dict]:
    outcome = subject.run(case, gradients=True)
    if outcome.error:
        findings.append(_raised(f"{case}, backward", outcome))
        return []
    golden, standard = gradient_references(case, alignment)
    return [
        judge(case, name, theirs, true, eager16)
        for name, theirs, true, eager16 in zip(("dq", "dk", "dv"), outcome.gradients, golden, standard)
    ]

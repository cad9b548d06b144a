"""What an attention does at the edges: empty rows, NaN, huge scores, strides, repeats, batches, padding.

Each check answers in a few words, which the kernels' table shows too; only what is wrong for every attention is a
failure. Where implementations differ in good faith (NaN for a row without a key, say), it is a fact.

Shape letters: B batch, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_study.attention import baseline_attention, golden_attention
from fa_study.audit.accuracy import eager_policy
from fa_study.audit.cases import Case
from fa_study.audit.faults import ROUNDING, distance
from fa_study.audit.probe import Support
from fa_study.audit.subject import Subject

# A live score this low tells whether hidden keys are left out or only given a lower finite score.
LOW_SCORES = (-5e4, -2e6)
Facts = dict[str, str]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit (all NaN are alike)."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check_behaviour(subject: Subject, support: Support) -> Facts:
    """Every check that the callable's features allow; failures go into `support.findings`."""
    facts: Facts = {}
    dtype = support.dtypes[0]
    length = (113, 113) if (113, 203) in support.lengths else (128, 128)
    case = Case(dtype, *length, D=64 if 64 in support.head_sizes else support.head_sizes[0], seed=5)
    check_repeats(subject, case, facts)
    _strides(subject, support, case, facts)
    _huge_scores(subject, support, facts)
    check_nan_in_query(subject, case, facts)
    check_hidden_nan(subject, support, case, facts)
    if "mask" in support.features:
        check_padding(subject, support, case, facts)
    check_empty_rows(subject, support, facts)
    for feature in ("mask", "causal"):
        if feature in support.features:
            _low_scores(subject, support, feature, facts)
    _nothing(subject, facts, Case(dtype))
    return facts


def check_repeats(subject: Subject, case: Case, facts: Facts) -> None:
    """The same call again, and one sequence of the batch alone."""
    q, k, v = case.inputs()
    runs = [subject.run_on(q, k, v) for _ in range(3)]
    if any(r.error for r in runs):
        facts["run to run"] = next(r.error for r in runs if r.error)
        return
    facts["run to run"] = "same bits" if all(same_bits(r.out, runs[0].out) for r in runs) else "other bits"
    alone = subject.run_on(q[1:2], k[1:2], v[1:2])
    more = subject.run_on(*(x.repeat(4, 1, 1, 1) for x in (q, k, v)))
    if alone.error or more.error:
        facts["batch size"] = alone.error or more.error
        return
    same = same_bits(alone.out, runs[0].out[1:2]) and same_bits(more.out[:2], runs[0].out)
    facts["batch size"] = "same bits" if same else "other bits"


def _strides(subject: Subject, support: Support, case: Case, facts: Facts) -> None:
    whole, strided = subject.run(case), subject.run(case, strided=True)
    if whole.error or strided.error:
        facts["strided inputs"] = whole.error or strided.error
        return
    if not distance(strided.out, golden_attention(*case.inputs()).out) <= ROUNDING:
        facts["strided inputs"] = "wrong"
        support.fail("strides", "inputs that are not contiguous give a wrong result: strides are ignored")
        return
    facts["strided inputs"] = "same bits" if same_bits(whole.out, strided.out) else "other bits"


def _huge_scores(subject: Subject, support: Support, facts: Facts) -> None:
    """Two equal scores of 1000 beside smaller ones: exp overflows unless the maximum is subtracted."""
    for dtype in support.dtypes:
        q, k, v = Case(dtype, B=1, H=2, Hkv=2, seed=6).inputs()
        q, k = torch.full_like(q, 8.0), k.clamp(-1, 1)
        k[:, :, :2] = 15.625  # 64 x 8 x 15.625 / 8 = 1000
        outcome = subject.run_on(q, k, v)
        if outcome.error:
            facts[f"scores of 1000, {dtype}"] = outcome.error
            continue
        away = distance(outcome.out, golden_attention(q, k, v).out)
        standard = baseline_attention(q, k, v, policy=eager_policy(dtype)).out
        fine = away <= ROUNDING
        excused = not fine and not distance(standard, golden_attention(q, k, v).out) <= ROUNDING
        facts[f"scores of 1000, {dtype}"] = "right" if fine else "wrong, as eager" if excused else "wrong"
        if not fine and not excused:
            what = "infinite or NaN" if away == math.inf else f"off by {away:.1e}"
            support.fail(
                "overflow", f"scores of 1000 in {dtype}: the result is {what}, and standard attention's is not"
            )


def check_nan_in_query(subject: Subject, case: Case, facts: Facts) -> None:
    """NaN in one query."""
    q, k, v = case.inputs()
    q[:, :, 3] = math.nan
    outcome = subject.run_on(q, k, v)
    if not outcome.error:
        others = torch.cat([outcome.out[:, :, :3], outcome.out[:, :, 4:]], 2)
        reached, rest = outcome.out[:, :, 3].isnan().all(), others.isfinite().all()
        facts["NaN in a query"] = "reaches its row" if reached and rest else "spreads" if reached else "is swallowed"
    else:
        facts["NaN in a query"] = outcome.error


def check_hidden_nan(subject: Subject, support: Support, case: Case, facts: Facts) -> None:
    """NaN in a key that a mask hides, or causal order if there is no mask."""
    hidden = {"mask": 7, "causal": case.S - 1}
    feature = next((f for f in hidden if f in support.features), "")
    if not feature:
        return
    j, values, rows = hidden[feature], {"causal": "top_left"}, slice(0, case.L - 1)
    if feature == "mask":
        mask = torch.ones(1, 1, case.L, case.S, dtype=torch.bool)
        mask[..., j] = False
        values, rows = {"mask": mask}, slice(0, case.L)
    for name, place in (("K", 1), ("V", 2)):
        inputs = [x.clone() for x in case.inputs()]
        inputs[place][:, :, j] = math.nan
        outcome = subject.run_on(*inputs, values)
        is_absent = not outcome.error and bool(outcome.out[:, :, rows].isfinite().all())
        facts[f"NaN in a hidden key's {name}"] = outcome.error or ("absent" if is_absent else "gives NaN")


def check_padding(subject: Subject, support: Support, case: Case, facts: Facts, live: int = 100) -> None:
    """Keys beyond the first `live` that are padded and hidden, against the same call without them."""
    q, k, v = case.inputs()
    short = subject.run_on(q, k[:, :, :live], v[:, :, :live])
    mask = torch.zeros(1, 1, case.L, case.S, dtype=torch.bool)
    mask[..., :live] = True
    padded = subject.run_on(q, k, v, {"mask": mask.expand(case.B, 1, -1, -1).contiguous()})
    if short.error or padded.error:
        facts["padded and hidden keys"] = short.error or padded.error
        return
    if not distance(padded.out, short.out) <= ROUNDING:
        facts["padded and hidden keys"] = "change the result"
        support.fail("padding", "keys that are padded and hidden change the result")
        return
    facts["padded and hidden keys"] = "same bits" if same_bits(short.out, padded.out) else "other bits"


def check_empty_rows(subject: Subject, support: Support, facts: Facts) -> None:
    """Rows without a key: by a mask, and by causal order where queries outnumber keys."""
    main = support.dtypes[0]
    if "mask" in support.features:
        case = Case(main, seed=7)
        mask = torch.ones(case.B, 1, case.L, case.S, dtype=torch.bool)
        mask[:, :, 80:] = False
        _empty(subject, support, case, {"mask": mask}, slice(80, 128), facts)
    if "causal" in support.features and subject.alignment == "bottom_right":
        case = Case(main, L=256, seed=7)
        values = {"causal": "bottom_right"}
        _empty(subject, support, case, values, slice(0, 128), facts)


def _empty(subject: Subject, support: Support, case: Case, values: dict, empty: slice, facts: Facts) -> None:
    question = "empty row, causal" if "causal" in values else "empty row, by mask"
    q, k, v = case.inputs()
    outcome = subject.run_on(q, k, v, values)
    if outcome.error:
        facts[question] = outcome.error
        return
    theirs, truth = outcome.out, golden_attention(q, k, v, **values).out
    live = torch.ones(case.L, dtype=torch.bool)
    live[empty] = False
    if not distance(theirs[:, :, live], truth[:, :, live]) <= ROUNDING:
        support.fail("empty-row", "rows without a key make other rows of the same call wrong")
    rows = theirs[:, :, empty]
    mean = v.double().mean(2, keepdim=True).expand(-1, -1, rows.shape[2], -1)
    answer = "other numbers"
    if (rows == 0).all():
        answer = "zeros"
    elif rows.isnan().all():
        answer = "NaN"
    elif distance(rows, mean) <= ROUNDING:
        answer = "mean of V"
        support.fail(
            "finite-mask", "a row without a key gives the mean of all values: hidden keys have a finite score, not none"
        )
    elif rows.isfinite().all():
        support.fail("empty-row", "a row without a key gives numbers that are neither 0 nor the mean of V")
    facts[question] = answer
    if outcome.lse is not None:
        found = outcome.lse[:, :, empty].unique()
        facts["lse of an empty row"] = f"{found[0].item():g}" if len(found) == 1 else "various"


def _low_scores(subject: Subject, support: Support, feature: str, facts: Facts) -> None:
    """One live key with a very low score, hidden keys with the score 0."""
    dtype = "fp32" if "fp32" in support.dtypes else support.dtypes[0]
    case = Case(dtype, B=1, H=2, Hkv=2, seed=8)
    q, k, v = case.inputs()
    for score in LOW_SCORES:
        root = math.sqrt(-score * 8 / 64)
        q, k = torch.full_like(q, root), torch.zeros_like(k)
        k[:, :, 0] = -root
        mask = torch.zeros(1, 1, case.L, case.S, dtype=torch.bool)
        mask[..., 0] = True
        values = {"mask": mask} if feature == "mask" else {"causal": subject.alignment or "top_left"}
        outcome = subject.run_on(q, k, v, values)
        if outcome.error:
            facts[f"hidden by {feature}"] = outcome.error
            return
        first = outcome.out[:, :, 0].double()  # sees key 0 alone in both
        if not first.isfinite().all():
            facts[f"hidden by {feature}"] = f"NaN with a live score of {score:g}"
            return
        if not torch.allclose(first, v[:, :, 0].double(), rtol=0.02, atol=0.02):
            facts[f"hidden by {feature}"] = "by a finite score"
            text = f"with a live score of {score:g} the keys hidden by {feature} have a weight: their score is finite"
            support.fail("finite-mask", text)
            return
    facts[f"hidden by {feature}"] = "absent"


def _nothing(subject: Subject, facts: Facts, case: Case) -> None:
    q, k, v = case.inputs()
    for name, inputs in (
        ("no batch", (q[:0], k[:0], v[:0])),
        ("no queries", (q[:, :, :0], k, v)),
        ("no keys", (q, k[:, :, :0], v[:, :, :0])),
    ):
        outcome = subject.run_on(*inputs)
        if outcome.error:
            facts[name] = outcome.error
        elif name == "no keys":
            out = outcome.out
            facts[name] = "zeros" if (out == 0).all() else "NaN" if out.isnan().all() else "other numbers"
        else:
            facts[name] = "empty result"

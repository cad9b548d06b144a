"""The tables of a model's audit, from passes and layer results of A, B, float64 and the twins."""

from __future__ import annotations

import math
import re

import pandas as pd
import torch
from torch import Tensor

from fa_study.audit.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR, against_golden
from fa_study.audit_model.layers import LayerResult, shown_operators
from fa_study.audit_model.passes import Pass, flat
from fa_study.names import ZERO_GRADIENT

LAYER_COLUMNS = ("layer", "tensor", "difference", "error_a", "error_b", "ratio", "verdict", "detail")
GROWTH_COLUMNS = ("layer", "depth", "direction", "difference", "twins_low", "twins_high", "error_a", "error_b")
END_COLUMNS = ("quantity", "difference", "twins_low", "twins_high", "error_a", "error_b", "ratio", "verdict")
OPERATOR_COLUMNS = ("layer", "a", "b", "same_operators", "same_bits")


def relative(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference| in L2, in float64; NaN where the sizes differ."""
    if x.shape != reference.shape:
        return math.nan
    x, reference = x.double(), reference.double()
    return float((x - reference).norm() / reference.norm().clamp_min(1e-300))


def layer_table(
    keys: list[str],
    a: dict[str, LayerResult],
    b: dict[str, LayerResult],
    golden: dict[str, LayerResult],
    floor: float,
) -> pd.DataFrame:
    """A row per layer and tensor, from the same inputs: see `ModelReport.layers`.

    The verdict is "pass", "fail", "as A" where neither is finite, "raises" where B gave nothing, or "unknown" where A
    or float64 did not.
    """
    rows = []
    for key in keys:
        results = [side.get(key, LayerResult(error="was not reached")) for side in (a, b, golden)]
        for tensor, factor in (("out", OUTPUT_FACTOR), ("gradient", GRADIENT_FACTOR)):
            rows.append({"layer": key, "tensor": tensor, **_layer_row(tensor, results, factor, floor)})
    return pd.DataFrame(rows, columns=LAYER_COLUMNS)


def _layer_row(tensor: str, results: list[LayerResult], factor: float, floor: float) -> dict[str, object]:
    nothing = dict.fromkeys(("difference", "error_a", "error_b", "ratio"), math.nan)
    x = [result.out if tensor == "out" else result.gradient for result in results]
    for value, result, verdict in ((x[0], results[0], "unknown"), (x[2], results[2], "unknown")):
        if value is None:
            return {**nothing, "verdict": verdict, "detail": result.error}
    if x[1] is None:
        return {**nothing, "verdict": "raises", "detail": results[1].error}
    if x[0].shape != x[1].shape or x[0].shape != x[2].shape:
        sizes = f"A gives {x[0].numel()} values, B {x[1].numel()}, float64 {x[2].numel()}"
        return {**nothing, "verdict": "fail", "detail": sizes}
    row = against_golden(x[1], x[2], x[0], factor, floor)
    return {
        "difference": float((x[1].double() - x[0].double()).abs().max()),
        "error_a": row["eager_max_error"],
        "error_b": row["max_error"],
        "ratio": row["ratio"],
        "verdict": "as A" if row["verdict"] == "as eager" else row["verdict"],
        "detail": "",
    }


def growth_table(keys: list[str], passes: list[Pass], twins: list[Pass]) -> pd.DataFrame:
    """Relative L2 differences along the depth of the whole passes: see `ModelReport.growth`."""
    a, b, golden = passes
    rows = []
    for direction, field in (("forward", "outputs"), ("backward", "backward")):
        sides = [getattr(side, field) for side in (a, b, golden)]
        others = [getattr(side, field) for side in twins]
        for depth, key in enumerate(keys):
            if key in sides[0] and key in sides[1]:
                rows.append({"layer": key, "depth": depth, "direction": direction, **_measures(key, sides, others)})
    return pd.DataFrame(rows, columns=GROWTH_COLUMNS)


def _measures(key: str, sides: list[dict[str, Tensor]], twins: list[dict[str, Tensor]]) -> dict[str, float]:
    a, b = sides[0][key], sides[1][key]
    apart = [relative(side[key], a) for side in twins if key in side]
    golden = sides[2].get(key)
    return {
        "difference": relative(b, a),
        "twins_low": min(apart, default=math.nan),
        "twins_high": max(apart, default=math.nan),
        "error_a": math.nan if golden is None else relative(a, golden),
        "error_b": math.nan if golden is None else relative(b, golden),
    }


def end_to_end_table(passes: list[Pass], twins: list[Pass], floor: float) -> pd.DataFrame:
    """Output, loss and gradients of the whole passes: see `ModelReport.end_to_end`.

    The verdict is "pass" by the authors' rule, "as twins" where that is exceeded and the twins differ as much, "fail",
    or "" where there is nothing to judge. The loss is one number, which may be right by luck: it has no verdict.
    """
    if passes[0].output is None or passes[1].output is None:
        return pd.DataFrame(columns=END_COLUMNS)
    rows = [
        _judged(passes[0].name, [_output(p) for p in passes], [_output(p) for p in twins], OUTPUT_FACTOR, floor),
        {**_judged("loss", [_loss(p) for p in passes], [_loss(p) for p in twins], OUTPUT_FACTOR, floor), "verdict": ""},
    ]
    if all(p.gradients for p in passes):
        gradients = [_gradients(p) for p in passes], [_gradients(p) for p in twins]
        rows.append(_judged("weight gradients", *gradients, GRADIENT_FACTOR, floor))
    return pd.DataFrame(rows, columns=END_COLUMNS)


def _output(p: Pass) -> Tensor:
    return torch.empty(0) if p.output is None else p.output.flatten()


def _loss(p: Pass) -> Tensor:
    return torch.tensor([p.loss], dtype=torch.float64)


def _gradients(p: Pass) -> Tensor:
    """All of them but those that are exactly zero in theory and rounding alone in practice."""
    return flat([g for name, g in p.gradients.items() if not re.search(ZERO_GRADIENT, name)])


def _judged(quantity: str, sides: list[Tensor], twins: list[Tensor], factor: float, floor: float) -> dict[str, object]:
    row = _measures("", [{"": x} for x in sides], [{"": x} for x in twins])
    a, b = row["error_a"], row["error_b"]
    if not sides[0].isfinite().all() or math.isnan(a):
        verdict = ""
    elif not math.isfinite(b):
        verdict = "fail"
    elif b <= factor * a + floor:
        verdict = "pass"
    else:
        verdict = "as twins" if row["difference"] <= row["twins_high"] else "fail"
    return {"quantity": quantity, **row, "ratio": b / a if a > 0 else math.nan, "verdict": verdict}


def operator_table(
    keys: list[str],
    a: dict[str, list[str]],
    b: dict[str, list[str]],
    result_a: dict[str, LayerResult],
    result_b: dict[str, LayerResult],
) -> pd.DataFrame:
    """Which attention ran in each layer, and whether A and B are told apart by operators or bits."""
    rows = []
    for key in keys:
        ran = [side.get(key, []) for side in (a, b)]
        same = [_same(getattr(result_a.get(key), f, None), getattr(result_b.get(key), f, None)) for f in _FIELDS]
        rows.append((key, *(shown_operators(names) for names in ran), ran[0] == ran[1], all(same)))
    return pd.DataFrame(rows, columns=OPERATOR_COLUMNS)


_FIELDS = ("out", "gradient")


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    return x is not None and y is not None and x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())

"""The audit of a model: two attention implementations on the same inputs, layer by layer and end to end."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from fa_study.audit.accuracy import FLOOR
from fa_study.audit.cases import DTYPES
from fa_study.audit.finding import Finding
from fa_study.audit.run import plain
from fa_study.audit_model.compare import end_to_end_table, growth_table, layer_table, operator_table
from fa_study.audit_model.exact import float64_throughout, golden_model
from fa_study.audit_model.findings import findings_of
from fa_study.audit_model.implementations import Implementation, implementation, library_of
from fa_study.audit_model.inputs import check_inputs, made_up_inputs
from fa_study.audit_model.layers import on_same_inputs, operators
from fa_study.audit_model.passes import Pass, end_to_end
from fa_study.audit_model.watching import attention_layers
from fa_study.compare.twin import one_ulp
from fa_study.tables import provenance

FACTS = ("model", "parameters", "attention layers", "dtype", "device", "inputs")


@dataclass(frozen=True)
class ModelReport:
    """Everything the audit of a model found out.

    Attributes
    ----------
    passed : no finding is a failure.
    findings : what is wrong, then notes: where the difference begins, how it grows, what became of the loss.
    layers : a row per attention layer and tensor ("out", "gradient"), computed from the same inputs: largest
        difference of B from A, largest errors of both against float64, their ratio, verdict.
    growth : a row per attention layer and direction of the whole passes: relative L2 difference of B from A, and the
        smallest and largest of the twins'.
    end_to_end : a row for the output, the loss and the gradients of all weights: the same, and both errors.
    operators : a row per layer: the attention operators that ran in A and in B, and whether anything differs.
    facts : the model and its inputs.
    """

    a: str
    b: str
    passed: bool
    findings: list[Finding]
    layers: pd.DataFrame
    growth: pd.DataFrame
    end_to_end: pd.DataFrame
    operators: pd.DataFrame
    facts: dict[str, str]
    origin: dict[str, object]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Plain values only; infinities and NaN become None."""
        tables = {name: getattr(self, name).to_dict("records") for name in TABLES}
        return plain(
            {
                **{name: getattr(self, name) for name in ("a", "b", "passed", "facts", "origin", "seconds")},
                "findings": [asdict(f) for f in self.findings],
                **tables,
            }
        )

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


TABLES = ("layers", "growth", "end_to_end", "operators")


def audit_model(
    model: nn.Module,
    a: str | Callable,
    b: str | Callable,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    twins: int = 3,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> ModelReport:
    """Is the difference that attention `b` makes in a model, in place of `a`, expected?

    Both run on the same inputs, forward and backward, beside the same model in float64. Expected is, by the rule of
    FlashAttention's authors, an error of `b` of at most twice that of `a`, three times for gradients: in every
    attention layer by itself, fed in both cases with the inputs that it has under `a` (largest errors), and end to end
    (relative L2 errors).

    On its way through a model rounding is amplified. The scale to read a difference by is that of twins: the model
    under `a` with every weight moved by at most one unit in the last place. Whatever differs end to end by no more than
    they do is expected too.

    In float64 nothing at all is rounded, not even where the model computes in float32 by itself (norms, angles of
    positions). Both implementations share that rounding: it makes the rule end to end more lenient, and the layers,
    which are handed their inputs, no more lenient.

    The copies take up to five times the memory of 16-bit weights, three times that of float32. There is no time limit.

    Parameters
    ----------
    model : of transformers or diffusers, in float64, float32, bfloat16 or float16. It is left as it is: copies run,
        in evaluation mode, without dropout.
    a, b : names of implementations (see `fa_study.audit_model.implementations`), a diffusers processor, or a function
        that is called as `torch.nn.functional.scaled_dot_product_attention` is.
    inputs : arguments of the model's `forward` by name; float tensors are rounded to the model's dtype. By default made
        up from the configuration. With `labels` the loss is the model's own; otherwise it is the mean square difference
        of the output from fixed normal noise.
    twins : how many.
    seed : of the inputs that are made up.
    say : gets a line for each stage.

    Returns
    -------
    ModelReport

    Raises
    ------
    ValueError
        If the model, an implementation or an input cannot be used. Whatever the model raises while it runs is in the
        report.
    """
    start = time.perf_counter()
    library_of(model)
    model = copy.deepcopy(model).eval()
    layers = attention_layers(model)
    dtype, device = _dtype_and_device(model)
    both = [implementation(model, which) for which in (a, b)]
    if both[0].name == both[1].name:
        raise ValueError(f"a and b are both {both[0].name}: name two implementations to compare")
    if twins < 1:
        raise ValueError(f"twins={twins}: use 1 or more, they are the scale that a difference is read by")
    given = made_up_inputs(model, seed) if inputs is None else check_inputs(inputs, model)
    given = {n: x.to(device, dtype if x.is_floating_point() else x.dtype) for n, x in given.items()}
    facts = (
        type(model).__name__,
        f"{sum(p.numel() for p in model.parameters()):,}",
        str(len(layers)),
        str(dtype).removeprefix("torch."),
        str(device),
        ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()),
    )
    name = next(n for n, d in DTYPES.items() if d == dtype)
    tables, passes, errors = _measured(model, both, given, twins, FLOOR[name], say)
    findings = findings_of(tables, passes, errors, *(i.name for i in both))
    return ModelReport(
        both[0].name,
        both[1].name,
        not any(f.level == "fail" for f in findings),
        findings,
        **tables,
        facts=dict(zip(FACTS, facts)),
        origin=provenance(f"audit of {facts[0]}: {both[0].name} and {both[1].name}"),
        seconds=time.perf_counter() - start,
    )


def _measured(
    model: nn.Module, both: list[Implementation], inputs: dict[str, Tensor], twins: int, floor: float, say: Callable
) -> tuple[dict[str, pd.DataFrame], list[Pass], list[str]]:
    """All four tables; the passes of A, B and float64; why B did not run through layer by layer."""
    passes, ran = [], []
    for number, one in enumerate(both):
        say(f"{one.name}, end to end")
        with one.switched(model):
            passes.append(end_to_end(model, inputs, keep_calls=number == 0))
            ran.append(operators(model, inputs))
    calls = passes[0].calls
    results, errors = [], []
    for one in both:
        say(f"{one.name}, layer by layer")
        with one.switched(model):
            result, error = on_same_inputs(model, inputs, calls)
        results.append(result)
        errors.append(error)
    say("float64")
    exact = golden_model(model)
    exact_inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    reference = implementation(exact, "eager" if library_of(model) == "transformers" else "sdpa:math")
    with reference.switched(exact), float64_throughout():
        passes.append(end_to_end(exact, exact_inputs))
        result, error = on_same_inputs(exact, exact_inputs, calls)
        results.append(result)
        errors.append(error)
    del exact
    others = []
    for k in range(twins):
        say(f"twin {k + 1} of {twins}")
        with both[0].switched(model):
            others.append(end_to_end(_twin(model, k + 1), inputs))
    tables = {
        "layers": layer_table(list(calls), *results, floor),
        "growth": growth_table(list(calls), passes, others),
        "end_to_end": end_to_end_table(passes, others, floor),
        "operators": operator_table(list(calls), *ran, *results[:2]),
    }
    return tables, passes, errors


def _twin(model: nn.Module, seed: int) -> nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(one_ulp(p, seed))
    return twin


def _dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Those of most of the weights."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for p in model.parameters():
        sizes[p.dtype, p.device] = sizes.get((p.dtype, p.device), 0) + p.numel()
    dtype, device = max(sizes, key=lambda key: sizes[key])
    if dtype not in DTYPES.values():
        raise ValueError(f"weights in {dtype} are not audited: use {', '.join(map(str, DTYPES.values()))}")
    return dtype, device

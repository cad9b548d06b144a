"""Distances between two sets of weights: a row per tensor, per group of layers, and for the whole model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import joblib
import pandas as pd
import torch

from fa_study.distance.metrics import COUNT_METRICS, METRICS, Comparison, compare
from fa_study.distance.pool import Pool
from fa_study.distance.values import Flat, flatten
from fa_study.names import ZERO_GRADIENT, group_of, merge_ties, plain_names
from fa_study.snapshots import Weights

COLUMNS = (
    "level",
    "name",
    "group",
    "average",
    "dtype_a",
    "dtype_b",
    "numel",
    "zero_gradient",
    "tied",
    *METRICS,
)


def weight_distances(
    weights_a: Mapping,
    weights_b: Mapping,
    *,
    groups: Mapping[str, str] | None = None,
    zero_gradient: str = ZERO_GRADIENT,
    strict: bool = False,
    n_jobs: int = -1,
    progress: Callable[[Iterable, int], Iterable] | None = None,
) -> pd.DataFrame:
    """Distances between two sets of weights, tensor by tensor, group by group and as a whole.

    Parameters
    ----------
    weights_a, weights_b
        Mappings from names to tensors or arrays, such as a state dict or what `load_weights` returns. Wrappers'
        prefixes are removed; of tied weights one name is compared.
    groups
        {label: regular expression}: a tensor's group is the first label whose expression is found in its name, else
        "other". Default: its layer, the path up to the first number.
    zero_gradient
        A regular expression for parameters whose exact gradient is zero: key-projection biases, unless the keys are
        rotated or normalised after the bias. Their rows are tagged, and no aggregate counts them.
    strict
        Make names on one side only, and shapes that differ, an error.
    n_jobs
        Threads that compare tensors side by side; -1 for one per core. Each holds one pair of tensors at a time.
    progress
        Called with an iterable of finished tensors and their number, such as a wrapper of tqdm.

    Returns
    -------
    DataFrame
        Tidy. The column `level` says what a row is: "tensor"; "group" or "model", each with three rows whose column
        `average` is "mean", "weighted" or "pooled" (`fa_study.distance.pool`); "only_a", "only_b" or "shape_differs"
        for what could not be compared. Other columns: name, group, dtype_a, dtype_b, numel, zero_gradient, tied
        (further names of the same tensor) and every name in `METRICS` (`fa_study.distance.metrics`). Integer and
        boolean buffers and empty tensors have rows but no part in aggregates; what could not be compared has counts of
        0. The pooled wasserstein of values wider than 16 bits reads the tensors again, slice by slice
        (`fa_study.distance.streamed`).

    Raises
    ------
    ValueError
        No name in common, two names that become one without their prefixes, or, if strict, what differs.
    """
    stored_a, stored_b = plain_names(weights_a, "first weights"), plain_names(weights_b, "second weights")
    ties = [_ties(weights, stored) for weights, stored in ((weights_a, stored_a), (weights_b, stored_b))]
    names_a, names_b, aliases = merge_ties(stored_a, stored_b, *ties)
    present = set(names_b)
    common = [name for name in names_a if name in present]
    if not common:
        raise ValueError(f"no name in common: {_some(names_a)} on one side, {_some(names_b)} on the other")
    only = [("only_a", n) for n in names_a if n not in present]
    only += [("only_b", n) for n in names_b if n not in set(names_a)]
    if strict and only:
        raise ValueError("strict: " + "; ".join(f"{name} is {level.replace('_', ' in ')}" for level, name in only))

    def read(name: str, side: int) -> Flat:
        return flatten((weights_a, weights_b)[side][(stored_a, stored_b)[side][name]])

    # What a Weights mapping returns is a copy that nobody else holds.
    own = tuple(isinstance(weights, Weights) for weights in (weights_a, weights_b))

    def task(name: str) -> tuple[dict, Comparison | None]:
        return _compare(name, weights_a[stored_a[name]], weights_b[stored_b[name]], own)

    results = joblib.Parallel(n_jobs=n_jobs, backend="threading", return_as="generator")(
        joblib.delayed(task)(name) for name in common
    )
    tensors, model, pools = [], Pool(), {}
    for row, comparison in progress(results, len(common)) if progress else results:
        row["group"] = group_of(row["name"], groups)
        row["zero_gradient"] = bool(re.search(zero_gradient, row["name"]))
        row["tied"] = ", ".join(aliases.get(row["name"], []))
        tensors.append(row)
        if strict and row["level"] == "shape_differs":
            raise ValueError(f"strict: {row['name']} has another shape on each side")
        if comparison is None or not comparison.is_float or row["zero_gradient"]:
            continue
        for pool in (model, pools.setdefault(row["group"], Pool())):
            pool.add(comparison, row)
    rows = tensors
    for label, pool in pools.items():
        rows += [{"level": "group", "name": label, "group": label} | row for row in pool.aggregates(read)]
    rows += [{"level": "model", "name": "model"} | row for row in model.aggregates(read)]
    rows += [{"level": level, "name": name, "group": group_of(name, groups)} for level, name in only]
    frame = pd.DataFrame(rows).reindex(columns=list(COLUMNS))
    for column, filler in (("group", ""), ("average", ""), ("dtype_a", ""), ("dtype_b", ""), ("tied", "")):
        frame[column] = frame[column].astype(object).where(frame[column].notna(), filler).astype(str)
    frame["zero_gradient"] = frame["zero_gradient"].eq(True)
    for column in ("numel", *COUNT_METRICS):
        frame[column] = frame[column].fillna(0).astype("int64")
    return frame


def _compare(name: str, a: object, b: object, overwrite: tuple[bool, bool]) -> tuple[dict, Comparison | None]:
    shape_a, shape_b = tuple(a.shape), tuple(b.shape)
    try:
        flat_a, flat_b = flatten(a), flatten(b)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    row = {
        "level": "tensor" if shape_a == shape_b else "shape_differs",
        "name": name,
        "dtype_a": str(flat_a.dtype).removeprefix("torch."),
        "dtype_b": str(flat_b.dtype).removeprefix("torch."),
        "numel": len(flat_a),
    }
    if shape_a != shape_b or not len(flat_a):
        return row, None
    comparison = compare(flat_a, flat_b, overwrite=overwrite)
    return row | comparison.metrics(), comparison


def _ties(weights: Mapping, stored: Mapping[str, str]) -> dict[str, str]:
    """{further name: first name}: as the source says, or by the memory that tensors of a state dict share."""
    if hasattr(weights, "tied"):
        return dict(weights.tied)
    first: dict[tuple, str] = {}
    tied = {}
    for name, key in stored.items():
        tensor = weights[key]
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.numel():
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
            if first.setdefault(place, name) != name:
                tied[name] = first[place]
    return tied


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "nothing"

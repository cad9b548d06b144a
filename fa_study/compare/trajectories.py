"""Which checkpoints of two series belong together, one pair or one per common step, and their distances."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import pandas as pd

from fa_study.distance import weight_distances
from fa_study.snapshots import load_weights, snapshot_steps


def paired_sources(sources: list[str], step: int | None = None) -> tuple[dict[int | None, tuple], list[str]]:
    """The pairs to compare, by step, and notes on what has no partner.

    Parameters
    ----------
    sources
        Two checkpoints; two run folders; two patterns with wildcards; or what a shell made of such patterns, namely
        files of two folders.
    step
        Compare run folders at this step only.

    Returns
    -------
    pairs
        {step: (arguments of load_weights for A, for B)}, with the key None for a single pair.

    Raises
    ------
    ValueError
        The sources are not two series, or have no step in common.
    """
    if any(glob.has_magic(source) and not Path(source).exists() for source in sources):
        if len(sources) != 2:
            raise ValueError(f"expected two patterns, got {len(sources)} sources; quote the patterns")
        series = [sorted(glob.glob(source)) or [source] for source in sources]
    elif len(sources) == 2:
        if step is None and all((Path(source) / "manifest.json").is_file() for source in sources):
            steps = [{n: (source, n) for n in snapshot_steps(source)} for source in sources]
            return _common(*steps, sources)
        return {None: tuple((s, step if (Path(s) / "manifest.json").is_file() else None) for s in sources)}, []
    else:
        folders = list(dict.fromkeys(Path(source).parent for source in sources))
        if len(folders) != 2:
            raise ValueError(
                f"expected two checkpoints or the files of two folders, got {len(sources)} sources in "
                f"{len(folders)} folders; quote patterns such as 'A/*' 'B/*'"
            )
        series = [[source for source in sources if Path(source).parent == folder] for folder in folders]
    return _common(*({step_of(path): (path, None) for path in _distinct(paths)} for paths in series), sources)


def step_of(path: str | Path) -> int:
    """The last number in a file's name without its suffix: 100 for step-000100.safetensors."""
    numbers = re.findall(r"\d+", Path(path).stem)
    if not numbers:
        raise ValueError(f"{path}: no step in the name; a series needs names such as step-000100.safetensors")
    return int(numbers[-1])


def _distinct(paths: list[str]) -> list[str]:
    steps: dict[int, str] = {}
    for path in paths:
        if steps.setdefault(step_of(path), path) != path:
            raise ValueError(f"{steps[step_of(path)]} and {path} have the same step; narrow the pattern")
    return paths


def _common(a: Mapping, b: Mapping, sources: list[str]) -> tuple[dict, list[str]]:
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ValueError(f"no step in common: {sorted(a)} in {sources[0]}, {sorted(b)} in {sources[-1]}")
    notes = [
        f"steps of {side} only: {', '.join(map(str, sorted(own.keys() - other.keys())))}"
        for side, own, other in (("A", a, b), ("B", b, a))
        if own.keys() - other.keys()
    ]
    return {n: (a[n], b[n]) for n in common}, notes


def pair_distances(
    pairs: Mapping[int | None, tuple],
    *,
    progress: Callable[[int | None, Iterable, int], Iterable] | None = None,
    **options,
) -> pd.DataFrame:
    """`weight_distances` of every pair, one below the other.

    Parameters
    ----------
    pairs
        {step: (arguments of load_weights for A, for B)}, as from `paired_sources`.
    progress
        Called with the step, an iterable of finished tensors and their number.
    options
        Further arguments of `weight_distances`.

    Returns
    -------
    DataFrame
        As `weight_distances` gives it, with the column `step` in front unless the step is None.
    """
    frames = []
    for step, (a, b) in pairs.items():
        shown = partial(progress, step) if progress else None
        frame = weight_distances(load_weights(*a), load_weights(*b), progress=shown, **options)
        if step is not None:
            frame.insert(0, "step", step)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)

"""Training runs on the disk, and which two of them differ in one thing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from fa_study.snapshots import snapshot_steps

# What the weights of a run at a step depend on, as dotted names in its config.yaml, and the value that an absent one
# stands for. Not the number of steps: a shorter run is the start of a longer one.
SETTINGS = {
    "attn": None,
    "precision.name": None,
    "seed": None,
    "data_seed": 0,
    "twin": 0,
    "twin_step": 0,
    "repeat": 0,
    "threads": 1,
    "batch_split": 1,
    "batch_size": None,
    "model": None,
    "data": None,
    "optimizer": None,
    "device": None,
}
# (setting, value of the first run, value of the second) -> what the comparison of two runs is called.
KINDS = {
    ("attn", "flash", "baseline"): "Flash against Baseline",
    ("attn", "tiled", "baseline"): "tiled against Baseline",
    ("precision.name", "bf16", "fp32"): "BF16 against FP32",
    ("precision.name", "fp16_emulated", "fp32"): "FP16 against FP32",
}
# Settings whose every change is a control of one kind.
CONTROLS = {
    "seed": "other initialisation",
    "data_seed": "other data order",
    "twin": "ulp twin",
    "repeat": "the same again",
    "threads": "other thread count",
    "batch_split": "batch in parts",
}
# What these settings are in a run without any control, whose seed is free.
PLAIN = {name: SETTINGS[name] for name in CONTROLS if name != "seed"}
TRAVELLED = "its own start"


@dataclass(frozen=True)
class Pair:
    """Two run folders that differ in one thing: what it is, and the precision and seed of the run compared with.

    variant tells pairs of one kind apart: the formats of a tiled arm, the step at which a twin forks.
    """

    kind: str
    variant: str
    run: Path
    reference: Path
    precision: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.run.name}--{self.reference.name}"


def run_settings(run: Path) -> dict:
    """What a run's weights depend on: `SETTINGS` out of its config.yaml."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    settings = {}
    for name, default in SETTINGS.items():
        group, _, leaf = name.partition(".")
        settings[name] = config[group][leaf] if leaf else config.get(group, default)
    return settings


def arm(settings: dict) -> str:
    """The attention of a run in short: baseline, flash, or policy and format of a tiled arm."""
    attn = settings["attn"]
    return f"{attn['policy']} {attn['format']}" if attn["name"] == "tiled" else attn["name"]


def runs_in(folder: Path) -> dict[Path, dict]:
    """{run folder: settings} of every finished run in `folder`, in order of name."""
    runs = {}
    for manifest in sorted(folder.glob("*/manifest.json")):
        # A folder of tables has a manifest too, and no state.
        if json.loads(manifest.read_text()).get("state") == "finished":
            runs[manifest.parent] = run_settings(manifest.parent)
    return runs


def plain(settings: dict) -> bool:
    """True for a run without any control; its seed is free."""
    return all(settings[name] == value for name, value in PLAIN.items())


def pairs_in(folder: Path) -> Iterator[Pair]:
    """Every two finished runs in `folder` that differ in one thing, and every plain Baseline run with its own start.

    A control is compared with the Baseline run from which it differs. Initialisations are compared one with the next,
    so that no run counts more than twice. Of runs that differ in their number of steps alone, the longest counts.
    """
    runs = longest_runs(folder)
    for run, settings in runs.items():
        if settings["attn"]["name"] == "baseline" and plain(settings):
            yield Pair(TRAVELLED, "", run, run, settings["precision.name"], settings["seed"])
        for reference, others in runs.items():
            kind, variant = _kind(settings, others)
            if kind is not None:
                yield Pair(kind, variant, run, reference, others["precision.name"], others["seed"])


def longest_runs(folder: Path) -> dict[Path, dict]:
    """`runs_in`, and of runs that differ in their number of steps alone the longest."""
    runs, chosen = runs_in(folder), {}
    for run, settings in runs.items():
        rival = chosen.get(repr(settings))
        if rival is None or max(snapshot_steps(run), default=0) > max(snapshot_steps(rival), default=0):
            chosen[repr(settings)] = run
    return {run: runs[run] for run in chosen.values()}


def _kind(a: dict, b: dict) -> tuple[str | None, str]:
    differing = [name for name in SETTINGS if a[name] != b[name]]
    if differing == ["twin", "twin_step"]:
        differing = ["twin"]
    if len(differing) != 1 or not plain(b):
        return None, ""
    (name,) = differing
    if name == "attn":
        return KINDS.get((name, a[name]["name"], b[name]["name"])), arm(a) if a[name]["name"] == "tiled" else ""
    if b["attn"]["name"] != "baseline":
        return None, ""
    if name == "seed":
        return CONTROLS[name] if a[name] == b[name] + 1 else None, ""
    variant = f"from step {a['twin_step']}" if a["twin_step"] else ""
    return CONTROLS.get(name) or KINDS.get((name, a[name], b[name])), variant

"""What may be set, what it must be, and the run's name that follows from it.

The resolved settings of a run are an OmegaConf node with the shape of conf/config.yaml. Everything a user can get wrong
is a ValueError in one sentence, raised before anything is trained or written.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from train import Refusal
from train.system import PROJECT

CONF = PROJECT / "conf"
GROUPS = ("attn", "precision", "model", "data", "logger", "experiment")
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "finished": ("refuse", "skip"),
    "on_nan": ("stop", "continue"),
    "snapshots.predictions": (True, False),
    "sampling.strip": (True, False),
    "model.size": ("tiny", "small", "base"),
    "data.pixels": (16, 32, 64),
    "attn.algorithm": ("baseline", "fa1", "fa2", "fa4"),
    "attn.policy": ("kernel", "torch_cpu", "eager", "uniform"),
    "attn.exp": ("exact", "exp2_fma", "fexp_u20"),
    "attn.backend": ("math", "flash", "efficient", "cudnn"),
    "logger.mode": ("online", "offline", "disabled"),
}
POSITIVE = ("steps", "batch_size", "batch_split", "threads", "snapshots.every", "log_every", "sampling.steps")
POSITIVE_OF_SOME_ARMS = ("attn.tile_rows", "attn.tile_keys")
NATURAL = ("seed", "data_seed", "twin", "twin_step", "repeat", "sampling.count", "probe.deviation_every")
# Settings that say where a run goes or what is reported on the way, and change nothing that it computes.
ELSEWHERE = ("runs_dir", "finished", "continue_from", "logger.mode", "logger.project")


def flat(node: DictConfig | dict) -> dict[str, object]:
    """Dotted name -> value of every setting."""
    container = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    result: dict[str, object] = {}
    for key, value in container.items():
        if isinstance(value, dict):
            result |= {f"{key}.{inner}": leaf for inner, leaf in flat(value).items()}
        else:
            result[key] = value
    return result


def choices_of(group: str) -> list[str]:
    """The files of a configuration group, by name."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def defaults(chosen: dict[str, str]) -> dict[str, object]:
    """Every setting's default, flat, where group `g` is at `chosen[g]`."""
    main = OmegaConf.load(CONF / "config.yaml")
    for key in ("defaults", "hydra"):
        del main[key]
    for group, choice in chosen.items():
        main[group] = OmegaConf.load(CONF / group / f"{choice}.yaml")
    return flat(main)


def results_settings(settings: DictConfig) -> dict[str, object]:
    """The settings that a run's results depend on; what config.yaml in its folder holds and is compared with."""
    return {key: value for key, value in flat(settings).items() if key not in ELSEWHERE}


def run_name(settings: DictConfig) -> str:
    """<attn>-<precision>-<model>-s<seed>, and behind it the other settings that differ from their defaults."""
    chosen = {group: settings[group].name for group in ("attn", "precision", "model", "data")}
    usual = defaults(chosen)
    leaves = [key.rpartition(".")[2] for key in usual]
    parts = [settings.attn.name, settings.precision.name, settings.model.name, f"s{settings.seed}"]
    if settings.data.name != "emoji":
        parts.append(settings.data.name)
    for key, value in results_settings(settings).items():
        if key in ("seed", "device") or value == usual.get(key):
            continue
        leaf = key.rpartition(".")[2]
        label = leaf if leaves.count(leaf) == 1 else key
        if key == "data.path":
            value = Path(str(value)).name
        number = isinstance(value, int | float) and not isinstance(value, bool)
        parts.append(f"{label}{value}" if number else f"{label}_{value}".replace(":", "_"))
    return "-".join(parts)


def check_settings(settings: DictConfig) -> None:
    """Raise Refusal for a value that is not allowed."""
    values = flat(settings)
    for key, allowed in CHOICES.items():
        if key in values and values[key] not in allowed:
            raise Refusal(f"{key}={values[key]} is unknown; use {_listed(allowed)}")
    for key in (*POSITIVE, *(key for key in POSITIVE_OF_SOME_ARMS if key in values)):
        if not _is_whole(values[key]) or values[key] < 1:
            raise Refusal(f"{key}={values[key]} is no count; use a whole number of at least 1")
    for key in NATURAL:
        if not _is_whole(values[key]) or values[key] < 0:
            raise Refusal(f"{key}={values[key]} is not allowed; use a whole number of at least 0")
    if settings.batch_split > settings.batch_size:
        sizes = f"batch_split={settings.batch_split} is more than batch_size={settings.batch_size}"
        raise Refusal(f"{sizes}; a batch has at most as many parts as pictures")
    for key, value in flat({name: dict(settings[name]) for name in ("optimizer",)}).items():
        if not _is_finite(value) or value < 0:
            raise Refusal(f"{key}={value} is not allowed; use a finite number of at least 0")
    if not _is_finite(values["sampling.guidance"]):
        raise Refusal(f"sampling.guidance={values['sampling.guidance']} is no finite number; use one such as 3.0")
    if settings.twin_step and not settings.twin:
        raise Refusal(f"twin_step={settings.twin_step} without a twin changes nothing; add twin=1")
    if settings.twin_step >= settings.steps:
        raise Refusal(f"twin_step={settings.twin_step} lies behind the end; use less than steps={settings.steps}")
    if settings.data.name == "folder" and not settings.data.path:
        raise Refusal("data=folder needs a folder; give data.path=/path/to/pictures")
    dropout = values["data.caption_dropout"]
    if not _is_finite(dropout) or not 0 <= dropout <= 1:
        raise Refusal(f"data.caption_dropout={dropout} is no probability; use 0 to 1")


def check_overrides(arguments: Sequence[str]) -> None:
    """Raise Refusal for an option on the command line that does not exist, listing those that do.

    Hydra's own message for `stpes=60` names no alternative, and `+stpes=60` would be accepted and ignored.
    """
    keys = set(defaults({}))
    for group in GROUPS:
        for choice in choices_of(group) if group != "experiment" else ():
            keys |= {f"{group}.{key}" for key in flat(OmegaConf.load(CONF / group / f"{choice}.yaml")) if key != "name"}
    allowed = sorted(keys | set(GROUPS))
    for argument in arguments:
        key, equals, value = argument.partition("=")
        key = key.lstrip("+~").partition("@")[0]
        if not equals or argument.startswith("-") or key.startswith("hydra"):
            continue
        if key in GROUPS:
            for choice in value.split(","):
                if choice not in choices_of(key) and (key, choice) != ("experiment", "null"):
                    raise Refusal(f"{key}={choice} is unknown; use {_listed(choices_of(key))}")
        elif key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise Refusal(f"there is no option {key}; {hint}the options are {', '.join(allowed)}")


def difference(path: Path, settings: DictConfig, ignore: Sequence[str] = ()) -> str:
    """What differs between the settings kept in a run folder and these, as text; empty if nothing does.

    An option that the folder's config.yaml does not know yet had what is its default now.
    """
    kept = OmegaConf.load(path / "config.yaml")
    chosen = {group: kept[group].name for group in ("attn", "precision", "model", "data")}
    usual = {key: value for key, value in defaults(chosen).items() if key not in ELSEWHERE}
    there, here = {**usual, **results_settings(kept)}, results_settings(settings)
    if here["device"] == "auto":  # not looked up yet
        here["device"] = there["device"]
    there, here = ({key: value for key, value in side.items() if key not in ignore} for side in (there, here))
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return ", ".join(f"{key} is {there.get(key)} there and {here.get(key)} here" for key in keys)


def save_settings(settings: DictConfig, path: Path) -> None:
    """Write the resolved settings as YAML."""
    path.write_text(OmegaConf.to_yaml(settings, resolve=True), encoding="utf-8")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # Python counts True as the number 1


def _is_finite(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _listed(allowed: Sequence[object]) -> str:
    *first, last = map(str, allowed)
    return f"{', '.join(first)} or {last}" if first else last

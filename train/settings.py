"""What may be set, what it must be, and the run's name that follows from it.

The resolved settings of a run are an OmegaConf node with the shape of conf/config.yaml. Everything a user can get wrong
is a ValueError in one sentence, raised before anything is trained or written.
"""

from __future__ import annotations

import functools
import hashlib
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
POSITIVE += ("attn.tile_rows", "attn.tile_keys")  # of attn=tiled
NATURAL = ("seed", "data_seed", "twin", "twin_step", "repeat", "sampling.count", "probe.deviation_every")
LARGEST = 2**31 - 1
LONGEST_NAME = 200  # bytes
MOST = {"threads": 1024, "sampling.count": 1024, "sampling.steps": 1000}
TEXTS = ("runs_dir", "continue_from", "logger.project", "data.path")
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


@functools.cache
def options_in(path: Path) -> dict[str, object]:
    """Every option of a configuration file with its default, flat, without Hydra's own."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    return flat({key: value for key, value in content.items() if key not in ("defaults", "hydra")})


def defaults(chosen: dict[str, str]) -> dict[str, object]:
    """Every setting's default, flat, where group `g` is at `chosen[g]`."""
    result = dict(options_in(CONF / "config.yaml"))
    for group, choice in chosen.items():
        result |= {f"{group}.{key}": value for key, value in options_in(CONF / group / f"{choice}.yaml").items()}
    return result


def chosen_groups(settings: DictConfig) -> dict[str, str]:
    """The choice of every group that has a name of its own in the settings."""
    return {group: settings[group].name for group in ("attn", "precision", "model", "data")}


def results_settings(settings: DictConfig) -> dict[str, object]:
    """The settings that a run's results depend on; what config.yaml in its folder holds and is compared with."""
    return {key: value for key, value in flat(settings).items() if key not in ELSEWHERE}


def run_name(settings: DictConfig) -> str:
    """<attn>-<precision>-<model>-s<seed>, and behind it the other settings that differ from their defaults.

    The end of a name that is too long for a folder gives way to a hash of it.
    """
    usual = defaults(chosen_groups(settings))
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
        if is_whole(value) and isinstance(usual.get(key), float):
            value = float(value)  # lr=1 and lr=1.0 are one run
        number = isinstance(value, int | float) and not isinstance(value, bool)
        parts.append(f"{label}{value}" if number else f"{label}_{value}".replace(":", "_"))
    name = "-".join(parts)
    if len(name.encode()) <= LONGEST_NAME:
        return name
    begin = name.encode()[: LONGEST_NAME - 9].decode(errors="ignore")
    return f"{begin}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def check_settings(settings: DictConfig) -> None:
    """Raise Refusal for a value that is not allowed."""
    values = flat(settings)
    usual = defaults(chosen_groups(settings) | {"logger": "wandb"})
    for key in usual:
        if key not in values:
            raise Refusal(f"{key} is a single value, and not one with parts of its own")
    for key, allowed in CHOICES.items():
        if key in values and not any(values[key] == each and type(values[key]) is type(each) for each in allowed):
            raise Refusal(f"{key}={values[key]} is unknown; use {listed(allowed)}")
    for key in TEXTS:
        if key in values and not (values[key] is None and usual[key] is None) and not _is_text(values[key]):
            raise Refusal(f"{key}={values[key]} is no text; a number in quotes is one: \"{key}='1'\"")
        if key != "logger.project" and str(values.get(key)).startswith("~"):
            raise Refusal(f"{key}={values[key]} would make a folder called ~; write the path out, from / on")
    for keys, least in ((POSITIVE, 1), (NATURAL, 0)):
        for key in keys:
            if key in values and not (is_whole(values[key]) and least <= values[key] <= LARGEST):
                raise Refusal(f"{key}={values[key]} is not allowed; use a whole number from {least} to {LARGEST}")
    for key, most in MOST.items():
        if values[key] > most:
            raise Refusal(f"{key}={values[key]} is too many; use at most {most}")
    project = settings.logger.project
    if set(project) & set("/\\#?%:") or len(project) > 128:
        raise Refusal(f"logger.project={project} is no name for W&B; use at most 128 signs, none of / \\ # ? % :")
    if settings.batch_split > settings.batch_size:
        sizes = f"batch_split={settings.batch_split} is more than batch_size={settings.batch_size}"
        raise Refusal(f"{sizes}; a batch has at most as many parts as pictures")
    for key, value in values.items():
        if key.startswith("optimizer.") and (not _is_finite(value) or value < 0):
            raise Refusal(f"{key}={value} is not allowed; use a finite number of at least 0")
    if not _is_finite(values["sampling.guidance"]):
        raise Refusal(f"sampling.guidance={values['sampling.guidance']} is no finite number; use one such as 3.0")
    if settings.twin_step and not settings.twin:
        raise Refusal(f"twin_step={settings.twin_step} without a twin changes nothing; add twin=1")
    if settings.twin_step >= settings.steps:
        raise Refusal(f"twin_step={settings.twin_step} lies behind the end; use less than steps={settings.steps}")
    if settings.data.name == "folder" and settings.data.path is None:
        raise Refusal("data=folder needs a folder; give data.path=/path/to/pictures")
    dropout = values["data.caption_dropout"]
    if not _is_finite(dropout) or not 0 <= dropout <= 1:
        raise Refusal(f"data.caption_dropout={dropout} is no probability; use 0 to 1")


def difference(path: Path, settings: DictConfig, ignore: Sequence[str] = ()) -> str:
    """What differs between the settings kept in a run folder and these, as text; empty if nothing does.

    An option that the folder's config.yaml does not know yet had what is its default now.
    """
    kept = OmegaConf.load(path / "config.yaml")
    usual = {key: value for key, value in defaults(chosen_groups(kept)).items() if key not in ELSEWHERE}
    there, here = {**usual, **results_settings(kept)}, results_settings(settings)
    if here["device"] == "auto":  # not looked up yet
        here["device"] = there["device"]
    there, here = ({key: value for key, value in side.items() if key not in ignore} for side in (there, here))
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return ", ".join(f"{key} is {there.get(key)} there and {here.get(key)} here" for key in keys)


def listed(allowed: Sequence[object]) -> str:
    """The allowed values as text: a, b or c."""
    *first, last = map(str, allowed)
    return f"{', '.join(first)} or {last}" if first else last


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)  # Python counts True as the number 1


def _is_finite(value: object) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value

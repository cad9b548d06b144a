"""The words of a command line, checked before Hydra sees them: its own messages are long and name no alternative."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from train import Refusal
from train.settings import CONF, GROUPS, choices_of, defaults, listed, options_in

SWEEP_FLAGS = ("-m", "--multirun")


def options_of(group: str, choice: str) -> list[str]:
    """The options that a choice of a group brings along, such as attn.backend for attn=sdpa."""
    return [f"{group}.{key}" for key in options_in(CONF / group / f"{choice}.yaml") if key != "name"]


def check_overrides(arguments: Sequence[str], single: str = "for a sweep over them add -m") -> None:
    """Raise Refusal for a word that is no option=value, an option or a choice that does not exist, or several values.

    `single` is what to do about several values where the arguments ask for no sweep. Hydra's own flags are left to it,
    and so are the values of its options, hydra.launcher.n_jobs for one.
    """
    sweep = any(argument in SWEEP_FLAGS for argument in arguments)
    before = ["-m", *arguments]
    words = [
        word
        for flag, word in zip(before, arguments)
        if not word.startswith("-") and ("=" in word or not flag.startswith("-") or flag in SWEEP_FLAGS)
    ]
    chosen = {
        group: [choice] for entry in OmegaConf.load(CONF / "config.yaml").defaults for group, choice in _of(entry)
    }
    options = []
    for word in words:
        override = _parse(word)
        if override.is_sweep_override() and not sweep:
            raise Refusal(f"{word} has several values; {single}")
        key = override.get_key_element()
        if key in GROUPS:
            chosen[key] = word.partition("=")[2].split(",")
            for choice in chosen[key]:
                if choice not in choices_of(key):
                    raise Refusal(f"{key}={choice} is unknown; use {listed(choices_of(key))}")
        elif key.lstrip("+~").split(".")[0] == "hydra":
            _check_hydra(word, key.lstrip("+~"))
        elif not key.startswith("hydra/"):
            options.append(key)
    for key in options:
        _check_option(key, chosen)


def _of(entry) -> list[tuple[str, str]]:
    """The (group, choice) of an entry of the defaults list, if it is one of our groups."""
    return [(group, choice) for group, choice in entry.items() if group in GROUPS] if OmegaConf.is_dict(entry) else []


def _parse(word: str) -> Override:
    key, equals, _ = word.partition("=")
    if not equals and not word.startswith("~"):
        raise Refusal(f"{word} is no option; use option=value, or --help for the options")
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        quoted = f"""write it in quotes inside quotes: "{key}='...'\""""
        raise Refusal(f"{word} cannot be read; if its value has special characters, {quoted}") from None


def _check_hydra(word: str, key: str) -> None:
    """Raise Refusal for a part of Hydra's settings that has parts of its own: most of them would end in a traceback."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        part = OmegaConf.to_container(compose("config", return_hydra_config=True))
    for name in key.split("."):
        part = part.get(name) if isinstance(part, dict) else None
    if isinstance(part, dict):
        inner = ", ".join(f"{key}.{name}" for name in part if name != "_target_")
        why = f", as {key} has options of its own; they are {inner}" if inner else f"; leave {key} as it is"
        raise Refusal(f"{word} is not allowed{why}")
    if key.endswith("._target_"):
        group = key.removesuffix("._target_").replace(".", "/")
        known = ("hydra/launcher", "hydra/sweeper", "hydra/job_logging", "hydra/hydra_logging")
        raise Refusal(f"{word} is not allowed" + (f"; choose with {group}=name" if group in known else ""))


def one_line(error: Exception) -> str:
    """An error's first sentence; Hydra's go on with what else could be tried, and keep the reason apart."""
    text = str(error).split("\n\n")[0]
    if text.startswith("Error merging override") and error.__cause__ is not None:
        text += f": {str(error.__cause__).splitlines()[0]}"
    return " ".join(text.split())


def _check_option(key: str, chosen: dict[str, list[str]]) -> None:
    """Raise Refusal for an option that does not exist, or not for the choices that were made."""
    groups = [group for group in GROUPS if group != "experiment"]
    owners = {(group, choice): options_of(group, choice) for group in groups for choice in choices_of(group)}
    allowed = sorted({*defaults({}), *GROUPS}.union(*owners.values()))
    plain = key.lstrip("+~")
    if plain not in allowed:
        close = difflib.get_close_matches(plain, allowed, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise Refusal(f"there is no option {plain}; {hint}the options are {', '.join(allowed)}")
    if plain != key:
        raise Refusal(f"{key} cannot be added or removed; every option has a default, change it with {plain}=value")
    group = key.partition(".")[0]
    for choice in chosen.get(group, ()):
        if group in groups and key not in owners[group, choice] and (group, choice) in owners:
            which = listed([f"{group}={other}" for other in choices_of(group) if key in owners[group, other]])
            raise Refusal(f"{key} is an option of {which}, not of {group}={choice}; leave it out or change {group}")

"""Names of parameters: wrappers' prefixes, tied weights, layers, and parameters that no gradient moves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# What DistributedDataParallel, FSDP, torch.compile and activation checkpointing put into a path, as whole components.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"})

# A bias added to every key shifts all scores of a query alike, and softmax is blind to a shift: its exact gradient is
# zero. Not so where keys are rotated or normalised afterwards (RoPE, QK norm): pass another pattern there.
ZERO_GRADIENT = r"(^|[._])(to_k|k_proj|key|key_proj|k_lin|w_?k|k)\.bias$"


def plain_name(name: str) -> str:
    """The name without wrappers: `_orig_mod.module.decoder.0.weight` becomes `decoder.0.weight`."""
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), last])


def plain_names(names: Iterable[str], source: str = "the weights") -> dict[str, str]:
    """{plain name: name as stored}; ValueError where two names become one."""
    plain: dict[str, str] = {}
    for name in names:
        short = plain_name(name)
        if short in plain:
            raise ValueError(
                f"{source}: {plain[short]!r} and {name!r} both become {short!r} without their wrappers' prefixes; "
                "rename one of them"
            )
        plain[short] = name
    return plain


def layer_of(name: str) -> str:
    """The layer a tensor belongs to: its path up to the first number, or all of it but the last component."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or name


def group_of(name: str, groups: Mapping[str, str] | None) -> str:
    """The first label whose regular expression is found in the name, "other" if none is; the layer without groups."""
    if groups is None:
        return layer_of(name)
    return next((label for label, pattern in groups.items() if re.search(pattern, name)), "other")


def merge_ties(
    names_a: Iterable[str], names_b: Iterable[str], tied_a: Mapping[str, str], tied_b: Mapping[str, str]
) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Keep one name of weights that are one tensor on a side and one tensor, or partly absent, on the other.

    `tied` maps each further name to the first one. Returns the remaining names of both sides and {name kept: others}.
    A pair that is tied on one side only, with two tensors on the other, stays two rows: they may differ.
    """
    names_a, names_b = dict.fromkeys(names_a), dict.fromkeys(names_b)
    aliases: dict[str, list[str]] = {}
    for tied, here, there, tied_there in ((tied_a, names_a, names_b, tied_b), (tied_b, names_b, names_a, tied_a)):
        families: dict[str, list[str]] = {}
        for alias, first in tied.items():
            families.setdefault(first, [first]).append(alias)
        for family in families.values():
            family = [name for name in family if name in here]
            found = [name for name in family if name in there]
            if len(family) < 2 or len({tied_there.get(name, name) for name in found}) > 1:
                continue
            keep = found[0] if found else family[0]
            others = [name for name in family if name != keep]
            aliases.setdefault(keep, []).extend(others)
            for name in others:
                here.pop(name, None)
                there.pop(name, None)
    return list(names_a), list(names_b), aliases

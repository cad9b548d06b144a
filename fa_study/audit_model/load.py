"""A model by name: a local folder, a configuration, or a class. Nothing is downloaded, and no code of others is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fa_study.audit.calls import one_line
from fa_study.audit_model.implementations import library_of, offline

# A seed for the weights of models built from a configuration.
SEED = 0


def load_model(
    source: str, changes: Mapping[str, object] | None = None, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """The model that `source` names, in `dtype`, in evaluation mode.

    Parameters
    ----------
    source
        * a folder with config.json and .safetensors files, as `save_pretrained` writes it,
        * a config.json file: the model gets random weights,
        * the name of a class of transformers or diffusers: its default configuration, and random weights.
    changes : entries of the configuration to replace, for random weights only.

    Raises
    ------
    ValueError
        If there is no such folder, file or class, or the library cannot make the model of it.

    Notes
    -----
    Random weights of language models are drawn with a standard deviation of 1 / sqrt(hidden size) instead of the usual
    0.02, so that the scores of attention are of size 1: near zero all keys would weigh the same, and even a wrong scale
    would hardly show. `changes` may name another `initializer_range`.
    """
    path = Path(source)
    config = _read_config(path / "config.json" if path.is_dir() else path) if path.exists() else {}
    cls = _model_class(source, config)
    try:
        with offline(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            if path.is_dir():
                if changes:
                    raise ValueError("the configuration of trained weights stays as it is")
                model = cls.from_pretrained(path, local_files_only=True, use_safetensors=True, **_dtype_of(cls, dtype))
            else:
                model = _from_config(cls, config, changes or {}, dtype)
    except Exception as error:  # whatever a library raises for a configuration that it cannot take
        raise ValueError(f"{source}: {cls.__name__} cannot be made of it: {one_line(error)}") from error
    library_of(model)
    return model.eval()


def _read_config(path: Path) -> dict:
    if (path.parent / "model_index.json").exists() and not path.exists():
        raise ValueError(f"{path.parent} is a whole pipeline: name the folder of its unet or transformer")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no configuration: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no configuration: expected an object, got {type(config).__name__}")
    return config


def _model_class(source: str, config: dict) -> type:
    """The class of a configuration's `architectures` or `_class_name`, or the one that `source` names."""
    import diffusers
    import transformers

    name = (config.get("architectures") or [config.get("_class_name")])[0] if config else source
    if not isinstance(name, str):
        raise ValueError(f"{source} names no class: add architectures (transformers) or _class_name (diffusers)")
    for library, base in ((transformers, transformers.PreTrainedModel), (diffusers, diffusers.ModelMixin)):
        cls = getattr(library, name, None) if name.isidentifier() else None
        if isinstance(cls, type) and issubclass(cls, base):
            return cls
    if config:
        raise ValueError(f"{source}: {name} is no model class of transformers or diffusers; code of others is not run")
    raise ValueError(
        f"{source} is neither a folder, nor a config.json, nor a model class of transformers or diffusers; nothing is "
        "downloaded: save the model with save_pretrained and name that folder"
    )


def _dtype_of(cls: type, dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"dtype": dtype} if cls.__module__.startswith("transformers") else {"torch_dtype": dtype}


def _from_config(cls: type, config: dict, changes: Mapping[str, object], dtype: torch.dtype) -> nn.Module:
    if not cls.__module__.startswith("transformers"):
        return nn.Module.to(cls.from_config({**config, **changes}), dtype)
    settings = cls.config_class.from_dict({**config, **changes})
    if "initializer_range" not in changes and hasattr(settings, "hidden_size"):
        settings.initializer_range = settings.hidden_size**-0.5
    return cls._from_config(settings, dtype=dtype)

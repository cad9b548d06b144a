"""The inputs of a model: made up from its configuration, or read from a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fa_study.audit_model.implementations import library_of

BATCH = 2
TEXT = 16  # tokens of a caption
_LONGEST = 1024
_WITH_LOSS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel")


def made_up_inputs(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Inputs as the model's configuration describes them: token ids, or noisy pictures, timesteps and text states.

    Token ids are as many as show a sliding window, 128 or more where the model allows it; no token is padding.

    Raises
    ------
    ValueError
        If the model's first input is of a kind that is not made up here.
    """
    g = torch.Generator().manual_seed(seed)
    make = _language_inputs if library_of(model) == "transformers" else _diffusion_inputs
    inputs = make(model, g)
    if not inputs:
        raise ValueError(f"the inputs of {type(model).__name__} cannot be made up: give them in a .safetensors file")
    return inputs


def read_inputs(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, whose names are arguments of the model's `forward`.

    Raises
    ------
    ValueError
        If the file is no safetensors file, or a name is no argument.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        inputs = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a .safetensors file: {error}") from error
    return check_inputs(inputs, model)


def check_inputs(inputs: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The inputs as a dict, if each is an argument of the model's `forward` and a tensor."""
    takes = [n for n in inspect.signature(model.forward).parameters if n != "kwargs"]
    for name, value in inputs.items():
        if name not in takes:
            raise ValueError(f"{type(model).__name__} takes no input {name!r}: it takes {', '.join(takes)}")
        if not isinstance(value, Tensor):
            raise ValueError(f"the input {name!r} is {type(value).__name__}: give a tensor")
    if not inputs:
        raise ValueError(f"no inputs are given: {type(model).__name__} takes {', '.join(takes)}")
    return dict(inputs)


def _language_inputs(model: nn.Module, g: torch.Generator) -> dict[str, Tensor]:
    config = model.config.get_text_config()
    takes = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = (BATCH, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(size, generator=g)}
    if model.main_input_name != "input_ids":
        return {}
    window = getattr(config, "sliding_window", None) or 0
    most = getattr(config, "max_position_embeddings", None) or _LONGEST
    length = min(max(128, 2 * window), most, _LONGEST)
    ids = torch.randint(0, config.vocab_size, (BATCH, length), generator=g)
    inputs = {"input_ids": ids}
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = torch.randint(0, config.vocab_size, (BATCH, length), generator=g)
    if "labels" in takes and any(part in type(model).__name__ for part in _WITH_LOSS):
        inputs["labels"] = inputs.get("decoder_input_ids", ids).clone()
    return inputs


def _diffusion_inputs(model: nn.Module, g: torch.Generator) -> dict[str, Tensor]:
    """A picture of noise, timesteps and text states, for each argument whose size the configuration tells."""
    config = dict(model.config)

    def size(*names: str) -> int:
        value = next((config[n] for n in names if config.get(n)), 0)
        return value if isinstance(value, int) else value[0]

    picture = config.get("sample_size") or 32
    height, width = (picture, picture) if isinstance(picture, int) else picture
    shape = (BATCH, size("in_channels"), height, width)
    text = size("caption_channels", "joint_attention_dim", "cross_attention_dim")
    pooled = size("pooled_projection_dim")
    makers: dict[str, Callable[[], Tensor] | None] = {
        "sample": lambda: torch.randn(shape, generator=g),
        "hidden_states": (lambda: torch.randn(shape, generator=g)) if config.get("sample_size") else None,
        "timestep": lambda: torch.tensor([100, 700]),
        "encoder_hidden_states": (lambda: torch.randn(BATCH, TEXT, text, generator=g)) if text else None,
        "pooled_projections": (lambda: torch.randn(BATCH, pooled, generator=g)) if pooled else None,
        "class_labels": (lambda: torch.tensor([0, 1])) if size("num_class_embeds", "num_embeds_ada_norm") else None,
    }
    takes = inspect.signature(model.forward).parameters
    inputs = {name: make() for name, make in makers.items() if make and name in takes}
    missing = [n for n, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    pictures = {"sample", "hidden_states"} & set(inputs)
    return inputs if shape[1] and pictures and not set(missing) - set(inputs) else {}

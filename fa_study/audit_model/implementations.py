"""Attention implementations by name, and how each is put into a transformers or a diffusers model.

==================================  ==================================================================================
eager                               attention written out: transformers' own; for diffusers a product, a softmax in at
                                    least FP32 and a product in place of PyTorch's attention
sdpa                                PyTorch's attention; for diffusers the processors that the model was built with
sdpa:math                           PyTorch's attention held to one of its kernels, or sdpa:flash, sdpa:efficient,
                                    sdpa:cudnn; an error where that one cannot run
emulated                            this package's FlashAttention 2 with the kernels' rounding, tiles of 64 keys
flash_attention_2, flex_attention   any other that transformers registers (transformers models)
AttnProcessor, AttnProcessor2_0     a class of diffusers.models.attention_processor that takes no arguments (diffusers)
MODULE:FUNCTION, FILE.py:FUNCTION   your own, called as `torch.nn.functional.scaled_dot_product_attention` is
==================================  ==================================================================================

In a diffusers model `set_attention_backend` is not used: for `UNet2DConditionModel` it silently changes nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_study.audit.calls import one_line
from fa_study.audit.worker import load_callable
from fa_study.audit_model.replacements import Replace, emulated, written_out

_KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Implementation:
    """A name, and a context manager that has a model compute its attention so while it is open."""

    name: str
    switched: Callable[[nn.Module], contextlib.AbstractContextManager]


def library_of(model: nn.Module) -> str:
    """The library a model is of: "transformers" or "diffusers".

    Raises
    ------
    ValueError
        If it is of neither, or its attention cannot be switched.
    """
    modules = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    if "transformers" in modules and hasattr(model, "set_attn_implementation"):
        return "transformers"
    if "diffusers" in modules and hasattr(model, "register_to_config"):
        return "diffusers"
    raise ValueError(
        f"{type(model).__name__} is no model whose attention can be switched: use one of transformers "
        "(set_attn_implementation) or diffusers"
    )


def implementation(model: nn.Module, which: str | Callable) -> Implementation:
    """The implementation that a name, a callable or a diffusers processor stands for, checked against the model.

    Raises
    ------
    ValueError
        If the model has no such implementation, or what it needs is not installed. Nothing is ever downloaded.
    """
    library = library_of(model)
    processor = _processor(which) if hasattr(model, "set_attn_processor") else None
    if processor is not None:
        name = which if isinstance(which, str) else type(which).__name__
        return Implementation(name, lambda m: _with_processor(m, processor))
    usual = "sdpa" if library == "transformers" else None
    if callable(which):
        return _replacing(getattr(which, "__name__", type(which).__name__), which, usual)
    if which == "emulated":
        return _replacing(which, emulated, usual)
    if which.startswith("sdpa:") and which[5:] in _KERNELS:
        return Implementation(which, lambda m: _held_to(m, _KERNELS[which[5:]], usual))
    if ":" in which and not which.startswith("sdpa:"):
        return _replacing(which, load_callable(which), usual)
    if library == "diffusers":
        if which == "eager":
            return _replacing(which, written_out, usual)
        if which == "sdpa":
            return Implementation(which, lambda m: contextlib.nullcontext())
        raise ValueError(_unknown(model, which, "a processor class such as AttnProcessor"))
    _try_to_switch(model, which)
    return Implementation(which, lambda m: _switched(m, which))


def _unknown(model: nn.Module, which: str, also: str) -> str:
    kernels = ", ".join(f"sdpa:{name}" for name in _KERNELS)
    return (
        f"{which!r} is no attention of {type(model).__name__}: use eager, sdpa, {kernels}, emulated, {also}, or "
        "MODULE:FUNCTION"
    )


def _try_to_switch(model: nn.Module, name: str) -> None:
    """Refuse, before anything runs, what transformers cannot switch this model to."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    if "/" in name:
        raise ValueError(f"{name!r} would be downloaded, and nothing is: install a package and use {registered}")
    if name not in registered:
        raise ValueError(_unknown(model, name, ", ".join(n for n in registered if n not in ("eager", "sdpa"))))
    before = model.config._attn_implementation
    try:
        with _switched(model, name):
            pass
    except Exception as error:  # whatever a library raises for what it lacks
        raise ValueError(f"{type(model).__name__} cannot use {name} here: {one_line(error)}") from error
    model.set_attn_implementation(before)


@contextlib.contextmanager
def _switched(model: nn.Module, name: str) -> Iterator[None]:
    with offline():
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"the model stays with {model.config._attn_implementation}")
    yield


@contextlib.contextmanager
def _held_to(model: nn.Module, kernel: SDPBackend, usual: str | None) -> Iterator[None]:
    with _switched(model, usual) if usual else contextlib.nullcontext(), sdpa_kernel(kernel):
        yield


def _processor(which: object) -> object | None:
    """A diffusers processor by class name, or the one given (its first argument is `attn`); None for anything else."""
    from diffusers.models import attention_processor

    if not isinstance(which, str):
        return which if next(iter(inspect.signature(which).parameters), "") == "attn" else None
    cls = getattr(attention_processor, which, None)
    if not isinstance(cls, type) or "Processor" not in which:
        return None
    try:
        return cls()
    except Exception as error:
        raise ValueError(f"the processor {which} cannot be made here: {one_line(error)}") from error


@contextlib.contextmanager
def _with_processor(model: nn.Module, processor: object) -> Iterator[None]:
    before = model.attn_processors
    model.set_attn_processor(processor)
    try:
        yield
    finally:
        model.set_attn_processor(before)


def _replacing(name: str, function: Callable, usual: str | None) -> Implementation:
    @contextlib.contextmanager
    def replaced(model: nn.Module) -> Iterator[None]:
        with _switched(model, usual) if usual else contextlib.nullcontext(), Replace(function):
            yield

    return Implementation(name, replaced)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """While open, no Hugging Face library asks the network for anything."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before

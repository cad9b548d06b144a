"""Every attention layer on the same inputs: its output, its gradients, and the operators that computed it.

A model is run as a whole, so that each implementation gets masks of its own form, and every attention layer is handed
the float inputs that were recorded before, whatever came out of the layers below.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from fa_study.audit.calls import one_line
from fa_study.audit_model.implementations import library_of
from fa_study.audit_model.passes import Call, detached, flat, forward, noise
from fa_study.audit_model.watching import attention_layers, outputs_of, watching
from fa_study.quiet import quiet_stderr

_SHOWN = ("attention", "attn", "bmm", "softmax", "Compiled")
_MARK = "fa_study layer "


@dataclass(frozen=True)
class LayerResult:
    """What a layer gave on the recorded inputs, flat; `error` is one line, empty if nothing is missing.

    Attributes
    ----------
    out : all outputs.
    gradient : of sum(out * dout) by the layer's direct inputs, dout from a normal distribution.
    """

    out: Tensor | None = None
    gradient: Tensor | None = None
    error: str = ""


def on_same_inputs(
    model: nn.Module, inputs: Mapping[str, Tensor], calls: Mapping[str, Call]
) -> tuple[dict[str, LayerResult], str]:
    """The results of all layers on the inputs of `calls`, and why the model did not run to its end ("" if it did)."""
    library, results = library_of(model), {}

    def around(key, layer, bound):
        if key not in calls:
            return layer(*bound.args, **bound.kwargs)
        results[key], value = _forced(key, layer, bound, calls[key], library)
        return value

    try:
        with torch.no_grad(), watching(attention_layers(model), around):
            forward(model, inputs)
    except Exception as error:  # any that a model raises
        return results, one_line(error)
    return results, ""


def _forced(key: str, layer, bound: inspect.BoundArguments, call: Call, library: str) -> tuple[LayerResult, object]:
    leaves: list[Tensor] = []

    def given(path: tuple, own: object) -> object:
        recorded = call.arguments.get(pytree.keystr(path))
        if not isinstance(own, Tensor) or recorded is None or recorded.shape != own.shape:
            return own
        x = recorded.to(own.dtype).clone()
        # Nested tensors, such as the angles of positions, are the same for all layers: no gradient is wanted.
        if len(path) == 1:
            leaves.append(x.requires_grad_())
        return x

    bound.arguments = pytree.tree_map_with_path(given, bound.arguments)
    try:
        with torch.enable_grad():
            result = layer(*bound.args, **bound.kwargs)
            out = outputs_of(result, library)
            gradient = torch.autograd.grad(out, leaves, _douts(key, out, call, library), allow_unused=True)
        return LayerResult(flat(out), flat([g for g in gradient if g is not None])), detached(result)
    except Exception as error:  # any that a layer raises
        reason = one_line(error)
    try:
        result = layer(*bound.args, **bound.kwargs)
        return LayerResult(flat(outputs_of(result, library)), None, f"backward: {reason}"), result
    except Exception as error:
        # The run goes on with what was recorded, so that the layers above are tried too.
        dtype = next(iter(leaves)).dtype if leaves else torch.float32
        stand_in = pytree.tree_map(
            lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, call.result
        )
        return LayerResult(error=one_line(error)), stand_in


def _douts(key: str, out: list[Tensor], call: Call, library: str) -> list[Tensor]:
    """Normal gradients of the outputs, rounded to the dtype of the recorded output in every run."""
    seed = zlib.crc32(key.encode())
    recorded = outputs_of(call.result, library)
    return [noise(x.shape, seed).to(r.dtype).to(x.device, x.dtype) for x, r in zip(out, recorded)]


def operators(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Layer -> the operators that ran in it, forward, in order, as PyTorch's profiler saw them; {} if the model raises.

    `shown_operators` picks those that tell attentions apart.
    """

    def around(key, layer, bound):
        with record_function(_MARK + key):
            return layer(*bound.args, **bound.kwargs)

    try:
        watched = watching(attention_layers(model), around)
        with torch.no_grad(), watched, quiet_stderr(), profile(activities=[ProfilerActivity.CPU]) as record:
            forward(model, inputs)
    except Exception:  # the passes say why
        return {}
    seen: dict[str, list[str]] = {}
    for event in record.events():
        if event.name.startswith(_MARK):
            seen[event.name.removeprefix(_MARK)] = [e.name for e in _descendants(event)]
    return seen


def _descendants(event) -> Iterator:
    for child in event.cpu_children:
        yield child
        yield from _descendants(child)


def shown_operators(names: list[str]) -> str:
    """The names that tell attentions apart, without repetition."""
    shown = (name.removeprefix("aten::") for name in names if any(part in name for part in _SHOWN))
    return ", ".join(dict.fromkeys(shown))

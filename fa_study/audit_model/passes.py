"""A model's whole forward and backward pass: output, loss, gradients, and what every attention layer gave."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fa_study.audit.calls import one_line
from fa_study.audit_model.implementations import library_of
from fa_study.audit_model.watching import attention_layers, float_tensors, outputs_of, watching

_OUTPUTS = ("logits", "sample", "last_hidden_state")
_TARGET_SEED = 1


@dataclass(frozen=True)
class Call:
    """What an attention layer was called with and gave: float arguments by path, and its result."""

    arguments: dict[str, Tensor]
    result: object


@dataclass
class Pass:
    """What one pass gave. `error` says why something is missing; then `output` is None, or only gradients are empty.

    Attributes
    ----------
    outputs : layer -> its output, flat.
    backward : layer -> the gradient of the loss by its output, flat.
    gradients : parameter -> gradient of the loss.
    calls : layer -> its call, in the order of the calls, if asked for.
    """

    output: Tensor | None = None
    name: str = "output"
    loss: float = float("nan")
    outputs: dict[str, Tensor] = field(default_factory=dict)
    backward: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    error: str = ""


def flat(tensors: list[Tensor]) -> Tensor:
    """All values in one tensor."""
    return torch.cat([x.detach().flatten() for x in tensors])


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal values in float32. NumPy draws them: PyTorch's depend on the default dtype, which float64 runs change."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32))


def forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> object:
    """The model's own result; keys and values are not kept for later tokens."""
    takes = inspect.signature(model.forward).parameters
    return model(**inputs, **({"use_cache": False} if "use_cache" in takes else {}))


def end_to_end(model: nn.Module, inputs: Mapping[str, Tensor], *, keep_calls: bool = False) -> Pass:
    """One pass of the model, forward and backward; an error of the model is in the result."""
    try:
        return _end_to_end(model, inputs, keep_calls, backward=True)
    except Exception as error:  # any that a model raises
        reason = one_line(error)
    try:
        with torch.no_grad():
            result = _end_to_end(model, inputs, keep_calls, backward=False)
    except Exception as error:
        return Pass(error=one_line(error))
    result.error = f"backward: {reason}"
    return result


def _end_to_end(model: nn.Module, inputs: Mapping[str, Tensor], keep_calls: bool, backward: bool) -> Pass:
    library, seen = library_of(model), Pass()
    at_layers: dict[str, dict[int, Tensor]] = {}

    def around(key, layer, bound):
        result = layer(*bound.args, **bound.kwargs)
        tensors = outputs_of(result, library)
        seen.outputs[key] = flat(tensors)
        at = at_layers.setdefault(key, {})
        for i, x in enumerate(tensors):
            if x.requires_grad:
                x.register_hook(lambda g, i=i: at.__setitem__(i, g.detach()))
        if keep_calls:
            given = {path: x.detach().clone() for path, x in float_tensors(bound.arguments).items()}
            seen.calls[key] = Call(given, detached(result))
        return result

    model.zero_grad(set_to_none=True)
    with watching(attention_layers(model), around):
        result = forward(model, inputs)
    seen.name, seen.output = _main_output(result)
    loss = getattr(result, "loss", None)
    if not isinstance(loss, Tensor):
        target = noise(seen.output.shape, _TARGET_SEED).to(seen.output.device)
        loss = (seen.output.float() - target).square().mean()
    if backward:
        loss.backward()
        seen.backward = {key: flat([at[i] for i in sorted(at)]) for key, at in at_layers.items() if at}
        seen.gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    seen.loss, seen.output = float(loss.detach()), seen.output.detach()
    return seen


def detached(tree: object) -> object:
    """A copy in which no tensor carries a gradient."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def _main_output(result: object) -> tuple[str, Tensor]:
    for name in _OUTPUTS:
        if isinstance(getattr(result, name, None), Tensor):
            return name, getattr(result, name)
    values = result.values() if hasattr(result, "values") else (result if isinstance(result, tuple) else (result,))
    tensors = [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1]
    if not tensors:
        raise TypeError(f"the model returned {type(result).__name__} without an output tensor")
    return "output", tensors[0]

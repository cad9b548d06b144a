"""A model in float64, all the way through.

Models widen to float32 where they care about rounding: norms, softmax, rotary angles. In a float64 model that narrows.
Inside `float64_throughout` whatever asks for a narrower format gets float64.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_NARROWER = (torch.float32, torch.bfloat16, torch.float16)


class float64_throughout(TorchDispatchMode):
    """While open, no operator casts to, or creates, a float tensor narrower than float64."""

    def __enter__(self):
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self._before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROWER:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def golden_model(model: nn.Module) -> nn.Module:
    """A copy of the model whose weights and buffers are those of `model`, exactly, in float64."""
    golden = copy.deepcopy(model).double()
    # The grouped matrix product that transformers takes for mixtures of experts knows no float64.
    if getattr(golden, "_can_set_experts_implementation", bool)():
        golden.set_experts_implementation("eager")
    return golden

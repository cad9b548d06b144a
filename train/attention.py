"""The attention arms, put into a diffusers model through attention processors.

B batch, H heads, L queries, S keys, D head size, C channels. An `attend` function takes q (B, H, L, D) and
k, v (B, H, S, D) in the dtype that the model computes in and returns (B, H, L, D) in the same dtype.

`set_attention_backend` is not used: for `UNet2DConditionModel` it silently changes nothing. No mask is ever passed:
padding tokens of a caption are attended to, as in Stable Diffusion, because the flash kernels take no mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def baseline(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eager attention as CUDA autocast rounds it, the same on every device.

    out = round(P) V with S = round(round(q k^T) / sqrt(D)) and P = softmax(S) computed in FP32 (FP64 for FP64 inputs).
    Rounding is to the inputs' dtype, so for FP32 and FP64 inputs nothing is rounded further.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.matmul(probabilities.to(v.dtype), v)


def sdpa(backend: str) -> Attend:
    """PyTorch's attention held to one backend (math, flash, efficient, cudnn): an error where that one cannot run.

    PyTorch has no deterministic backward pass for cudnn: the same run again gives other bits.
    """
    only = SDPBackend.MATH if backend == "math" else getattr(SDPBackend, f"{backend}_attention".upper())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(only), _only_warning() if backend == "cudnn" else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v)

    return attend


@contextlib.contextmanager
def _only_warning() -> Iterator[None]:
    """Let a kernel run that PyTorch refuses under deterministic algorithms; its backward pass asks for no leave."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(min(mode, 1))  # 0: off, 1: warn, 2: refuse
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def flash_attn_package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention 2 of its authors (CUDA, FP16 and BF16), with the same gradients in every run."""
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, deterministic=True).transpose(1, 2)


class Processor:
    """A diffusers attention processor: projections as in `AttnProcessor2_0`, with `attend` in the middle.

    The middle runs with autocast switched off: autocast would compute the softmax's inputs and outputs in formats of
    its own choice, and differently on CPU and CUDA.
    """

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self.observers: list[Callable[[Attention, Tensor, Tensor, Tensor, Tensor], None]] = []

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,  # (B, L, C)
        encoder_hidden_states: Tensor | None = None,  # (B, S, C') in cross-attention
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        if attention_mask is not None:
            raise ValueError("attention here takes no mask, since the flash kernels take none")
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            out = self.attend(q, k, v)
            for observer in self.observers:
                observer(attn, q, k, v, out)
        out = out.transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))  # projection, dropout


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """Name -> layer of every attention of a diffusers model, in the order of its modules."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Attention)}


@contextlib.contextmanager
def observing(model: nn.Module, observer: Callable[[str, Tensor, Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """While open, `observer(layer name, q, k, v, out)` is called at every attention call of a model."""
    layers = attention_layers(model)
    names = {id(layer): name for name, layer in layers.items()}
    processors = {id(layer.processor): layer.processor for layer in layers.values()}.values()

    def observe(layer: Attention, *tensors: Tensor) -> None:
        observer(names[id(layer)], *tensors)

    for processor in processors:
        processor.observers.append(observe)
    try:
        yield
    finally:
        for processor in processors:
            processor.observers.remove(observe)


def set_attention(model: nn.Module, attend: Attend) -> None:
    """Put `attend` into every attention layer of a diffusers model."""
    for name, layer in attention_layers(model).items():
        extras = (layer.group_norm, layer.spatial_norm, layer.norm_q, layer.norm_k, layer.norm_cross)
        assert all(x is None for x in extras), f"{name} has a norm that Processor would leave out"
        assert not layer.residual_connection and layer.rescale_output_factor == 1, f"{name} has a residual of its own"
    model.set_attn_processor(Processor(attend))

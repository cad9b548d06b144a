"""The precisions a run can be trained in, as Lightning plugins."""

from __future__ import annotations

import contextlib

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fa_study.attention.tile_products import bf16_products
from train import Refusal

NAMES = ("fp32", "bf16", "fp16", "fp16_emulated", "bf16_true", "fp64", "tf32")
_aten = torch.ops.aten
PRODUCTS = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
    )
)


# PyTorch's 65,536 overflows at once here, and an arm whose first steps are skipped would differ from its FP32 twin by
# more than its precision.
INITIAL_SCALE = 1024.0


class ScaledFP16(MixedPrecision):
    """FP16 autocast with a scaled loss; `skipped` counts the steps left out for a gradient that was not finite."""

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device, torch.amp.GradScaler(device, init_scale=INITIAL_SCALE))
        self.skipped = 0

    def optimizer_step(self, *args, **kwargs):
        before = self.scaler.get_scale()
        result = super().optimizer_step(*args, **kwargs)
        self.skipped += self.scaler.get_scale() < before
        return result

    def state_dict(self) -> dict:
        return super().state_dict() | {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.skipped = state_dict.get("skipped", 0)


class ProductsInFP32(TorchDispatchMode):
    """Inside, matrix products and convolutions of 16-bit tensors are FP32 ones of the same values, rounded once.

    A CPU without instructions for the dtype does about 1 GFLOP/s in native products and fifty times that in FP32.
    Products of two FP16 or BF16 numbers are exact in FP32; what may differ from a native kernel is the order of an FP32
    sum. Everything else (softmax, norms, GELU, sums) is left to PyTorch, which computes it in FP32 and rounds, as on
    CUDA; an attention kernel is one operator, whose products are its own.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if func not in PRODUCTS or all(x.dtype != self.dtype for x in tensors):
            return func(*args, **(kwargs or {}))

        def cast(value, source: torch.dtype, target: torch.dtype):
            return value.to(target) if isinstance(value, torch.Tensor) and value.dtype == source else value

        wide = tree_map(lambda x: cast(x, self.dtype, torch.float32), (args, kwargs or {}))
        out = func(*wide[0], **wide[1])
        return tree_map(lambda x: cast(x, torch.float32, self.dtype), out)


class _ProductsInFP32:
    """Beside a precision plugin: forward and backward inside `ProductsInFP32` of `dtype`."""

    dtype = torch.bfloat16
    products = "FP32 products of the 16-bit values, rounded once"

    @contextlib.contextmanager
    def forward_context(self):
        with super().forward_context(), ProductsInFP32(self.dtype):
            yield

    def backward(self, *args, **kwargs) -> None:
        with ProductsInFP32(self.dtype):
            super().backward(*args, **kwargs)


class EmulatedFP16(_ProductsInFP32, ScaledFP16):
    """FP16 autocast whose products are computed in FP32."""

    dtype = torch.float16


class EmulatedBF16(_ProductsInFP32, MixedPrecision):
    """BF16 autocast whose products are computed in FP32."""


class EmulatedTrueBF16(_ProductsInFP32, HalfPrecision):
    """BF16 weights whose products are computed in FP32."""


def precision_plugin(name: str, device: str) -> Precision:
    """The plugin of a precision.

    fp32, fp64: everything in that format. tf32: as fp32, with TF32 matrix products allowed (CUDA).
    bf16, fp16: autocast, with weights, gradients and optimiser in FP32; fp16 scales the loss. Lightning's own
    "16-mixed" would silently train in BF16 on a CPU, hence the explicit plugin.
    fp16_emulated: as fp16, see `ProductsInFP32`. bf16_true: weights and optimiser in BF16 too. Where PyTorch has no
    BF16 products for the processor but a plain loop, both BF16 precisions take FP32 ones in the same way.

    Raises
    ------
    Refusal
        If the precision is unknown.
    """
    if name in ("fp32", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
        return Precision()
    if name == "fp64":
        return DoublePrecision()
    native = device != "cpu" or bf16_products()
    if name == "bf16":
        return (MixedPrecision if native else EmulatedBF16)("bf16-mixed", device)
    if name == "bf16_true":
        return (HalfPrecision if native else EmulatedTrueBF16)("bf16-true")
    if name == "fp16":
        return ScaledFP16(device)
    if name == "fp16_emulated":
        return EmulatedFP16(device)
    raise Refusal(f"precision={name} is unknown; use {', '.join(NAMES[:-1])} or {NAMES[-1]}")

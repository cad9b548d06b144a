"""The precisions a run can be trained in, as Lightning plugins."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from train import Refusal


def precision_plugin(name: str, device: str) -> Precision:
    """fp32: everything in FP32. bf16: autocast, with weights, gradients and optimiser in FP32.

    Raises
    ------
    Refusal
        If the precision is unknown.
    """
    if name == "fp32":
        return Precision()
    if name == "bf16":
        return MixedPrecision("bf16-mixed", device)
    raise Refusal(f"precision={name} is unknown; use fp32 or bf16")

"""From the settings' `attn` and `precision` to the attention function that a run uses, and what a device cannot do.

Shapes as in `train.attention`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from train import Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from train.attention import Attend

CUDA_FLASH_PRECISIONS = ("bf16", "fp16", "bf16_true")
CUDA_BACKEND_PRECISIONS = {
    "flash": CUDA_FLASH_PRECISIONS,
    "cudnn": CUDA_FLASH_PRECISIONS,
    "efficient": (*CUDA_FLASH_PRECISIONS, "fp32", "tf32"),
}


def check_arm(attn: DictConfig, precision: str, device: str) -> None:
    """Raise Refusal for what this device, "cpu" or "cuda", cannot do, or for a tiled arm that makes no sense."""
    backend = attn.backend if attn.name == "sdpa" else attn.name
    label = f"attn=sdpa attn.backend={backend}" if attn.name == "sdpa" else f"attn={attn.name}"
    if device == "cpu" and precision == "tf32":
        raise Refusal("precision=tf32 needs CUDA, this run is on the CPU; use precision=fp32")
    if device == "cuda" and precision == "fp16_emulated":
        raise Refusal("precision=fp16_emulated is for the CPU, this run is on CUDA; use precision=fp16")
    if precision == "fp16_emulated" and attn.name == "sdpa":
        raise Refusal("precision=fp16_emulated cannot look into attn=sdpa; use attn=baseline, flash or tiled")
    if device == "cpu" and backend in ("efficient", "cudnn"):
        raise Refusal(f"{label} needs CUDA, this run is on the CPU; use attn.backend=math or flash")
    if device == "cuda" and backend in CUDA_BACKEND_PRECISIONS and precision not in CUDA_BACKEND_PRECISIONS[backend]:
        allowed = ", ".join(CUDA_BACKEND_PRECISIONS[backend])
        others = "attn=baseline" if precision == "tf32" else "attn=baseline or attn=tiled"
        raise Refusal(f"{label} on CUDA takes {allowed}, got precision={precision}; use {others} for {precision}")
    if attn.name == "tiled":
        if precision == "tf32":
            raise Refusal(
                "precision=tf32 would round the products of attn=tiled too, whatever its policy says; "
                "use precision=fp32, and attn.format=tf32 for TF32 inside attention"
            )
        policy_of(attn)


def policy_of(attn: DictConfig):
    """The RoundingPolicy that attn.policy, attn.format and attn.sites describe.

    Raises
    ------
    Refusal
        If a format is unknown, with fa_study's sentence about it.
    """
    from fa_study.rounding import RoundingPolicy

    option = "attn.format"
    try:
        policy = getattr(RoundingPolicy, attn.policy)(attn.format)
        for site, fmt in attn.sites.items():
            option = f"attn.sites.{site}"
            policy = policy if fmt is None else policy.replace(**{site: fmt})
        return policy
    except ValueError as error:
        raise Refusal(f"{option}: {error}") from error


class Tiled:
    """fa_study's emulation as an attention function.

    Stochastic roundings draw from a generator that `start` sets from the step, so that a resumed run repeats them.
    Twins draw others each: had they their random errors in common, these would look like an effect of the arm.
    """

    def __init__(self, policy, algorithm: str, tile: tuple[int, int], exp: str, device: str = "cpu") -> None:
        import torch

        self.options = {"policy": policy, "algorithm": algorithm, "tile": tile, "exp": exp}
        self.random = "stochastic" in repr(policy)
        self.generator = torch.Generator(device)  # of the tensors' device: no other can draw for them

    def start(self, data_seed: int, step: int, twin: int = 0) -> None:
        key = hashlib.sha256((f"rounding {data_seed} {step}" + (f" {twin}" if twin else "")).encode()).digest()
        self.generator.manual_seed(int.from_bytes(key[:8], "little", signed=True))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from fa_study.attention.gradients import tiled_attention

        return tiled_attention(q, k, v, generator=self.generator if self.random else None, **self.options)


def attention_function(attn: DictConfig, precision: str, device: str) -> Attend:
    """The attention function of an arm on a device; see `check_arm` for what is refused beforehand."""
    from train import attention

    if attn.name == "baseline":
        return attention.baseline
    if attn.name == "sdpa":
        return attention.sdpa(attn.backend)
    if attn.name == "tiled":
        return Tiled(policy_of(attn), attn.algorithm, (attn.tile_rows, attn.tile_keys), attn.exp, device)
    assert attn.name == "flash", attn.name
    if precision == "fp16_emulated":  # the CPU kernel's tiles, roundings and exponential, without FP16 arithmetic
        from fa_study.rounding import RoundingPolicy

        return Tiled(RoundingPolicy.torch_cpu("fp16"), "fa2", (256, 512), "fexp_u20")
    # The package's CUDA part: flash-attn-4 alone also makes a package flash_attn, without the function.
    has_package = device == "cuda" and importlib.util.find_spec("flash_attn_2_cuda") is not None
    return attention.flash_attn_package if has_package else attention.sdpa("flash")


def key_tile(attn: DictConfig, q: Tensor, k: Tensor, pictures: int) -> int | None:
    """Keys per tile of an arm for q (1, H, L, D) and k of one of `pictures` in a call: None for one without tiles."""
    if attn.name == "tiled":
        return None if attn.algorithm == "baseline" else attn.tile_keys
    if attn.name != "flash" and not (attn.name == "sdpa" and attn.backend == "flash"):
        return None
    if q.device.type == "cpu":
        return 512  # PyTorch's CPU flash kernel
    import torch

    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return flash_2_tile(q.shape[3], q.shape[2], k.shape[2], pictures * q.shape[1], processors)


def flash_2_tile(head_size: int, queries: int, keys: int, sequences: int, processors: int) -> int:
    """Keys per tile of FlashAttention 2's forward pass on an A100 or H100, PyTorch's and its authors', no dropout.

    As a rule 128 keys for heads up to 64, else 64. Where `sequences` (pictures times heads) with a thread block for
    every 64 queries would leave more than a fifth of the places for blocks empty, two per processor, the keys of a row
    may be shared among up to 128 blocks. That is another kernel, whose tiles are twice as long for heads up to 128;
    what its blocks find is merged by their log-sum-exp.
    """
    usual, shared = 128 if head_size <= 64 else 64, 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    blocks, tiles, places = sequences * math.ceil(queries / 64), math.ceil(keys / shared), 2 * processors
    if blocks >= 0.8 * places:
        return usual
    # Of the numbers of parts that make the longest part shorter, the smallest that fills nearly as many places as any.
    parts = [n for n in range(1, min(128, places, tiles) + 1) if n == 1 or -(-tiles // n) < -(-tiles // (n - 1))]
    filled = [blocks * n / places / math.ceil(blocks * n / places) for n in parts]
    return usual if filled[0] >= 0.85 * max(filled) else shared

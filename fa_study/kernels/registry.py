"""The table of known kernels: what each needs, whether it can be called here, and the call."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import golden_attention
from fa_study.audit.calls import Direct, Job
from fa_study.audit.cases import DTYPES, Case
from fa_study.audit.faults import ROUNDING, distance
from fa_study.kernels import cuda, interpreted, pytorch

FIRST_CALL = 300.0  # seconds that a first call may take, with all that it imports and compiles
COLUMNS = ("name", "package", "version", "device", "dtypes", "runs", "reason")


@dataclass(frozen=True)
class Kernel:
    """A kernel: its function, the module it needs, the dtypes that it might take, and what it costs to call.

    Attributes
    ----------
    slow : "" for a plain call; "compiled" or "interpreted" where a call takes seconds.
    """

    name: str
    package: str
    device: str
    function: Callable[..., Tensor]
    dtypes: tuple[str, ...]
    module: str = "torch"
    slow: str = ""

    def reason(self) -> str:
        """Why it cannot be called here; "" if it can, as far as can be seen without calling it."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "needs a CUDA device, and there is none"
        if self.device == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
            return "TRITON_INTERPRET=1 is set, for kernels of the CPU: unset it to measure the GPU's"
        if not installed_version(self):
            return f"the package {self.package} is not installed" + self._hint()
        # flash-attn also brings an old copy of the module of flash-attn-4, hence the package is asked for first.
        if not _is_installed(self.module):
            return f"the package {self.package} is installed without its module {self.module}" + self._hint()
        if self.name == "flash-attn-triton" and interpreted.missing_switches():
            return interpreted.missing_switches()
        if self.slow == "compiled" and self.device == "cpu" and not _compiler():
            return "needs a C++ compiler (g++ or clang++), and there is none"
        return ""

    def _hint(self) -> str:
        return "; `make kernels` installs it" if self.device == "cpu" else "; requirements-gpu.txt says how"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _compiler() -> str | None:
    return next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None)


HALF, WIDE = ("bf16", "fp16"), ("bf16", "fp16", "fp32", "fp64")
KERNELS = {
    k.name: k
    for k in (
        Kernel("torch-flash-cpu", "torch", "cpu", pytorch.flash, WIDE),
        Kernel("torch-math-cpu", "torch", "cpu", pytorch.math, WIDE),
        Kernel("torch-math-reduced-cpu", "torch", "cpu", pytorch.math_reduced, HALF),
        Kernel("flex-eager-cpu", "torch", "cpu", pytorch.flex_eager, WIDE),
        Kernel("flex-compiled-cpu", "torch", "cpu", pytorch.flex_compiled, WIDE[:3], slow="compiled"),
        Kernel("jax-pallas-tpu", "jax", "cpu", interpreted.pallas_tpu, WIDE[:3], "jax.experimental", "interpreted"),
        Kernel("jax-pallas-gpu", "jax", "cpu", interpreted.pallas_gpu, WIDE[:3], "jax.experimental", "interpreted"),
        # No BF16: the interpreter's products take its bits for those of another format.
        Kernel(
            "flash-attn-triton",
            "flash-attn",
            "cpu",
            interpreted.flash_attn_triton,
            ("fp16", "fp32"),
            "flash_attn",
            "interpreted",
        ),
        Kernel("torch-flash-cuda", "torch", "cuda", pytorch.flash, HALF),
        Kernel("torch-efficient-cuda", "torch", "cuda", pytorch.efficient, WIDE[:3]),
        Kernel("torch-cudnn-cuda", "torch", "cuda", pytorch.cudnn, HALF),
        Kernel("torch-math-cuda", "torch", "cuda", pytorch.math, WIDE),
        Kernel("flash-attn-2", "flash-attn", "cuda", cuda.flash_attn_2, HALF, "flash_attn_2_cuda"),
        Kernel("flash-attn-3", "flash-attn-3", "cuda", cuda.flash_attn_3, HALF, "flash_attn_interface"),
        Kernel("xformers", "xformers", "cuda", cuda.xformers, WIDE[:3], "xformers"),
        # Those that compile come last: a GPU is measured for minutes, and what is left then is left out.
        Kernel("flex-compiled-cuda", "torch", "cuda", pytorch.flex_compiled, WIDE[:3], slow="compiled"),
        Kernel("flash-attn-4", "flash-attn-4", "cuda", cuda.flash_attn_4, HALF, "flash_attn.cute", "compiled"),
    )
}
# The same kernels as (out, log-sum-exp), where the function above gives the output alone although there is more.
WITH_LSE: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "torch-flash-cpu": pytorch.flash_cpu_with_lse,
    "torch-efficient-cuda": pytorch.efficient_with_lse,
    "torch-cudnn-cuda": pytorch.cudnn_with_lse,
    "xformers": cuda.xformers_with_lse,
}


def kernel(name: str) -> Kernel:
    """The kernel of a name; ValueError if there is none."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown: use one of {', '.join(KERNELS)}")
    return KERNELS[name]


def available_kernels(device: str | None = None) -> pd.DataFrame:
    """Every known kernel, tried on this machine.

    Parameters
    ----------
    device : "cpu" or "cuda"; None for both.

    Returns
    -------
    DataFrame
        name, package, version, device; dtypes in which a small call gave attention; runs; reason why not. Kernels
        that compile or are interpreted are only looked for, since a call takes seconds to minutes.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r} is unknown: use 'cpu', 'cuda', or None for both")
    rows = [_availability(k) for k in KERNELS.values() if device in (None, k.device)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _availability(k: Kernel) -> tuple:
    reason, dtypes = k.reason(), k.dtypes
    if not reason and not k.slow:
        answers = {dtype: _answer(k, dtype) for dtype in k.dtypes}
        dtypes = tuple(d for d, answer in answers.items() if not answer)
        reason = "" if dtypes else next(iter(answers.values()))
    shown = "" if reason else ", ".join(dtypes)
    return k.name, k.package, installed_version(k), k.device, shown, not reason, reason


def _answer(k: Kernel, dtype: str) -> str:
    """Why a dtype is not usable, "" if a small call gives attention."""
    case = Case(dtype, L=128, S=128, B=1, H=2, Hkv=2)
    q, k_, v = case.inputs()
    outcome = Direct(k.function, limit=FIRST_CALL)(Job(q, k_, v, device=k.device))
    if outcome.error:
        return outcome.error
    away = distance(outcome.out, golden_attention(q, k_, v).out)
    return "" if away <= ROUNDING else f"relative error {away:.1e}"


def installed_version(k: Kernel) -> str:
    """Version of the kernel's package, "" if it is not installed."""
    try:
        return version(k.package)
    except PackageNotFoundError:
        return ""


def run_kernel(name: str, q: Tensor, k: Tensor, v: Tensor, **features: object) -> Tensor:
    """The output (B, H, L, D) of a real kernel, differentiable where the kernel is.

    Parameters
    ----------
    name : one of `available_kernels`.
    features : causal=True, mask, bias, scale, softcap or window, as far as the kernel has them.

    Raises
    ------
    ValueError
        If the kernel is unknown, cannot run here, or has not the feature.
    """
    chosen = kernel(name)
    reason = chosen.reason()
    if reason:
        raise ValueError(f"kernel {name} cannot run here: {reason}")
    known = set(inspect.signature(chosen.function).parameters) - {"q", "k", "v"}
    unknown = [f for f in features if f not in known]
    if unknown:
        raise ValueError(f"kernel {name} has no {unknown[0]}: it takes {', '.join(sorted(known)) or 'no feature'}")
    if q.device.type != chosen.device:
        raise ValueError(f"kernel {name} runs on {chosen.device}, got tensors on {q.device.type}: move them there")
    if q.dtype not in [DTYPES[d] for d in chosen.dtypes]:
        raise ValueError(f"kernel {name} takes {', '.join(chosen.dtypes)}, got {q.dtype}: convert the inputs")
    result = chosen.function(q, k, v, **features)
    return result[0] if isinstance(result, tuple) else result

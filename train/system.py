"""What the process runs on: device, threads, memory, and the record of versions that goes into the manifest."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

from train import Refusal

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "lightning", "diffusers", "transformers", "tokenizers", "safetensors", "numpy", "wandb")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_PR_SET_PDEATHSIG = 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed instead of returning it to the system; True if it took effect (Linux only).

    A training step frees and allocates the same large tensors again. By default each of them is a fresh mapping whose
    pages the kernel zeroes one fault at a time, which took up to half of a step here. M_MMAP_THRESHOLD alone does not
    help: glibc caps it at 32 MiB, below the size of a score matrix, so mappings are switched off altogether.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent ends, even by SIGKILL (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def choose_device(requested: str) -> str:
    """ "cpu" or "cuda" for "auto", "cpu" or "cuda"; never Apple's MPS.

    Raises
    ------
    Refusal
        If CUDA is asked for where there is none, or the device is unknown.
    """
    import torch

    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (PyTorch {torch.__version__} is built without CUDA)"
        raise Refusal(f"device=cuda was asked for, but PyTorch finds no CUDA device{built}; use device=auto or cpu")
    if requested not in ("cpu", "cuda"):
        raise Refusal(f"device={requested} is unknown; use auto, cpu or cuda")
    return requested


def set_up_torch(threads: int, device: str = "cpu") -> None:
    """Thread count, deterministic algorithms, no TF32 unless a precision asks for it, FP32 sums in 16-bit products."""
    import torch

    keep_freed_memory()
    torch.set_num_threads(threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # PyTorch's flash and memory-efficient backward passes on CUDA heed this only without warn_only.
    torch.use_deterministic_algorithms(True, warn_only=device != "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # no operation here reads what it has not written
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # By default cuBLAS may add the parts of a 16-bit product up in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def commit() -> str | None:
    """The checkout's commit, with "+changes" behind it if tracked files differ; None outside of git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=PROJECT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe(device: str, threads: int) -> dict:
    """Versions, commit, device and threads: the part of the manifest that tells where the bits come from."""
    import torch

    from fa_study.tables import machine

    versions = {"python": platform.python_version()}
    versions |= {package: importlib.metadata.version(package) for package in PACKAGES}
    if device == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["flash-attn"] = importlib.metadata.version("flash-attn")
    return {
        "commit": commit(),
        "versions": versions,
        "platform": platform.platform(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else machine(),
        "threads": threads,
    }

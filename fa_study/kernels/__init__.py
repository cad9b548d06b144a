"""Real kernels: which of them this machine can run, and one way to call them all.

Every kernel takes q (B, H, L, D), k and v (B, Hkv, S, D) and the features that it has by itself, under these names:
`causal` (in the kernel's own alignment), `mask` (True = attend), `bias`, `scale`, `softcap`, `window`.
"""

from fa_study.kernels.registry import KERNELS, Kernel, available_kernels, kernel, run_kernel

__all__ = ["KERNELS", "Kernel", "available_kernels", "kernel", "run_kernel"]

"""Speed and memory of the attention functions, as ratios to PyTorch's own and to the slow twin.

N = 4096, D = 64, 4 heads on the CPU, with as many threads as OMP_NUM_THREADS says.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import torch
from harness import ratio, show

from fa_study.attention import baseline_attention, flash_attention
from fa_study.attention.reference import reference_attention
from fa_study.rounding import RoundingPolicy

# Linux hands the parent's peak down in ru_maxrss: a child's own is VmHWM.
LONG = """
import resource, torch
from pathlib import Path
from fa_study.attention import flash_attention
from fa_study.rounding import RoundingPolicy

def peak():
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.read_text().partition("VmHWM:")[2].split()[0])

q, k, v = (torch.randn(1, 1, 32768, 64) for _ in range(3))
flash_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], policy=RoundingPolicy.kernel("bf16"))
before = peak()
flash_attention(q, k, v, policy=RoundingPolicy.kernel("bf16"), tile=(64, 512))
print((peak() - before) / 2**20)
"""


def measure() -> list[dict]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 4096, 64).bfloat16() for _ in range(3))
    uniform, kernel = RoundingPolicy.uniform("bf16"), RoundingPolicy.kernel("bf16")

    def eager():
        return torch.softmax((q @ k.mT) * 0.125, -1) @ v

    def torch_flash():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)

    def flash(policy, **options):
        return lambda: flash_attention(q, k, v, policy=policy, **options)

    rows = [
        ratio(
            f"uniform BF16, {a}, tile 64, to eager BF16",
            flash(uniform, algorithm=a),
            eager,
            bar="at most 2.5",
            rounds=3,
        )
        for a in ("fa1", "fa2", "fa4")
    ]
    rows += [
        ratio(
            "kernel BF16, tile 512, to the CPU flash kernel",
            flash(kernel, tile=(64, 512)),
            torch_flash,
            bar="at most 2.5",
        ),
        ratio(
            "the same with its exp (fexp_u20)",
            flash(kernel, tile=(64, 512), exp="fexp_u20"),
            torch_flash,
            bar="none: the bits, not the speed",
        ),
        ratio(
            "eager BF16 policy to eager BF16",
            lambda: baseline_attention(q, k, v, policy=RoundingPolicy.eager("bf16")),
            eager,
            bar="none",
            rounds=3,
        ),
        ratio(
            "uniform FP16, fa2, tile 64, to eager BF16",
            flash(RoundingPolicy.uniform("fp16")),
            eager,
            bar="none",
            rounds=1,
        ),
        ratio(
            "uniform TF32, fa2, tile 64, to eager BF16",
            flash(RoundingPolicy.uniform("tf32")),
            eager,
            bar="none",
            rounds=1,
        ),
        _twin(),
        _memory(),
    ]
    return rows


def _twin() -> dict:
    """The slow twin has one head: 64 rows of it, against the fast path on one head, per row."""
    q, k, v = (torch.randn(4096, 64).bfloat16().float() for _ in range(3))
    policy = RoundingPolicy.uniform("bf16")
    x = [t[None, None] for t in (q, k, v)]
    row = ratio(
        "slow twin, 64 of 4096 rows, to all rows of the fast path",
        lambda: reference_attention(q[:64], k, v, policy, 64, "fa1"),
        lambda: flash_attention(*x, policy=policy, algorithm="fa1"),
        bar="at least 1.57 (100 x per row)",
        rounds=1,
    )
    return row


def _memory() -> dict:
    grown = float(subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True).stdout)
    return {
        "benchmark": "memory of N = 32,768, 1 head, kernel BF16, above its inputs, in GB",
        "ours_s": float("nan"),
        "peer_s": float("nan"),
        "ratio": grown * 2**30 / 1e9,
        "bar": "at most 1",
    }


if __name__ == "__main__":
    show(measure())
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")

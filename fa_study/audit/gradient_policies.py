"""Which rounding policy predicts the gradients of an attention, scored as its output is.

    R2 = 1 - |theirs - emulation|^2 / |theirs - golden|^2, the mean over dQ, dK and dV

Shape letters: B batch, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import functools
import math

import pandas as pd
from torch import Tensor

from fa_study.attention.gradients import attention_gradients
from fa_study.audit.accuracy import eager_gradients, gradient_references
from fa_study.audit.candidates import WHOLE
from fa_study.audit.cases import Case
from fa_study.audit.policies import COLUMNS, FITS, TIE, mean_of_known, r_squared
from fa_study.audit.subject import Subject
from fa_study.rounding import RoundingPolicy


def torch_cpu_tile(L: int) -> tuple[int, int]:
    """The tile of PyTorch's CPU flash kernel: rows by the number of queries, 512 keys."""
    return (256 if L >= 768 else 64 if L >= 192 else 32, 512)


def gradient_candidates(dtype: str, L: int) -> dict[str, dict[str, object]]:
    """Name -> keywords of `attention_gradients`."""
    kernel, eager = RoundingPolicy.kernel(dtype), RoundingPolicy.eager(dtype)
    exact = RoundingPolicy(inputs=dtype, output=dtype)
    found = {
        f"backward of the kernel, tiles of {t[0]} x {t[1]}": {"policy": kernel, "tile": t}
        for t in ((64, 64), (128, 128))
    }
    found["backward in FP32 inside"] = {"policy": exact, "algorithm": "baseline"}
    if dtype not in ("bf16", "fp16"):
        return found
    torch_cpu = RoundingPolicy.torch_cpu(dtype)
    return found | {
        "backward of PyTorch CPU flash": {"policy": torch_cpu, "tile": torch_cpu_tile(L), "exp": "fexp_u20"},
        "backward of PyTorch CPU flash, sums in FP32": {"policy": kernel, "tile": torch_cpu_tile(L), "exp": "fexp_u20"},
        "backward of eager": {"policy": eager, "algorithm": "baseline"},
        "backward of eager, scores in FP32": {"policy": eager.replace(scores="fp32"), "algorithm": "baseline"},
        "backward of the kernel, dQ, dK, dV summed in " + dtype: {"policy": torch_cpu, "tile": (64, 64)},
        "backward of the kernel, dS in FP32": {"policy": kernel.replace(grad_scores="fp32"), "tile": (64, WHOLE)},
        "backward of the kernel, delta in " + dtype: {"policy": kernel.replace(delta=dtype), "tile": (64, 64)},
    }


# Not a policy but the thing itself: PyTorch's own gradients of 16-bit operations, which round dP too.
AUTOGRAD = "autograd through eager"


@functools.lru_cache(maxsize=128)
def _emulated(case: Case, name: str) -> tuple[Tensor, ...]:
    if name == AUTOGRAD:
        return eager_gradients(*case.inputs(), case.dout())
    return attention_gradients(*case.inputs(), case.dout(), **gradient_candidates(case.dtype, case.L)[name])


def fit_gradients(subject: Subject, cases: list[Case]) -> pd.DataFrame:
    """The table of policies for one dtype, best first, as `fa_study.audit.policies.fit` has it.

    Empty without gradients. The first half of the cases is fitted, the second checked.
    """
    data = []
    for case in cases:
        outcome = subject.run(case, gradients=True)
        if not outcome.error and all(g.isfinite().all() for g in outcome.gradients):
            data.append((case, outcome.gradients, gradient_references(case, "top_left")[0]))
    if len(data) < 2:
        return pd.DataFrame(columns=COLUMNS)
    half = len(data) // 2

    def r2(name: str, part: list[tuple]) -> float:
        scores = [
            r_squared(theirs, emulation, true)
            for case, gradients, golden in part
            for theirs, emulation, true in zip(gradients, _emulated(case, name), golden)
        ]
        return mean_of_known(scores)

    rows = [
        (cases[0].dtype, True, name, r2(name, data[:half]), math.nan, math.nan, False, "")
        for name in (*gradient_candidates(cases[0].dtype, cases[0].L), AUTOGRAD)
    ]
    table = pd.DataFrame(rows, columns=COLUMNS).sort_values("r2", ascending=False, kind="stable", ignore_index=True)
    for i in table.index[table.r2 >= table.r2.iloc[0] - TIE]:
        name = table.policy[i]
        table.loc[i, "r2_check"] = r2(name, data[half:])
        equal = [
            float((a == b).double().mean()) for case, gs, _ in data[half:] for a, b in zip(gs, _emulated(case, name))
        ]
        table.loc[i, "equal"] = mean_of_known(equal)
        table.loc[i, "chosen"] = bool(table.r2_check[i] >= FITS and table.r2.iloc[0] >= FITS)
    return table

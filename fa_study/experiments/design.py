"""Figure 2: what is compared with what, and where each policy rounds; both read off the code that does it."""

from __future__ import annotations

import pandas as pd

from fa_study.rounding import SITES, RoundingPolicy

# What the presets round, for a format of 16 bits: the paper's reading, two kinds of kernels, attention written out.
PRESETS = ("uniform", "kernel", "torch_cpu", "eager")
# What is rounded at each site, in the order of the computation.
MEANINGS = {
    "inputs": "Q, K and V",
    "scores": "S after each of product, scale, cap and bias",
    "max": "m, the running maximum of a row",
    "exponentials": "S - m and exp(S - m), what the row sum adds up",
    "probabilities": "P, the operand of the product with V",
    "sum": "l, the running sum of a row",
    "rescale": "the factor exp(m_old - m_new)",
    "accumulator": "O before and after each key tile",
    "output": "O at the end",
    "lse": "log-sum-exp of a row, kept for the backward pass",
    "grad_scores": "dS, the operand of the products for dQ and dK",
    "delta": "rowsum(dO * O)",
    "grad_accumulator": "dQ, dK and dV while they are summed up",
}


def presets(fmt: str) -> dict[str, RoundingPolicy]:
    """The package's own policies for a 16-bit format, by name."""
    return {name: getattr(RoundingPolicy, name)(fmt) for name in PRESETS}


def policy_table(policies: dict[str, RoundingPolicy]) -> pd.DataFrame:
    """A row per rounding site: what it rounds, and the format that each of the named policies uses there."""
    missing = set(SITES) - set(MEANINGS)
    assert not missing, f"sites without a meaning: {missing}"
    rows = [
        {"site": site, "what is rounded": MEANINGS[site]}
        | {name: str(getattr(policy, site)) for name, policy in policies.items()}
        for site in SITES
    ]
    rows.append(
        {"site": "products", "what is rounded": "sums inside a matrix product"}
        | {name: str(policy.products) for name, policy in policies.items()}
    )
    return pd.DataFrame(rows)

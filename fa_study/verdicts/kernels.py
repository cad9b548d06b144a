"""What the table of real kernels says, with its numbers, as Markdown."""

from __future__ import annotations

import pandas as pd


def kernels_verdict(table: pd.DataFrame) -> str:
    """Does the emulation predict the 16-bit kernels that others wrote, and do these keep to the authors' rule?"""
    half = table[table["runs"].astype(bool) & table["dtype"].isin(["bf16", "fp16"])]
    predicted = half[~half["policies"].str.startswith("none fits")]
    backward = half[half["gradient_r2"].notna()]
    known = backward[~backward["gradient_policies"].str.startswith("none fits")]
    failed = half[(half["verdict"] == "fail") | (half["gradient_verdict"] == "fail")]
    text = (
        f"Of {len(half)} pairs of a kernel and a 16-bit format that run here, the emulation predicts the output of "
        f"{len(predicted)}, with an R² of {predicted['r2'].min():.3f} or more and "
        f"{predicted['equal'].min():.1%} to {predicted['equal'].max():.1%} of the outputs equal to the bit; "
        f"and the gradients of {len(known)} of the {len(backward)} that have them. "
    )
    if failed.empty:
        return text + "All keep to the FlashAttention authors' rule for the error that is to be expected."
    names = ", ".join(f"{row.kernel} in {row.dtype.upper()}" for row in failed.itertuples())
    return text + f"Beyond the FlashAttention authors' rule: {names}."


def other_processor(table: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The 16-bit pairs of two machines' tables, side by side.

    Returns
    -------
    DataFrame : kernel, dtype, r2 and equal of both (`_other` for the second), policies that both name, and other_bits:
        whether the error differs, and with it some output.
    """
    half = [t[t["runs"].astype(bool) & t["dtype"].isin(["bf16", "fp16"])] for t in (table, other)]
    both = half[0].merge(half[1], on=["kernel", "dtype"], suffixes=("", "_other"))
    names = [[set(text.split("; ")) for text in both[column]] for column in ("policies", "policies_other")]
    both["shared"] = ["" if "none fits" in a | b else "; ".join(sorted(a & b)) for a, b in zip(*names)]
    both["other_bits"] = both["rms_error"] != both["rms_error_other"]
    return both[["kernel", "dtype", "r2", "r2_other", "equal", "equal_other", "shared", "other_bits"]]


def other_processor_verdict(both: pd.DataFrame, there: str) -> str:
    """Does what was found on one machine hold on another?"""
    alike = both["shared"] != ""
    return (
        f"On {there}, a policy that predicts the kernel here is named for "
        f"{alike.sum()} of {len(both)} pairs again, with an R² of {both['r2_other'].min():.3f} or more, although at "
        f"least {both['other_bits'].sum()} of the pairs have other outputs there, as their error tells."
    )


def empty_rows(table: pd.DataFrame) -> str:
    """What each kernel returns as the log-sum-exp of a row without a key."""
    lse = table[table["empty_row_lse"].notna()].drop_duplicates(["kernel", "empty_row_lse"])
    lines = [
        f"* {'' if value == 'not returned' else 'returned as '}**{value}**: {', '.join(rows['kernel'])}"
        for value, rows in lse.groupby("empty_row_lse")
    ]
    return "Log-sum-exp of a row without a key:\n\n" + "\n".join(lines)

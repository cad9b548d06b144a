"""What a verdict on a claim of the paper is: an answer, and the sentence that gives it with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# From the strongest to the weakest; undecided: the data allow both answers.
Holds = Literal["holds", "holds only where", "undecided", "does not hold"]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: whether it holds, and the sentence that says so with its numbers."""

    claim: str
    holds: Holds
    text: str

    def _repr_markdown_(self) -> str:
        answer = self.holds.replace("only where", "only in some settings")
        return f"**Our verdict on {self.claim}: {answer}.** {self.text}"


def precision_name(precision: str) -> str:
    """A precision's name for readers: "BF16", "FP16 (emulated)"."""
    return precision.upper().replace("_EMULATED", " (emulated)")

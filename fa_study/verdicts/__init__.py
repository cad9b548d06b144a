"""The verdict on each claim of the paper, computed from the tables and put into one sentence of Markdown.

Each function takes a figure's table and returns a `Verdict`, which a page shows and whose `holds` a test checks.
"""

from fa_study.verdicts.amplification import (
    amplification_verdict,
    explained_verdict,
    meeting_sentence,
    systematic_verdict,
    uniform_in_training,
)
from fa_study.verdicts.layers import location_verdict
from fa_study.verdicts.matter import barrier_verdict, jumps_verdict, loss_verdict
from fa_study.verdicts.microbenchmark import (
    block_size_verdict,
    format_verdict,
    length_verdict,
    square_verdict,
    swap_verdict,
    ten_times_verdict,
)
from fa_study.verdicts.questions import blame_verdict, law_verdict, rescaling_verdict
from fa_study.verdicts.verdict import Verdict
from fa_study.verdicts.weights import drift_verdict, initialisation_verdict, low_precision_verdict

__all__ = [
    "Verdict",
    "amplification_verdict",
    "barrier_verdict",
    "blame_verdict",
    "block_size_verdict",
    "drift_verdict",
    "explained_verdict",
    "format_verdict",
    "initialisation_verdict",
    "jumps_verdict",
    "law_verdict",
    "length_verdict",
    "location_verdict",
    "loss_verdict",
    "low_precision_verdict",
    "meeting_sentence",
    "rescaling_verdict",
    "square_verdict",
    "swap_verdict",
    "systematic_verdict",
    "ten_times_verdict",
    "uniform_in_training",
]

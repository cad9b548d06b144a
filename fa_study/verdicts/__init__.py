"""The verdict on each claim of the paper, computed from the tables and put into one sentence of Markdown.

Each function takes a figure's table and returns a `Verdict`, which a page shows and whose `holds` a test checks.
"""

from fa_study.verdicts.verdict import Verdict
from fa_study.verdicts.weights import drift_verdict

__all__ = ["Verdict", "drift_verdict"]

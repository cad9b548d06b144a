"""Audit an attention: is its difference expected, which rounding explains it, and how does it behave at the edges?"""

from fa_study.audit.finding import Finding, Tried
from fa_study.audit.run import AuditReport, audit

__all__ = ["AuditReport", "Finding", "Tried", "audit"]

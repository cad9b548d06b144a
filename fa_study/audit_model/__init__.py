"""Audit a model: is the difference that another attention makes expected, where does it begin, how does it grow?"""

from fa_study.audit_model.run import ModelReport, audit_model

__all__ = ["ModelReport", "audit_model"]

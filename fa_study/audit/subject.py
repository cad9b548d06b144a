"""The attention under audit, called in its own terms: which keywords name which feature, and how heads are laid out.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from fa_study.audit.calls import Attention, Direct, Job, Outcome
from fa_study.audit.cases import Case

# How libraries name each feature: keyword, and what they take for our value (None: the value as it is).
SPELLINGS: dict[str, tuple[tuple[str, object], ...]] = {
    "causal": (("causal", True), ("is_causal", True), ("causal", "top_left"), ("causal", "bottom_right")),
    "mask": (("mask", None), ("attn_mask", None)),
    "bias": (("bias", None), ("attn_bias", None), ("attn_mask", None)),
    "scale": (("scale", None), ("softmax_scale", None), ("sm_scale", None)),
    "softcap": (("softcap", None), ("logits_soft_cap", None), ("softcap_value", None)),
    "window": (("window", None), ("window_size", None)),
    "grouped": (("", None), ("enable_gqa", True)),
}


def parameters_of(function: Attention) -> tuple[frozenset[str], bool]:
    """Names of the keywords that a callable takes, and whether it may take others that cannot be seen."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions have no signature
        return frozenset(), True
    named = frozenset(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return named, any(p.kind is p.VAR_KEYWORD for p in found)


@dataclass
class Subject:
    """A callable, and what has been found out about calling it.

    Attributes
    ----------
    call : runs a `Job`: `fa_study.audit.calls.Direct` or `fa_study.audit.worker.Worker`.
    keywords : the spelling found for each feature.
    alignment : what its causal means where L and S differ: "top_left", "bottom_right", or "" if not known.
    """

    call: Callable[[Job], Outcome]
    name: str
    parameters: frozenset[str]
    open_ended: bool
    device: str = "cpu"
    heads_last: bool = False
    keywords: dict[str, tuple[str, object]] = field(default_factory=dict)
    alignment: str = ""
    hangs: int = 0

    @classmethod
    def of(cls, function: Attention, *, device: str = "cpu", limit: float = 20.0, name: str = "") -> Subject:
        """A subject that is called in this process."""
        named, open_ended = parameters_of(function)
        label = name or getattr(function, "__name__", type(function).__name__)
        return cls(Direct(function, limit), label, named, open_ended, device)

    def spellings(self, feature: str) -> list[tuple[str, object]]:
        """The spellings of a feature that this callable could take."""
        return [s for s in SPELLINGS[feature] if not s[0] or s[0] in self.parameters or self.open_ended]

    def run(self, case: Case, *, gradients: bool = False, strided: bool = False) -> Outcome:
        """The outcome of a case."""
        values = case.values(self.alignment or "top_left")
        return self.run_on(*case.inputs(), values, dout=case.dout() if gradients else None, strided=strided)

    def run_on(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        values: dict[str, object] | None = None,
        *,
        spelled: dict[str, object] | None = None,
        dout: Tensor | None = None,
        strided: bool = False,
    ) -> Outcome:
        """Call with our features translated into its keywords; `spelled` are keywords as they are."""
        keywords = dict(spelled or {})
        for feature, value in (values or {}).items():
            keyword, own = self.keywords[feature]
            keywords[keyword] = value if own is None else own
        if q.shape[1] != k.shape[1]:
            keyword, own = self.keywords.get("grouped", ("", None))
            keywords.update({keyword: own} if keyword else {})
        if self.hangs >= 2:
            return Outcome(error="not tried: two calls before did not return", hung=True)
        job = Job(q, k, v, keywords, dout, self.device, self.heads_last, strided)
        outcome = self.call(job)
        self.hangs += outcome.hung
        return outcome

"""What a callable supports, found out by trying, and whether what it returns is attention.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fa_study.audit.accuracy import golden_gradients
from fa_study.audit.calls import Outcome
from fa_study.audit.cases import DTYPES, Case
from fa_study.audit.faults import ROUNDING, diagnose, distance
from fa_study.audit.finding import Finding, Tried
from fa_study.audit.subject import Subject

ORDER = ("bf16", "fp16", "fp32", "fp64")
HEAD_SIZES, MORE_HEAD_SIZES = (32, 40, 59, 64, 96, 128), (111, 160, 192, 224, 256)
LENGTHS = ((1, 1), (5, 5), (17, 17), (97, 97), (113, 203), (203, 113), (1, 257), (128, 128), (256, 256))
MORE_LENGTHS = ((2, 2), (128, 217), (108, 256), (256, 512), (512, 256), (384, 384), (1023, 1024), (1024, 1023))
FEATURES = ("causal", "mask", "bias", "scale", "softcap", "window")


@dataclass
class Support:
    """What works: `tried` has a line for each trial, `findings` what is wrong."""

    tried: list[Tried] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    head_sizes: list[int] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    grouped: bool = False
    gradients: set[str] = field(default_factory=set)

    def add(self, what: str, setting: str, case: Case, outcome: Outcome, values: dict) -> bool:
        """Enter an outcome; True if it is attention as asked for."""
        if outcome.changed:
            names = ", ".join(outcome.changed)
            self.fail("in-place", f"{what} {setting}: the call overwrites its input {names}")
        if outcome.error:
            self.refused(what, setting, outcome)
            return False
        fault = diagnose(outcome.out, case, values)
        if fault is None:
            self.tried.append(Tried(what, setting, "yes", f"{outcome.seconds * 1e3:.1f} ms"))
            return True
        self.tried.append(Tried(what, setting, "wrong", fault[1]))
        self.fail(fault[0], f"{what} {setting}: {fault[1]}")
        return False

    def refused(self, what: str, setting: str, outcome: Outcome) -> None:
        """Enter a call that raised, which is no failure, or that hung or took its process with it, which is one."""
        self.tried.append(Tried(what, setting, "no", outcome.error))
        for is_so, code in ((outcome.hung, "hangs"), (outcome.died, "crashes")):
            if is_so and not any(f.code == code for f in self.findings):
                self.fail(code, f"{what} {setting}: {outcome.error}")

    def fail(self, code: str, text: str) -> None:
        """Enter a failure, once."""
        finding = Finding("fail", code, text)
        if finding not in self.findings:
            self.findings.append(finding)


def probe(subject: Subject, *, quick: bool = True, causal: str | None = None, dtypes: tuple = ORDER) -> Support:
    """Try dtypes, layouts, head sizes, lengths, features and gradients; completes `subject` on the way.

    Parameters
    ----------
    causal : the alignment that is expected; None accepts either.
    """
    support = Support()
    for dtype in dtypes:
        _try_dtype(subject, support, dtype)
    if not support.dtypes:
        if not any(f.level == "fail" for f in support.findings):
            reasons = "; ".join(dict.fromkeys(t.detail for t in support.tried))
            support.fail("unusable", f"no call succeeded: {reasons}")
        return support
    # In the widest precision a mistake stands out most clearly against rounding.
    main = next(d for d in ("fp32", "fp64", "bf16", "fp16") if d in support.dtypes)
    for D in (*HEAD_SIZES, *(() if quick else MORE_HEAD_SIZES)):
        case = Case(main, D=D)
        if support.add("head size", str(D), case, subject.run(case), {}):
            support.head_sizes.append(D)
    for L, S in (*LENGTHS, *(() if quick else MORE_LENGTHS)):
        case = Case(main, L=L, S=S, B=1, H=2, Hkv=2)
        if support.add("lengths", f"{L} x {S}", case, subject.run(case), {}):
            support.lengths.append((L, S))
    _try_grouped(subject, support, Case(main, Hkv=2))
    for feature in FEATURES:
        try_feature(subject, support, Case(main, features=(feature,)), feature, causal)
    for dtype in support.dtypes:
        _try_gradients(subject, support, Case(dtype))
    return support


def _try_dtype(subject: Subject, support: Support, dtype: str) -> None:
    case = Case(dtype)
    outcome = subject.run(case)
    if not support.dtypes and not _is_right(outcome, case):
        # Heads and lengths may be the other way round, (B, L, H, D), as the flash-attn package has them.
        subject.heads_last = True
        swapped = subject.run(case)
        subject.heads_last = _is_right(swapped, case)
        outcome = swapped if subject.heads_last else outcome
    if not support.add("dtype", dtype, case, outcome, {}):
        return
    support.dtypes.append(dtype)
    if outcome.out.dtype != DTYPES[dtype]:
        returned = str(outcome.out.dtype).removeprefix("torch.")
        support.fail("dtype", f"returns {returned} for inputs in {dtype}")


def _is_right(outcome: Outcome, case: Case) -> bool:
    return not outcome.error and diagnose(outcome.out, case, {}) is None


def _try_grouped(subject: Subject, support: Support, case: Case) -> None:
    for spelling in subject.spellings("grouped"):
        subject.keywords["grouped"] = spelling
        outcome = subject.run(case)
        if not outcome.error or outcome.hung or outcome.died:
            break
    support.grouped = support.add("grouped heads", f"{case.H} query, {case.Hkv} key", case, outcome, {})


def try_feature(subject: Subject, support: Support, case: Case, feature: str, causal: str | None = None) -> None:
    """Find the keyword of a feature, and of `causal` the alignment, and check what it does."""
    spellings = subject.spellings(feature)
    if not spellings:
        support.tried.append(Tried(feature, "", "no", "no keyword for it"))
        return
    for spelling in spellings:
        subject.keywords[feature] = spelling
        outcome = subject.run(case)
        if not outcome.error or outcome.hung or outcome.died:
            break
    keyword = spelling[0] if spelling[1] is None else f"{spelling[0]}={spelling[1]!r}"
    if support.add(feature, keyword, case, outcome, case.values()):
        support.features.append(feature)
        if feature == "causal":
            _find_alignment(subject, support, case, causal)


def _find_alignment(subject: Subject, support: Support, case: Case, expected: str | None) -> None:
    """More keys than queries tell where the diagonal lies; a spelling that names an alignment has to keep to it."""
    keyword, own = subject.keywords["causal"]
    named = [own] if isinstance(own, str) else []
    named += ["bottom_right"] if named and own != "bottom_right" else []
    for alignment in named:
        subject.keywords["causal"] = (keyword, alignment)
        _check_alignment(subject, support, case, alignment, f"{keyword}={alignment!r}")
    if named:
        subject.keywords["causal"], subject.alignment = (keyword, own), own
        return
    wide = case.replace(S=2 * case.S)
    outcome = subject.run(wide)
    fits = [a for a in ("top_left", "bottom_right") if not outcome.error and _fits(outcome, wide, a)]
    if fits and expected in (None, *fits):
        subject.alignment = fits[0]
        support.tried.append(Tried("causal alignment", f"{wide.L} x {wide.S}", "yes", fits[0]))
    else:
        _check_alignment(subject, support, case, expected or "top_left", f"{keyword}={own!r}", outcome)


def _fits(outcome: Outcome, case: Case, alignment: str) -> bool:
    return diagnose(outcome.out, case, case.values(alignment)) is None


def _check_alignment(subject, support, case: Case, alignment: str, setting: str, outcome: Outcome | None = None):
    wide = case.replace(S=2 * case.S)
    outcome = outcome or subject.run(wide)
    support.add("causal alignment", f"{setting} at {wide.L} x {wide.S}", wide, outcome, wide.values(alignment))


def _try_gradients(subject: Subject, support: Support, case: Case) -> None:
    outcome = subject.run(case, gradients=True)
    if outcome.error:
        support.refused("gradients", case.dtype, outcome)
        return
    true = golden_gradients(*case.inputs(), case.dout())
    away = {name: distance(g, t) for name, g, t in zip(("dq", "dk", "dv"), outcome.gradients, true)}
    worst = max(away, key=away.get)
    if away[worst] <= 2 * ROUNDING:
        support.gradients.add(case.dtype)
        support.tried.append(Tried("gradients", case.dtype, "yes"))
        return
    text = f"{worst} has a relative error of {away[worst]:.1e}"
    support.tried.append(Tried("gradients", case.dtype, "wrong", text))
    support.fail("gradient", f"gradients {case.dtype}: {text}")

"""One call of a stranger's attention: whatever it does, the answer is an `Outcome` and never an exception.

A `Job` says what to call it with, `invoke` does it, and `Direct` puts a time limit around it in this process. A process
of its own, which survives crashes as well, is in `fa_study.audit.worker`.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Attention = Callable[..., object]


@dataclass(frozen=True)
class Job:
    """A call: q (B, H, L, D), k and v (B, Hkv, S, D), keywords, and how the tensors are handed over.

    Attributes
    ----------
    dout : gradient of the output; None asks for no gradients.
    heads_last : the callable takes and returns (B, L, H, D).
    strided : hand over views whose heads and lengths are swapped in memory.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keywords: Mapping[str, object] = field(default_factory=dict)
    dout: Tensor | None = None
    device: str = "cpu"
    heads_last: bool = False
    strided: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a call. `error` is one line, empty if there is a usable output; tensors lie on the CPU."""

    out: Tensor | None = None
    gradients: tuple[Tensor, ...] | None = None
    error: str = ""
    hung: bool = False
    changed: tuple[str, ...] = ()  # inputs that the call overwrote: q, k, v, or keywords
    died: bool = False  # the call took its process with it
    seconds: float = 0.0
    lse: Tensor | None = None  # the second thing returned, if it is (B, H, L)


class TimeLimit(BaseException):
    """Raised inside a call that takes too long. No Exception, so that the callable's own handlers do not catch it."""


def one_line(error: BaseException) -> str:
    """The error's type and the first line of its text, at most 200 characters."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def invoke(function: Attention, job: Job) -> Outcome:
    """Call `function` as the job says. PyTorch's default dtype is afterwards what it was."""
    start, default = time.perf_counter(), torch.get_default_dtype()
    try:
        with torch.set_grad_enabled(job.dout is not None):
            return _invoke(function, job, start)
    except (KeyboardInterrupt, TimeLimit):
        raise
    except BaseException as error:  # SystemExit too: a callable must not end the audit
        return Outcome(error=one_line(error), seconds=time.perf_counter() - start)
    finally:
        torch.set_default_dtype(default)


def _invoke(function: Attention, job: Job, start: float) -> Outcome:
    given = []
    for x in (job.q, job.k, job.v):
        x = x.to(job.device)
        x = x.transpose(1, 2) if job.heads_last else x
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if job.strided else x.contiguous()
        x = x.clone() if x.data_ptr() in (job.q.data_ptr(), job.k.data_ptr(), job.v.data_ptr()) else x
        given.append(x.requires_grad_(job.dout is not None))
    before = [x.detach().clone() for x in given]
    keywords = {k: v.to(job.device).clone() if isinstance(v, Tensor) else v for k, v in job.keywords.items()}
    result = function(*given, **keywords)
    overwritten = [name for name, x, old in zip("qkv", given, before) if not _same(x, old)]
    tensors = {name: x for name, x in keywords.items() if isinstance(x, Tensor)}
    overwritten += [name for name, x in tensors.items() if not _same(x, job.keywords[name].to(job.device))]
    changed = tuple(overwritten)
    out = result[0] if isinstance(result, tuple | list) and result else getattr(result, "out", result)
    if not isinstance(out, Tensor):
        return Outcome(error=f"returned {type(out).__name__} instead of a tensor", changed=changed)
    out = out.as_subclass(Tensor)
    out = out.transpose(1, 2) if job.heads_last and out.dim() == 4 else out
    wanted = (*job.q.shape[:3], job.v.shape[3])
    if tuple(out.shape) != wanted:
        return Outcome(error=f"returned shape {tuple(out.shape)} instead of {wanted}", changed=changed)
    lse = result[1] if isinstance(result, tuple | list) and len(result) > 1 else getattr(result, "lse", None)
    is_lse = isinstance(lse, Tensor) and lse.shape == out.shape[:3]
    gradients = None
    if job.dout is not None:
        if not out.requires_grad:
            return Outcome(error="the output carries no gradient", changed=changed)
        gradients = torch.autograd.grad(out, given, job.dout.to(job.device, out.dtype))
        gradients = tuple((g.transpose(1, 2) if job.heads_last else g).detach().cpu() for g in gradients)
    # A copy: the callable may return the same buffer next time.
    out = out.detach().cpu().clone(memory_format=torch.contiguous_format)
    seconds = time.perf_counter() - start
    lse = lse.detach().as_subclass(Tensor).cpu().clone() if is_lse else None
    return Outcome(out, gradients, changed=changed, seconds=seconds, lse=lse)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach().nan_to_num(12345.0), b.nan_to_num(12345.0))


class Direct:
    """Calls in this process. The limit interrupts Python code in the main thread, not a compiled loop."""

    def __init__(self, function: Attention, limit: float = 30.0) -> None:
        self.function, self.limit = function, limit

    def __call__(self, job: Job) -> Outcome:
        timed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
        if not timed:
            return invoke(self.function, job)
        try:
            before = signal.signal(signal.SIGALRM, _raise_limit)
            signal.setitimer(signal.ITIMER_REAL, self.limit)
            try:
                return invoke(self.function, job)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
        except TimeLimit:
            return Outcome(error=f"did not return within {self.limit:g} s", hung=True, seconds=self.limit)

    def close(self) -> None:
        """Nothing to end."""


def _raise_limit(*_: object) -> None:
    raise TimeLimit

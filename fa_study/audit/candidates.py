"""The policies that might predict an attention: presets, and kernels and eager attention with one site changed.

Shape letters: B batch, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fa_study.attention import baseline_attention, flash_attention
from fa_study.attention.exponentials import exact_exp, fexp_u20
from fa_study.audit.cases import DTYPES
from fa_study.rounding import RoundingPolicy

TILES = (16, 32, 64, 128)
WHOLE = 1 << 20  # a tile that holds all keys
# Sites that every released flash kernel keeps in FP32, and the code of a finding where one is not.
NARROW = {"accumulator": "accumulator", "sum": "row-sum", "rescale": "rescale", "max": "max", "exponentials": "row-sum"}

Emulation = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Candidate:
    """A policy that might predict, its emulation, and the code of what is wrong with it ("" for a sound one)."""

    name: str
    emulate: Emulation
    fault: str = ""


def torch_cpu_exp(keys: int) -> Callable[[Tensor], Tensor]:
    """The exponential of PyTorch's CPU flash kernel: `fexp_u20`, but exact in the last keys of a short row.

    For one tile of at most 512 keys: those that do not fill a vector, of 16 numbers with AVX-512, else of 8, take
    another path.
    """
    whole = keys - keys % (16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8)

    def exp(x: Tensor) -> Tensor:
        value = fexp_u20(x)
        value[..., whole:] = exact_exp(x[..., whole:])
        return value

    return exp


def _flash(policy: RoundingPolicy, **options: object) -> Emulation:
    return lambda q, k, v: flash_attention(q, k, v, policy=policy, **options).out


def kept_narrow(q: Tensor, k: Tensor, v: Tensor, *, dtype: torch.dtype, tile: int, products: bool) -> Tensor:
    """FlashAttention 2 with O put away in `dtype` after each tile and added up in FP32: a rounding per tile, not three.

    products: the product of P and V is rounded as well, as that of two 16-bit tensors is.
    """
    m = torch.full((*q.shape[:3], 1), -math.inf, dtype=torch.float32)
    l, o = torch.zeros_like(m), torch.zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    for keys, values in zip(k.split(tile, 2), v.split(tile, 2)):
        s = q.float() @ keys.float().mT * q.shape[-1] ** -0.5
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, a = (s - new).exp(), (m - new).exp()
        pv = p.to(v.dtype).float() @ values.float()
        pv = pv.to(dtype).float() if products else pv
        l, o, m = a * l + p.sum(-1, keepdim=True), (a * o.float() + pv).to(dtype), new
    return (o.float() / l).to(q.dtype)


def _baseline(policy: RoundingPolicy, **options: object) -> Emulation:
    return lambda q, k, v: baseline_attention(q, k, v, policy=policy, **options).out


def _scaled_inputs(policy: RoundingPolicy) -> Emulation:
    """PyTorch's math kernel shares the scale between Q and K before their product."""

    def emulate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = q.shape[-1] ** -0.25
        return baseline_attention(q * half, k * half, v, policy=policy, scale=1.0).out.to(q.dtype)

    return emulate


def _torch_cpu(policy: RoundingPolicy) -> Emulation:
    def emulate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = k.shape[2]
        exp = torch_cpu_exp(S) if S <= 512 and S % 16 else "fexp_u20"
        return flash_attention(q, k, v, policy=policy, tile=(64, 512), exp=exp).out

    return emulate


def candidates(dtype: str, keys: int) -> list[Candidate]:
    """Presets first, then kernels and eager attention with one site changed."""
    narrow = dtype in ("bf16", "fp16")
    kernel, inside = RoundingPolicy.kernel(dtype), "fp32" if dtype != "fp64" else "fp64"
    if dtype == "fp64":
        kernel = RoundingPolicy.uniform("fp64")
    exact = RoundingPolicy(inputs=dtype, output=dtype) if dtype != "fp64" else kernel
    tiles = [t for t in TILES if t < keys] + [WHOLE]
    found = [Candidate(f"kernel, {_tiles(t)}", _flash(kernel, tile=(64, t))) for t in tiles]
    found += [
        Candidate(f"kernel, {_tiles(t)}, exp2_fma", _flash(kernel, tile=(64, t), exp="exp2_fma")) for t in tiles[-3:]
    ]
    for name, options in (
        ("FlashAttention 1", {"algorithm": "fa1"}),
        ("FlashAttention 4", {"algorithm": "fa4", "exp": "exp2_fma"}),
        ("from the last tile to the first, exp2_fma", {"key_order": "reverse", "exp": "exp2_fma"}),
    ):
        found += [Candidate(f"kernel, {_tiles(t)}, {name}", _flash(kernel, tile=(64, t), **options)) for t in (64, 128)]
    found.append(Candidate(f"everything in {inside.upper()} inside, softmax at once", _baseline(exact)))
    if not narrow:
        return found + _wide_candidates(dtype, keys)
    eager = RoundingPolicy.eager(dtype)
    found += [
        Candidate("PyTorch CPU flash: tiles of 512, fast exponential", _torch_cpu(kernel)),
        Candidate("eager", _baseline(eager)),
        Candidate("eager, scale shared by Q and K", _scaled_inputs(eager)),
        Candidate("eager, scores in FP32", _baseline(eager.replace(scores="fp32"))),
        Candidate("eager, probabilities in FP32", _baseline(eager.replace(probabilities="fp32"))),
        Candidate("kernel, scores rounded", _flash(kernel.replace(scores=dtype), tile=(64, 64))),
        Candidate("kernel, probabilities in FP32", _flash(kernel.replace(probabilities="fp32"), tile=(64, 64))),
    ]
    return found + _faulty_candidates(dtype, kernel, eager, tiles)


def _faulty_candidates(dtype: str, kernel: RoundingPolicy, eager: RoundingPolicy, tiles: list[int]) -> list[Candidate]:
    found = []
    for site, code in NARROW.items():
        changed = kernel.replace(**{site: dtype})
        for t in tiles:
            found.append(Candidate(f"kernel, {_tiles(t)}, {site} in {dtype}", _flash(changed, tile=(64, t)), code))
    for t in tiles[:-1]:
        both = kernel.replace(sum=dtype, rescale=dtype)
        found.append(
            Candidate(f"kernel, {_tiles(t)}, sum and rescale in {dtype}", _flash(both, tile=(64, t)), "row-sum")
        )
        for products in (False, True):
            name = f"kernel, {_tiles(t)}, O kept in {dtype}" + (", products with V rounded" if products else "")
            emulate = functools.partial(kept_narrow, dtype=DTYPES[dtype], tile=t, products=products)
            found.append(Candidate(name, emulate, "accumulator"))
    for t in (64, WHOLE):
        uniform = RoundingPolicy.uniform(dtype)
        for algorithm in ("fa1", "fa2"):
            name = f"every site in {dtype}, {_tiles(t)}, {algorithm}"
            found.append(Candidate(name, _flash(uniform, tile=(64, t), algorithm=algorithm), "accumulator"))
    found.append(Candidate(f"every site in {dtype}, softmax at once", _baseline(uniform), "row-sum"))
    cut = f"{dtype}:toward_zero"
    for sites in (("probabilities",), ("output",), ("probabilities", "output")):
        name = " and ".join(sites) + " truncated"
        changed = dict.fromkeys(sites, cut)
        found.append(Candidate(f"kernel, {name}", _flash(kernel.replace(**changed), tile=(64, 64)), "truncation"))
        found.append(Candidate(f"eager, {name}", _baseline(eager.replace(**changed)), "truncation"))
    truncated = eager.replace(scores=cut, probabilities=cut, output=cut)
    found.append(Candidate("eager, every cast truncated", _baseline(truncated), "truncation"))
    return found


def _wide_candidates(dtype: str, keys: int) -> list[Candidate]:
    """What 32-bit and 64-bit inputs may meet inside: narrower operands, narrower sums."""
    narrower = ("tf32", "bf16", "fp16") if dtype == "fp32" else ("fp32",)
    base = RoundingPolicy.kernel(dtype) if dtype == "fp32" else RoundingPolicy.uniform("fp64")
    found = []
    for fmt in narrower:
        rounded = base.replace(inputs=fmt, probabilities=fmt)
        found.append(Candidate(f"operands of products in {fmt}", _flash(rounded, tile=(64, 64))))
        found.append(Candidate(f"eager in {fmt}", _baseline(RoundingPolicy.eager(fmt).replace(output=dtype))))
        for site, code in NARROW.items():
            for t in (64, WHOLE):
                name = f"kernel, {_tiles(t)}, {site} in {fmt}"
                found.append(Candidate(name, _flash(base.replace(**{site: fmt}), tile=(64, t)), code))
    if dtype == "fp32":
        found.append(
            Candidate("everything in FP64 inside", _baseline(RoundingPolicy.uniform("fp64").replace(output=dtype)))
        )
    return found


def _tiles(t: int) -> str:
    return "one tile" if t == WHOLE else f"tiles of {t}"

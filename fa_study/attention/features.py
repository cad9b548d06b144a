"""What an attention call asks for beyond Q, K and V: checked once, then cut into tiles.

Order of the features: scale, softcap, bias, mask. Shape letters: B batch, H query heads, Hkv key heads, G = H / Hkv,
L queries, S keys, D and Dv head sizes, R rows of a chunk, W keys of a tile after padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.nn.functional import pad

CAUSAL = (None, "top_left", "bottom_right")


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call, taken from Q, K and V by `check_shapes`."""

    B: int
    H: int
    Hkv: int
    L: int
    S: int
    D: int
    Dv: int

    @property
    def G(self) -> int:
        return self.H // self.Hkv


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> Shapes:
    """The sizes of q (B, H, L, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv); ValueError if they do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} has to be a floating-point tensor, got {given}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} has to have 4 dimensions (batch, heads, length, size), got shape {tuple(x.shape)}"
            )
    B, H, L, D = q.shape
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit: batch and head size (first and last) must be equal"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: batch, heads and length must be equal")
    if k.shape[1] == 0 or H % k.shape[1]:
        raise ValueError(f"{H} query heads cannot share {k.shape[1]} key/value heads: the second must divide the first")
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k and v lie on {q.device}, {k.device} and {v.device}: move them to one device")
    return Shapes(B, H, k.shape[1], L, k.shape[2], D, v.shape[3])


@dataclass(frozen=True)
class Features:
    """The checked features of one call; `tile` says which keys of a tile are absent for which rows."""

    shapes: Shapes
    scale: float
    softcap: float | None
    mask: Tensor | None
    bias: Tensor | None
    low: int | None  # row i sees keys j with low <= j - i <= high
    high: int | None
    bias_hides: bool  # the bias holds -inf, which masks

    @property
    def hides(self) -> bool:
        """Whether any key may be absent for a row."""
        return self.mask is not None or self.bias_hides or self.low is not None or self.high is not None

    def seen(self) -> tuple[Tensor | None, Tensor | None]:
        """By mask and bias: rows that see a key (B, H, L), keys that a row of any head sees (B, 1, S); None for all."""
        live = self.mask
        if self.bias_hides:
            shown = self.bias != -math.inf
            live = shown if live is None else live & shown
        if live is None:
            return None, None
        rows, keys = live.any(3), live.any(2).any(1, keepdim=True)
        return (rows if rows.shape[2] > 1 else None), (keys if keys.shape[2] > 1 else None)

    def is_dead(self, rows: slice, keys: slice) -> bool:
        """Whether causal order and window alone leave no key of the tile to any of the rows."""
        beyond = self.high is not None and keys.start > rows.stop - 1 + self.high
        return beyond or (self.low is not None and keys.stop - 1 < rows.start + self.low)

    def tile(
        self, rows: slice, R: int, keys: slice, W: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """(dead, bias) of a tile padded to R rows and W keys, each None or broadcasting to (B, H, R, W).

        dead is True where a key is absent for a row; padded keys always are. None says that all keys are there.
        """
        bias = None if self.bias is None else _cut(self.bias, rows, R, keys, W, 0.0)
        dead = None
        if self.mask is not None:
            dead = ~_cut(self.mask, rows, R, keys, W, False)
        if bias is not None and self.bias_hides:
            hidden = bias == -math.inf
            bias = bias.masked_fill(hidden, 0.0)
            dead = hidden if dead is None else dead | hidden
        outside = self._outside(rows, R, keys, W, device)
        if outside is not None:
            dead = outside if dead is None else dead | outside
        n = keys.stop - keys.start
        if n < W:
            padded = (torch.arange(W, device=device) >= n)[None, None, None]
            dead = padded if dead is None else dead | padded
        return dead, bias

    def _outside(self, rows: slice, R: int, keys: slice, W: int, device: torch.device) -> Tensor | None:
        right = self.high is not None and keys.stop - 1 > rows.start + self.high
        left = self.low is not None and keys.start < rows.stop - 1 + self.low
        if not (right or left):
            return None
        distance = torch.arange(keys.start, keys.start + W, device=device) - torch.arange(
            rows.start, rows.start + R, device=device
        ).unsqueeze(1)
        outside = torch.zeros(R, W, dtype=torch.bool, device=device)
        if right:
            outside |= distance > self.high
        if left:
            outside |= distance < self.low
        return outside[None, None]


def check_features(
    shapes: Shapes,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
) -> Features:
    """The features of a call, checked against its shapes; ValueError in one sentence if something does not fit."""
    if causal not in CAUSAL:
        raise ValueError(f"causal={causal!r} is unknown: use None, 'top_left' or 'bottom_right'")
    if softcap is not None:
        softcap = check_positive("softcap", softcap, ", or None for no cap")
    if scale is not None and not math.isfinite(as_number(scale)):
        raise ValueError(f"scale={scale!r}: use a finite number, or None for 1/sqrt(D)")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"mask has to be a boolean tensor (True = attend), got {given}; use bias to add numbers")
        mask = _broadcastable(mask, "mask", shapes)
    bias_hides = False
    if bias is not None:
        if not isinstance(bias, Tensor) or not bias.is_floating_point():
            given = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias has to be a floating-point tensor, got {given}; use mask to hide keys")
        bias = _broadcastable(bias, "bias", shapes)
        bias_hides = bool((bias == -math.inf).any())
    # Without a causal alignment a window is aligned like the kernels' own: the last row with the last key.
    offset = 0 if causal == "top_left" else shapes.S - shapes.L
    left, right = _check_window(window)
    if causal is not None:
        right = 0
    return Features(
        shapes,
        1.0 / math.sqrt(max(shapes.D, 1)) if scale is None else float(scale),
        softcap,
        mask,
        bias,
        None if left is None else offset - left,
        None if right is None else offset + right,
        bias_hides,
    )


def as_number(x: object) -> float:
    """x in float64, NaN if it is no real number."""
    if isinstance(x, bool) or not (isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1)):
        return math.nan
    try:
        return float(x)
    except OverflowError:  # a whole number beyond float64
        return math.inf


def check_positive(name: str, x: object, otherwise: str = "") -> float:
    """x in float64 if it is positive in float32 too, where it may be used; ValueError if not."""
    limits, number = torch.finfo(torch.float32), as_number(x)
    if not limits.tiny <= number <= limits.max:
        raise ValueError(f"{name}={x!r}: use a positive finite number in the range of float32{otherwise}")
    return number


def _check_window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    ok = isinstance(window, tuple | list) and len(window) == 2
    if not ok or not all(w is None or (isinstance(w, int) and w >= -1) for w in window):
        raise ValueError(f"window={window!r}: use (left, right), each a number of keys >= 0, or None for no limit")
    return tuple(None if w is None or w < 0 else w for w in window)


def _broadcastable(x: Tensor, name: str, s: Shapes) -> Tensor:
    full = (s.B, s.H, s.L, s.S)
    fits = x.dim() <= 4 and all(a in (1, b) for a, b in zip(reversed(x.shape), reversed(full)))
    if not fits:
        raise ValueError(f"{name} of shape {tuple(x.shape)} does not broadcast to (B, H, L, S) = {full}")
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def _cut(x: Tensor, rows: slice, R: int, keys: slice, W: int, fill: float | bool) -> Tensor:
    """The tile of a (1|B, 1|H, 1|L, 1|S) tensor, padded to R rows and W keys where it has them."""
    add_rows = add_keys = 0
    if x.shape[2] > 1:
        x, add_rows = x[:, :, rows], R - (rows.stop - rows.start)
    if x.shape[3] > 1:
        x, add_keys = x[..., keys], W - (keys.stop - keys.start)
    return pad(x, (0, add_keys, 0, add_rows), value=fill) if add_rows or add_keys else x

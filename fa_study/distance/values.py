"""One flat view of any tensor or array: its bit codes, its exact float64 values, its order.

Every distance reads values through `Flat`, so that BF16, FP8 and float64 share one code path and nothing is rounded on
the way in. Work goes block by block: a block of 32,768 float64 values stays in a core's cache, is small enough for
every library here to run it on one thread, and fixes the order of every sum: results do not depend on thread counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32_768
_CODE_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NUMPY_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}
_PACKED = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))


@dataclass(frozen=True)
class Flat:
    """A tensor's bits as a 1-D array of unsigned integers, and what they mean."""

    codes: np.ndarray
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, part: slice) -> Flat:
        return Flat(self.codes[part], self.dtype)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_narrow(self) -> bool:
        """True for floats of 16 bits or fewer, whose codes are counted instead of sorted."""
        return self.is_float and self.codes.itemsize <= 2

    def native_type(self) -> type:
        """The type of `native`."""
        return np.float32 if self.is_narrow or self.dtype == torch.float32 else np.float64

    def native(self) -> np.ndarray:
        """The values in float32 or float64, whichever holds them exactly; no copy where that is their own type."""
        if self.dtype == torch.float32:
            return self.codes.view(np.float32)
        if self.dtype == torch.float64:
            return self.codes.view(np.float64)
        if self.is_float:
            return np.concatenate([block.float64().astype(np.float32) for block in blocks(self)] or [np.empty(0, "f4")])
        return self.float64()

    def float64(self, out: np.ndarray | None = None) -> np.ndarray:
        """The exact values as float64 (64-bit integers above 2^53 are rounded), in `out` if it is given."""
        if self.dtype == torch.float64 and out is None:
            return self.codes.view(np.float64)
        out = np.empty(len(self)) if out is None else out[: len(self)]
        if self.dtype in _NUMPY_FLOATS:
            out[:] = self.codes.view(_NUMPY_FLOATS[self.dtype])
            return out
        # from_numpy warns about read-only arrays, such as memory-mapped ones: those few bytes are copied.
        tensor = torch.from_numpy(np.require(self.codes, requirements="W")).view(self.dtype)
        torch.from_numpy(out).copy_(tensor.float() if self.codes.itemsize == 1 and self.is_float else tensor)
        return out

    def order(self) -> np.ndarray:
        """Integers, as wide as the codes, that count representable values: neighbours differ by 1, +0 and -0 are 0."""
        codes = self.codes
        signless = self.is_float and torch.finfo(self.dtype).min >= 0  # float8_e8m0fnu
        if self.dtype == torch.bool or signless or not (self.is_float or self.dtype.is_signed):
            return codes
        signed = codes.view(codes.dtype.str.replace("u", "i"))
        if not self.is_float:
            return signed
        bits = 8 * codes.itemsize - 1
        sign = signed >> bits
        return ((signed & signed.dtype.type((1 << bits) - 1)) ^ sign) - sign


def flatten(x: object) -> Flat:
    """The values of a torch tensor, a NumPy array or a nested list, flattened; complex values become pairs of reals."""
    if isinstance(x, torch.Tensor):
        return _from_tensor(x.detach())
    array = np.asarray(x)
    if array.dtype.kind == "c":
        array = np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)
    array = np.ascontiguousarray(array).reshape(-1)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # NumPy's own names and those of ml_dtypes ("bfloat16", "float8_e5m2") are torch's names too.
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or array.dtype.itemsize not in _CODE_TYPES:
        raise ValueError(f"expected floats of at most 64 bits, integers or booleans, got dtype {array.dtype}")
    return Flat(array.view(_CODE_TYPES[array.dtype.itemsize]), dtype)


def _from_tensor(x: torch.Tensor) -> Flat:
    if x.layout != torch.strided or x.is_quantized or x.dtype in _PACKED or x.device.type == "meta":
        raise ValueError(f"expected a dense, unpacked tensor, got {x.dtype}, {x.layout}, device {x.device}; densify it")
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.resolve_neg().cpu().contiguous().reshape(-1)
    code_type = getattr(torch, np.dtype(_CODE_TYPES[x.element_size()]).name)
    return Flat(x.view(code_type).numpy(), x.dtype)


def blocks(flat: Flat, size: int = BLOCK) -> Iterator[Flat]:
    for start in range(0, len(flat), size):
        yield flat[start : start + size]

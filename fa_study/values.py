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

    def native(self) -> np.ndarray:
        """The values in float32 or float64, whichever holds them exactly; no copy where that is their own type."""
        if self.dtype == torch.float32:
            return self.codes.view(np.float32)
        if self.dtype == torch.float64:
            return self.codes.view(np.float64)
        if self.is_float:
            return np.concatenate([block.float64().astype(np.float32) for block in blocks(self)] or [np.empty(0, "f4")])
        return self.float64()

    def float64(self) -> np.ndarray:
        """The exact values as float64 (64-bit integers above 2^53 are rounded)."""
        if self.dtype == torch.float32:
            return self.codes.view(np.float32).astype(np.float64)
        if self.dtype == torch.float64:
            return self.codes.view(np.float64)
        # from_numpy warns about read-only arrays, such as memory-mapped ones: those few bytes are copied.
        tensor = torch.from_numpy(np.require(self.codes, requirements="W")).view(self.dtype)
        return (tensor.float() if self.codes.itemsize == 1 and self.is_float else tensor).double().numpy()

    def order(self) -> np.ndarray:
        """Integers that count representable values: neighbours differ by one, and +0 and -0 are both 0."""
        codes = self.codes
        if self.dtype == torch.bool or not (self.is_float or self.dtype.is_signed):
            return codes.astype(np.int64) if codes.itemsize < 8 else codes
        if self.is_float and torch.finfo(self.dtype).min >= 0:  # float8_e8m0fnu has no sign
            return codes.astype(np.int64)
        signed = codes.view(codes.dtype.str.replace("u", "i"))
        if not self.is_float:
            return signed.astype(np.int64)
        wide = signed if codes.itemsize == 8 else signed.astype(np.int32 if codes.itemsize < 4 else np.int64)
        sign = wide >> (wide.itemsize * 8 - 1)
        top = wide.dtype.type((1 << (codes.itemsize * 8 - 1)) - 1)
        return ((wide & top) ^ sign) - sign


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

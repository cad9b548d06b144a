"""A tensor that lies somewhere in a file: mapped into memory when it is read, checked, and gone when it is dropped."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Region:
    """Bytes of a file that hold the values of a tensor, or of several that share them.

    Attributes
    ----------
    offset, nbytes
        Where the bytes lie in the file.
    first, shape, strides
        Which of the values belong to the tensor, in elements; strides None for a contiguous tensor.
    crc32
        The checksum of all bytes, if the file has one.
    """

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    first: int = 0
    crc32: int | None = None

    def __post_init__(self) -> None:
        shape, strides = self.shape, self.strides if self.strides is not None else contiguous(self.shape)
        numbers = (self.offset, self.nbytes, self.first, *shape, *strides)
        whole = all(type(n) is int and n >= 0 for n in numbers) and isinstance(self.dtype, torch.dtype)
        # 2^48 values are more than any file holds; torch's own arithmetic must not overflow on empty tensors either.
        if len(shape) != len(strides) or not whole or math.prod(max(n, 1) for n in shape) >= 1 << 48:
            raise ValueError(
                f"{self.path}: a {self.dtype} of shape {shape!r:.99}, strides {strides!r:.99} is no tensor"
            )
        if math.prod(shape):
            end = self.first + sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1
            if end * self.dtype.itemsize > self.nbytes:
                raise ValueError(
                    f"{self.path}: a tensor of shape {shape} needs more than the {self.nbytes} bytes it has"
                )

    def read(self) -> torch.Tensor:
        """The tensor, in pages of the file that are copied only where they are written to."""
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        try:
            data = np.memmap(self.path, dtype=np.uint8, mode="c", offset=self.offset, shape=(self.nbytes,))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path}: cannot read {self.nbytes} bytes at {self.offset} ({error}); cut off?"
            ) from error
        if self.crc32 is not None and zlib.crc32(data) != self.crc32:
            raise ValueError(f"{self.path}: the checksum of the data at {self.offset} is wrong; the file is damaged")
        size = self.dtype.itemsize
        if self.offset % size:  # only written by others: torch wants aligned values
            data = data.copy()
        values = torch.from_numpy(np.asarray(data[: self.nbytes // size * size])).view(self.dtype)
        return values.as_strided(self.shape, self.strides or contiguous(self.shape), self.first)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))

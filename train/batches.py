"""What a batch is, and the captioned pictures that batches are drawn from.

B batch, N pictures, P pixels along a side, T tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from train.captions import CaptionTokenizer

TIMESTEPS = 1000
HELD_OUT = 8


class Batch(NamedTuple):
    """What one step sees: pictures in [-1, 1] (B, 3, P, P), tokens (B, T), noise like the pictures, timesteps (B,)."""

    pictures: Tensor
    tokens: Tensor
    noise: Tensor
    timesteps: Tensor
    indices: Tensor


@dataclass
class CaptionedPictures:
    """N pictures (N, 3, P, P) as bytes, their captions, and the tokenizer trained on these captions."""

    pictures: Tensor
    captions: list[str]
    tokenizer: CaptionTokenizer
    held_out_pictures: Tensor  # some that no batch contains, (8, 3, P, P)
    held_out_captions: list[str]
    unreadable: list[str] = field(default_factory=list)  # files that were left out

    def __post_init__(self) -> None:
        self.tokens = self.tokenizer(self.captions)
        self._no_caption = self.tokenizer([""])[0]

    @cached_property
    def held_out(self) -> Batch:
        """One fixed batch of the held-out pictures, at timesteps spread over the whole schedule."""
        count = len(self.held_out_captions)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(self.held_out_pictures.shape, generator=generator, dtype=torch.float32)
        timesteps = torch.linspace(0, TIMESTEPS - 1, count, dtype=torch.float32).long()
        pictures = self.held_out_pictures.float() / 127.5 - 1
        return Batch(pictures, self.tokenizer(self.held_out_captions), noise, timesteps, torch.full((count,), -1))

    def sha256(self) -> str:
        """Of the pictures, the captions and the tokenizer: equal for equal training data."""
        digest = hashlib.sha256(self.pictures.numpy().tobytes())
        digest.update(json.dumps([self.captions, self.tokenizer.json]).encode())
        return digest.hexdigest()

    def batch(self, data_seed: int, step: int, size: int, caption_dropout: float) -> Batch:
        """Batch number `step`: a function of (data_seed, step) and of the data settings, and of nothing else.

        Drawn on the CPU with a generator of its own and in FP32, so that the arm, the precision (FP64 and true BF16
        change the default dtype), the initial weights, the device and the batches before it cannot change it; a run
        resumed at any step therefore sees what it would have seen.
        """
        key = hashlib.sha256(f"{data_seed} {step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
        indices = torch.randint(len(self.captions), (size,), generator=generator)
        noise = torch.randn((size, *self.pictures.shape[1:]), generator=generator, dtype=torch.float32)
        timesteps = torch.randint(TIMESTEPS, (size,), generator=generator)
        dropped = torch.rand(size, generator=generator, dtype=torch.float32) < caption_dropout
        pictures = self.pictures[indices].float() / 127.5 - 1
        tokens = torch.where(dropped[:, None], self._no_caption, self.tokens[indices])
        return Batch(pictures, tokens, noise, timesteps, indices)

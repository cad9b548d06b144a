"""Pictures sampled for fixed captions with classifier-free guidance.

B pictures, P pixels along a side.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import DDIMScheduler
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor

from train.module import TextToImage

CAPTIONS = (
    "red heart",
    "smiling face with smiling eyes",
    "sun",
    "flag Italy",
    "green apple",
    "cat face",
    "blue circle",
    "rainbow",
)


def sample(module: TextToImage, captions: list[str], steps: int, guidance: float, seed: int = 0) -> Tensor:
    """One picture per caption, (B, 3, P, P) in [-1, 1], by DDIM; equal weights and seed give equal pictures."""
    schedule = DDIMScheduler.from_config(module.schedule.config, clip_sample=True)
    schedule.set_timesteps(steps)
    pixels = module.data.pictures.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(module.dtype, torch.float32)
    pictures = torch.randn((len(captions), 3, pixels, pixels), generator=generator, dtype=torch.float32).to(
        module.device, wide
    )
    tokens = module.data.tokenizer(captions + [""] * len(captions)).to(module.device)
    training = module.training
    module.eval()
    with torch.no_grad():
        for timestep in schedule.timesteps:
            noisy = torch.cat([pictures, pictures]).to(module.dtype)
            predicted = module(noisy, timestep.expand(len(noisy)).to(module.device), tokens).to(wide)
            with_caption, without = predicted.chunk(2)
            pictures = schedule.step(without + guidance * (with_caption - without), timestep, pictures).prev_sample
    module.train(training)
    return pictures.clamp(-1, 1)


def draw(module: TextToImage, settings: DictConfig, path: Path) -> Path:
    """Sample `settings.count` pictures for the fixed captions and save them as one picture.

    Must run inside the precision's forward context.
    """
    module.start_step(-1)
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(settings.count)]
    path.parent.mkdir(exist_ok=True)
    return save_grid(sample(module, captions, settings.steps, settings.guidance), path)


def join_strip(folder: Path, path: Path) -> Path:
    """Put the pictures of a folder below each other, by name: the samples over training."""
    rows = [np.asarray(Image.open(file)) for file in sorted(folder.glob("step-*.png"))]
    Image.fromarray(np.concatenate(rows)).save(path)
    return path


def save_grid(pictures: Tensor, path: Path, zoom: int = 2, gap: int = 2) -> Path:
    """Save pictures (B, 3, P, P) in [-1, 1] side by side, `zoom` times their size, on white."""
    values = ((pictures.float().cpu() + 1) * 127.5).round().to(torch.uint8).numpy().transpose(0, 2, 3, 1)
    values = values.repeat(zoom, axis=1).repeat(zoom, axis=2)
    padded = np.pad(values, ((0, 0), (gap, gap), (gap, gap), (0, 0)), constant_values=255)
    Image.fromarray(np.concatenate(padded, axis=1)).save(path)
    return path

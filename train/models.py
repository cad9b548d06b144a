"""The text-to-image models, built in plain Python from diffusers' and transformers' classes.

Both denoisers see at least 1,024 keys in self-attention at 32 x 32 pixels: PyTorch's CPU flash kernel takes 512 keys
at a time and CUDA kernels 64 to 256, and with a single tile nothing is ever rescaled and nothing can be studied.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

TEXT_WIDTH = {"tiny": 64, "small": 128, "base": 256}

TWIN_SIZE = 1e-7

# tokens' width, heads, blocks. Heads of 64 make the scale 1/8, a power of two, whose product rounds nothing.
_DIT = {"tiny": (64, 1, 2), "small": (128, 2, 4), "base": (256, 4, 8)}
# channels at full and at half resolution
_UNET = {"tiny": (32, 64), "small": (64, 128), "base": (128, 256)}


def build_dit(size: str, pixels: int) -> nn.Module:
    """A diffusion transformer with one token per pixel: 0.18, 1.1 and 8.6 million parameters."""
    from diffusers import PixArtTransformer2DModel

    width, heads, blocks = _DIT[size]
    return PixArtTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        in_channels=3,
        out_channels=3,
        num_layers=blocks,
        sample_size=pixels,
        patch_size=1,
        interpolation_scale=1,
        cross_attention_dim=TEXT_WIDTH[size],
        caption_channels=None,
        use_additional_conditions=False,
    )


def build_unet(size: str, pixels: int) -> nn.Module:
    """A U-Net of two resolutions with self- and cross-attention at the full one and in the middle."""
    from diffusers import UNet2DConditionModel

    channels = _UNET[size]
    return UNet2DConditionModel(
        sample_size=pixels,
        in_channels=3,
        out_channels=3,
        block_out_channels=channels,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH[size],
        # diffusers reads this argument as the number of heads: heads of 32 or 64 here
        attention_head_dim=tuple(max(1, c // 64) for c in channels),
        norm_num_groups=8,
    )


def build_text_encoder(size: str, vocabulary: int, length: int, bos: int, eos: int, pad: int) -> nn.Module:
    """A two-layer CLIP text encoder, trained along; its own attention is eager in every arm."""
    from transformers import CLIPTextConfig, CLIPTextModel

    width = TEXT_WIDTH[size]
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=length,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        attn_implementation="eager",
    )
    return CLIPTextModel(config)


def build_denoiser(name: str, size: str, pixels: int) -> nn.Module:
    """The denoiser `name` ("dit" or "unet"): noisy picture, timestep and text states in, predicted noise out."""
    return {"dit": build_dit, "unet": build_unet}[name](size, pixels)


def build_models(settings, tokenizer) -> tuple[nn.Module, nn.Module]:
    """(text encoder, denoiser) with initial weights that depend on `settings.seed` alone, or on `settings.twin` too.

    A twin k >= 1 starts from nudged weights (`nudge`, seed k), unless twin_step says that it forks later.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        text_encoder = build_text_encoder(
            settings.model.size, tokenizer.vocabulary, tokenizer.length, tokenizer.bos, tokenizer.eos, tokenizer.pad
        )
        denoiser = build_denoiser(settings.model.name, settings.model.size, settings.data.pixels)
    if settings.twin and not settings.twin_step:
        nudge([*text_encoder.parameters(), *denoiser.parameters()], settings.twin)
    return text_encoder, denoiser


@torch.no_grad()
def nudge(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Multiply weights by 1 + 1e-7 N(0, 1), in place: most move by one unit in the last place of FP32 or not at all."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parameter in parameters:
            noise = torch.randn(parameter.shape, dtype=parameter.dtype)
            parameter *= 1 + TWIN_SIZE * noise.to(parameter.device)

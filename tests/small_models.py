"""Small models of three kinds from configurations, and attentions that are wrong in one layer only."""

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn
from transformers import MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.125,
}
UNET = {
    "sample_size": 16,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 32,
    "attention_head_dim": [2, 4],
    "norm_num_groups": 8,
}
SD3 = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 24,
    "pos_embed_max_size": 16,
    "dual_attention_layers": [0],
    "qk_norm": "rms_norm",
}


def decoder(dtype=torch.bfloat16):
    """A decoder language model with grouped heads and a sliding window."""
    torch.manual_seed(0)
    return MistralForCausalLM._from_config(MistralConfig(**DECODER), dtype=dtype).eval()


def unet(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Module.to(UNet2DConditionModel(**UNET), dtype).eval()


def sd3(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Module.to(SD3Transformer2DModel(**SD3), dtype).eval()


MODELS = {"decoder": decoder, "unet": unet, "sd3": sd3}


def _in_layer(layer, wrong):
    """transformers' PyTorch attention; in one layer `wrong(q, k, v, mask, options)` changes what it is called with."""

    def attention(module, q, k, v, mask, **options):
        if module.layer_idx == layer:
            q, k, v, mask, options = wrong(q, k, v, mask, options)
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    return attention


def _wrong_scale(q, k, v, mask, options):
    return q, k, v, mask, {**options, "scaling": 1.25 * options["scaling"]}


def _one_key_too_many(q, k, v, mask, options):
    seen = mask.clone()
    seen[..., :-1, 1:] |= mask[..., 1:, 1:]
    return q, k, v, seen, options


def _no_window(q, k, v, mask, options):
    return q, k, v, torch.ones_like(mask).tril(), options


def _wrong_groups(q, k, v, mask, options):
    return q, k.flip(1), v.flip(1), mask, options


def _no_gradient_of_v(q, k, v, mask, options):
    return q, k, v.detach(), mask, options


def _not_a_number(q, k, v, mask, options):
    return q, k, v / 0, mask, options


def _raises(q, k, v, mask, options):
    raise RuntimeError("no kernel for this layer\nand a second line")


# Name -> (layer that is wrong, attention function).
WRONG_IN_ONE = {
    "scale": (2, _wrong_scale),
    "causal": (1, _one_key_too_many),
    "window": (3, _no_window),
    "groups": (0, _wrong_groups),
    "gradient": (1, _no_gradient_of_v),
    "nan": (2, _not_a_number),
    "raises": (1, _raises),
}


def wrong_in_one(name):
    """(name of the layer that is wrong, attention function to register)."""
    layer, wrong = WRONG_IN_ONE[name]
    return f"model.layers.{layer}.self_attn", _in_layer(layer, wrong)


class WrongInTheMiddle(AttnProcessor2_0):
    """A diffusers processor that scales the queries once more in the U-Net's middle, where layers are 64 wide."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        weight = attn.to_q.weight
        kept = weight.data
        if weight.shape[0] == 64:
            weight.data = 2 * kept
        try:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        finally:
            weight.data = kept


def wrong_without_text(q, k, v, **options):
    """In place of PyTorch's attention: wrong where there are 64 tokens, as in SD3's second attention of a block."""
    return F.scaled_dot_product_attention(q * 2 if q.shape[2] == 64 else q, k, v, **options)

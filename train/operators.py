"""Which attention operator really runs, seen by the profiler, layer by layer.

B batch, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fa_study.quiet import quiet_stderr
from train.arms import key_tile
from train.attention import attention_layers, observing
from train.module import TextToImage


def rescalings_per_row(q: Tensor, k: Tensor, tile: int) -> float:
    """Mean number of tiles after the first that raise a row's running maximum, so that the row is rescaled."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    maxima = torch.stack([part.amax(-1) for part in scores.split(tile, dim=-1)], dim=-1)  # (B, H, L, tiles)
    running = maxima.cummax(-1).values
    return float((running[..., 1:] > running[..., :-1]).sum(-1).double().mean())


def operators_of(call, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[str], list[str]]:
    """The operators that compute call(q, k, v) and its gradients: attention, matrix products and softmax only."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))

    def names(function) -> tuple[object, list[str]]:
        with quiet_stderr(), profile(activities=[ProfilerActivity.CPU]) as record:
            result = function()
        seen = dict.fromkeys(event.name for event in record.events())
        wanted = ("attention", "flash_attn", "bmm", "softmax")
        return result, [name for name in seen if any(part in name for part in wanted)]

    out, forward = names(lambda: call(q, k, v))
    _, backward = names(lambda: out.backward(torch.ones_like(out)))
    return forward, backward


def record_operators(module: TextToImage) -> list[dict]:
    """Run one picture through the model and describe every attention call: layer, kind, sizes, tiles and operators.

    Each call is repeated by itself under the profiler on the very inputs that it had, forward and backward. Uses
    batch 0 and changes neither weights nor random state.
    """
    settings = module.settings
    layers = attention_layers(module.denoiser)
    calls: list[tuple[str, Tensor, Tensor, Tensor]] = []
    batch = module.batch(0)
    with torch.no_grad(), observing(module.denoiser, lambda name, q, k, v, out: calls.append((name, q, k, v))):
        module.start_step(0)
        module(batch.pictures[:1].to(module.dtype), batch.timesteps[:1], batch.tokens[:1])
    rows = []
    for name, q, k, v in calls:
        forward, backward = operators_of(layers[name].processor.attend, q, k, v)
        tile = key_tile(settings.attn, q, k, -(-settings.batch_size // settings.batch_split))
        row = {
            "layer": name,
            "kind": "cross" if layers[name].is_cross_attention else "self",
            "heads": q.shape[1],
            "queries": q.shape[2],
            "keys": k.shape[2],
            "head_size": q.shape[3],
            "dtype": str(q.dtype).removeprefix("torch."),
            "key_tile": tile,
            "key_tiles": -(-k.shape[2] // tile) if tile else 1,
            "rescalings_per_row": rescalings_per_row(q, k, tile) if tile else 0.0,
            "forward": forward,
            "backward": backward,
        }
        rows.append(row)
    return rows

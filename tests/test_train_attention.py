"""The arms: what they compute, and which operator of PyTorch computes it inside the models."""

import pytest
import torch
from diffusers.models.attention_processor import Attention
from tiny_runs import compose_settings

from train.attention import attention_layers, baseline, sdpa
from train.data import load_emoji
from train.module import TextToImage
from train.operators import record_operators, rescalings_per_row
from train.precision import precision_plugin

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def qkv(dtype, keys=1024, heads=2, size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, size, generator=generator).to(dtype) for n in (96, keys, keys)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_baseline_rounds_scores_probabilities_and_output(dtype):
    q, k, v = qkv(dtype, keys=128)
    scores = ((q.double() @ k.double().mT).to(dtype) * 0.125).double()  # the scale is a power of two
    probabilities = torch.softmax(scores, -1).float().to(dtype)
    expected = (probabilities.double() @ v.double()).to(dtype)
    got = baseline(q, k, v)
    assert got.dtype == dtype
    # sums in FP32 instead of FP64 may turn a rounding over at a tie, rarely
    assert (got != expected).double().mean() < 0.02
    assert (got.double() - expected.double()).abs().max() <= 2 * torch.finfo(dtype).eps
    unrounded = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    assert (got != unrounded.to(dtype)).double().mean() > 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_baseline_rounds_nothing_in_wide_formats(dtype):
    q, k, v = qkv(dtype)
    expected = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    assert (baseline(q, k, v).double() - expected).abs().max() < 20 * torch.finfo(dtype).eps


def test_autocast_around_the_processor_changes_nothing_inside_it():
    layer = Attention(query_dim=64, heads=1, dim_head=64)
    x = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(1))
    seen = []
    from train.attention import Processor

    def attend(q, k, v):
        seen.append((q.dtype, torch.is_autocast_enabled("cpu")))
        return baseline(q, k, v)

    layer.set_processor(Processor(attend))
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert seen == [(torch.bfloat16, False)]


def test_processor_agrees_with_diffusers_own():
    from diffusers.models.attention_processor import AttnProcessor2_0

    from train.attention import Processor

    torch.manual_seed(0)
    layer = Attention(query_dim=64, cross_attention_dim=32, heads=2, dim_head=32, bias=True)
    x, context = torch.randn(2, 10, 64), torch.randn(2, 7, 32)
    layer.set_processor(AttnProcessor2_0())
    expected = layer(x, context)
    layer.set_processor(Processor(baseline))
    torch.testing.assert_close(layer(x, context), expected)


def test_a_mask_is_refused():
    layer = Attention(query_dim=64, heads=1, dim_head=64)
    from train.attention import Processor

    layer.set_processor(Processor(baseline))
    with pytest.raises(ValueError, match="takes no mask"):
        layer(torch.randn(1, 4, 64), attention_mask=torch.zeros(1, 4))


def test_flash_differs_from_baseline_by_rounding_only():
    q, k, v = qkv(torch.bfloat16)
    a, b = baseline(q, k, v), sdpa("flash")(q, k, v)
    exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    assert not torch.equal(a, b)
    assert (b.double() - exact).norm() <= 2 * (a.double() - exact).norm()


def test_rescalings_are_counted_per_row():
    q = torch.ones(1, 1, 2, 1)
    rising, falling = torch.arange(8.0).view(1, 1, 8, 1), torch.arange(8.0).flip(0).view(1, 1, 8, 1)
    assert rescalings_per_row(q, rising, 2) == 3
    assert rescalings_per_row(q, falling, 2) == 0
    assert rescalings_per_row(q, rising, 8) == 0


@pytest.fixture(scope="module")
def operators():
    """Rows of record_operators per (model, attn), under BF16 autocast, at the full 32 x 32 pixels."""
    rows = {}
    data = load_emoji(32)
    for model in ("dit", "unet"):
        for attn in ("baseline", "flash"):
            settings = compose_settings("model.size=tiny", f"model={model}", f"attn={attn}", "device=cpu")
            module = TextToImage(settings, data)
            with precision_plugin("bf16", "cpu").forward_context():
                rows[model, attn] = record_operators(module)
    return rows


@pytest.mark.parametrize("model", ["dit", "unet"])
def test_profiler_proves_the_flash_kernel_in_every_layer(operators, model):
    rows = operators[model, "flash"]
    assert {row["kind"] for row in rows} == {"self", "cross"}
    for row in rows:
        assert FLASH in row["forward"] and FLASH + "_backward" in row["backward"], row
        assert not any("bmm" in name or "softmax" in name for name in row["forward"] + row["backward"]), row
        assert row["dtype"] == "bfloat16"


@pytest.mark.parametrize("model", ["dit", "unet"])
def test_profiler_proves_written_out_products_in_every_layer_of_the_baseline(operators, model):
    rows = operators[model, "baseline"]
    assert {row["kind"] for row in rows} == {"self", "cross"}
    for row in rows:
        assert {"aten::bmm", "aten::softmax"} <= set(row["forward"]), row
        assert {"aten::bmm", "aten::_softmax_backward_data"} <= set(row["backward"]), row
        assert not any("attention" in name for name in row["forward"] + row["backward"]), row
        assert row["key_tile"] is None and row["rescalings_per_row"] == 0


@pytest.mark.parametrize("model", ["dit", "unet"])
def test_flash_really_tiles_and_rescales_in_self_attention(operators, model):
    full = [row for row in operators[model, "flash"] if row["kind"] == "self" and row["keys"] >= 1024]
    assert full
    for row in full:
        assert row["key_tiles"] == 2
        assert row["rescalings_per_row"] > 0


def test_one_row_per_attention_layer_in_the_order_of_the_calls(operators):
    names = [row["layer"] for row in operators["dit", "flash"]]
    assert names == [f"transformer_blocks.{block}.attn{kind}" for block in (0, 1) for kind in (1, 2)]
    module = TextToImage(compose_settings("model.size=tiny", "model=unet", "device=cpu"), load_emoji(32))
    assert {row["layer"] for row in operators["unet", "flash"]} == set(attention_layers(module.denoiser))

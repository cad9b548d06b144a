"""Arms and precisions beyond the main four: what they compute, what a device cannot do, and the controls."""

import copy
import csv
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import TINY, compose_settings, train_here
from torch import nn

import train.precision
from fa_study.attention import flash_attention
from fa_study.attention.tile_products import bf16_products
from fa_study.rounding import RoundingPolicy
from train import Refusal
from train.arms import Tiled, attention_function, check_arm, policy_of
from train.attention import sdpa
from train.data import load_data
from train.module import TextToImage
from train.operators import record_operators
from train.precision import ProductsInFP32, precision_plugin


def attn(*overrides):
    return compose_settings(*overrides).attn


@pytest.mark.parametrize(
    ("overrides", "precision", "device", "message"),
    [
        (["attn=flash"], "fp32", "cuda", "attn=flash on CUDA takes bf16, fp16, bf16_true, got precision=fp32"),
        (["attn=flash"], "fp64", "cuda", "attn=tiled for fp64"),
        (["attn=sdpa", "attn.backend=efficient"], "fp64", "cuda", "attn.backend=efficient on CUDA takes"),
        (["attn=sdpa", "attn.backend=cudnn"], "bf16", "cpu", "attn.backend=cudnn needs CUDA"),
        (["attn=baseline"], "tf32", "cpu", "precision=tf32 needs CUDA"),
        (["attn=baseline"], "fp16_emulated", "cuda", "use precision=fp16"),
        (["attn=sdpa"], "fp16_emulated", "cpu", "use attn=baseline, flash or tiled"),
        (["attn=tiled", "attn.format=bf17"], "fp32", "cpu", "attn.format: .*bf17"),
        (["attn=tiled", "attn.sites.sum=fp33"], "fp32", "cpu", "attn.sites.sum: .*fp33"),
    ],
)
def test_what_a_device_cannot_do_is_refused_by_name(overrides, precision, device, message):
    with pytest.raises(Refusal, match=message) as caught:
        check_arm(attn(*overrides), precision, device)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_device_can_do_passes(device):
    for overrides in (["attn=flash"], ["attn=baseline"], ["attn=tiled"], ["attn=sdpa"]):
        check_arm(attn(*overrides), "bf16", device)
    check_arm(attn("attn=sdpa", "attn.backend=efficient"), "fp32", "cuda")
    check_arm(attn("attn=flash"), "fp32", "cpu")


def test_policy_follows_policy_format_and_sites():
    assert policy_of(attn("attn=tiled", "attn.policy=uniform", "attn.format=e8m10")) == RoundingPolicy.uniform("e8m10")
    assert policy_of(attn("attn=tiled", "attn.sites.sum=fp16")) == RoundingPolicy.kernel("bf16").replace(sum="fp16")


def qkv(dtype=torch.float32, keys=300):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 32, generator=generator).to(dtype) for n in (64, keys, keys)]


def test_tiled_is_the_emulation_with_its_gradients():
    q, k, v = (x.requires_grad_() for x in qkv())
    attend = attention_function(
        attn("attn=tiled", "attn.policy=uniform", "attn.format=e8m10", "attn.tile_keys=32"), "fp32", "cpu"
    )
    out = attend(q, k, v)
    expected = flash_attention(q, k, v, policy=RoundingPolicy.uniform("e8m10"), tile=(64, 32), algorithm="fa2").out
    assert torch.equal(out, expected.detach())
    out.sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    (torch.softmax(exact[0] @ exact[1].mT / 32**0.5, -1) @ exact[2]).sum().backward()
    for ours, theirs in zip((q, k, v), exact):
        error = (ours.grad - theirs.grad).norm() / max(theirs.grad.norm(), 1.0)
        assert 0 < error < 0.02


def test_stochastic_roundings_are_a_function_of_step_and_twin():
    attend = Tiled(RoundingPolicy.uniform("bf16:stochastic"), "fa2", (64, 64), "exact")
    q, k, v = qkv()

    def at(step, twin=0):
        attend.start(0, step, twin)
        return attend(q, k, v)

    first = at(3)
    assert torch.equal(first, at(3))
    assert not torch.equal(first, at(4)) and not torch.equal(first, at(3, twin=1))


def test_a_twin_draws_its_own_roundings_from_its_fork_on():
    words = (
        "attn=tiled",
        "attn.format=e8m4:stochastic",
        "precision=fp32",
        "twin=2",
        "steps=9",
        "twin_step=5",
        "device=cpu",
    )
    settings = compose_settings(*TINY, *words)
    module = TextToImage(settings, load_data(settings))
    drawn = []
    module.attend.start = lambda *key: drawn.append(key)
    for step in (4, 5):
        module.start_step(step)
    assert drawn == [(0, 4, 0), (0, 5, 2)]


def test_fp16_emulated_flash_is_the_cpu_kernel():
    q, k, v = (x.requires_grad_() for x in qkv(torch.float16, keys=1024))
    ours = attention_function(attn("attn=flash"), "fp16_emulated", "cpu")(q, k, v)
    gradients = torch.autograd.grad(ours.float().square().sum(), (q, k, v))
    theirs = sdpa("flash")(q, k, v)
    expected = torch.autograd.grad(theirs.float().square().sum(), (q, k, v))
    assert ours.dtype == torch.float16
    assert (ours == theirs).double().mean() > 0.99
    for a, b in zip(gradients, expected):
        assert (a.float() - b.float()).norm() < 1e-3 * b.float().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", ["linear", "matmul", "convolution"])
def test_products_in_fp32_equal_native_ones_operator_by_operator(operator, dtype):
    torch.manual_seed(0)
    layer = {
        "linear": lambda: nn.Linear(64, 48),
        "convolution": lambda: nn.Conv2d(16, 24, 3, padding=1),
        "matmul": nn.Identity,
    }[operator]().to(dtype)
    shape = {"linear": (40, 64), "matmul": (3, 40, 64), "convolution": (2, 16, 12, 12)}[operator]
    x = torch.randn(shape).to(dtype).requires_grad_()

    def out_and_gradients(layer, x, dout=None):
        out = x @ x.detach().mT if operator == "matmul" else layer(x)
        dout = torch.ones_like(out).uniform_(-1, 1) if dout is None else dout
        return out, *torch.autograd.grad(out, (x, *layer.parameters()), dout.to(out.dtype)), dout

    *native, dout = out_and_gradients(layer, x)
    with ProductsInFP32(dtype):
        emulated = out_and_gradients(layer, x, dout)
    exact = out_and_gradients(copy.deepcopy(layer).double(), x.detach().double().requires_grad_(), dout)
    for theirs, ours, truth in zip(native, emulated, exact):
        assert theirs.dtype == ours.dtype == dtype
        assert (ours == truth.to(dtype)).double().mean() > 0.95
        # One unit in the last place of the largest terms that were added. Not more equality than that: on a CPU
        # without FP16 instructions, PyTorch's convolution adds in FP16.
        size = truth.abs().max()
        assert (theirs.double() - ours.double()).abs().max() <= 2 * torch.finfo(dtype).eps * size
        assert (ours.double() - truth).norm() <= 1.01 * (theirs.double() - truth).norm()


@pytest.mark.parametrize(
    ("precision", "attention", "weights"),
    [
        ("fp16", "float16", torch.float32),
        ("fp16_emulated", "float16", torch.float32),
        ("bf16", "bfloat16", torch.float32),
        ("bf16_true", "bfloat16", torch.bfloat16),
        ("fp64", "float64", torch.float64),
    ],
)
def test_precision_reaches_attention_and_weights(precision, attention, weights, tmp_path, capsys):
    folder = train_here(tmp_path, "attn=flash", f"precision={precision}", "steps=2", "snapshots.every=2")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {row["dtype"] for row in manifest["operators"]} == {attention}
    emulated = precision == "fp16_emulated" or (precision.startswith("bf16") and not bf16_products())
    assert (manifest["products"] == "native") != emulated
    assert ("rounded once" in capsys.readouterr().out) == emulated
    last = load_file(folder / "weights" / "step-000002.safetensors")
    assert {tensor.dtype for tensor in last.values()} == {weights}
    first = load_file(folder / "weights" / "step-000000.safetensors")
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert all(torch.isfinite(tensor).all() for tensor in last.values())


def test_unet_trains(tmp_path):
    folder = train_here(tmp_path, "model=unet", "attn=flash", "precision=bf16", "steps=2", "snapshots.every=2")
    first, last = (load_file(folder / "weights" / f"step-{step:06d}.safetensors") for step in (0, 2))
    assert all(not torch.equal(first[name], last[name]) for name in first)


def test_scaled_loss_is_unscaled_before_it_is_clipped_and_logged(tmp_path):
    rows = {}
    for precision in ("fp32", "fp16"):
        folder = train_here(tmp_path, "attn=baseline", f"precision={precision}", "steps=2", "snapshots.every=2")
        rows[precision] = (folder / "metrics.csv").read_text().splitlines()[1].split(",")
    loss, norm = 1, 2
    for column in (loss, norm):
        assert float(rows["fp16"][column]) == pytest.approx(float(rows["fp32"][column]), rel=0.01)


def test_skipped_steps_are_counted_told_and_kept_over_a_restart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.precision, "INITIAL_SCALE", 2.0**18)
    like = ("attn=baseline", "precision=fp16_emulated", "snapshots.every=1")
    folder = train_here(tmp_path, *like, "steps=6")
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    weights = [load_file(path) for path in sorted((folder / "weights").iterdir())]
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(weights)]
    counts = list(itertools.accumulate(int(not each) for each in moved))
    assert [int(row["skipped_steps"]) for row in rows] == counts
    assert 0 < counts[-1] < 6
    assert json.loads((folder / "manifest.json").read_text())["skipped_steps"] == counts[-1]
    assert f"{counts[-1]} of 6 steps skipped, as their gradients overflowed" in capsys.readouterr().out
    longer = train_here(tmp_path, *like, "steps=7", f"continue_from={folder}")
    assert json.loads((longer / "manifest.json").read_text())["skipped_steps"] == counts[-1]
    assert f"{counts[-1]} of 7 steps" in capsys.readouterr().out


def test_operators_of_tiled_and_sdpa_are_recorded():
    data = load_data(compose_settings(*TINY))
    for overrides, tile, tiles in (
        (["attn=tiled", "attn.tile_keys=32"], 32, 8),
        (["attn=tiled", "attn.algorithm=baseline"], None, 1),
        (["attn=sdpa"], None, 1),
    ):
        module = TextToImage(compose_settings(*TINY, "device=cpu", *overrides), data)
        with precision_plugin("bf16", "cpu").forward_context():
            row = record_operators(module)[0]
        assert (row["keys"], row["key_tile"], row["key_tiles"]) == (256, tile, tiles)
        if overrides == ["attn=sdpa"]:
            assert "aten::_scaled_dot_product_attention_math" in row["forward"]


def test_a_fork_is_the_run_itself_up_to_its_step(tmp_path):
    """Equal bits up to the snapshot of twin_step, other bits from the next step on; the nudge itself is tiny."""
    run = train_here(tmp_path, "steps=4", "snapshots.every=1")
    fork = train_here(tmp_path, "steps=4", "snapshots.every=1", "twin=1", "twin_step=2")
    for step in range(5):
        ours, theirs = (load_file(folder / "weights" / f"step-{step:06d}.safetensors") for folder in (run, fork))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours) == (step <= 2)
    nudged = train_here(tmp_path, "steps=4", "snapshots.every=1", "twin=1")
    start, moved = (load_file(folder / "weights" / "step-000000.safetensors") for folder in (run, nudged))
    assert max(float((moved[name] / start[name] - 1).abs().nan_to_num(0).max()) for name in start) < 1e-6
    for words, message in ((["twin_step=2"], "without a twin"), (["twin=1", "twin_step=4"], "lies behind the end")):
        with pytest.raises(Refusal, match=message):
            train_here(tmp_path, "steps=4", *words)


@pytest.mark.parametrize("experiment", ["ulp", "init", "order", "repeat", "batch_split"])
def test_a_control_differs_in_exactly_one_thing(experiment, flash_run, tmp_path):
    like = ("attn=flash", "precision=bf16", "steps=2", "snapshots.every=2")
    folder = train_here(tmp_path, *like, f"experiment={experiment}")
    assert folder.name.startswith("flash-bf16-dit-s1" if experiment == "init" else "flash-bf16-dit-s0")

    def weights(run, step):
        return load_file(run / "weights" / f"step-{step:06d}.safetensors")

    start, end = (
        [torch.equal(a, weights(folder, step)[name]) for name, a in weights(flash_run, step).items()] for step in (0, 2)
    )
    assert all(start) == (experiment not in ("ulp", "init"))
    assert all(end) == (experiment == "repeat")
    if experiment == "ulp":
        moved = weights(folder, 0)
        for name, a in weights(flash_run, 0).items():
            assert ((moved[name] - a).abs() <= 1e-6 * a.abs()).all()

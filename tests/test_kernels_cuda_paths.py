"""What runs on a GPU, as far as it goes without one: stand-ins with the packages' own signatures compute on the CPU."""

import importlib
import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import compose_settings

from fa_study.attention import flash_attention, golden_attention, merge_attention
from fa_study.attention.gradients import tiled_attention
from fa_study.audit.subject import Subject
from fa_study.kernels import KERNELS, kernel, measure, registry
from fa_study.rounding import RoundingPolicy
from train import Refusal
from train.arms import attention_function, check_arm, flash_2_tile
from train.attention import sdpa
from train.system import set_up_torch

A100, H100 = 108, 132  # processors


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU; what the kernels' table sends there is computed on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "Subject", lambda *known: Subject(*known[:-1], "cpu"))


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash-attn 2.8.3's, rounded as it rounds; a long row of a single sequence is shared among two thread blocks."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert q.dtype in (torch.bfloat16, torch.float16) and q.shape[1] % k.shape[1] == 0 and k.shape == v.shape
    options = {"scale": softmax_scale, "causal": "bottom_right" if causal else None, "softcap": softcap or None}
    rounding = {"policy": RoundingPolicy.kernel("bf16"), "tile": (128, 128), "exp": "exp2_fma"}
    if q.requires_grad:
        out = tiled_attention(q, k, v, **rounding, **options)
        return out.transpose(1, 2), golden_attention(q, k, v, **options).lse.float(), None
    if len(q) == 1 and k.shape[2] > 256:
        halves = (flash_attention(q, *x, **rounding, **options) for x in zip(k.chunk(2, 2), v.chunk(2, 2)))
        result = merge_attention(list(halves))
    else:
        result = flash_attention(q, k, v, key_order="reverse", **rounding, **options)
    lse = result.lse.masked_fill(result.lse == -torch.inf, torch.inf)
    out = result.out.to(q.dtype).transpose(1, 2)
    return (out, lse, torch.empty(0)) if return_attn_probs else out


def test_table_of_flash_attn_2(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    row = measure.measure_kernel(KERNELS["flash-attn-2"], "bf16")
    assert row["runs"] and row["verdict"] == "pass" and row["gradient_verdict"] == "pass"
    assert "tiles of 128, from the last tile to the first" in row["policies"]
    assert (row["alignment"], row["empty_row_causal"], row["empty_row_lse"]) == ("bottom_right", "zeros", "inf")
    assert (row["run_to_run"], row["batch_size"]) == ("same bits", "other bits")


class LowerTriangularMask:
    """xformers' own."""


def forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """xformers 0.0.35's: heads behind lengths, a bias of the full shape, log-sum-exp of whole blocks of 32 rows."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    assert q.shape[:2] == k.shape[:2] and k.shape == v.shape
    causal = isinstance(attn_bias, LowerTriangularMask)
    bias = None if causal else attn_bias
    assert bias is None or (bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype)
    result = golden_attention(q, k, v, bias=bias, scale=scale, causal="top_left" if causal else None)
    return result.out.transpose(1, 2), F.pad(result.lse, (0, -q.shape[2] % 32), value=torch.inf)


def test_wrappers_of_xformers(monkeypatch):
    ops = SimpleNamespace(
        LowerTriangularMask=LowerTriangularMask,
        memory_efficient_attention=lambda *inputs, **options: forward_requires_grad(*inputs, **options)[0],
    )
    fmha = SimpleNamespace(memory_efficient_attention_forward_requires_grad=forward_requires_grad)
    for name, module in {"xformers": SimpleNamespace(), "xformers.ops": ops, "xformers.ops.fmha": fmha}.items():
        monkeypatch.setitem(sys.modules, name, module)
    q, k, v = (torch.randn(2, 4, n, 32) for n in (50, 70, 70))
    mask, bias = torch.rand(2, 1, 50, 70) < 0.5, torch.randn(1, 4, 1, 70)
    for ours, theirs in (
        ({}, {}),
        ({"causal": True}, {"causal": "top_left"}),
        ({"mask": mask}, {"mask": mask}),
    ):
        want = golden_attention(q, k, v, **theirs)
        out, lse = registry.WITH_LSE["xformers"](q, k, v, **ours)
        assert torch.equal(out, want.out) and torch.equal(lse, want.lse)
        assert torch.equal(KERNELS["xformers"].function(q, k, v, **ours), want.out)
    want = golden_attention(q, k, v, bias=bias, scale=0.3)
    assert torch.equal(KERNELS["xformers"].function(q, k, v, bias=bias, scale=0.3), want.out)
    for two in ({"causal": True, "mask": mask}, {"mask": mask, "bias": bias}):
        with pytest.raises(ValueError, match="causal order or a mask or a bias"):
            KERNELS["xformers"].function(q, k, v, **two)


def test_causal_order_for_squares_alone_is_told(gpu):
    def square(q, k, v, *, causal=False):
        if causal and q.shape[2] != k.shape[2]:
            raise RuntimeError("No available kernel. Aborting execution.")
        return golden_attention(q, k, v, causal="top_left" if causal else None).out.to(q.dtype)

    k = registry.Kernel("torch-flash-cuda", "torch", "cuda", square, ("bf16",))
    named = frozenset(("q", "k", "v", "causal"))
    subject = Subject.of(square, name="square")
    assert subject.parameters == named
    assert measure._behaviour(subject, k, "bf16")["alignment"] == "only where L = S"


def test_old_copy_inside_flash_attn_is_not_taken_for_flash_attn_4(gpu, monkeypatch, tmp_path):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    for folder in ("flash_attn", "flash_attn/cute"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "flash_attn_2_cuda.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    versions = {"flash-attn": "2.8.3"}

    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(registry, "version", version)
    assert kernel("flash-attn-2").reason() == ""
    assert "flash-attn-4 is not installed; requirements-gpu.txt" in kernel("flash-attn-4").reason()
    versions["flash-attn-4"] = "4.0.0"
    assert kernel("flash-attn-4").reason() == ""
    sys.modules.pop("flash_attn")  # looking for the module inside imported it
    (tmp_path / "flash_attn_2_cuda.py").unlink()
    importlib.invalidate_caches()
    assert "installed without its module flash_attn_2_cuda" in kernel("flash-attn-2").reason()


def test_kernels_of_a_gpu_are_left_alone_while_triton_is_interpreted(gpu, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET=1 is set" in kernel("flex-compiled-cuda").reason()


@pytest.fixture
def settings_of_torch(monkeypatch):
    """Gives PyTorch's switches back as they were."""
    import torch._inductor.config as inductor

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    products, names = torch.backends.cuda.matmul, ("bf16", "fp16")
    names = ["allow_tf32", *(f"allow_{name}_reduced_precision_reduction" for name in names)]
    before = [getattr(products, name) for name in names], torch.backends.cudnn.allow_tf32
    mode, deterministic, threads = torch.get_deterministic_debug_mode(), inductor.deterministic, torch.get_num_threads()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    for name, value in zip(names, before[0]):
        setattr(products, name, value)
    torch.backends.cudnn.allow_tf32, inductor.deterministic = before[1], deterministic
    torch.set_deterministic_debug_mode(mode)
    torch.set_num_threads(threads)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_training_on_cuda_asks_for_determinism_that_flash_heeds(settings_of_torch, monkeypatch):
    set_up_torch(1, "cuda")
    assert torch.get_deterministic_debug_mode() == 2
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_: torch.get_deterministic_debug_mode())
    q = torch.zeros(1, 1, 8, 8)
    # PyTorch refuses cuDNN's kernel where a deterministic one is demanded.
    assert [sdpa(backend)(q, q, q) for backend in ("flash", "efficient", "cudnn")] == [2, 2, 1]
    assert torch.get_deterministic_debug_mode() == 2
    set_up_torch(1)
    assert torch.get_deterministic_debug_mode() == 1


def attn(*overrides):
    return compose_settings(*overrides).attn


def test_flash_on_cuda_takes_the_package_where_it_has_its_kernels(monkeypatch):
    asked = {}

    def watched(q, k, v, **options):
        asked.update(options, shape=q.shape)
        return flash_attn_func(q, k, v, **options)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=watched, __spec__=object()))
    q, k, v = (torch.randn(2, 4, n, 32).bfloat16() for n in (64, 96, 96))
    assert attention_function(attn("attn=flash"), "bf16", "cuda").__qualname__.startswith("sdpa")
    spec = SimpleNamespace(__spec__=object())
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", spec)
    out = attention_function(attn("attn=flash"), "bf16", "cuda")(q, k, v)
    assert asked == {"deterministic": True, "shape": (2, 64, 4, 32)}
    assert out.shape == q.shape and (out - golden_attention(q, k, v).out).abs().max() < 0.02


def test_random_roundings_are_drawn_on_the_gpu(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": made.append(device))
    attention_function(attn("attn=tiled", "attn.format=e8m10:stochastic"), "fp32", "cuda")
    assert made == ["cuda"]


def test_tf32_and_the_emulation_exclude_each_other():
    for words in (["attn=tiled"], ["attn=flash"]):
        with pytest.raises(Refusal) as caught:
            check_arm(attn(*words), "tf32", "cuda")
        assert "attn=tiled for tf32" not in str(caught.value)
    check_arm(attn("attn=baseline"), "tf32", "cuda")


@pytest.mark.parametrize(
    ("head_size", "queries", "keys", "sequences", "processors", "tile"),
    [
        (64, 1024, 1024, 8, A100, 256),  # 128 blocks for 216 places, in 4 parts 512: 79 % of three rounds, not 59 %
        (64, 1024, 1024, 8, H100, 256),  # in 2 parts 256 blocks for 264 places
        (64, 1024, 1024, 11, A100, 128),  # 176 blocks for 216 places: full enough
        (64, 256, 256, 1, A100, 128),  # a single tile of 256 cannot be shared
        (128, 2048, 2048, 64, H100, 64),
        (128, 64, 2048, 1, H100, 128),
        (256, 64, 2048, 1, H100, 64),
    ],
)
def test_key_tile_of_flash_attention_2(head_size, queries, keys, sequences, processors, tile):
    assert flash_2_tile(head_size, queries, keys, sequences, processors) == tile

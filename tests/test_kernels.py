"""Real kernels: what is available is said truly, they are called as asked, and the emulation predicts them."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from fa_study.__main__ import main
from fa_study.attention import golden_attention
from fa_study.audit.cases import Case
from fa_study.audit.gradient_policies import fit_gradients, torch_cpu_tile
from fa_study.audit.policies import fit
from fa_study.audit.subject import Subject
from fa_study.kernels import KERNELS, Kernel, available_kernels, command, kernel, measure, run_kernel
from fa_study.kernels.measure import COLUMNS, measure_kernel, measure_kernels
from fa_study.kernels.registry import WITH_LSE
from fa_study.tables import read_table
from fa_study.verdicts.kernels import kernels_verdict, other_processor, other_processor_verdict

ROOT = Path(__file__).resolve().parents[1]
CASE = Case("bf16", L=64, S=96, B=2, H=4, Hkv=2)
vector_code = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the kernel's fast exponential is code for AVX2 and AVX-512; elsewhere it is the exact one",
)


def test_available_kernels_runs_or_says_why_not():
    table = available_kernels("cpu").set_index("name")
    assert table.loc["torch-flash-cpu", "runs"] and "bf16" in table.loc["torch-flash-cpu", "dtypes"]
    assert (table.runs == (table.reason == "")).all()
    assert set(table.device) == {"cpu"}
    with pytest.raises(ValueError, match="device='tpu' is unknown: use 'cpu', 'cuda', or None for both"):
        available_kernels("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what is said without a GPU")
def test_cuda_kernels_are_listed_with_the_reason():
    table = available_kernels("cuda")
    assert len(table) == sum(k.device == "cuda" for k in KERNELS.values())
    assert not table.runs.any()
    assert set(table.reason) == {"needs a CUDA device, and there is none"}


@pytest.mark.parametrize("name", ["torch-flash-cpu", "torch-math-cpu", "torch-math-reduced-cpu"])
def test_run_kernel_with_features_and_gradients(name):
    q, k, v = (x.requires_grad_() for x in CASE.inputs())
    out = run_kernel(name, q, k, v, causal=True, scale=0.1)
    true = golden_attention(q.detach(), k.detach(), v.detach(), causal="top_left", scale=0.1).out
    assert out.dtype == torch.bfloat16
    assert (out.double() - true).abs().max() < 0.05
    assert all(g.shape == x.shape for g, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v)))
    mask = torch.rand(2, 1, 64, 96) < 0.5
    masked = run_kernel(name, *CASE.inputs(), mask=mask)
    assert (masked.double() - golden_attention(*CASE.inputs(), mask=mask).out).abs().max() < 0.05


def test_run_kernel_takes_the_backend_it_names():
    q, k, v = CASE.replace(Hkv=4).inputs()
    assert torch.equal(run_kernel("torch-flash-cpu", q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert not torch.equal(run_kernel("torch-math-cpu", q, k, v), run_kernel("torch-flash-cpu", q, k, v))
    assert not torch.equal(run_kernel("torch-math-cpu", q, k, v), run_kernel("torch-math-reduced-cpu", q, k, v))
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() is False


def test_user_errors():
    q, k, v = CASE.inputs()
    with pytest.raises(ValueError, match="kernel 'fa9' is unknown: use one of torch-flash-cpu"):
        run_kernel("fa9", q, k, v)
    with pytest.raises(ValueError, match="has no softcap: it takes bias, causal, mask, scale"):
        run_kernel("torch-flash-cpu", q, k, v, softcap=5.0)
    with pytest.raises(ValueError, match=r"takes bf16, fp16, got torch\.float32"):
        run_kernel("torch-math-reduced-cpu", q.float(), k.float(), v.float())
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch-flash-cuda cannot run here: needs a CUDA device"):
            run_kernel("torch-flash-cuda", q, k, v)


def subject_of(name):
    return Subject.of(kernel(name).function, limit=300, name=name)


@vector_code
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("torch-flash-cpu", "PyTorch CPU flash: tiles of 512, fast exponential"),
        ("torch-math-cpu", "everything in FP32 inside, softmax at once"),
        ("torch-math-reduced-cpu", "eager, scale shared by Q and K"),
    ],
)
def test_policy_that_predicts_a_kernel(name, policy, dtype):
    # 250 keys: the fast exponential leaves the last ten of a row to another one with AVX-512, the last two with AVX2.
    start = Case(dtype, L=32, S=250, B=1, H=2, Hkv=2)
    table, findings = fit(subject_of(name), [start.replace(seed=s) for s in range(4)])
    found = table[table.policy == policy].iloc[0]
    assert found.chosen and found.r2_check > 0.98 and found.equal > 0.98
    assert findings == []


@vector_code
@pytest.mark.parametrize("L", [40, 200])
def test_backward_of_the_cpu_flash_kernel_is_predicted(L):
    cases = [Case("bf16", L=L, S=512, B=1, H=2, Hkv=2, seed=s) for s in (1, 2)]
    table = fit_gradients(subject_of("torch-flash-cpu"), cases)
    assert list(table[table.chosen].policy) == ["backward of PyTorch CPU flash"]
    assert table.r2_check.iloc[0] > 0.99


def test_rows_of_the_cpu_flash_tile():
    assert [torch_cpu_tile(L)[0] for L in (191, 192, 767, 768)] == [32, 64, 64, 256]


@vector_code
def test_measured_row_of_a_kernel():
    row = measure_kernel(kernel("torch-flash-cpu"), "bf16")
    assert set(row) == set(COLUMNS)
    assert row["runs"] and row["verdict"] == "pass" and row["gradient_verdict"] == "pass"
    assert row["alignment"] == "top_left" and row["empty_row_mask"] == "zeros" and row["empty_row_lse"] == "0"
    assert row["policies"] == "PyTorch CPU flash: tiles of 512, fast exponential"
    assert row["run_to_run"] == "same bits"


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what is said without a GPU")
def test_kernel_that_cannot_run_has_a_row_with_the_reason():
    frame = measure_kernels(["flash-attn-2"])
    assert list(frame.runs) == [False] and "needs a CUDA device" in frame.reason[0]


def test_log_sum_exp_beside_the_output_is_the_same_kernels():
    q, k, v = CASE.inputs()
    mask = torch.ones(2, 1, 64, 96, dtype=torch.bool)
    mask[:, :, 40:] = False
    out, lse = WITH_LSE["torch-flash-cpu"](q, k, v, mask=mask)
    assert torch.equal(out, run_kernel("torch-flash-cpu", q, k, v, mask=mask))
    true = golden_attention(q, k, v, mask=mask).lse
    assert (lse - true)[:, :, :40].abs().max() < 1e-3 and (lse[:, :, 40:] == 0).all()
    out, lse = KERNELS["flex-eager-cpu"].function(q, k, v, mask=mask)
    assert (lse - true)[:, :, :40].abs().max() < 1e-3 and (lse[:, :, 40:] == -math.inf).all()


@pytest.mark.parametrize("name", ["torch-efficient-cuda", "torch-cudnn-cuda"])
def test_operators_of_cuda_take_what_is_handed_to_them(name):
    # The meta device checks arguments and shapes without a GPU. 100 rows: the first of the two pads its log-sum-exp.
    q, k, v = (torch.empty(2, 4, n, 64, dtype=torch.bfloat16, device="meta") for n in (100, 128, 128))
    mask = torch.empty(2, 1, 100, 128, dtype=torch.bool, device="meta")
    for options in ({}, {"mask": mask}, {"causal": True}):
        out, lse = WITH_LSE[name](q, k, v, **options)
        assert out.shape == q.shape and lse.shape == q.shape[:3]


def exact(q, k, v, softmax_scale, causal, window_size, softcap):
    """What the flash-attn packages compute, heads behind lengths."""
    assert window_size in ((-1, -1), (None, None), (5, 0))
    result = golden_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        scale=softmax_scale,
        causal="bottom_right" if causal else None,
        window=window_size if window_size == (5, 0) else None,
        softcap=softcap or None,
    )
    return result.out.transpose(1, 2), result.lse


# Their signatures: 2 and the newest 3; 3 as it was; 4.
def asked(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_attn_probs=False):
    assert return_attn_probs
    return exact(q, k, v, softmax_scale, causal, window_size, softcap)


def output_alone(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    return exact(q, k, v, softmax_scale, causal, window_size, softcap)[0]


def both_always(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0):
    return exact(q, k, v, softmax_scale, causal, window_size, softcap)


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("flash-attn-2", "flash_attn", asked),
        ("flash-attn-3", "flash_attn_interface", asked),
        ("flash-attn-3", "flash_attn_interface", output_alone),
        ("flash-attn-4", "flash_attn.cute", both_always),
    ],
)
def test_wrappers_of_the_flash_attn_packages(monkeypatch, name, module, function):
    monkeypatch.setitem(sys.modules, module.split(".")[0], SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_func=function))
    q, k, v = CASE.inputs()
    for ours, theirs in (
        ({}, {}),
        ({"causal": True, "scale": 0.1}, {"causal": "bottom_right", "scale": 0.1}),
        ({"window": (5, 0), "softcap": 3.0}, {"window": (5, 0), "softcap": 3.0}),
    ):
        result, want = KERNELS[name].function(q, k, v, **ours), golden_attention(q, k, v, **theirs)
        out, lse = (result, want.lse) if function is output_alone else result
        assert torch.equal(out, want.out) and torch.equal(lse, want.lse)


@pytest.mark.skipif(not (ROOT / "notebooks/data/kernels.csv").exists(), reason="the table is not stored yet")
def test_stored_table_supports_the_page():
    table = read_table("kernels.csv")
    assert list(table.columns) == list(COLUMNS)
    assert set(table.kernel) == set(KERNELS)
    assert table[~table.runs].reason.notna().all()
    half = table[table.runs & (table.kernel == "torch-flash-cpu") & table.dtype.isin(["bf16", "fp16"])]
    assert (half.r2 > 0.99).all() and (half.gradient_r2 > 0.99).all()
    assert "the emulation predicts the output of" in kernels_verdict(table)


@pytest.mark.parametrize("other", ["kernels_avx2.csv", "kernels_amx.csv"])
def test_policies_hold_on_another_processor_too(other):
    both = other_processor(read_table("kernels.csv"), read_table(other))
    assert {"torch-flash-cpu", "torch-math-cpu", "torch-math-reduced-cpu"} <= set(both.kernel)
    assert (both.shared != "").all() and both.other_bits.any()
    text = f"named for {len(both)} of {len(both)} pairs again"
    assert text in other_processor_verdict(both, "another")
    both.loc[0, "shared"] = ""
    assert text not in other_processor_verdict(both, "another")


def test_command_writes_the_table_with_its_origin(tmp_path, capsys):
    code = main(["kernels", "--kernel", "torch-math-reduced-cpu", "--out", str(tmp_path / "k.csv")])
    assert code == 0
    assert capsys.readouterr().out.startswith("measuring torch-math-reduced-cpu (bf16, fp16) with")
    frame = read_table("k.csv", tmp_path)
    assert list(frame.dtype) == ["bf16", "fp16"] and frame.runs.all()
    assert main(["kernels", "--kernel", "nothing"]) == 1
    assert main(["kernels", "--out", "x.txt"]) == 1


def test_a_machine_with_a_gpu_measures_its_gpu_and_says_so_first(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(
        command,
        "measure_kernels",
        lambda names, say, seconds: asked.append((names, seconds)) or pd.DataFrame(columns=COLUMNS, dtype=object),
    )
    assert main(["kernels", "--all"]) == 0
    assert asked[0] == ([n for n, k in KERNELS.items() if k.device == "cuda"], command.GPU_SECONDS)
    said = capsys.readouterr().out
    assert said.startswith("measuring torch-flash-cuda (bf16, fp16), torch-efficient-cuda")
    assert "on NVIDIA H100 with" in said and "a minute or more for each format" in said
    assert main(["kernels", "--all", "--device", "cpu"]) == 0
    assert main(["kernels", "--kernel", "torch-math-cpu"]) == 0
    assert {KERNELS[n].device for n in asked[1][0]} == {"cpu"} and asked[2] == (["torch-math-cpu"], math.inf)


def test_no_kernel_is_begun_when_time_is_over(monkeypatch):
    now = iter((0, 1, 5, 5, 7, 7, 7))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    measured = {"runs": True, "reason": None, "verdict": "pass", "seconds": 4}
    monkeypatch.setattr(measure, "measure_kernel", lambda k, dtype: {"kernel": k.name, "dtype": dtype, **measured})
    monkeypatch.setattr(Kernel, "reason", lambda k: "none here" if k.name == "xformers" else "")
    said = []
    frame = measure_kernels(["torch-math-reduced-cpu", "torch-math-cuda", "xformers"], said.append, 4)
    assert list(frame[frame.runs].dtype) == ["bf16"] and len(said) == 6
    left = frame[frame.reason.fillna("").str.startswith("left out after 0 minutes: --kernel torch-math")]
    assert list(left.kernel) == ["torch-math-reduced-cpu"] + ["torch-math-cuda"] * 4 and left.dtype.iloc[0] == "fp16"
    assert frame.reason.iloc[-1] == "none here"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n, k in KERNELS.items() if k.device == "cuda"])
def test_cuda_kernel_keeps_to_the_rule(name):
    k = kernel(name)
    if k.reason():
        pytest.skip(k.reason())
    for dtype in k.dtypes:
        row = measure_kernel(k, dtype)
        if row["runs"]:
            assert row["verdict"] == "pass" and math.isfinite(row["max_error"]), row
        else:  # a GPU may be too old or too new for the others' kernels
            assert row["reason"] and k.package != "torch", row


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, k in KERNELS.items() if k.device == "cpu" and k.slow])
def test_compiled_or_interpreted_kernel_keeps_to_the_rule(name):
    k = kernel(name)
    if k.reason():
        pytest.skip(k.reason())
    row = measure_kernel(k, "fp32")
    assert row["verdict"] == "pass", row


def test_extras_are_pinned():
    lines = (ROOT / "requirements-kernels.txt").read_text().splitlines()
    assert all(line.count("==") == 1 for line in lines if line and not line.startswith("#"))

"""The parts of the audit: R2, verdicts, calls that misbehave, the report and the command."""

import json
import math
import sys
import time

import faulty_attentions as faulty
import pytest
import torch

from fa_study.__main__ import main
from fa_study.audit import audit
from fa_study.audit.accuracy import eager_gradients, golden_gradients, judge, row_share
from fa_study.audit.calls import Direct, Job
from fa_study.audit.cases import Case
from fa_study.audit.faults import diagnose
from fa_study.audit.page import to_html
from fa_study.audit.policies import r_squared
from fa_study.audit.worker import Worker, load_callable

CASE = Case("fp32", L=20, S=24, D=16, B=1, H=2, Hkv=2)


def test_r_squared_in_closed_form():
    golden = torch.zeros(100)
    theirs = torch.full((100,), 2.0)
    assert r_squared(theirs, theirs, golden) == 1.0
    assert r_squared(theirs, golden, golden) == 0.0
    assert r_squared(theirs, torch.full((100,), 1.0), golden) == 0.75
    assert r_squared(theirs, -theirs, golden) == -3.0
    assert math.isnan(r_squared(golden, theirs, golden))
    assert r_squared(theirs, torch.full((100,), math.nan), golden) == -math.inf


def test_rule_of_the_authors():
    golden = torch.linspace(-1, 1, 64).double()
    standard = (golden + 0.01).float()
    for error, verdict in ((0.0199, "pass"), (0.0202, "fail"), (math.nan, "fail")):
        assert judge(Case("bf16"), "out", (golden + error).float(), golden, standard)["verdict"] == verdict
    assert judge(Case("bf16"), "dq", (golden + 0.029).float(), golden, standard)["verdict"] == "pass"
    assert judge(Case("bf16"), "out", golden * math.nan, golden, golden * math.inf)["verdict"] == "as eager"


def test_row_share_tells_row_factors_from_noise():
    g = torch.Generator().manual_seed(0)
    golden = torch.randn(50, 64, generator=g).double()
    assert row_share(golden * (1 + torch.randn(50, 1, generator=g) / 100), golden) == pytest.approx(1.0, abs=1e-6)
    assert row_share(golden + torch.randn(50, 64, generator=g) / 100, golden) < 0.05


def test_golden_gradients_are_those_of_finite_differences():
    q, k, v = (x.double() for x in Case("fp64", L=3, S=4, D=4, B=1, H=1, Hkv=1).inputs())
    dout = torch.ones(1, 1, 3, 4, dtype=torch.float64)
    dq, _, _ = golden_gradients(q, k, v, dout)
    h = 1e-6
    up, down = q.clone(), q.clone()
    up[0, 0, 1, 2] += h
    down[0, 0, 1, 2] -= h
    difference = (faulty_free(up, k, v).sum() - faulty_free(down, k, v).sum()) / (2 * h)
    assert dq[0, 0, 1, 2].item() == pytest.approx(difference.item(), abs=1e-8)


def faulty_free(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def test_diagnosis_of_an_unknown_mistake():
    q, k, v = CASE.inputs()
    assert diagnose(faulty_free(q, k, v), CASE, {}) is None
    code, text = diagnose(faulty_free(q, k, v).flip(2), CASE, {})
    assert code == "wrong" and "no known fault" in text
    code, text = diagnose(faulty_free(q, k, v) / 0.0, CASE, {})
    assert code == "non-finite"


def raises(q, k, v):
    raise RuntimeError("needs a GPU\nand a second line")


def leaves(q, k, v):
    sys.exit(3)


def asks_for_cuda(q, k, v):
    return faulty_free(*(x.to("cuda") for x in (q, k, v)))


def changes_q(q, k, v):
    q.mul_(q.shape[-1] ** -0.5)
    return torch.softmax(q @ k.mT, -1) @ v


def hangs(q, k, v):
    while True:
        time.sleep(0.01)


def hangs_on_long(q, k, v):
    return hangs(q, k, v) if q.shape[2] == 97 else faulty.sound(q, k, v)


def always_float(q, k, v):
    return faulty.sound(q, k, v).float()


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raises, "RuntimeError: needs a GPU"),
        (leaves, "SystemExit: 3"),
        (hangs, "did not return within 0.2 s"),
        (lambda q, k, v: None, "returned NoneType instead of a tensor"),
        (lambda q, k, v: q[:, :, :3], "returned shape (1, 2, 3, 16) instead of (1, 2, 20, 16)"),
    ],
)
def test_bad_call_is_a_line(function, error):
    outcome = Direct(function, limit=0.2)(Job(*CASE.inputs()))
    assert outcome.error == error
    assert outcome.out is None


def test_inputs_changed_in_place_are_seen_and_the_callers_kept():
    q, k, v = CASE.inputs()
    before = q.clone()
    assert Direct(changes_q)(Job(q, k, v)).changed == ("q",)
    assert torch.equal(q, before)


def inverts_its_mask(q, k, v, mask):
    return faulty_free(q, k, v).where(mask.logical_not_().any(), q)


def test_a_mask_changed_in_place_is_seen_and_the_callers_kept():
    q, k, v = CASE.inputs()
    mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    assert Direct(inverts_its_mask)(Job(q, k, v, {"mask": mask})).changed == ("mask",)
    assert mask.all()


class OwnTensor(torch.Tensor):
    """A class of tensors that the audit knows nothing of."""


def test_an_output_is_a_plain_tensor_of_its_own():
    buffer = torch.empty(1, 2, 20, 16).as_subclass(OwnTensor)
    q, k, v = CASE.inputs()
    call = Direct(lambda q, k, v: buffer.copy_(faulty_free(q, k, v)))
    first = call(Job(q, k, v)).out
    assert type(first) is torch.Tensor
    call(Job(-q, k, v))
    assert torch.equal(first, faulty_free(q, k, v))


def everything(case):
    return (*case.inputs(), case.dout(), *case.values().values())


def test_another_default_dtype_changes_neither_inputs_nor_calls():
    case = CASE.replace(features=("mask", "bias"), distribution="outliers")
    before, given = everything(case), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        after = everything(case)
        Direct(lambda q, k, v: torch.set_default_dtype(torch.float16))(Job(*case.inputs()))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(given)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (raises, "unusable"),
        (leaves, "unusable"),
        (changes_q, "in-place"),
        (always_float, "dtype"),
        (hangs, "hangs"),
        (hangs_on_long, "hangs"),
    ],
)
def test_audit_of_a_bad_callable_says_so(function, code):
    report = audit(function, dtypes=("bf16",), limit=0.3)
    assert not report.passed
    assert code in {f.code for f in report.findings if f.level == "fail"}
    json.loads(report.to_json())
    assert "FAIL" in to_html(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without a GPU")
def test_missing_gpu_is_a_line():
    report = audit(asks_for_cuda, dtypes=("bf16",))
    assert [f.code for f in report.findings] == ["unusable"]


def test_audit_goes_on_after_a_call_that_hangs():
    report = audit(hangs_on_long, dtypes=("bf16",), limit=0.3)
    lengths = {t.setting: t.answer for t in report.tried if t.what == "lengths"}
    assert lengths["97 x 97"] == "no" and lengths["256 x 256"] == "yes"
    assert len(report.accuracy) > 0


CALLABLES = """
import os, time
import torch
print("chatter on standard output")

def good(q, k, v):
    return torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1).to(v.dtype) @ v

def dies_or_sleeps(q, k, v):
    if q.shape[2] == 97:
        os._exit(7)
    if q.shape[2] == 98:
        time.sleep(60)
    return good(q, k, v)

def unscaled(q, k, v):
    return torch.softmax(q.float() @ k.float().mT, -1).to(v.dtype) @ v
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "theirs.py").write_text(CALLABLES)
    return str(tmp_path / "theirs.py")


def test_worker_survives_dying_and_hanging(target):
    worker = Worker(f"{target}:dies_or_sleeps", limit=20)
    assert worker.start() == (frozenset("qkv"), False)
    outcome = worker(Job(*CASE.replace(L=97).inputs()))
    assert outcome.died and outcome.error == "ended its process (exit code 7)"
    q, k, v = CASE.inputs()
    assert diagnose(worker(Job(q, k, v)).out, CASE, {}) is None
    worker.limit = 0.3
    outcome = worker(Job(*CASE.replace(L=98).inputs()))
    assert outcome.hung and outcome.error == "did not return within 0.3 s"
    worker.close()


def test_command_passes_and_writes_an_offline_page(target, tmp_path, capfd):
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    files = ["--report", str(page), "--json", str(data)]
    assert main(["audit", f"{target}:good", "--quick", "--dtypes", "bf16", *files]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("PASS") and "chatter" not in printed
    report = json.loads(data.read_text())
    assert report["passed"] is True and report["accuracy"]
    text = page.read_text()
    body = text.split("<script>")[0]
    assert "vegaEmbed" in text and "src=" not in body and "<link" not in body
    assert body.count("<h2>") == 5


def test_a_call_that_takes_its_process_with_it_fails(target, capfd):
    assert main(["audit", f"{target}:dies_or_sleeps", "--quick", "--dtypes", "fp32"]) == 2
    assert "fail  crashes: lengths 97 x 97: ended its process (exit code 7)" in capfd.readouterr().out


def test_command_fails_with_2(target, capfd):
    assert main(["audit", f"{target}:unscaled", "--quick", "--dtypes", "fp32"]) == 2
    printed = capfd.readouterr()
    assert "fail  scale: " in printed.out and "Traceback" not in printed.err


def test_command_user_errors_are_one_line_with_exit_code_1(target, tmp_path, capfd):
    assert main(["audit", f"{target}:nothing"]) == 1
    printed = capfd.readouterr().err.splitlines()
    assert printed[-1].startswith("error: ") and "has no function 'nothing'" in printed[-1]
    assert main(["audit", target]) == 1
    for place in (tmp_path / "no" / "r.json", tmp_path):
        assert main(["audit", f"{target}:good", "--json", str(place)]) == 1
    assert main(["audit", f"{target}:good", "--device", "nonsense"]) == 1
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:f", "no_such_module_here cannot be imported: ModuleNotFoundError"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("module", "use MODULE:FUNCTION or FILE.py:FUNCTION"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_target_that_cannot_be_loaded(name, message):
    with pytest.raises(ValueError, match=message):
        load_callable(name)


def test_a_scale_of_zero_is_a_scale():
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 6, 8) for _ in range(4))
    for scale in (0.0, 0.3, None):
        want = golden_gradients(q, k, v, dout, scale=scale)
        for a, b in zip(eager_gradients(q, k, v, dout, scale=scale), want):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)

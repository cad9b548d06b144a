"""The audit of diffusion models: processors, what stands in for PyTorch's attention, and which operator really ran."""

import pytest
import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel, FluxTransformer2DModel
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from small_models import MODELS, WrongInTheMiddle, sd3, unet, wrong_without_text

from fa_study.audit_model import audit_model
from fa_study.audit_model.compare import relative
from fa_study.audit_model.exact import float64_throughout, golden_model
from fa_study.audit_model.implementations import implementation
from fa_study.audit_model.inputs import made_up_inputs
from fa_study.audit_model.layers import operators, shown_operators
from fa_study.audit_model.passes import end_to_end
from fa_study.audit_model.replacements import emulated, written_out

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def failures(report):
    return {f.code for f in report.findings if f.level == "fail"}


def failed_layers(report):
    return set(report.layers[report.layers.verdict.isin(["fail", "raises"])].layer)


@pytest.mark.parametrize(
    ("make", "a", "b"),
    [
        (unet, "AttnProcessor", "AttnProcessor2_0"),
        (unet, "eager", "sdpa"),
        (unet, AttnProcessor(), "sdpa:math"),
        (sd3, "eager", "sdpa"),
        (sd3, "sdpa:math", "sdpa:flash"),
        (sd3, "sdpa", "emulated"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sound_attentions_pass(make, a, b, dtype):
    report = audit_model(make(dtype), a, b, twins=2)
    assert report.passed, report.findings
    assert not report.operators.same_operators.any()
    assert report.end_to_end.quantity.tolist() == ["sample", "loss", "weight gradients"]
    assert len(report.layers) == 2 * int(report.facts["attention layers"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_processor_that_is_wrong_in_the_middle_of_a_unet(dtype):
    report = audit_model(unet(dtype), "AttnProcessor", WrongInTheMiddle(), twins=1)
    middle = "mid_block.attentions.0.transformer_blocks.0."
    assert "layer-error" in failures(report)
    assert failed_layers(report) == {middle + "attn1", middle + "attn2"}
    forward = next(f.text for f in report.findings if f.code == "forward-growth")
    assert f"is largest in {middle}attn2 (" in forward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_function_that_is_wrong_in_one_attention_of_sd3(dtype):
    report = audit_model(sd3(dtype), "sdpa:math", wrong_without_text, twins=1)
    assert "layer-error" in failures(report)
    assert failed_layers(report) == {"transformer_blocks.0.attn2"}


def test_the_processor_that_was_there_already_is_no_switch():
    report = audit_model(unet(), "sdpa", "AttnProcessor2_0", twins=1)
    assert failures(report) == {"not-switched"}
    assert FLASH in report.findings[0].text


def test_set_attention_backend_does_nothing_in_a_unet_and_processors_do():
    """Why the audit switches by processors: the operators that ran say so."""
    model, inputs = unet(), None
    inputs = made_up_inputs(model)
    before = operators(model, inputs)
    model.set_attention_backend("_native_math")
    try:
        assert operators(model, inputs) == before
    finally:
        model.reset_attention_backend()
    assert all(FLASH in shown_operators(names) for names in before.values())
    with implementation(model, "AttnProcessor").switched(model):
        changed = operators(model, inputs)
    assert all("softmax" in shown_operators(n) and FLASH not in shown_operators(n) for n in changed.values())
    assert operators(model, inputs) == before


def test_processor_that_does_not_fit_is_a_line():
    report = audit_model(sd3(), "sdpa", "AttnProcessor", twins=1)
    assert "raises" in failures(report) or "layer-error" in failures(report)
    assert not report.passed


def test_slices_of_one_head_are_eager_attention():
    report = audit_model(unet(), "AttnProcessor2_0", SlicedAttnProcessor(1), twins=1)
    assert report.passed, report.findings


@pytest.mark.parametrize("name", MODELS)
def test_float64_rounds_nowhere(name):
    model = golden_model(MODELS[name]())
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in made_up_inputs(model).items()}
    outputs = []
    for which in ("eager", "sdpa:math", "sdpa:flash"):
        with implementation(model, which).switched(model), float64_throughout():
            outputs.append(end_to_end(model, inputs))
    assert all(x.output.dtype == torch.float64 for x in outputs)
    assert relative(outputs[0].output, outputs[1].output) < 1e-12
    assert relative(outputs[0].output, outputs[2].output) < 1e-12
    assert outputs[0].loss == pytest.approx(outputs[1].loss, rel=1e-12)


@pytest.mark.parametrize("function", [written_out, emulated])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "bias", "grouped", "scale", "mask and causal"])
def test_stand_ins_take_what_pytorchs_attention_takes(function, case):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, 2 if case == "grouped" else 4, 11, 8, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(9, 11, generator=g) < 0.8
    mask[:, 0] = True
    bias = torch.randn(2, 4, 9, 11, generator=g, dtype=torch.float64)
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": mask},
        "bias": {"attn_mask": bias},
        "grouped": {"enable_gqa": True},
        "scale": {"scale": 0.7},
        "mask and causal": {"attn_mask": mask & torch.ones(9, 11, dtype=torch.bool).tril()},
    }[case]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(function(q, k, v, **options), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("NoSuchProcessor", "'NoSuchProcessor' is no attention of UNet2DConditionModel: use eager, sdpa, "),
        ("flash_attention_2", "'flash_attention_2' is no attention of UNet2DConditionModel"),
        ("SlicedAttnProcessor", "the processor SlicedAttnProcessor cannot be made here: TypeError"),
        ("XFormersJointAttnProcessor:x", "cannot be imported"),
    ],
)
def test_unknown_processors_are_one_sentence(which, message):
    with pytest.raises(ValueError, match=message):
        audit_model(unet(), "sdpa", which)


def test_models_without_switchable_processors():
    torch.manual_seed(0)
    autoencoder = AutoencoderKL(block_out_channels=[32], norm_num_groups=8, sample_size=8)
    size = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8, "norm_num_groups": 1}
    classes = DiTTransformer2DModel(in_channels=4, out_channels=8, patch_size=2, **size)
    for model, inputs in ((autoencoder, "sample (2, 3, 8, 8)"), (classes, "hidden_states (2, 4, 8, 8), timestep (2,)")):
        report = audit_model(model, "eager", "sdpa", twins=1)
        assert report.passed, report.findings
        assert report.facts["inputs"].startswith(inputs)
    with pytest.raises(ValueError, match="'AttnProcessor' is no attention of DiTTransformer2DModel"):
        audit_model(classes, "sdpa", "AttnProcessor")


def test_inputs_that_cannot_be_made_up_are_asked_for():
    size = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    flux = FluxTransformer2DModel(in_channels=4, joint_attention_dim=32, axes_dims_rope=(4, 4, 8), **size)
    with pytest.raises(ValueError, match="the inputs of FluxTransformer2DModel cannot be made up: give them"):
        audit_model(flux, "eager", "sdpa")


def test_processors_are_put_back():
    model = unet()
    before = model.attn_processors
    audit_model(model, "AttnProcessor", "sdpa", twins=1)
    assert model.attn_processors == before

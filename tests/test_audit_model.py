"""The audit of a decoder language model: what it measures, and that faults planted in one layer are found there."""

import contextlib
import json
import zlib
from dataclasses import replace

import pytest
import torch
from small_models import WRONG_IN_ONE, decoder, wrong_in_one
from transformers import (
    BertConfig,
    BertModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fa_study.audit_model import audit_model
from fa_study.audit_model.compare import end_to_end_table, relative
from fa_study.audit_model.exact import float64_throughout, golden_model
from fa_study.audit_model.inputs import made_up_inputs
from fa_study.audit_model.layers import on_same_inputs
from fa_study.audit_model.page import to_html
from fa_study.audit_model.passes import Pass, end_to_end, noise


@contextlib.contextmanager
def registered(function, mask=sdpa_mask):
    """transformers knows `function` as "mine"; with mask=None it gets no mask, as transformers does by default."""
    ALL_ATTENTION_FUNCTIONS._global_mapping["mine"] = function
    if mask is not None:
        AttentionMaskInterface._global_mapping["mine"] = mask
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["mine"]
        AttentionMaskInterface._global_mapping.pop("mine", None)


def failures(report):
    return {f.code for f in report.findings if f.level == "fail"}


def failed_layers(report):
    return set(report.layers[report.layers.verdict.isin(["fail", "raises"])].layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sound_attentions_pass(dtype):
    report = audit_model(decoder(dtype), "eager", "sdpa")
    assert report.passed, report.findings
    assert set(report.layers.verdict) == {"pass"} and len(report.layers) == 8
    assert not report.operators.same_operators.any()
    assert report.operators.a[0] == "bmm, softmax, _softmax" and "flash_attention" in report.operators.b[0]
    assert (report.growth.difference > 0).all() and (report.growth.twins_low > 0).all()
    assert report.end_to_end.quantity.tolist() == ["logits", "loss", "weight gradients"]
    assert json.loads(report.to_json())["passed"] is True


@pytest.mark.parametrize("name", [n for n in WRONG_IN_ONE if n not in ("gradient", "nan", "raises")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fault_in_one_layer_is_found_in_that_layer(name, dtype):
    layer, function = wrong_in_one(name)
    with registered(function):
        report = audit_model(decoder(dtype), "eager", "mine")
    assert not report.passed and "layer-error" in failures(report)
    assert failed_layers(report) == {layer}
    text = next(f.text for f in report.findings if f.code == "layer-error")
    assert f"in 1 of 4 layers: {layer}; most in {layer}, " in text


def test_fault_of_the_backward_pass_is_found_in_its_layer():
    layer, function = wrong_in_one("gradient")
    with registered(function):
        report = audit_model(decoder(), "eager", "mine")
    assert "layer-gradient-error" in failures(report) and "layer-error" not in failures(report)
    assert failed_layers(report) == {layer}


def test_layer_that_is_not_finite_fails_there():
    layer, function = wrong_in_one("nan")
    with registered(function):
        report = audit_model(decoder(), "eager", "mine")
    assert failed_layers(report) == {layer} and {"layer-error", "end-to-end-error"} <= failures(report)
    assert "NaN" not in report.to_json() and "FAIL" in to_html(report)


def test_layer_that_raises_is_a_line_and_the_others_are_audited():
    layer, function = wrong_in_one("raises")
    with registered(function):
        report = audit_model(decoder(), "eager", "mine")
    assert failures(report) == {"raises", "layer-raises"}
    assert failed_layers(report) == {layer}
    assert (report.layers[report.layers.layer != layer].verdict == "pass").all()
    text = next(f.text for f in report.findings if f.code == "layer-raises")
    assert text == f"mine in 1 of 4 layers: {layer}: RuntimeError: no kernel for this layer"
    assert "FAIL" in to_html(report)


def test_attention_registered_without_its_mask_loses_the_window_in_every_layer():
    with registered(ALL_ATTENTION_FUNCTIONS["sdpa"], mask=None):
        report = audit_model(decoder(), "eager", "mine")
    assert len(failed_layers(report)) == 4 and "layer-error" in failures(report)


def test_the_same_computation_under_another_name_is_no_pass():
    with registered(ALL_ATTENTION_FUNCTIONS["sdpa"]):
        report = audit_model(decoder(), "sdpa", "mine")
    assert failures(report) == {"not-switched"}
    assert "the same bits in every layer" in report.findings[0].text


def test_model_that_switches_in_one_layer_only_says_so():
    def first_layer_eager(module, q, k, v, mask, **options):
        if module.layer_idx == 0:
            s = (q @ k.repeat_interleave(2, 1).mT) * options["scaling"]
            p = s.float().masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
            return (p @ v.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), None
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)

    with registered(first_layer_eager):
        report = audit_model(decoder(), "sdpa", "mine")
    assert report.passed, report.findings
    text = next(f.text for f in report.findings if f.code == "not-switched")
    assert "model.layers.1.self_attn, model.layers.2.self_attn, model.layers.3.self_attn" in text
    assert "model.layers.0" not in text


@pytest.mark.slow  # torch.compile
def test_flex_attention_without_a_backward_pass_says_so():
    report = audit_model(decoder(torch.float32), "eager", "flex_attention", twins=1)
    out = report.layers[report.layers.tensor == "out"]
    assert (out.verdict == "pass").all()
    assert failures(report) <= {"raises", "layer-raises"}
    if not report.passed:
        assert all("backward: NotImplementedError" in f.text for f in report.findings if f.level == "fail")


def test_emulation_of_flash_attention_passes_in_a_model():
    report = audit_model(decoder(), "eager", "emulated", twins=1)
    assert report.passed, report.findings


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_recorded_inputs_give_the_whole_pass_again_to_the_bit(implementation):
    model = decoder()
    model.set_attn_implementation(implementation)
    inputs = made_up_inputs(model)
    whole = end_to_end(model, inputs, keep_calls=True)
    results, error = on_same_inputs(model, inputs, whole.calls)
    assert error == "" and list(results) == list(whole.outputs)
    for name, result in results.items():
        assert torch.equal(result.out, whole.outputs[name])


def test_layers_are_fed_the_recorded_inputs_whatever_came_before():
    model = decoder(torch.float32)
    inputs = made_up_inputs(model)
    calls = end_to_end(model, inputs, keep_calls=True).calls
    before, _ = on_same_inputs(model, inputs, calls)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3)
    after, _ = on_same_inputs(model, inputs, calls)
    assert all(torch.equal(before[name].out, after[name].out) for name in before)


def test_gradient_of_a_layer_is_that_of_finite_differences():
    model, name, path = golden_model(decoder(torch.float32)), "model.layers.1.self_attn", "['hidden_states']"
    inputs = made_up_inputs(model)
    with float64_throughout():
        calls = end_to_end(model, inputs, keep_calls=True).calls
        results, _ = on_same_inputs(model, inputs, calls)
        given = calls[name].arguments
        step = 1e-6 * noise(given[path].shape, 0).double()
        outs = []
        for moved in (given[path] + step, given[path] - step):
            call = replace(calls[name], arguments={**given, path: moved})
            outs.append(on_same_inputs(model, inputs, {**calls, name: call})[0][name].out)
    # The gradient of the output is normal noise whose seed is made of the layer's name.
    dout = noise(calls[name].result[0].shape, zlib.crc32(name.encode())).double().flatten()
    expected = float((outs[0] - outs[1]) @ dout) / 2
    assert float(results[name].gradient @ step.flatten()) == pytest.approx(expected, rel=1e-6)


def test_float64_model_rounds_nowhere():
    model = golden_model(decoder())
    inputs = made_up_inputs(model)
    losses = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with float64_throughout():
            whole = end_to_end(model, inputs)
        assert whole.output.dtype == torch.float64
        losses.append((whole.loss, whole.output))
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-13)
    assert relative(losses[0][1], losses[1][1]) < 1e-13
    assert torch.get_default_dtype() == torch.float32


def test_the_rule_end_to_end():
    golden = torch.linspace(1, 2, 50).double()
    floor = 0.0

    def table(error, twin):
        def side(x):
            return Pass(output=golden + x, loss=1.0)

        return end_to_end_table([side(0.01), side(error), side(0.0)], [side(0.01 + twin)], floor).iloc[0]

    assert table(0.0199, 0.001).verdict == "pass"
    assert table(0.0201, 0.001).verdict == "fail"
    assert table(0.0201, 0.02).verdict == "as twins"
    assert table(float("nan"), 0.02).verdict == "fail"
    assert table(0.0201, 0.001).ratio == pytest.approx(2.01)


def test_the_model_is_left_as_it_was():
    model = decoder().train()
    model.set_attn_implementation("sdpa")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    audit_model(model, "eager", "sdpa", twins=1)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in vars(model.model.layers[0].self_attn)


def test_encoders_of_text_and_of_pictures():
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    text = BertModel(BertConfig(vocab_size=64, **small))
    pictures = ViTModel(ViTConfig(image_size=32, patch_size=4, **small))
    for model, layers in ((text, 2), (pictures, 2)):
        report = audit_model(model, "eager", "sdpa", twins=1)
        assert report.passed, report.findings
        assert report.facts["attention layers"] == str(layers)
        assert report.end_to_end.quantity[0] == "last_hidden_state"


def test_encoder_and_decoder_and_a_mixture_of_experts():
    torch.manual_seed(0)
    t5 = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    experts = MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=2, **size)
    for model, layers in ((T5ForConditionalGeneration(t5), 6), (MixtralForCausalLM(experts), 2)):
        report = audit_model(model, "eager", "sdpa", twins=1)
        assert report.passed, report.findings
        assert report.facts["attention layers"] == str(layers)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("eager", "eager", "a and b are both eager: name two"),
        ("eager", "nonsense", "'nonsense' is no attention of MistralForCausalLM: use eager, sdpa, sdpa:math, "),
        ("eager", "AttnProcessor", "'AttnProcessor' is no attention of MistralForCausalLM"),
        ("eager", "sdpa:nonsense", "'sdpa:nonsense' is no attention"),
        ("eager", "someone/flash-attn", "'someone/flash-attn' would be downloaded, and nothing is"),
        ("eager", "nowhere.py:f", "there is no file nowhere.py"),
    ],
)
def test_unknown_implementations_are_one_sentence(a, b, message):
    with pytest.raises(ValueError, match=message):
        audit_model(decoder(), a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without a GPU")
def test_implementations_that_lack_something_are_one_sentence_or_a_line():
    with pytest.raises(ValueError, match="MistralForCausalLM cannot use flash_attention_2 here: ImportError"):
        audit_model(decoder(), "eager", "flash_attention_2")
    report = audit_model(decoder(), "eager", "sdpa:cudnn", twins=1)
    assert failures(report) == {"raises", "layer-raises"}
    assert any(f.text.startswith("sdpa:cudnn: ") for f in report.findings)


def test_first_implementation_that_cannot_run_is_a_line():
    report = audit_model(decoder(), "sdpa:cudnn", "sdpa", twins=1)
    assert not report.passed and "raises" in failures(report)
    assert "FAIL" in to_html(report) and json.loads(report.to_json())["layers"] == []


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokens": torch.zeros(1, 4)}, "takes no input 'tokens': it takes input_ids, "),
        ({"input_ids": [1, 2]}, "the input 'input_ids' is list: give a tensor"),
        ({}, "no inputs are given"),
    ],
)
def test_inputs_that_do_not_fit_are_one_sentence(inputs, message):
    with pytest.raises(ValueError, match=message):
        audit_model(decoder(), "eager", "sdpa", inputs=inputs)


def test_inputs_that_make_the_model_raise_are_a_line():
    report = audit_model(decoder(), "eager", "sdpa", inputs={"input_ids": torch.full((1, 8), 9999)}, twins=1)
    assert "raises" in failures(report) and "eager: IndexError" in report.findings[0].text


def test_models_that_cannot_be_audited():
    with pytest.raises(ValueError, match="Linear is no model whose attention can be switched"):
        audit_model(torch.nn.Linear(2, 2), "eager", "sdpa")
    with pytest.raises(ValueError, match=r"weights in torch.float8_e5m2 are not audited"):
        audit_model(torch.nn.Module.to(decoder(), torch.float8_e5m2), "eager", "sdpa")
    with pytest.raises(ValueError, match="twins=0: use 1 or more"):
        audit_model(decoder(), "eager", "sdpa", twins=0)
    model = decoder()
    for layer in model.model.layers:
        layer.self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match="has no attention layers"):
        audit_model(model, "eager", "sdpa")


def test_attention_that_is_never_called_is_no_pass():
    model = decoder()
    model.unused = torch.nn.MultiheadAttention(4, 1)
    for layer in model.model.layers:
        layer.self_attn = _Skipped()
    assert failures(audit_model(model, "eager", "sdpa", twins=1)) == {"no-attention"}


class _Skipped(torch.nn.Module):
    def forward(self, hidden_states, **options):
        return hidden_states, None

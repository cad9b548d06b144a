"""python -m fa_study audit-model: what it opens, what it writes, its exit codes, and that it never asks the network."""

import json
import shutil
import socket

import pytest
import torch
from safetensors.torch import save_file
from small_models import DECODER, SD3, UNET, decoder, unet

from fa_study.__main__ import main
from fa_study.audit_model.load import load_model

SMALL = [f"{name}={json.dumps(value)}" for name, value in DECODER.items()]
FAULT = """
import torch.nn.functional as F

def unscaled(q, k, v, **options):
    options["scale"] = 1.0
    return F.scaled_dot_product_attention(q, k, v, **options)
"""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    decoder().save_pretrained(folder)
    return folder


def test_folder_passes_and_everything_is_written(saved, tmp_path, capsys):
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    files = ["--report", str(page), "--json", str(data), "--twins", "2"]
    assert main(["audit-model", str(saved), "eager", "sdpa", *files]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("PASS: the difference of MistralForCausalLM with sdpa in place of eager is expected")
    assert "running twin 2 of 2" in printed.err and "Traceback" not in printed.err
    report = json.loads(data.read_text())
    assert report["passed"] is True and len(report["layers"]) == 8 and len(report["growth"]) == 8
    text = page.read_text()
    body = text.split("<script>")[0]
    assert "vegaEmbed" in text and "src=" not in body and "<link" not in body
    assert body.count("<h2>") == 5


@pytest.mark.parametrize(
    ("name", "config", "a", "b"),
    [
        ("UNet2DConditionModel", UNET, "AttnProcessor", "AttnProcessor2_0"),
        ("SD3Transformer2DModel", SD3, "eager", "sdpa"),
    ],
)
def test_configuration_of_diffusers(name, config, a, b, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": name, **config}))
    assert main(["audit-model", str(file), a, b, "--twins", "1", "--dtype", "fp32"]) == 0
    assert "dtype: float32" in capsys.readouterr().out


def test_class_with_changed_configuration(capsys):
    assert main(["audit-model", "MistralForCausalLM", "eager", "sdpa", "--twins", "1", "--set", *SMALL]) == 0
    assert "attention layers: 4" in capsys.readouterr().out


def test_configuration_of_transformers_gets_scores_of_size_one(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["MistralForCausalLM"], **DECODER, "initializer_range": 0.02}))
    weight = load_model(str(file), dtype=torch.float32).model.layers[0].self_attn.q_proj.weight
    assert weight.std().item() == pytest.approx(DECODER["hidden_size"] ** -0.5, rel=0.05)
    changed = load_model(str(file), {"initializer_range": 0.02}, torch.float32)
    assert changed.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_own_function_that_is_wrong_fails_with_2(saved, tmp_path, capsys):
    (tmp_path / "theirs.py").write_text(FAULT)
    assert main(["audit-model", str(saved), "sdpa", f"{tmp_path / 'theirs.py'}:unscaled", "--twins", "1"]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("FAIL: ") and "fail  layer-error: from the same inputs" in printed


def test_inputs_from_a_file(saved, tmp_path, capsys):
    ids = torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "inputs.safetensors")
    command = ["audit-model", str(saved), "eager", "sdpa", "--twins", "1", "--inputs"]
    assert main([*command, str(tmp_path / "inputs.safetensors")]) == 0
    assert "inputs: input_ids (1, 40)" in capsys.readouterr().out
    (tmp_path / "broken.safetensors").write_text("nothing")
    assert main([*command, str(tmp_path / "broken.safetensors")]) == 1
    assert main([*command, str(tmp_path / "none.safetensors")]) == 1
    save_file({"words": ids}, tmp_path / "words.safetensors")
    assert main([*command, str(tmp_path / "words.safetensors")]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3 and "takes no input 'words'" in errors[2]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("someone/some-model", "is neither a folder, nor a config.json, nor a model class"),
        ("NoSuchModel", "nothing is downloaded: save the model with save_pretrained"),
        ("MistralConfig", "is neither a folder"),
        ("{folder}/empty", "config.json is no configuration: FileNotFoundError"),
        ("{folder}/pipeline", "is a whole pipeline: name the folder of its unet or transformer"),
        ("{folder}/list.json", "is no configuration: expected an object, got list"),
        ("{folder}/text.json", "is no configuration: JSONDecodeError"),
        ("{folder}/nameless.json", "names no class: add architectures (transformers) or _class_name (diffusers)"),
        ("{folder}/remote.json", "code of others is not run"),
        ("{folder}/wrong.json", "MistralForCausalLM cannot be made of it: "),
        ("{folder}/pickled", "MistralForCausalLM cannot be made of it: OSError"),
    ],
)
def test_models_that_cannot_be_opened_are_one_sentence(source, message, saved, tmp_path, capsys):
    for name in ("empty", "pipeline"):
        (tmp_path / name).mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    files = {
        "list": [],
        "nameless": {"hidden_size": 4},
        "remote": {"architectures": ["TheirModel"], "auto_map": {"AutoModelForCausalLM": "theirs.TheirModel"}},
        "wrong": {"architectures": ["MistralForCausalLM"], **DECODER, "hidden_size": "many"},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "text.json").write_text("hidden_size: 4")
    shutil.copytree(saved, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(decoder().state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    assert main(["audit-model", source.format(folder=tmp_path), "eager", "sdpa"]) == 1
    printed = capsys.readouterr().err
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["eager", "nonsense"], "'nonsense' is no attention of MistralForCausalLM"),
        (["eager", "sdpa", "--twins", "0"], "twins=0: use 1 or more"),
        (["eager", "sdpa", "--device", "nonsense"], "device nonsense cannot be used here"),
        (["eager", "sdpa", "--json", "nowhere/r.json"], "cannot be written: there is no folder"),
        (["eager", "sdpa", "--set", "num_hidden_layers=2"], "the configuration of trained weights stays as it is"),
    ],
)
def test_user_errors_are_one_sentence_with_exit_code_1(options, message, saved, capsys):
    assert main(["audit-model", str(saved), *options]) == 1
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith("error: ") and message in printed and "Traceback" not in printed


def test_entries_of_the_configuration_have_a_form(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["audit-model", "MistralForCausalLM", "eager", "sdpa", "--set", "layers"])
    assert exit_.value.code == 1
    assert "expected NAME=VALUE such as num_hidden_layers=4, got 'layers'" in capsys.readouterr().err


def test_folder_of_diffusers(tmp_path, capsys):
    unet().save_pretrained(tmp_path / "unet")
    assert main(["audit-model", str(tmp_path / "unet"), "eager", "sdpa", "--twins", "1"]) == 0
    assert "UNet2DConditionModel" in capsys.readouterr().out

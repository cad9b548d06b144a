"""Every kind of checkpoint opens, lazily and safely; what is damaged or contradicts itself is refused in words."""

import json
import os
import pickle
import sys
import types
import warnings
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from checkpoints import KINDS, same, save_as, save_run, save_sharded, state_dict
from safetensors.torch import save_file

from fa_study.names import layer_of, plain_name
from fa_study.snapshots import Weights, load_weights, snapshot_steps


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_weights_bit_for_bit(tmp_path, kind):
    expected = state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch.distributed")
        source = save_as(kind, tmp_path, expected)
        weights = load_weights(source)
    assert isinstance(weights, Weights)
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert same(weights[name], tensor), name


def test_a_tensor_can_be_written_to_without_changing_the_file(tmp_path):
    source = save_as("torch", tmp_path, state_dict())
    weights = load_weights(source)
    weights["blocks.0.to_q.weight"].zero_()
    assert same(weights["blocks.0.to_q.weight"], state_dict()["blocks.0.to_q.weight"])


def test_run_folders_steps_and_checksums(tmp_path):
    run = save_run(
        tmp_path / "run", {0: {"w": torch.zeros(2)}, 100: {"w": torch.ones(2)}, 20: {"w": torch.ones(2) * 2}}
    )
    assert snapshot_steps(run) == [0, 20, 100]
    assert load_weights(run)["w"].tolist() == [1, 1]
    assert load_weights(run, step=20, verify=True)["w"].tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"no snapshot at step 7; there are \[0, 20, 100\]"):
        load_weights(run, step=7)
    path = run / "weights/step-000020.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    load_weights(run, step=20)
    with pytest.raises(ValueError, match="sha256"):
        load_weights(run, step=20, verify=True)
    for text in ('[{"file": "x"}]', '[{"step": 1}]', '[{"step": 1, "file": 2}]', "[" * 100_000):
        (run / "manifest.json").write_text(f'{{"snapshots": {text}}}')
        with pytest.raises(ValueError, match="lists no snapshots"):
            load_weights(run)
    (run / "manifest.json").write_text('{"snapshots": []}')
    with pytest.raises(ValueError, match="no snapshot yet"):
        load_weights(run)


def test_c1_c2_wrappers_are_removed_component_by_component():
    for name in ("_orig_mod.module.decoder.0.weight", "module._orig_mod.decoder.0.weight"):
        assert plain_name(name) == "decoder.0.weight"
    deep = "_fsdp_wrapped_module.decoder._checkpoint_wrapped_module.layers.1._fsdp_wrapped_module.weight"
    assert plain_name(deep) == "decoder.layers.1.weight"
    for name in ("decoder.weight", "submodule.weight", "my_orig_mod.weight", "module_list.0.module", "module"):
        assert plain_name(name) == name


def test_c1_two_names_that_become_one_are_an_error(tmp_path):
    save_file({"module.w": torch.zeros(1), "_orig_mod.w": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"'_orig_mod\.w' and 'module\.w'|'module\.w' and '_orig_mod\.w'"):
        load_weights(tmp_path / "x.safetensors")


class _Config:
    """Stands for any class that a checkpoint may hold."""

    def __init__(self):
        self.content = {"a": 1}


class _Exploit:
    def __reduce__(self):
        return os.system, ("touch exploited",)


def test_c3_foreign_objects_are_named_and_never_run(tmp_path, monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.chdir(tmp_path)
    expected = state_dict()
    checkpoint = {
        "hyper_parameters": OmegaConf.create({"a": [1, {"b": 2}]}),
        "best": np.float64(0.5),
        "config": _Config(),
        "exploit": _Exploit(),
        "state_dict": OrderedDict(expected),
    }
    for new in (True, False):
        torch.save(checkpoint, "x.ckpt", _use_new_zipfile_serialization=new)
        with pytest.warns(UserWarning) as caught:
            weights = load_weights("x.ckpt")
        message = " ".join(str(w.message) for w in caught)
        for name in ("omegaconf.dictconfig.DictConfig", "multiarray.scalar", "_Config", ".system"):
            assert name in message
        assert all(same(weights[name], tensor) for name, tensor in expected.items())
    assert not os.path.exists("exploited")


def test_c3_a_pickle_that_is_no_checkpoint_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(pickle.dumps(_Exploit()))
    with pytest.raises(ValueError), pytest.warns(UserWarning, match="system"):
        load_weights("x.pt")
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(_Exploit()))
    with pytest.raises(ValueError), pytest.warns(UserWarning, match="system"):
        load_weights(folder)
    assert not (tmp_path / "exploited").exists()


def test_a_pickled_module_gives_its_parameters(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(model, tmp_path / "m.pt")
    with pytest.warns(UserWarning, match="torch.nn.modules.linear.Linear"):
        weights = load_weights(tmp_path / "m.pt")
    assert set(weights) == set(model.state_dict())
    assert all(same(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_parameters_views_and_tied_weights(tmp_path):
    base = torch.randn(10, 8)
    embedding = torch.nn.Parameter(base)
    saved = {"embed": embedding, "lm_head": embedding, "column": base[:, 3], "rows": base[2:5], "turned": base.t()}
    for new in (True, False):
        torch.save(
            {"model": saved, "optim": {"x": torch.ones(2)}}, tmp_path / "x.pt", _use_new_zipfile_serialization=new
        )
        weights = load_weights(tmp_path / "x.pt")
        assert weights.tied == {"lm_head": "embed"}
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())


def test_a_view_that_is_negated_or_conjugated_is_refused(tmp_path):
    """The file holds the values without their sign."""
    x = torch.tensor([1 + 2j])
    for new in (True, False):
        for view in (x.conj(), torch._neg_view(torch.ones(3))):
            torch.save({"w": view}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
            with pytest.raises(ValueError, match="resolve_conj"):
                load_weights(tmp_path / "x.pt")


class Wrapping(torch.Tensor):
    """A tensor made of another, as a DTensor of FSDP is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(getattr(x, "inner", x) for x in args), **(kwargs or {}))


def test_a_part_of_a_weight_is_refused_by_name_and_not_left_out(tmp_path):
    part = Wrapping(torch.ones(2))
    torch.save({"model": {"a": torch.ones(2), "b": {"w": part}}}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"b\.w is a .*Wrapping, .*full_tensor"), pytest.warns(UserWarning):
        load_weights(tmp_path / "x.pt")
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": {"m": part}}, tmp_path / "x.pt")
    with pytest.warns(UserWarning, match="Wrapping"):
        assert set(load_weights(tmp_path / "x.pt")) == {"a"}


def test_weights_whose_names_begin_like_an_optimizer_are_weights(tmp_path):
    weights = {"optimal.bias": torch.ones(2), "optim.state.0": torch.ones(2), "w": torch.ones(2)}
    torch.save(weights | {"optimizer_states": {"x": torch.ones(2)}}, tmp_path / "x.pt")
    assert set(load_weights(tmp_path / "x.pt")) == {"optimal.bias", "w"}


def test_a_compressed_pickle_is_refused(tmp_path):
    """It could be a thousand times larger than its file."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            kind = zipfile.ZIP_DEFLATED if name.endswith("data.pkl") else zipfile.ZIP_STORED
            new.writestr(name, old.read(name), kind)
    with pytest.raises(ValueError, match=r"data\.pkl is damaged or compressed"):
        load_weights(tmp_path / "y.pt")


def test_c4_an_index_that_lies(tmp_path):
    index = save_sharded(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)})
    content = json.loads(index.read_text())
    shard = content["weight_map"].pop("b")
    content["weight_map"]["ghost"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"ghost.*\['b'\]"):
        load_weights(index)
    with pytest.raises(ValueError, match=r"ghost.*\['b'\]"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "not an index"),
        ("not json", "not an index"),
        ("[" * 100_000, "not an index"),
        ('{"weight_map": [1]}', "not an index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "do not exist"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "outside"),
        ('{"weight_map": {"a": 5}}', "not an index"),
    ],
)
def test_indices_that_are_none(tmp_path, content, words):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        load_weights(tmp_path)


def test_an_index_of_torch_files(tmp_path):
    for name, shard in (("a", "one.bin"), ("b", "two.bin")):
        torch.save({name: torch.ones(2)}, tmp_path / shard)
    index = {"weight_map": {"a": "one.bin", "b": "two.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert set(load_weights(tmp_path)) == {"a", "b"}


def test_two_shards_with_the_same_tensor(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"'a' is in .*one\.safetensors and in .*two\.safetensors"):
        load_weights(tmp_path)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.ckpt", "x.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\3\4", b"\xff" * 100, b"\0" * 8, b"{}"], ids=repr)
def test_files_that_are_no_checkpoints(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="x"):
        load_weights(tmp_path / name)


def safetensors_bytes(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},  # four bytes belong to nobody
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}},
        {"a": 3},
        [],
        b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, '
        b'"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}',
    ],
    ids=str,
)
def test_safetensors_headers_that_lie(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(header, bytes(8)))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        load_weights(tmp_path / "x.safetensors")


def test_sources_that_are_not_there_or_not_clear(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_weights(tmp_path / "gone.pt")
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        load_weights(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match=r"expected \.safetensors"):
        load_weights(tmp_path / "x.txt")
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ValueError, match="2 files"):
        load_weights(tmp_path)
    with pytest.raises(ValueError, match="needs a run folder"):
        load_weights(tmp_path / "a.pt", step=3)
    for content in ([1, 2], {"lr": 0.1}, {"optimizer": {"x": torch.ones(2)}}):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"state dict|no weights"):
            load_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("source", ["", " "])
def test_an_empty_source_is_not_the_current_folder(tmp_path, monkeypatch, source):
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    monkeypatch.chdir(tmp_path)
    assert set(load_weights(".")) == {"w"}
    with pytest.raises(ValueError, match="source of the weights is empty"):
        load_weights(source)


def test_sharded_tensors_of_a_distributed_checkpoint(tmp_path):
    """Two parts of one tensor, described as two processes would have written them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    whole = torch.arange(12.0).reshape(4, 3)
    dcp.save({"top": whole[:3].clone(), "rest": whole[3:].clone()}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    top, rest = (metadata.state_dict_metadata.pop(name) for name in ("top", "rest"))
    top.size = torch.Size([4, 3])
    top.chunks.append(ChunkStorageMetadata(offsets=torch.Size([3, 0]), sizes=rest.chunks[0].sizes))
    metadata.state_dict_metadata["w"] = top
    metadata.planner_data = {"w": ("w",)}
    metadata.storage_data = {
        type(index)("w", torch.Size([3 if index.fqn == "rest" else 0, 0])): place
        for index, place in metadata.storage_data.items()
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(load_weights(tmp_path)["w"], whole)
    top.chunks[1] = ChunkStorageMetadata(offsets=torch.Size([2, 0]), sizes=rest.chunks[0].sizes)
    places = {type(i)("w", torch.Size([min(i.offset[0], 2), 0])): p for i, p in metadata.storage_data.items()}
    metadata.storage_data = places
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="parts of 'w' overlap"):
        load_weights(tmp_path)
    top.chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="hold 9 values"):
        load_weights(tmp_path)


def test_wandb_artifacts_come_from_the_local_folder_first_then_from_the_api(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_as("safetensors", tmp_path / "artifacts/weights:v3", {"w": torch.ones(2)})
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    assert load_weights("wandb:me/project/weights:v3")["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="not to be had"):
        load_weights("wandb:me/project/weights:v4")
    with pytest.raises(ValueError, match="expected wandb:"):
        load_weights("wandb:weights")

    asked = []

    class Api:
        def artifact(self, name):
            asked.append(name)
            return types.SimpleNamespace(download=lambda: str(tmp_path / "artifacts/weights:v3"))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Api=Api))
    assert load_weights("wandb:me/project/weights:v4")["w"].tolist() == [1, 1]
    assert asked == ["me/project/weights:v4"]


def test_layers():
    assert layer_of("model.layers.12.mlp.up.weight") == "model.layers.12"
    assert layer_of("down_blocks.0.attentions.1.to_q.weight") == "down_blocks.0"
    assert layer_of("conv_in.weight") == "conv_in"
    assert layer_of("scale") == "scale"

"""Twins of a checkpoint, and what they say about the distance of two runs."""

import pytest
import torch
from checkpoints import save_run
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fa_study.__main__ import main
from fa_study.compare.context import METRICS, context_chart, context_distances, context_sentences
from fa_study.compare.twin import one_ulp
from fa_study.snapshots import load_weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_twin_moves_by_one_unit_in_the_last_place(dtype):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(3000, generator=g, dtype=torch.float64) * torch.logspace(-3, 3, 3000, dtype=torch.float64)).to(
        dtype
    )
    twin = one_ulp(x)
    size = (twin.double() - x.double()).abs() / (x.double().abs() * torch.finfo(dtype).eps)
    assert twin.dtype == dtype
    # A unit in the last place is between eps / 2 and eps of a number's size.
    normal = x.double().abs() >= torch.finfo(dtype).tiny
    assert ((size == 0) | ((size > 0.49) & (size < 1.01)))[normal].all()
    assert 0.6 < (size > 0).double().mean() < 0.73
    assert ((twin > x).sum() - (twin < x).sum()).abs() < 300


def test_twin_keeps_what_has_no_neighbour():
    largest, tiny = torch.finfo(torch.float32).max, 1.401298464324817e-45
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, largest, tiny] * 50)
    twin = one_ulp(x)
    assert torch.equal(torch.signbit(twin), torch.signbit(x))
    for i in range(5):
        assert torch.equal(twin[i::7].isnan(), x[i::7].isnan())
        assert torch.equal(twin[i::7].nan_to_num(), x[i::7].nan_to_num())
    assert twin[5::7].isfinite().all() and (twin[6::7] > 0).all()
    whole = torch.arange(5)
    assert one_ulp(whole) is whole


def test_a_twin_of_any_layout_and_its_count(tmp_path, capsys):
    """channels_last weights, NaN that differs from itself, and dtypes that are not moved."""
    weights = {
        "conv": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "nan": torch.tensor([torch.nan, 1.0]),
    }
    torch.save(weights, tmp_path / "a.pt")
    assert main(["twin", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]) == 0
    twin = load_file(tmp_path / "b.safetensors")
    differ = {name: (twin[name].float() != x.float()) & ~x.float().isnan() for name, x in weights.items()}
    assert {name for name, where in differ.items() if where.any()} <= {"conv", "nan"}
    moved = sum(int(where.sum()) for where in differ.values())
    assert 0 < moved < 109 and f"{moved} of 119 values moved" in capsys.readouterr().out


def test_a_twin_that_would_be_none_or_cannot_be_written(tmp_path, monkeypatch, capsys):
    for name, tensor in (("whole", torch.arange(3)), ("zero", torch.zeros(3)), ("one", torch.ones(30))):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    out = tmp_path / "out.safetensors"
    for name in ("whole", "zero"):
        assert main(["twin", str(tmp_path / f"{name}.safetensors"), str(out)]) == 1
        assert "no value could be moved" in capsys.readouterr().err
    assert main(["twin", str(tmp_path / "one.safetensors"), str(tmp_path / "no" / "out.safetensors")]) == 1
    assert "there is no folder" in capsys.readouterr().err

    def full_disk(weights, path, metadata):
        path.write_bytes(b"half of it")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("fa_study.compare.twin.save_file", full_disk)
    assert main(["twin", str(tmp_path / "one.safetensors"), str(out)]) == 1
    assert "could not be written: I/O error: No space left" in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".*"))  # no half of it under another name either


def test_a_twin_given_twice_is_refused(tmp_path, capsys):
    for name in ("a", "b", "t"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    a, b, twin = (str(tmp_path / f"{name}.safetensors") for name in "abt")
    assert main(["compare", a, b, "--twins", twin, f"{tmp_path}/./t.safetensors"]) == 1
    assert "--twins names a run twice" in capsys.readouterr().err


def test_twin_is_reproducible_and_keeps_ties():
    x = torch.randn(100)
    assert torch.equal(one_ulp(x), one_ulp(x.clone()))
    assert not torch.equal(one_ulp(x, 1), one_ulp(x, 2))


@pytest.fixture
def runs(tmp_path):
    """A, B and three twins as series of two steps; B is moved `far` times as much as the twins."""

    def write(name, size, seed):
        (tmp_path / name).mkdir()
        for step in (10, 20):
            g = torch.Generator().manual_seed(seed)
            weight = torch.ones(50, 4) + step / 10 * size * torch.randn(50, 4, generator=g)
            save_file({"layer.weight": weight}, tmp_path / name / f"step-{step}.safetensors")
        return str(tmp_path / name / "*.safetensors")

    return write


def test_pair_within_its_twins_and_beyond(runs):
    a = runs("a", 0.0, 0)
    twins = [runs(f"twin{i}", 1e-3, i) for i in (1, 2, 3)]
    low = runs("low", 1e-2, 9)
    near, far = runs("near", 5e-4, 7), runs("far", 1e-2, 8)
    frame = context_distances(a, near, twins, [low])
    assert len(frame) == 2 * 5 and set(frame.step) == {10, 20}
    for sentence in context_sentences(frame):
        assert "at step 20" in sentence and "a perturbation would have given as much" in sentence
    beyond = context_distances(a, far, twins, [low])
    for sentence in context_sentences(beyond):
        assert "times the farthest of 3 twins of A" in sentence and "once in 4" in sentence
    row = beyond[(beyond.kind == "A against B") & (beyond.step == 20)].iloc[0]
    expected = (2e-2 * torch.randn(50, 4, generator=torch.Generator().manual_seed(8))).abs().max().item()
    assert row.max_difference == pytest.approx(expected, rel=1e-4)
    chart = context_chart(beyond).to_dict()
    assert len(chart["vconcat"]) == len(METRICS)


def test_commands(runs, tmp_path, capsys):
    a, b = runs("a", 0.0, 0), runs("b", 1e-2, 8)
    checkpoint, out = str(tmp_path / "b" / "step-20.safetensors"), tmp_path / "twin.safetensors"
    assert main(["twin", checkpoint, str(out)]) == 0
    assert "values moved by one unit in the last place" in capsys.readouterr().out
    moved = load_file(out)["layer.weight"] - load_file(checkpoint)["layer.weight"]
    assert 0 < moved.abs().max() <= 2.5e-7
    assert main(["twin", checkpoint, str(out)]) == 1
    assert "exists: remove it or name another file" in capsys.readouterr().err
    twins = [runs(f"twin{i}", 1e-3, i) for i in (1, 2)]
    chart = tmp_path / "c.html"
    assert main(["compare", a, b, "--twins", *twins, "--chart", str(chart)]) == 0
    assert "times the farthest of 2 twins of A" in capsys.readouterr().out
    assert "A against a twin" in chart.read_text()


@pytest.fixture
def files(tmp_path):
    """Writes checkpoints without a step in their names."""

    def write(name, weights):
        save_file(weights, tmp_path / f"{name}.safetensors")
        return str(tmp_path / f"{name}.safetensors")

    return write


@pytest.mark.parametrize("option", ["--twins", "--low-precision"])
@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_a_distance_of_zero_is_no_scale(files, option, moved, tmp_path, capsys):
    a, b = files("a", {"w": torch.ones(4)}), files("b", {"w": torch.ones(4) + moved})
    assert main(["compare", a, b, option, a, "--chart", str(tmp_path / "c.html")]) == 0
    out = capsys.readouterr().out
    assert f"Max Difference: {moved:.3g}" in out and out.count("no scale to read it by.") == 2


def test_no_step_in_the_words_where_there_is_none(files, tmp_path):
    a, b, twin = (files(name, {"w": torch.full((4,), x)}) for name, x in (("a", 1.0), ("b", 2.0), ("twin", 1.5)))
    frame = context_distances(a, b, [twin])
    assert frame.step.isna().all()
    chart = context_chart(frame).to_dict()
    words = [*context_sentences(frame), chart["usermeta"]["alt"]]
    assert len(words) == 3 and not any("step" in text for text in words)
    for panel in chart["vconcat"]:
        assert panel["encoding"]["x"]["axis"] is None
        assert [told["field"] for told in panel["encoding"]["tooltip"]][:2] == ["kind", "run"]
        assert len(panel["encoding"]["tooltip"]) == 3
    runs = [
        str(save_run(tmp_path / n, {s: {"w": torch.full((4,), s * k)} for s in (0, 7)}))
        for n, k in zip("xy", (1.0, 2.0))
    ]
    assert "at step 7" in context_sentences(context_distances(*runs, [runs[1]], step=7))[0]
    with pytest.raises(ValueError, match="the other has none"):
        context_distances(runs[0], b, [runs[1]])


def test_other_tensors_than_those_of_the_pair_are_named(files):
    a = files("a", {"w": torch.ones(4), "x": torch.ones(2), "y": torch.ones(3)})
    b = files("b", {"w": torch.ones(4) * 2, "x": torch.ones(2) * 2, "y": torch.ones(5)})
    twin = files("twin", {"w": torch.ones(4), "x": torch.ones(7), "y": torch.ones(3)})
    with pytest.warns(UserWarning) as warned:
        context_distances(a, b, [twin])
    texts = [str(w.message) for w in warned]
    assert len(texts) == 2 and "without x, unlike B" in texts[0] and "also with y, unlike B" in texts[1]


def test_nothing_to_pool_is_said(files):
    a, b = files("a", {"to_k.bias": torch.ones(2)}), files("b", {"to_k.bias": torch.ones(2)})
    with pytest.raises(ValueError, match="nothing to pool"):
        context_distances(a, b, [a])


def test_each_pair_is_compared_once(files, monkeypatch):
    opened = []
    monkeypatch.setattr(
        "fa_study.compare.trajectories.load_weights", lambda *s: opened.append(s[0]) or load_weights(*s)
    )
    a, b, twin = (files(name, {"w": torch.full((4,), x)}) for name, x in (("a", 1.0), ("b", 2.0), ("twin", 1.5)))
    assert main(["compare", a, b, "--twins", twin]) == 0
    assert opened == [a, b, a, twin]


def test_an_unknown_distance_is_within_nothing(files):
    a, b, twin = (files(n, {"w": torch.full((4,), x)}) for n, x in (("a", 1.0), ("b", 2.0), ("twin", torch.nan)))
    for one, other in ((b, twin), (twin, b)):
        for sentence in context_sentences(context_distances(a, one, [other])):
            assert "not to be read by 1 twin of A" in sentence and "would have given" not in sentence

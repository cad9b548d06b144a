"""Sets of weights: rows, groups, aggregates, tied and zero-gradient tensors; and the command that prints them."""

import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from checkpoints import KINDS, save_as, save_run, save_sharded, state_dict
from PIL import Image
from safetensors.torch import save_file

from fa_study.__main__ import main
from fa_study.distance import METRICS, tensor_distance, weight_distances
from fa_study.distance.metrics import COUNT_METRICS, REAL_METRICS
from fa_study.distance.wasserstein import sorted_wasserstein
from fa_study.names import ZERO_GRADIENT
from fa_study.snapshots import load_weights


def moved(weights: dict, by: float = 0.1, seed: int = 9) -> dict:
    """The weights with noise on every float of two bytes or more."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (w.double() + by * torch.randn(w.shape, generator=generator)).to(w.dtype)
        if w.is_floating_point() and w.element_size() > 1
        else w
        for name, w in weights.items()
    }


def rows(frame: pd.DataFrame, level: str, **where) -> pd.DataFrame:
    found = frame[frame.level == level]
    for column, value in where.items():
        found = found[found[column] == value]
    return found


def test_a_row_per_tensor_with_every_metric():
    a = state_dict()
    b = moved(a)
    frame = weight_distances(a, b)
    tensors = rows(frame, "tensor").set_index("name")
    assert list(tensors.index) == list(a)
    for name in a:
        if a[name].numel():
            for metric, value in tensor_distance(a[name], b[name]).items():
                assert tensors.loc[name, metric] == pytest.approx(value, rel=0, abs=0, nan_ok=True)
    assert tensors.loc["nothing", "numel"] == 0
    assert math.isnan(tensors.loc["nothing", "max_difference"])
    assert tensors.loc["head.fp8", "dtype_a"] == "float8_e4m3fn"
    assert list(tensors[tensors.zero_gradient].index) == ["blocks.0.to_k.bias"]
    assert tensors.loc["blocks.1.scale", "group"] == "blocks.1"


def test_the_three_averages_follow_their_definitions():
    generator = torch.Generator().manual_seed(0)
    a = {f"l.{i}.w": torch.randn(n, generator=generator) * (i + 1) for i, n in enumerate((10, 300, 50))}
    a |= {"l.0.to_k.bias": torch.zeros(5), "steps": torch.tensor(1), "zero": torch.zeros(4)}
    b = moved(a)
    b["l.0.to_k.bias"] = torch.full((5,), 1e6)
    b["steps"] = torch.tensor(1000)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = ({k: v.to(dtype) if v.is_floating_point() else v for k, v in side.items()} for side in (a, b))
        frame = weight_distances(a, b)
        model = rows(frame, "model").set_index("average")
        names = [name for name in a if name not in ("l.0.to_k.bias", "steps")]
        each = [tensor_distance(a[n], b[n]) for n in names]
        pooled = tensor_distance(torch.cat([a[n] for n in names]), torch.cat([b[n] for n in names]))
        assert set(model.numel) == {364}
        for metric in REAL_METRICS:
            known = [row for row in each if math.isfinite(row[metric])]
            values, sizes = [row[metric] for row in known], [row["numel"] for row in known]
            assert model.loc["mean", metric] == pytest.approx(np.mean(values), rel=1e-12)
            assert model.loc["weighted", metric] == pytest.approx(np.average(values, weights=sizes), rel=1e-12)
            assert model.loc["pooled", metric] == pytest.approx(pooled[metric], rel=1e-11)
        for metric in COUNT_METRICS:
            assert set(model[metric]) == {pooled[metric]}
        group = rows(frame, "group", name="l.1", average="pooled").iloc[0]
        assert group["wasserstein"] == pytest.approx(tensor_distance(a["l.1.w"], b["l.1.w"])["wasserstein"], rel=1e-12)


def test_pooled_values_of_several_formats_are_pooled_exactly():
    a = {
        "x": torch.randn(50).bfloat16(),
        "y": torch.randn(60).half(),
        "z": torch.randn(70),
        "w": torch.randn(5).double(),
    }
    for names in ("xy", "xz", "xyzw"):
        left = {n: a[n] for n in names}
        right = {n: (a[n].double() * 1.5 + 0.1).to(a[n].dtype) for n in names}
        pooled = rows(weight_distances(left, right), "model", average="pooled").iloc[0]
        expected = tensor_distance(*(torch.cat([v.double() for v in side.values()]) for side in (left, right)))
        assert pooled["wasserstein"] == pytest.approx(expected["wasserstein"], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("limit", [1, 700, 10**9])
def test_pooled_distance_is_exact_in_slices_of_any_size(monkeypatch, dtype, limit):
    monkeypatch.setattr("fa_study.distance.streamed.SLICE", limit)
    generator = torch.Generator().manual_seed(0)
    a = {f"w{i}": torch.randn(300, generator=generator, dtype=torch.float64).to(dtype) * 10.0**i for i in range(-3, 3)}
    a |= {"narrow": torch.randn(500, generator=generator).bfloat16(), "zero": torch.zeros(50, dtype=dtype)}
    b = {name: (w.double() * 1.1 + 0.01).to(w.dtype) for name, w in a.items()}
    top = torch.finfo(dtype).max
    a["edges"] = torch.tensor([math.nan, math.inf, -math.inf, top, -top, 0.0, -0.0, 1.0], dtype=dtype)
    b["edges"] = torch.tensor([1.0, 2.0, -math.inf, top / 2, -top, -1e-30, 3.0, 4.0], dtype=dtype)
    pooled = rows(weight_distances(a, b), "model", average="pooled").wasserstein.item()
    flat = [torch.cat([w.to(dtype) for w in side.values()]).numpy() for side in (a, b)]
    x, y = (np.sort(side[np.isfinite(side)]) for side in flat)
    assert len(x) != len(y)
    assert pooled == pytest.approx(sorted_wasserstein(x, y), rel=1e-12)


def test_results_do_not_depend_on_workers():
    a = state_dict()
    b = moved(a)
    pd.testing.assert_frame_equal(weight_distances(a, b, n_jobs=1), weight_distances(a, b, n_jobs=2))


def test_groups_by_pattern():
    a = {"attn.to_q": torch.ones(2), "attn.to_v": torch.ones(2), "mlp.up": torch.ones(3), "norm": torch.ones(1)}
    b = {name: w + 1 for name, w in a.items()}
    frame = weight_distances(a, b, groups={"attention": r"\.to_[qkv]$", "mlp": "^mlp"})
    assert rows(frame, "group", average="pooled").set_index("name").numel.to_dict() == {
        "attention": 4,
        "mlp": 3,
        "other": 1,
    }


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("down.attn1.to_k.bias", True),
        ("attn.add_k_proj.bias", True),
        ("layers.0.self_attn.k_proj.bias", True),
        ("bert.encoder.layer.0.attention.self.key.bias", True),
        ("attn.to_k.weight", False),
        ("attn.to_q.bias", False),
        ("block.bias", False),
        ("monkey_proj.bias", False),
        ("k_norm.bias", False),
    ],
)
def test_names_of_parameters_that_no_gradient_moves(name, zero):
    frame = weight_distances({name: torch.ones(2)}, {name: torch.zeros(2)})
    assert rows(frame, "tensor").zero_gradient.item() == zero
    assert len(rows(frame, "model")) == (0 if zero else 3)


def test_key_biases_really_have_a_zero_gradient():
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attention(x, x, x)[0].square().sum().backward()
    query, key, value = attention.in_proj_bias.grad.chunk(3)
    assert key.abs().max() < 1e-14
    assert min(query.abs().max(), value.abs().max()) > 1e-6
    assert "to_k" in ZERO_GRADIENT


def test_tied_weights_are_compared_once(tmp_path):
    shared = torch.randn(4, 3)
    tied = {"embed.weight": shared, "head.weight": shared, "other": torch.ones(2)}
    apart = {"embed.weight": shared + 1, "head.weight": shared + 2, "other": torch.ones(2)}
    single = {"embed.weight": shared + 1, "other": torch.ones(2)}
    both = {"embed.weight": shared * 2, "other": torch.ones(2)}
    both["head.weight"] = both["embed.weight"]
    for a, b in ((tied, both), (tied, single), (single, tied)):
        frame = weight_distances(a, b)
        tensors = rows(frame, "tensor").set_index("name")
        assert set(tensors.index) == {"embed.weight", "other"}
        assert tensors.loc["embed.weight", "tied"] == "head.weight"
        assert not len(rows(frame, "only_a")) and not len(rows(frame, "only_b"))
        assert set(rows(frame, "model").numel) == {14}
    assert set(rows(weight_distances(tied, apart), "tensor").name) == set(tied)
    paths = []
    for i, weights in enumerate((tied, both)):
        torch.save(weights, tmp_path / f"{i}.pt")
        paths.append(load_weights(tmp_path / f"{i}.pt"))
    assert set(rows(weight_distances(*paths), "tensor").name) == {"embed.weight", "other"}


def test_names_on_one_side_and_shapes_that_differ_are_listed_or_refused():
    a = {"w": torch.ones(2), "x": torch.ones(3), "left": torch.ones(1)}
    b = {"module.w": torch.ones(2), "x": torch.ones(4), "right": torch.ones(1)}
    frame = weight_distances(a, b)
    assert list(rows(frame, "only_a").name) == ["left"]
    assert list(rows(frame, "only_b").name) == ["right"]
    assert list(rows(frame, "shape_differs").name) == ["x"]
    assert set(rows(frame, "model").numel) == {2}
    with pytest.raises(ValueError, match="left is only in a; right is only in b"):
        weight_distances(a, b, strict=True)
    with pytest.raises(ValueError, match="x has another shape"):
        weight_distances({"x": a["x"]}, {"x": b["x"]}, strict=True)
    with pytest.raises(ValueError, match="no name in common"):
        weight_distances({"a": a["w"]}, {"b": a["w"]})
    with pytest.raises(ValueError, match="odd"):
        weight_distances({"odd": torch.eye(2).to_sparse()}, {"odd": torch.eye(2)})


# The command.


@pytest.fixture
def pair(tmp_path):
    a = state_dict()
    save_file(a, tmp_path / "a.safetensors")
    save_file(moved(a), tmp_path / "b.safetensors")
    return str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_any_two_checkpoints_compare(tmp_path, kind, capsys):
    a = state_dict()
    paths = [str(save_as(kind, tmp_path / "a", a)), str(save_as("safetensors", tmp_path / "b", moved(a)))]
    assert main(["compare", *paths, "--json", str(tmp_path / "o.json")]) == 0
    expected = weight_distances(a, moved(a))
    written = pd.DataFrame(json.loads((tmp_path / "o.json").read_text()))
    tensors = rows(written, "tensor").set_index("name").max_difference.astype(float)
    for row in rows(expected, "tensor").itertuples():
        assert tensors[row.name] == row.max_difference or math.isnan(row.max_difference)
    out = capsys.readouterr().out
    assert "blocks.0.to_q.weight" in out and "\\n[x]" in out and "Exact gradient zero" in out


def test_tables_are_written_whole_and_shown_largest_first(pair, tmp_path, capsys):
    csv, parquet = tmp_path / "o.csv", tmp_path / "o.parquet"
    assert main(["compare", *pair, "--top", "2", "--csv", str(csv), "--parquet", str(parquet)]) == 0
    expected = weight_distances(*map(load_weights, pair))
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), expected, check_dtype=False)
    assert pd.read_csv(csv)[list(METRICS)].equals(
        expected[list(METRICS)].astype(pd.read_csv(csv)[list(METRICS)].dtypes)
    )
    out = capsys.readouterr().out
    shown = [row.name for row in rows(expected, "tensor").itertuples() if row.name in out and not row.zero_gradient]
    largest = rows(expected, "tensor", zero_gradient=False).sort_values("max_difference", ascending=False).name[:2]
    assert set(shown) == set(largest)
    assert main(["compare", *pair, "--by", "layer"]) == 0
    out = capsys.readouterr().out
    assert "blocks.1" in out and "blocks.1.weight" not in out


def test_run_folders_give_the_trajectory_over_common_steps(tmp_path, capsys):
    weights = {"w": torch.zeros(8)}
    runs = [
        save_run(tmp_path / "one", {step: {"w": weights["w"] + step} for step in (0, 10, 20, 40)}),
        save_run(tmp_path / "two", {step: {"w": weights["w"] + 2 * step} for step in (0, 10, 20, 30)}),
    ]
    out = tmp_path / "o.csv"
    assert main(["compare", *map(str, runs), "--csv", str(out), "--fail-above", "max_difference=20"]) == 0
    frame = pd.read_csv(out)
    pooled = rows(frame, "model", average="pooled")
    assert dict(zip(pooled.step, pooled.max_difference)) == {0: 0, 10: 10, 20: 20}
    text = capsys.readouterr().out
    assert "steps of A only: 40" in text and "steps of B only: 30" in text
    assert main(["compare", *map(str, runs), "--fail-above", "max_difference=15"]) == 2
    assert "above max_difference=15: w at step 20 has 20" in capsys.readouterr().out
    assert main(["compare", *map(str, runs), "--step", "10", "--fail-above", "max_difference=15"]) == 0


def test_patterns_quoted_or_expanded_by_a_shell(tmp_path, capsys):
    for side, factor in (("A", 1), ("B", 3)):
        (tmp_path / side).mkdir()
        for step in (5, 100):
            torch.save({"w": torch.full((4,), float(step * factor))}, tmp_path / side / f"step-{step:06d}.pt")
    expanded = sorted(str(p) for p in tmp_path.glob("?/*.pt"))
    for sources in ([f"{tmp_path}/A/*.pt", f"{tmp_path}/B/*.pt"], expanded):
        out = tmp_path / "o.csv"
        assert main(["compare", *sources, "--csv", str(out)]) == 0
        pooled = rows(pd.read_csv(out), "model", average="pooled")
        assert dict(zip(pooled.step, pooled.max_difference)) == {5: 10, 100: 200}
    assert main(["compare", *expanded[:3]]) == 0
    assert "steps of A only" in capsys.readouterr().out
    assert main(["compare", f"{tmp_path}/A/*.pt", f"{tmp_path}/C/*.pt"]) == 1


def test_exit_codes(pair, tmp_path, capsys):
    a, b = pair
    assert main(["compare", a, b, "--fail-above", "max_difference=1e9", "--fail-above", "nan_b=0"]) == 0
    assert main(["compare", a, b, "--fail-above", "max_difference=1e-3"]) == 2
    assert main(["compare", a, a, "--fail-above", "max_difference=0", "--fail-above", "max_ulp=0"]) == 0
    assert main(["compare", a, str(tmp_path / "gone.pt")]) == 1
    assert "error: " in capsys.readouterr().err
    for usage in (
        [],
        ["compare"],
        ["unknown", a, b],
        ["compare", a, b, "--by", "x"],
        ["compare", a, b, "--fail-above", "max_difference"],
        ["compare", a, b, "--fail-above", "speed=3"],
        ["compare", a, b, "--chart", "x.pdf"],
        ["compare", a, b, "--top", "0"],
        ["compare", a, b, "--workers", "0"],
        ["compare", a, b, "--zero-gradient", "("],
    ):
        with pytest.raises(SystemExit) as stop:
            main(usage)
        assert stop.value.code == 1, usage
        assert "error: " in capsys.readouterr().err
    assert main(["compare", a]) == 1
    assert main(["compare", a, b, "--workers", "1", "--zero-gradient", "^blocks"]) == 0


@pytest.mark.parametrize("option", ["csv", "parquet", "json", "chart"])
def test_a_place_that_cannot_be_written_is_refused_before_the_comparison(pair, tmp_path, option, capsys):
    for path, words in ((tmp_path / "no" / "o.svg", "there is no folder"), (tmp_path / "o.svg", "is a folder")):
        (tmp_path / "o.svg").mkdir(exist_ok=True)
        assert main(["compare", *pair, f"--{option}", str(path)]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and f"--{option} {path}" in printed.err and words in printed.err


def test_a_nan_never_passes_a_threshold(tmp_path):
    torch.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "a.pt")
    torch.save({"w": torch.tensor([1.0, math.nan])}, tmp_path / "b.pt")
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    assert main(["compare", a, b, "--fail-above", "max_difference=1"]) == 2
    assert main(["compare", b, b, "--fail-above", "max_difference=1"]) == 0


def test_ulps_of_unlike_dtypes_are_unknown_and_never_pass(tmp_path):
    for name, tensor in (("a", torch.ones(2)), ("b", torch.ones(2).bfloat16()), ("c", torch.full((2,), 3.0).half())):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    a, b, c = (str(tmp_path / f"{name}.safetensors") for name in "abc")
    assert main(["compare", a, b, "--fail-above", "max_ulp=9"]) == 0  # the same values
    assert main(["compare", a, c, "--fail-above", "max_ulp=9"]) == 2


def test_thresholds_that_judge_nothing_are_an_error(tmp_path, capsys):
    for name, size in (("a", 2), ("b", 3), ("c", 0)):
        save_file({"w": torch.ones(size)}, tmp_path / f"{name}.safetensors")
    a, b, c = (str(tmp_path / f"{name}.safetensors") for name in "abc")
    for files in ([a, b], [c, c]):
        assert main(["compare", *files]) == 0
        assert main(["compare", *files, "--fail-above", "max_difference=0"]) == 1
        assert "--fail-above judges nothing" in capsys.readouterr().err


def test_a_step_that_nothing_has_is_an_error(pair, capsys):
    assert main(["compare", *pair, "--step", "5"]) == 1
    assert "--step 5 chooses a snapshot of a run folder, and no source is one" in capsys.readouterr().err


def test_strict(tmp_path):
    torch.save({"w": torch.ones(2), "x": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pt")
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    assert main(["compare", a, b]) == 0
    assert main(["compare", a, b, "--strict"]) == 1


def test_charts_of_one_pair_and_of_a_series(pair, tmp_path):
    runs = [
        str(save_run(tmp_path / name, {s: {"w": torch.ones(8) * s * k} for s in (0, 10, 20)}))
        for name, k in (("one", 1), ("two", 2))
    ]
    for sources, path in ((pair, tmp_path / "x.html"), (pair, tmp_path / "x.svg"), (runs, tmp_path / "y.png")):
        assert main(["compare", *sources, "--chart", str(path)]) == 0
    assert main(["compare", pair[0], pair[0], "--chart", str(tmp_path / "z.svg")]) == 0
    assert "No difference" in (tmp_path / "z.svg").read_text()
    html, svg = ((tmp_path / name).read_text() for name in ("x.html", "x.svg"))
    assert 'src="http' not in html and "vegaEmbed" in html
    assert all(text in svg for text in ("Wasserstein distance", "blocks.1", "head"))
    picture = np.asarray(Image.open(tmp_path / "y.png").convert("RGB"))
    colours = {tuple(c) for c in picture.reshape(-1, 3)}
    assert len(colours) > 20  # two lines, not an empty frame


@pytest.mark.slow
def test_two_gigabytes_are_compared_within_one(tmp_path):
    """A sharded checkpoint of 2 GB a side, by a process that may hold 1 GB more than its interpreter."""
    values = torch.randn(16 * 2**20, generator=torch.Generator().manual_seed(0))
    for side, factor in (("a", 1.0), ("b", 1.01)):
        (tmp_path / side).mkdir()
        for shard in range(8):
            part = {f"l.{shard}.{i}": values * (factor + i + shard) for i in range(4)}
            save_file(part, tmp_path / side / f"s{shard}.safetensors")
    program = (
        "import resource, sys; import fa_study.compare.command; from fa_study.__main__ import main;"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30));"
        f"sys.exit(main(['compare', '{tmp_path}/a', '{tmp_path}/b', '--workers', '2']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "536,870,912" in result.stdout


def test_a_sharded_checkpoint_of_many_tensors(tmp_path):
    a = {f"layers.{i}.w": torch.full((5,), float(i)) for i in range(200)}
    index = save_sharded(tmp_path / "a", a, shards=7)
    other = save_sharded(tmp_path / "b", {name: w + 1 for name, w in a.items()}, shards=3)
    frame = weight_distances(load_weights(index), load_weights(other))
    assert list(rows(frame, "model").max_difference) == [1, 1, 1]
    assert len(rows(frame, "tensor")) == 200


def test_a_tensor_that_was_all_zero_is_shown(tmp_path, capsys):
    """Its relative L2 distance is infinite: biases that training has moved away from zero."""
    save_file({"w": torch.ones(4), "bias": torch.zeros(4)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(4), "bias": torch.ones(4)}, tmp_path / "b.safetensors")
    assert main(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 0
    assert "inf" in capsys.readouterr().out

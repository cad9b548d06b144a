"""Stored tables: what is written is read back to the bit, and nothing else is ever read."""

import json
import subprocess

import pandas as pd
import pytest

from fa_study import tables


@pytest.fixture
def frame():
    return pd.DataFrame({"step": [0, 100], "value": [0.1 + 0.2, 1.234567890123456e-17], "name": ["a", "b"]})


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
def test_a_table_comes_back_to_the_bit(frame, name, tmp_path):
    tables.write_table(frame, name, command="make tables", folder=tmp_path, seeds=[1, 2])
    pd.testing.assert_frame_equal(tables.read_table(name, tmp_path), frame, check_exact=True)
    entry = json.loads((tmp_path / "manifest.json").read_text())[name]
    assert entry["command"] == "make tables" and entry["seeds"] == [1, 2] and entry["rows"] == 2
    assert {"sha256", "commit", "machine", "threads", "date", "torch"} <= set(entry)
    assert "make tables" in tables.source_line(name, tmp_path)
    tables.write_table(frame, name, command="make study", folder=tmp_path, run_devices=["a CPU", "another"])
    assert "a CPU and another, " in tables.source_line(name, tmp_path)


def test_a_changed_table_is_refused_by_name(frame, tmp_path):
    path = tables.write_table(frame, "x.csv", command="make tables", folder=tmp_path)
    path.write_text(path.read_text().replace("100", "101"))
    with pytest.raises(ValueError, match=r"x\.csv differs from the sha256 in the manifest"):
        tables.read_table("x.csv", tmp_path)


def test_missing_and_unknown_tables_are_told_apart(frame, tmp_path):
    tables.write_table(frame, "x.csv", command="make tables", folder=tmp_path).unlink()
    with pytest.raises(ValueError, match=r"x\.csv is missing"):
        tables.read_table("x.csv", tmp_path)
    with pytest.raises(ValueError, match=r"y\.csv is not in"):
        tables.read_table("y.csv", tmp_path)
    with pytest.raises(ValueError, match=r"ends in \.csv or \.parquet"):
        tables.write_table(frame, "x.xlsx", command="", folder=tmp_path)


def test_a_second_table_keeps_the_first_entry(frame, tmp_path):
    tables.write_table(frame, "x.csv", command="one", folder=tmp_path)
    tables.write_table(frame, "y.csv", command="two", folder=tmp_path)
    assert list(tables.read_manifest(tmp_path)) == ["x.csv", "y.csv"]
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".csv", ".json", ".lock")]


def test_the_manifest_as_a_table(frame, tmp_path):
    tables.write_table(frame, "b.csv", command="second", folder=tmp_path, seconds=60)
    tables.write_table(frame, "a.csv", command="first", folder=tmp_path, note="timed nothing")
    shown = tables.manifest_table(tmp_path)
    assert shown[["table", "command", "rows"]].to_numpy().tolist() == [["a.csv", "first", 2], ["b.csv", "second", 2]]
    assert shown["seconds"].isna().tolist() == [True, False]


def test_the_commit_is_unclean_through_code_and_not_through_tables(tmp_path, monkeypatch):
    (tmp_path / "notebooks/data").mkdir(parents=True)
    for name in ("code.py", "notebooks/data/x.csv"):
        (tmp_path / name).write_text("old")
    who = ("-c", "user.name=a", "-c", "user.email=b")
    for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "notebooks/data/x.csv").write_text("new")
    clean = tables.commit()
    assert len(clean) == 12
    (tmp_path / "code.py").write_text("new")
    assert tables.commit() == clean + "-dirty"
    monkeypatch.setattr(tables, "ROOT", tmp_path / "elsewhere")
    assert tables.commit() == "unknown"


def test_every_committed_table_matches_its_manifest():
    for name in tables.read_manifest():
        assert len(tables.read_table(name)) > 0

"""Training on one's own pictures: what is read, what is left out and named, what is refused."""

import json

import pytest
import torch
from PIL import Image
from tiny_runs import compose_settings, train_here

from train import Refusal
from train.picture_folder import load_folder, read_metadata
from train.settings import check_settings

COLOURS = ("red", "green", "blue", "black", "white")


@pytest.fixture
def pictures(tmp_path):
    """Five pictures of one colour each, 40 x 20, with their colours as captions."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    lines = []
    for colour in COLOURS:
        Image.new("RGB", (40, 20), colour).save(folder / f"{colour}.png")
        lines.append(json.dumps({"file_name": f"{colour}.png", "text": f"all {colour}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FA_STUDY_CACHE", str(tmp_path / "cache"))


def test_pictures_keep_their_captions_and_one_is_held_out(pictures):
    data = load_folder(pictures, 16)
    assert len(data.captions) == 4 and len(data.held_out_captions) == 1
    assert sorted(data.captions + data.held_out_captions) == sorted(f"all {colour}" for colour in COLOURS)
    both = zip([*data.pictures, *data.held_out_pictures], data.captions + data.held_out_captions)
    colours = {caption: picture.reshape(3, -1).unique(dim=1).flatten().tolist() for picture, caption in both}
    assert colours["all red"] == [255, 0, 0] and colours["all blue"] == [0, 0, 255]


def test_unreadable_pictures_are_counted_and_named_not_fatal(pictures, capsys):
    (pictures / "blue.png").write_bytes((pictures / "blue.png").read_bytes()[:60])
    (pictures / "red.png").write_text("no picture")
    data = load_folder(pictures, 16)
    assert sorted(data.unreadable) == ["blue.png", "red.png"]
    assert len(data.captions) + len(data.held_out_captions) == 3
    assert "2 of 5 pictures cannot be read: " in capsys.readouterr().out


def test_only_unreadable_pictures_are_refused(pictures):
    for colour in COLOURS:
        (pictures / f"{colour}.png").write_text("no picture")
    with pytest.raises(Refusal, match="has 0 readable pictures of 5"):
        load_folder(pictures, 16)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"file_name": "red.png", "text": ', "line 6 is no JSON"),
        ('{"file_name": "red.png"}', 'line 6 needs the texts "file_name" and "text"'),
        ('["red.png", "red"]', 'line 6 needs the texts "file_name" and "text"'),
        ('{"file_name": "pink.png", "text": "pink"}', "line 6 names pink.png, which is not there"),
    ],
)
def test_a_broken_line_is_named_with_its_number(pictures, line, message):
    with open(pictures / "metadata.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(Refusal, match=message):
        load_folder(pictures, 16)


def test_missing_metadata_and_missing_path_are_refused(tmp_path):
    with pytest.raises(Refusal, match=r"there is no .*metadata\.jsonl; write a line"):
        read_metadata(tmp_path / "metadata.jsonl")
    with pytest.raises(Refusal, match="data=folder needs a folder"):
        check_settings(compose_settings("data=folder"))


def test_a_run_on_a_folder_records_what_it_left_out(pictures, tmp_path):
    (pictures / "red.png").write_text("no picture")
    words = ("data=folder", "data.pixels=16", f"data.path={pictures}", "steps=1")
    folder = train_here(tmp_path / "runs", *words)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["unreadable_pictures"] == ["red.png"] and manifest["state"] == "finished"
    assert folder.name.startswith("baseline-fp32-dit-s0-folder-") and "/" not in folder.name


def test_the_order_of_pictures_does_not_depend_on_the_file_system(pictures):
    first = load_folder(pictures, 16)
    (pictures / "red.png").rename(pictures / "tmp.png")
    (pictures / "tmp.png").rename(pictures / "red.png")
    assert load_folder(pictures, 16).sha256() == first.sha256()
    assert torch.equal(load_folder(pictures, 16).pictures, first.pictures)

"""Training on one's own pictures: what is read, what is left out and named, what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import compose_settings, train_here

from train import Refusal
from train.picture_folder import load_folder, read_metadata, square
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
        ('{"file_name": "red.png", "text": "\\ud83d"}', "line 6 has half of a surrogate pair"),
        ("[" * 100_000, "line 6 is no JSON"),
    ],
)
def test_a_broken_line_is_named_with_its_number(pictures, line, message):
    with open(pictures / "metadata.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(Refusal, match=message):
        load_folder(pictures, 16)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_refused_and_a_mark_of_this_one_is_not(pictures, encoding):
    text = json.dumps({"file_name": "red.png", "text": "café"}, ensure_ascii=False)
    (pictures / "metadata.jsonl").write_text(text, encoding="utf-8-sig")
    assert read_metadata(pictures / "metadata.jsonl") == [("red.png", "café")]
    (pictures / "metadata.jsonl").write_text(text, encoding=encoding)
    with pytest.raises(Refusal, match="is not in UTF-8"):
        read_metadata(pictures / "metadata.jsonl")


def test_names_of_pictures_and_folders_and_further_columns_mean_nothing(tmp_path):
    """What the imagefolder loader takes for splits, patterns, columns of one type and ends of lines."""
    folder, lines = tmp_path / "pictures [1]", []
    names = ("test.png", "train/a.png", "val-1.png", "[x]*.png", "a.png", "a.png", "none", "b.heic")
    captions = ("a\u2028b", "a\x85b", "", "word " * 10_000, "one", "two", "日本 😀", " ")
    for number, (name, caption) in enumerate(zip(names, captions, strict=True)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), "red").save(folder / name, "PNG")
        line = {"file_name": name, "text": caption, "score": number if number % 2 else "high"}
        lines.append(json.dumps(line, ensure_ascii=False))
    (folder / "metadata.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    (folder / "train" / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "of another set"}\n')
    data = load_folder(folder, 16)
    assert tuple(data.captions + data.held_out_captions) == captions and not data.unreadable


def test_pictures_of_every_kind_have_their_own_colours(tmp_path):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    assert square(Image.fromarray(ramp), 16)[0].tolist() == (ramp >> 8).tolist()
    blue = Image.new("RGB", (20, 20), (0, 0, 255))
    for mode in ("CMYK", "YCbCr", "P", "PA", "RGBA"):
        error = square(blue.convert(mode), 16).float() - torch.tensor([0.0, 0.0, 255.0])[:, None, None]
        assert error.abs().max() <= 3, mode
    assert (square(Image.new("RGBA", (20, 20), (255, 0, 0, 0)), 16) == 255).all()
    turned, orientation = Image.new("RGB", (20, 20), "blue"), Image.Exif()
    turned.paste("red", (0, 0, 20, 10))  # the upper half, which orientation 6 puts to the right
    orientation[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=orientation)
    with Image.open(tmp_path / "turned.png") as picture:
        assert square(picture, 16)[:, 8, [0, -1]].T.tolist() == [[0, 0, 255], [255, 0, 0]]
    for mode in ("I", "F"):
        with pytest.raises(ValueError, match="32 bits"):
            square(Image.new(mode, (20, 20)), 16)


def test_a_picture_too_large_to_be_one_is_left_out(pictures, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("RGB", (5, 5), "red").save(pictures / "red.png")
    Image.new("RGB", (5, 5), "blue").save(pictures / "blue.png")
    assert load_folder(pictures, 16).unreadable == ["green.png", "black.png", "white.png"]


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


def test_a_run_goes_on_with_the_pictures_it_began_with_or_not_at_all(pictures, tmp_path):
    words = ("data=folder", "data.pixels=16", f"data.path={pictures}", "snapshots.every=1")
    short = train_here(tmp_path / "runs", *words, "steps=1")
    Image.new("RGB", (40, 20), "yellow").save(pictures / "red.png")
    for _ in range(2):  # and again, now that its folder is there
        with pytest.raises(Refusal, match="not those that the run began with"):
            train_here(tmp_path / "runs", *words, "steps=2", f"continue_from={short}")
    Image.new("RGB", (40, 20), "red").save(pictures / "red.png")
    longer = train_here(tmp_path / "runs", *words, "steps=2", f"continue_from={short}")
    assert json.loads((longer / "manifest.json").read_text())["state"] == "finished"


def test_the_order_of_pictures_does_not_depend_on_the_file_system(pictures):
    first = load_folder(pictures, 16)
    (pictures / "red.png").rename(pictures / "tmp.png")
    (pictures / "tmp.png").rename(pictures / "red.png")
    assert load_folder(pictures, 16).sha256() == first.sha256()
    assert torch.equal(load_folder(pictures, 16).pictures, first.pictures)

"""A folder of pictures beside a metadata.jsonl, read through the imagefolder loader of Hugging Face's datasets."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train import Refusal
from train.captions import CaptionTokenizer, train_tokenizer
from train.data import HELD_OUT, CaptionedPictures, cache_folder


def read_metadata(path: Path) -> dict[str, str]:
    """File name -> caption of a metadata.jsonl.

    Raises
    ------
    Refusal
        If the file is missing or empty, a line of it is broken, or a picture it names is not there, with the line.
    """
    if not path.is_file():
        raise Refusal(f'there is no {path}; write a line {{"file_name": "a.png", "text": "a caption"}} per picture')
    captions: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise Refusal(f"{path} line {number} is no JSON ({error.msg}); mend or remove the line") from error
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("file_name", "text")):
            raise Refusal(f'{path} line {number} needs the texts "file_name" and "text"; mend or remove the line')
        if not (path.parent / entry["file_name"]).is_file():
            raise Refusal(f"{path} line {number} names {entry['file_name']}, which is not there; remove the line")
        captions[entry["file_name"]] = entry["text"]
    if not captions:
        raise Refusal(f"{path} has no line; write one per picture")
    return captions


def square(picture, pixels: int) -> Tensor:
    """The middle square of a PIL picture, scaled, on white: (3, pixels, pixels) bytes."""
    from PIL import Image, ImageOps

    rgba = picture.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    scaled = ImageOps.fit(Image.alpha_composite(white, rgba).convert("RGB"), (pixels, pixels), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(scaled).transpose(2, 0, 1).copy())


def load_folder(folder: Path, pixels: int) -> CaptionedPictures:
    """The readable pictures of a folder; a tenth of them, at most eight, is held out. Unreadable ones are named.

    Raises
    ------
    Refusal
        If metadata.jsonl is broken (see `read_metadata`), or fewer than two pictures can be read.
    """
    import datasets
    from PIL import Image

    wanted = read_metadata(folder / "metadata.jsonl")
    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "imagefolder", data_dir=str(folder), split="train", cache_dir=str(cache_folder() / "datasets")
    ).cast_column("image", datasets.Image(decode=False))
    pictures, captions, unreadable = [], [], []
    for row in rows:
        path = Path(row["image"]["path"])
        try:
            pictures.append(square(Image.open(io.BytesIO(row["image"]["bytes"] or path.read_bytes())), pixels))
            captions.append(row["text"])
        except (OSError, ValueError):  # PIL's errors for what is no picture, or only half of one
            unreadable.append(path.name)
    if unreadable:
        print(f"{len(unreadable)} of {len(wanted)} pictures cannot be read: {', '.join(unreadable)}", flush=True)
    if len(pictures) < 2:
        raise Refusal(f"{folder} has {len(pictures)} readable pictures of {len(wanted)}; give at least 2")
    held_out = max(1, min(HELD_OUT, len(pictures) // 10))
    tokenizer = CaptionTokenizer(train_tokenizer(captions[:-held_out]))
    return CaptionedPictures(
        torch.stack(pictures[:-held_out]),
        captions[:-held_out],
        tokenizer,
        torch.stack(pictures[-held_out:]),
        captions[-held_out:],
        unreadable,
    )

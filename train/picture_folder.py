"""A folder of pictures beside a metadata.jsonl, laid out as for the imagefolder loader of Hugging Face's datasets.

The lines of metadata.jsonl are read here: that loader takes pictures called test.png for another split and leaves out
the others, wants every further column of one type, and fails at brackets in a folder's name.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train import Refusal
from train.batches import HELD_OUT, CaptionedPictures
from train.captions import CaptionTokenizer, train_tokenizer


def read_metadata(path: Path) -> list[tuple[str, str]]:
    """(file name, caption) for each line of a metadata.jsonl.

    Raises
    ------
    Refusal
        If the file is missing, empty or not in UTF-8, a line of it is broken, or a picture it names is not there, with
        the line.
    """
    if not path.is_file():
        raise Refusal(f'there is no {path}; write a line {{"file_name": "a.png", "text": "a caption"}} per picture')
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(
            f"{path} is not in UTF-8 (byte {error.start}: {error.reason}); save it in that encoding"
        ) from error
    captions = []
    # Not splitlines: a caption may hold the separators that Unicode has besides "\n".
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deep")
            raise Refusal(f"{path} line {number} is no JSON ({reason}); mend or remove the line") from error
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("file_name", "text")):
            raise Refusal(f'{path} line {number} needs the texts "file_name" and "text"; mend or remove the line')
        name, caption = entry["file_name"], entry["text"]
        if any("\ud800" <= sign <= "\udfff" for sign in name + caption):
            raise Refusal(
                f"{path} line {number} has half of a surrogate pair, which is no text; mend or remove the line"
            )
        if not (path.parent / name).is_file():
            raise Refusal(f"{path} line {number} names {name}, which is not there; remove the line")
        captions.append((name, caption))
    if not captions:
        raise Refusal(f"{path} has no line; write one per picture")
    return captions


def square(picture, pixels: int) -> Tensor:
    """The middle square of a PIL picture, upright, scaled, on white: (3, pixels, pixels) bytes.

    ValueError for 32 bits a value, of which no picture says what is white.
    """
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(picture)  # cameras write down how they were held
    if picture.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {picture.mode})")
    if picture.mode.startswith("I;16"):  # PIL itself would cut every value at 255
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
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
    from PIL import Image

    wanted = read_metadata(folder / "metadata.jsonl")
    pictures, captions, unreadable = [], [], []
    for name, caption in wanted:
        try:
            with Image.open(folder / name) as picture:
                pictures.append(square(picture, pixels))
            captions.append(caption)
        except Exception:  # what PIL raises for no picture, for half of one or for one too large, has many types
            unreadable.append(name)
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

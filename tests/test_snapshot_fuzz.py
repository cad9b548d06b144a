"""A thousand damaged files: each is refused in words, or gives what the file now says; never a crash, never a hang."""

import io
import shutil
import warnings

import numpy as np
import pytest
import torch
from checkpoints import same, save_as, state_dict
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from fa_study.snapshots import load_weights

ROUNDS = {"safetensors": 300, "torch": 250, "legacy": 250, "distributed": 200}


def damage(content: bytes, random: np.random.Generator) -> bytes:
    """One to three bytes flipped, or the end cut off, or a piece taken out."""
    kind = random.integers(10)
    if kind == 0:
        return content[: random.integers(len(content))]
    if kind == 1:
        start = random.integers(len(content))
        return content[:start] + content[start + random.integers(1, 9) :]
    changed = bytearray(content)
    # Half of the flips fall on the first 600 bytes, where headers and pickles are.
    for _ in range(random.integers(1, 4)):
        place = random.integers(min(600, len(changed)) if random.integers(2) else len(changed))
        changed[place] ^= random.integers(1, 256)
    return bytes(changed)


def oracle(kind: str, content: bytes, intact: dict) -> dict | None:
    """What the damaged file holds according to the format's own reader; None if that refuses it."""
    if kind == "safetensors":
        try:
            return load_safetensors(content)
        except (SafetensorError, KeyError, RuntimeError, UnicodeDecodeError, ValueError):
            return None
    if kind == "legacy":  # has no checksums: a damaged value is a value
        try:
            return torch.load(io.BytesIO(content), weights_only=True)
        except Exception:
            return None
    return intact


@pytest.mark.parametrize("kind", ROUNDS)
def test_damaged_files_give_an_error_or_the_right_answer(tmp_path, kind):
    intact = state_dict()
    source = save_as(kind, tmp_path, intact)
    targets = [source] if source.is_file() else sorted(p for p in source.iterdir())
    contents = {path: path.read_bytes() for path in targets}
    random = np.random.default_rng(0)
    outcomes = {"refused": 0, "right": 0}
    for _ in range(ROUNDS[kind]):
        target = targets[random.integers(len(targets))]
        changed = damage(contents[target], random)
        target.write_bytes(changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = dict(load_weights(source).items())
        except ValueError as error:
            assert str(tmp_path) in str(error)
            outcomes["refused"] += 1
        else:
            expected = oracle(kind, changed, intact)
            assert expected is not None or kind == "legacy", "read what the format's own reader refuses"
            if expected is not None:
                for name, tensor in found.items():
                    # A part of the pickle that is no tensor may have lost its name or its type, the values may not.
                    assert name in expected and same(tensor, expected[name]), name
            outcomes["right"] += 1
        target.write_bytes(contents[target])
    assert outcomes["refused"] > ROUNDS[kind] / 10
    assert all(same(load_weights(source)[name], tensor) for name, tensor in intact.items())
    shutil.rmtree(tmp_path)

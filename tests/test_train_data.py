"""The emoji set, its captions as tokens, and batches that depend on (data_seed, step) alone."""

import concurrent.futures
import multiprocessing

import pytest
import torch
from tiny_runs import TINY, compose_settings

from train.batches import CaptionedPictures
from train.data import cache_folder, emoji_name, load_emoji
from train.module import TextToImage
from train.precision import precision_plugin


@pytest.fixture(scope="module")
def emoji16():
    return load_emoji(16)


def test_pictures_have_names_and_no_skin_tones(emoji16):
    assert emoji16.pictures.shape == (len(emoji16.captions), 3, 16, 16)
    assert 1900 <= len(emoji16.captions) <= 2100
    assert len(set(emoji16.captions)) == len(emoji16.captions)
    assert not any("skin tone" in caption for caption in emoji16.captions)
    assert emoji16.pictures.float().std(dim=(1, 2, 3)).min() > 0  # none is blank


@pytest.mark.parametrize(
    ("stem", "name"), [("2764", "red heart"), ("1F431", "cat face"), ("1F1EE-1F1F9", "Italy"), ("E000", None)]
)
def test_names_of_code_points(stem, name):
    assert emoji_name(stem) == name


def test_the_picture_belongs_to_its_caption(emoji16):
    red = emoji16.pictures[emoji16.captions.index("red circle")].float()
    blue = emoji16.pictures[emoji16.captions.index("blue circle")].float()
    assert red[0, 8, 8] > red[2, 8, 8] + 100
    assert blue[2, 8, 8] > blue[0, 8, 8] + 50


def test_tokens_round_trip_and_fit(emoji16):
    tokenizer = emoji16.tokenizer
    tokens = tokenizer(["smiling cat", ""])
    assert tokens.shape == (2, tokenizer.length)
    assert tokenizer.decode(tokens[0]) == "smiling cat"
    assert tokens[1].tolist() == [tokenizer.bos, tokenizer.eos] + [tokenizer.pad] * (tokenizer.length - 2)
    long = tokenizer(["word " * 50])[0]
    assert long[0] == tokenizer.bos and long[-1] == tokenizer.eos
    assert tokenizer.decode(tokenizer(["São Tomé ✓"])[0]) == "são tomé ✓"  # letters unseen in training survive


def test_batch_depends_on_data_seed_and_step_alone(emoji16):
    combinations = [
        ("attn=flash", "precision=bf16", "seed=0"),
        ("attn=baseline", "precision=fp32", "seed=5"),
        ("attn=baseline", "precision=fp32", "seed=0", "model=unet"),
    ]
    batches = []
    for overrides in combinations:
        settings = compose_settings(*TINY, "device=cpu", *overrides)
        module = TextToImage(settings, emoji16)
        torch.randn(3)  # the global random state must not matter
        module.batch(3)
        batches.append(module.batch(7))
    for other in batches[1:]:
        assert all(torch.equal(a, b) for a, b in zip(batches[0], other))


@pytest.mark.parametrize("precision", ["fp64", "bf16_true", "bf16", "fp16_emulated"])
def test_batch_is_the_same_inside_every_precision(emoji16, precision):
    plain = [*emoji16.batch(0, 7, 8, 0.1), *emoji16.held_out]
    with precision_plugin(precision, "cpu").forward_context():
        inside = [*emoji16.batch(0, 7, 8, 0.1), *CaptionedPictures.held_out.func(emoji16)]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, inside))


@pytest.mark.parametrize(("data_seed", "step"), [(0, 8), (1, 7), (7, 0)])
def test_batches_of_other_steps_and_seeds_differ(emoji16, data_seed, step):
    a, b = emoji16.batch(0, 7, 8, 0.1), emoji16.batch(data_seed, step, 8, 0.1)
    assert not torch.equal(a.noise, b.noise)
    assert not torch.equal(a.indices, b.indices)


def test_captions_are_dropped_at_the_asked_rate(emoji16):
    empty = emoji16.tokenizer([""])[0]
    tokens = torch.cat([emoji16.batch(0, step, 100, 0.1).tokens for step in range(20)])
    rate = (tokens == empty).all(1).float().mean()
    assert 0.07 < rate < 0.13
    assert not (emoji16.batch(0, 0, 500, 0.0).tokens == empty).all(1).any()


def _load_into(folder: str) -> str:
    import os

    os.environ["FA_STUDY_CACHE"] = folder
    return load_emoji(16).sha256()


def test_two_processes_may_fill_the_cache_at_once(tmp_path, emoji16):
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        hashes = set(pool.map(_load_into, [str(tmp_path)] * 2))
    assert hashes == {emoji16.sha256()}
    assert len(list(tmp_path.iterdir())) == 1  # no temporary file is left


def test_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("FA_STUDY_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path

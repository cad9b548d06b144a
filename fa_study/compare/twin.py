"""Write a twin of a checkpoint: every weight moved by at most one unit in the last place.

  python -m fa_study twin CHECKPOINT OUT.safetensors
  python -m fa_study twin CHECKPOINT OUT.safetensors --seed 2        another twin

Train on from the checkpoint and from its twins, and `compare A B --twins TWIN...` says whether A and B differ by more
than any perturbation would have given. Exit codes: 0 written, 1 user error.
"""

from __future__ import annotations

import argparse
import os
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fa_study.snapshots import load_weights

_CODES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def one_ulp(x: Tensor, seed: int = 1) -> Tensor:
    """`x` with a third of its values moved up, a third down by one unit in the last place, and a third kept.

    Zeros, infinities and NaN stay, and no value becomes one of them; tensors of integers are returned as they are.
    Equal tensors get equal twins, so that tied weights stay tied.

    Parameters
    ----------
    x : Tensor of any shape and dtype; floats of 16, 32 or 64 bits are moved.
    seed : another seed gives another twin.
    """
    if not x.is_floating_point() or x.element_size() not in _CODES:
        return x
    codes = x.detach().cpu().contiguous().view(_CODES[x.element_size()])
    # From the content, so that tied weights move alike; of a seed PyTorch's generator uses 32 bits.
    generator = torch.Generator().manual_seed(zlib.crc32(codes.numpy().tobytes(), seed))
    # The codes of floats of one sign are in order: the next code is the next float, away from zero.
    moved = codes + torch.randint(-1, 2, codes.shape, generator=generator).to(codes.dtype)
    twin = moved.view(x.dtype)
    keep = (x.cpu() == 0) | ~x.cpu().isfinite() | (twin == 0) | ~twin.isfinite()
    return torch.where(keep, x.cpu(), twin)


def _moved(x: Tensor, twin: Tensor) -> int:
    """How many values have other bits; NaN differs from itself, its bits do not."""
    if twin.element_size() not in _CODES or not twin.is_floating_point():
        return 0
    codes = _CODES[twin.element_size()]
    return int((x.contiguous().view(codes) != twin.view(codes)).sum())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", help="anything that `compare` opens")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="the file to write")
    parser.add_argument("--step", type=int, help="the snapshot of a run folder (default: the last)")
    parser.add_argument("--seed", type=int, default=1, help="which twin (default 1)")


def run(args: argparse.Namespace) -> int:
    """Read, move, write; returns the exit code."""
    if args.out.suffix != ".safetensors":
        raise ValueError(f"{args.out}: a twin is written as .safetensors, name such a file")
    if args.out.exists():
        raise ValueError(f"{args.out} exists: remove it or name another file")
    if args.seed < 1:
        raise ValueError(f"--seed {args.seed}: use 1, 2, 3, ... for different twins")
    if not args.out.parent.is_dir():
        raise ValueError(f"{args.out}: there is no folder {args.out.parent}; create it or name another")
    weights = load_weights(args.checkpoint, args.step)
    twins = {name: one_ulp(tensor, args.seed).contiguous().clone() for name, tensor in weights.items()}
    moved = sum(_moved(weights[name], twin) for name, twin in twins.items())
    total = sum(tensor.numel() for tensor in twins.values())
    if not moved:
        raise ValueError(f"{args.checkpoint}: no value could be moved, only floats of 16, 32 and 64 bits are")
    temporary = args.out.with_name(f".{os.getpid()}.{args.out.name}")
    try:
        save_file(twins, temporary, metadata={"twin_of": str(args.checkpoint), "seed": str(args.seed)})
        os.replace(temporary, args.out)
    except (SafetensorError, OSError) as error:  # a full disk, as safetensors calls it
        temporary.unlink(missing_ok=True)
        raise ValueError(f"{args.out} could not be written: {error}") from error
    print(f"{args.out}: {moved} of {total} values moved by one unit in the last place")
    return 0

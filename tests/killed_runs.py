"""A program that trains in children which are killed, over and over, until one comes to its end.

    python tests/killed_runs.py RUNS_DIR points|random SEED OVERRIDES...

points: the children kill themselves halfway into a snapshot, before its checkpoint, halfway into a checkpoint, and
while the pictures are drawn at the end. random: this program ends 20 of them at random moments, by SIGKILL or SIGTERM.
Forking from one process that has the imports done, and has never run a backward pass, saves seconds per child.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_runs import train_here

import train.fit
import train.snapshots

KILLS = 20


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(name: str, step: int) -> None:
    """Make this process kill itself while the file named after `step` is written by save_file or torch.save."""
    module = train.snapshots if name == "save_file" else torch
    save = getattr(module, name)

    def half(content, path, *rest):
        if f"step-{step:06d}" in str(path):
            Path(path).write_bytes(b"half")
            die()
        return save(content, path, *rest)

    setattr(module, name, half)


def die_before_checkpoint(step: int) -> None:
    write = train.snapshots.write_checkpoint

    def check(trainer, folder, at):
        return die() if at == step else write(trainer, folder, at)

    train.snapshots.write_checkpoint = check


def die_drawing() -> None:
    train.fit.draw = lambda *_: die()


POINTS = (
    lambda: die_within("save_file", 2),
    lambda: die_before_checkpoint(2),
    lambda: die_within("save", 4),
    die_drawing,
)


def child(runs_dir: Path, overrides: list[str], prepare) -> int:
    """Train in a fork; returns its process number."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            prepare()
            train_here(runs_dir, *overrides)
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)
    return number


def main(runs_dir: Path, mode: str, seed: int, overrides: list[str]) -> None:
    kills = 0
    if mode == "points":
        for prepare in POINTS:
            _, status = os.waitpid(child(runs_dir, overrides, prepare), 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
            kills += 1
    else:
        chance = random.Random(seed)
        for _ in range(KILLS):
            number = child(runs_dir, overrides, lambda: None)
            time.sleep(chance.uniform(0.5, 6))
            os.kill(number, chance.choice((signal.SIGKILL, signal.SIGTERM)))
            os.waitpid(number, 0)
            kills += 1
    _, status = os.waitpid(child(runs_dir, overrides, lambda: None), 0)
    already_done = mode == "random" and os.waitstatus_to_exitcode(status) == 1  # refused: it had come to its end
    assert status == 0 or already_done, status
    print(f"{kills} kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])

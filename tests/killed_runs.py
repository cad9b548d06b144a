"""A program that trains in children which are killed, over and over, until one comes to its end.

    python tests/killed_runs.py RUNS_DIR points|random SEED OVERRIDES...

points: the children kill themselves halfway into a snapshot, before its checkpoint, halfway into a checkpoint, and
while the pictures are drawn at the end. random: 20 of them end by SIGKILL or SIGTERM at a random moment of their first
three steps, or halfway into a snapshot, a checkpoint or the manifest; none may have come to the run's end before.
Forking from one process that has the imports done, and has never run a backward pass, saves seconds per child.
"""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
from tiny_runs import train_here

import train.fit
import train.folder
import train.snapshots
from train.metrics import TableFile

KILLS = 20


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(name: str, step: int | None = None) -> None:
    """Make this process kill itself while save_file or torch.save writes a file, that of `step` if one is given."""
    module = train.snapshots if name == "save_file" else torch
    save = getattr(module, name)

    def half(content, path, *rest):
        if step is None or f"step-{step:06d}" in str(path):
            Path(path).write_bytes(b"half")
            die()
        return save(content, path, *rest)

    setattr(module, name, half)


def die_within_manifest(count: int) -> None:
    """Make this process kill itself halfway into the manifest, when it is written for the `count`-th time."""
    left = [count]
    fsync = os.fsync

    def half(number):
        name = os.readlink(f"/proc/self/fd/{number}") if sys.platform.startswith("linux") else ""
        left[0] -= ".manifest.json" in name
        if left[0] == 0:
            os.ftruncate(number, 20)
            die()
        fsync(number)

    os.fsync = half


def end_after(steps: int, seconds: float, number: int) -> None:
    """Make this process send itself a signal so many seconds after its first `steps` steps."""
    append, seen = TableFile.append, []

    def count(self, row):
        append(self, row)
        if "loss" in row:
            seen.append(row)
            if len(seen) == steps:
                threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

    TableFile.append = count


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


def at_random(chance: random.Random):
    """A way to end a child: two of three at a random moment, the others within a file."""
    kind = chance.choice(("moment",) * 6 + ("save_file", "save", "manifest"))
    if kind == "moment":
        moment = chance.randint(1, 3), chance.uniform(0, 0.3), chance.choice((signal.SIGKILL, signal.SIGTERM))
        return lambda: end_after(*moment)
    count = chance.randint(1, 5)
    return lambda: die_within_manifest(count) if kind == "manifest" else die_within(kind)


def main(runs_dir: Path, mode: str, seed: int, overrides: list[str]) -> None:
    chance = random.Random(seed)
    ways = POINTS if mode == "points" else [at_random(chance) for _ in range(KILLS)]
    for way in ways:
        _, status = os.waitpid(child(runs_dir, overrides, way), 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            assert mode == "random" and status == 0, status  # SIGTERM, which saves
            (manifest,) = runs_dir.glob("*/manifest.json")
            assert json.loads(manifest.read_text())["state"] == "interrupted"
    _, status = os.waitpid(child(runs_dir, overrides, lambda: None), 0)
    assert status == 0, status
    print(f"{len(ways)} kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])

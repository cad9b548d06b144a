"""What the training costs around its arithmetic, as ratios of two ways to do the same steps, timed in turn.

    python tests/benchmarks/bench_training.py

Our own bars: Lightning, callbacks and logging at most 1.10 times a plain loop; a snapshot every 100 steps at most 1.02;
the step at most 1/1.1 times that of the same model in the style of diffusers' text-to-image example; two jobs side by
side with one thread each at most 1/1.3 of the time per step of one job with two threads.
Every timing of a process is of its own process, since what is freed and kept by the allocator belongs to a process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import show

STEPS = 30  # every tenth is a logged one, as in a long run
KERNELS = re.compile(r"aten::(_scaled_dot_product_flash_attention|(add|b)?mm$|baddbmm|gelu|native_layer_norm)")
SETTINGS = ("attn=flash", "precision=fp32", "model.size=tiny", "logger.mode=disabled", "device=cpu")


def compose_settings(*overrides: str):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(__file__).resolve().parents[2] / "conf"), version_base="1.3"):
        return compose("config", overrides=[*SETTINGS, *overrides])


def plain_loop(settings, steps: int, *, diffusers_style: bool = False) -> float:
    """Seconds per step of a loop of a few lines; in diffusers' style also with its own attention processor."""
    import torch
    from diffusers.models.attention_processor import AttnProcessor2_0

    from train.data import load_data
    from train.module import TextToImage

    module = TextToImage(settings, load_data(settings))
    if diffusers_style:
        module.denoiser.set_attn_processor(AttnProcessor2_0())
    optimizer = torch.optim.AdamW(module.parameters(), settings.optimizer.lr)
    for step in range(steps + 2):
        if step == 2:
            begin = time.perf_counter()
        loss = module.loss(module.batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), settings.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return (time.perf_counter() - begin) / steps


def whole_run(settings) -> float:
    """Seconds per step of train.run with all its callbacks, snapshots only at both ends."""
    from train.run import train
    from train.settings import run_name

    with tempfile.TemporaryDirectory() as runs_dir:
        settings.runs_dir = runs_dir
        train(settings, "python train/run.py", sweep=True)
        manifest = json.loads((Path(runs_dir) / run_name(settings) / "manifest.json").read_text())
    return manifest["seconds_per_step"]


def snapshot_cost(settings) -> tuple[float, float]:
    """(seconds of a snapshot, its checkpoint and its prediction; seconds of a step), from two runs of equal length."""
    steps = settings.steps
    settings.snapshots.every = 1
    often = whole_run(settings)
    settings.snapshots.every = steps
    seldom = whole_run(settings)
    return often - seldom, seldom


def kernel_time(settings, steps: int) -> tuple[float, float]:
    """(seconds per step inside attention, products, GELU and norms; seconds per step in all), by PyTorch's profiler.

    These kernels are called with the same tensors in any style, and what is left is all that a loop could save.
    """
    from torch.profiler import profile

    with profile() as profiled:
        plain_loop(settings, steps)
    spent = {event.key: event.self_cpu_time_total / 1e6 / (steps + 2) for event in profiled.key_averages()}
    return sum(time for name, time in spent.items() if KERNELS.match(name)), sum(spent.values())


def in_process(way: str, threads: int = 1) -> subprocess.Popen:
    command = [sys.executable, __file__, way, str(threads)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def answer(process: subprocess.Popen) -> list[float]:
    out, _ = process.communicate()
    return json.loads(out.splitlines()[-1])


def row(name: str, ours: list[float], peer: list[float], bar: str) -> dict:
    """A row as harness.ratio gives it, from seconds per step that other processes measured, in turn."""
    quotients = [a / b for a, b in zip(ours, peer)]
    return {"benchmark": name, "ours_s": median(ours), "peer_s": median(peer), "ratio": median(quotients), "bar": bar}


def measure(rounds: int = 3) -> list[dict]:
    """The rows of all four comparisons, each process started `rounds` times, in turn."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way in ("run", "plain", "plain, default allocator", "diffusers"):
            times.setdefault(way, []).extend(answer(in_process(way)))
        side_by_side = [in_process("run"), in_process("run")]
        times.setdefault("two jobs", []).append(sum(answer(process)[0] for process in side_by_side) / 4)
        times.setdefault("two threads", []).extend(answer(in_process("run", threads=2)))
    snapshot, step = answer(in_process("snapshot"))
    kernels, whole = answer(in_process("kernels"))
    return [
        row("Lightning and callbacks / plain loop", times["run"], times["plain"], "at most 1.10"),
        row("steps with a snapshot per 100 / without", [100 * step + snapshot], [100 * step], "at most 1.02"),
        row("step / diffusers' style, default allocator", times["run"], times["diffusers"], "at most 0.91"),
        row("freed memory kept / handed back, plain loop", times["plain"], times["plain, default allocator"], "none"),
        row("attention, products, GELU and norms of a step / the step", [kernels], [whole], "none"),
        row("two jobs, a thread each / one with two", times["two jobs"], times["two threads"], "at most 0.77"),
        row("one job with two threads / with one", times["two threads"], times["run"], "none"),
    ]


def one_way(way: str, threads: int) -> list[float]:
    """What a process of its own measures."""
    from train.system import set_up_torch

    settings = compose_settings(f"steps={STEPS}", f"snapshots.every={STEPS}", "sampling.count=0", f"threads={threads}")
    if way in ("diffusers", "plain, default allocator"):
        import torch

        torch.set_num_threads(threads)
        return [plain_loop(settings, STEPS, diffusers_style=way == "diffusers")]
    set_up_torch(threads)
    if way == "plain":
        return [plain_loop(settings, STEPS)]
    if way == "kernels":
        return list(kernel_time(settings, STEPS))
    return list(snapshot_cost(settings)) if way == "snapshot" else [whole_run(settings)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one_way(sys.argv[1], int(sys.argv[2]))))
    else:
        show(measure())

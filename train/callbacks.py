"""What happens around the steps: the progress display, and stopping on a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import lightning.pytorch as pl
from tqdm import tqdm

from train.folder import RunFolder
from train.snapshots import write_checkpoint


class Progress(pl.Callback):
    """A bar with the time left and the loss; in a sweep, whose jobs share a screen, a line now and then.

    Measures the seconds per step on the way (`seconds_per_step`, without the first step of the process).
    """

    def __init__(self, name: str, lines_every: int | None) -> None:
        self.name = name
        self.lines_every = lines_every
        self._first = self._begin = self._bar = None
        self.seconds_per_step = float("nan")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.lines_every is None:
            interval = 0.5 if sys.stderr.isatty() else 10
            self._bar = tqdm(
                total=trainer.max_steps, initial=trainer.global_step, desc=self.name, unit="step", mininterval=interval
            )

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_) -> None:
        step = trainer.global_step
        if self._begin is None:
            self._first, self._begin = step, time.perf_counter()
        else:
            self.seconds_per_step = (time.perf_counter() - self._begin) / (step - self._first)
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{float(module.measured['loss']):.4f}", refresh=False)
            self._bar.update()
        elif step % self.lines_every == 0 or step == trainer.max_steps or step - self._first == 2:  # announced early
            left = (trainer.max_steps - step) * self.seconds_per_step
            loss, pace = float(module.measured["loss"]), f"{self.seconds_per_step:.2f} s a step, {left:.0f} s left"
            print(f"{self.name}: step {step} of {trainer.max_steps}, loss {loss:.4f}, {pace}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class StopOnSignal(pl.Callback):
    """Ctrl-C or SIGTERM: finish the step, write a checkpoint, stop. A second Ctrl-C stops at once.

    The manifest says "interrupted" from the moment of the signal, since SIGKILL may follow before the step is done.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
            }

    def _receive(self, number: int, frame) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        name = signal.Signals(number).name
        # Not print: a handler must not write into a buffer that the program it interrupts is writing into.
        os.write(2, f"\n{name}: finishing this step and saving a checkpoint\n".encode())
        with contextlib.suppress(OSError):  # a full disk
            self.folder.update(state="interrupted", reason=name)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_) -> None:
        if self.received is not None and trainer.global_step < trainer.max_steps:
            write_checkpoint(trainer, self.folder.path, trainer.global_step)
            trainer.should_stop = True

    def close(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

"""Calls in a process of their own, which is ended and started anew when a call hangs or takes the process with it."""

from __future__ import annotations

import importlib
import importlib.util
import io
import multiprocessing
import os
import sys
from pathlib import Path

import torch

from fa_study.audit.calls import Attention, Job, Outcome, invoke, one_line
from fa_study.audit.subject import parameters_of

START = 120.0  # seconds that importing the callable may take


def split_target(target: str) -> tuple[str, str]:
    """("my_kernels", "attention") from "my_kernels:attention"; ValueError if it is not of this form."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"target {target!r}: use MODULE:FUNCTION or FILE.py:FUNCTION, such as my_kernels:attention")
    return place, name


def load_callable(target: str) -> Attention:
    """The function that "package.module:function" or "path/to/file.py:function" names.

    Raises
    ------
    ValueError
        If the target has not that form, cannot be imported, or names nothing that can be called.
    """
    place, name = split_target(target)
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"there is no file {place}: name a Python file that exists, or a module")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{place} cannot be imported: {one_line(error)}") from error
    function = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}: name one that takes (q, k, v)")
    return function


def _from_file(path: Path):
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Worker:
    """Runs jobs for one target. Calling it gives an `Outcome`, also when the process hangs or dies."""

    def __init__(self, target: str, limit: float = 30.0) -> None:
        split_target(target)
        self.target, self.limit = target, limit
        self._context = multiprocessing.get_context("spawn")
        self._process = None

    def start(self) -> tuple[frozenset[str], bool]:
        """Start the process and import the target there; returns `parameters_of` it. ValueError if it has none."""
        self._pipe, theirs = self._context.Pipe()
        arguments = (self.target, theirs, torch.get_num_threads())
        self._process = self._context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START):
            self.close()
            raise ValueError(f"{self.target} was not imported within {START:g} s")
        try:
            answer = _unpack(self._pipe.recv_bytes())
        except (EOFError, OSError):
            answer = {"error": f"{self.target}: the process ended while importing it"}
        if "error" in answer:
            self.close()
            raise ValueError(answer["error"])
        return frozenset(answer["parameters"]), answer["open_ended"]

    def __call__(self, job: Job) -> Outcome:
        if self._process is None:
            self.start()
        try:
            self._pipe.send_bytes(_pack(_fields(job)))
            if not self._pipe.poll(self.limit):
                self.close()
                return Outcome(error=f"did not return within {self.limit:g} s", hung=True, seconds=self.limit)
            return Outcome(**_unpack(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.close()
            return Outcome(error=f"ended its process (exit code {code})", died=True)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def serve(target: str, pipe, threads: int) -> None:
    """The process: imports the target, answers with an error or the parameters, then with an outcome for each job."""
    torch.set_num_threads(threads)
    # What the callable prints must not mix with the report.
    os.dup2(2, 1)
    try:
        function = load_callable(target)
    except ValueError as error:
        pipe.send_bytes(_pack({"error": str(error)}))
        return
    named, open_ended = parameters_of(function)
    pipe.send_bytes(_pack({"parameters": sorted(named), "open_ended": open_ended}))
    while True:
        try:
            job = Job(**_unpack(pipe.recv_bytes()))
        except (EOFError, OSError):
            return
        outcome = invoke(function, job)
        pipe.send_bytes(_pack(_fields(outcome)))


def _fields(record: Job | Outcome) -> dict:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _pack(fields: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(fields, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> dict:
    return torch.load(io.BytesIO(data), weights_only=True)

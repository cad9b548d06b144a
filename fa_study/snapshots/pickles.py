"""Read pickles of checkpoints without running anything they hold.

A pickle is a program that may call any importable function. This Unpickler admits the functions and classes written
below, replaced by harmless ones of its own; every other class becomes an inert stub that accepts whatever the pickle
does with it, and is named in a warning. The weights of a checkpoint therefore load although it also holds, say, an
OmegaConf object. Python's own (not the C) Unpickler is used: its memo is a dict, so that a damaged file cannot ask
for gigabytes.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import BinaryIO

import torch


class Stub:
    """Stands for an object of a class that is not loaded; remembers its arguments and state, and does nothing."""

    path = ""

    def __new__(cls, *args, **kwargs):
        stub = super().__new__(cls)
        stub.args, stub.state = args, None
        return stub

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return Stub()

    def _ignore(self, *args):
        pass

    append = extend = add = update = __setitem__ = _ignore


class WrappedTensor(Stub):
    """Stands for a tensor made of others, such as the part of one that a process of FSDP holds (DTensor)."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the pickle describes it: which values of which storage."""

    key: str
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype | None  # None: untyped bytes


def _tensor(storage, first, shape, strides, requires_grad=False, hooks=None, state=None) -> StoredTensor:
    return _tensor_of_dtype(storage, first, shape, strides, requires_grad, hooks, storage.dtype, state)


def _tensor_of_dtype(storage, first, shape, strides, requires_grad, hooks, dtype, state=None) -> StoredTensor:
    if state:  # {"neg": True} or {"conj": True}: the stored values are not those of the tensor
        raise pickle.UnpicklingError(f"a tensor in the state {state!r:.50}: save x.resolve_conj().resolve_neg()")
    return StoredTensor(storage.key, dtype, first, tuple(shape), tuple(strides))


def _first(value, *_):
    return value


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": None,
}
_DCP = "torch.distributed.checkpoint."
ADMITTED = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": lambda *_: {},
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "torch.Size": tuple,
    "torch.device": lambda *parts: ":".join(map(str, parts)),
    "torch.serialization._get_layout": _first,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_wrapper_subclass": WrappedTensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": lambda rebuild, cls, args, state: rebuild(*args),
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
}
# Stubs as well, but expected ones: their state is what a distributed checkpoint is described by.
_SILENT = {
    *(f"{_DCP}metadata.{name}" for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties")),
    *(f"{_DCP}metadata.{name}" for name in ("ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(f"{_DCP}metadata.{name}" for name in ("StorageMeta",)),
    f"{_DCP}filesystem._StorageInfo",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
}


class _Unpickler(pickle._Unpickler):
    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012 - the base class has it so

    def __init__(self, file: BinaryIO):
        super().__init__(file, encoding="utf-8")
        self.refused: dict[str, type] = {}
        self.itemsize: dict[str, int] = {}

    def find_class(self, module: str, name: str):
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full in ADMITTED:
            return ADMITTED[full]
        short = full.removeprefix("torch.storage.").removeprefix("torch.cuda.").removeprefix("torch.")
        if full.startswith("torch.") and short in _STORAGES:
            return _Storage("", _STORAGES[short])
        if full in _SILENT:
            return type(name, (Stub,), {"path": full})
        return self.refused.setdefault(full, type("Refused", (Stub,), {"path": full}))

    def persistent_load(self, pid) -> _Storage:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"unknown persistent id {pid!r:.100}")
        self.itemsize[key] = storage.dtype.itemsize if storage.dtype else 1
        return _Storage(key, storage.dtype)

    def load_build(self) -> None:
        # Only stubs get their state: on anything else it would change attributes of objects that are ours.
        state = self.stack.pop()
        if isinstance(self.stack[-1], Stub):
            self.stack[-1].state = state

    dispatch[pickle.BUILD[0]] = load_build


def read_pickle(file: BinaryIO, source: str) -> tuple[object, dict[str, int]]:
    """The object a pickle describes, with tensors as `StoredTensor` and foreign objects as `Stub`.

    Also returns the bytes per element of each storage that it refers to. Warns (UserWarning) of the classes that were
    refused; ValueError for a damaged pickle.
    """
    unpickler = _Unpickler(file)
    try:
        result = unpickler.load()
    except Exception as error:  # a damaged pickle is a random program: any exception can come out of it
        raise ValueError(f"{source}: its pickle is damaged or of an unknown kind ({error!r:.200})") from error
    if unpickler.refused:
        names = ", ".join(sorted(unpickler.refused))
        warnings.warn(f"{source}: not loaded, replaced by inert stubs: {names}", UserWarning, stacklevel=2)
    return result, unpickler.itemsize

"""Where the tensors of a file written by torch.save lie: the zip format, and the one before torch 1.6."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from fa_study.snapshots.pickles import StoredTensor, Stub, WrappedTensor, read_pickle
from fa_study.snapshots.regions import Region

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# Where checkpoints of other programs keep the weights, the most usual first; everything beside them is ignored.
_WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "net", "app")


class Window(io.RawIOBase):
    """A part of a file, as a file: distributed checkpoints put many torch.save files into one."""

    def __init__(self, path: Path, start: int, length: int):
        self._file = open(path, "rb")  # noqa: SIM115 - closed with the window
        self._start, self._length, self._position = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def readinto(self, buffer) -> int:
        n = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        read = self._file.readinto(memoryview(buffer)[:n])
        self._position += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


def torch_object(path: Path, start: int = 0, length: int | None = None) -> object:
    """What torch.save wrote, with a `Region` for each tensor and inert stubs for what is not loaded.

    ValueError for a file, or a part of `length` bytes from `start`, that is cut off, damaged or of another kind.
    """
    try:
        if length is None:
            length = path.stat().st_size
        window = Window(path, start, length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened ({error})") from error
    with window, io.BufferedReader(window) as file:
        head = file.read(4)
        file.seek(0)
        if head[:2] == b"PK":
            return _read_zip(file, path, start)
        if head[:1] == b"\x80":
            return _read_legacy(file, path, start, length)
    raise ValueError(f"{path}: not a file of torch.save (it starts with {head!r}); empty, cut off or of another kind?")


def _read_zip(file: io.BufferedReader, path: Path, start: int) -> object:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {}
            for info in archive.infolist():
                if info.filename in entries:
                    raise ValueError(f"{info.filename} occurs twice")
                entries[info.filename] = info
            (top,) = [name.removesuffix("data.pkl") for name in entries if name.split("/")[1:] == ["data.pkl"]]
            if f"{top}constants.pkl" in entries:
                raise ValueError("it is a TorchScript program; save its state_dict()")
            if f"{top}byteorder" in entries and archive.read(f"{top}byteorder") != b"little":
                raise ValueError("its values are big-endian")
            _data_offset(file, entries[f"{top}data.pkl"])  # torch.save compresses nothing: no small file of gigabytes
            pickled = archive.read(f"{top}data.pkl")
            storages = {}
            for name, info in entries.items():
                if name.startswith(f"{top}data/"):
                    storages[name.removeprefix(f"{top}data/")] = (start + _data_offset(file, info), info)
    except Exception as error:  # zipfile's own errors are of many types on damaged archives
        raise ValueError(f"{path}: not a whole file of torch.save ({error!r:.200})") from error
    places = {key: (offset, info.file_size, info.CRC) for key, (offset, info) in storages.items()}
    return _located(read_pickle(io.BytesIO(pickled), str(path))[0], path, places)


def _data_offset(file: io.BufferedReader, info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: behind its local header, whose length only the header itself tells."""
    file.seek(info.header_offset)
    header = file.read(30)
    name_length, extra_length = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    same = header[:4] == b"PK\3\4" and file.read(name_length) == info.filename.encode()
    if not same or info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError(f"entry {info.filename} is damaged or compressed")
    return info.header_offset + 30 + name_length + extra_length


def _read_legacy(file: io.BufferedReader, path: Path, start: int, length: int) -> object:
    # Five pickles: a magic number, the protocol's version, the machine, the object, the storages' keys in file order.
    if read_pickle(file, str(path))[0] != _LEGACY_MAGIC:
        raise ValueError(f"{path}: a pickle, but not one of torch.save")
    _, (machine, _), (result, itemsize), (keys, _) = (read_pickle(file, str(path)) for _ in range(4))
    if not isinstance(machine, dict) or machine.get("little_endian") is not True or not isinstance(keys, list):
        raise ValueError(f"{path}: damaged, or its values are big-endian")
    places = {}
    for key in keys:
        numel = int.from_bytes(file.read(8), "little")
        if key not in itemsize:
            raise ValueError(f"{path}: storage {key!r:.50} belongs to no tensor, so its size is unknown")
        places[key] = (start + file.tell(), numel * itemsize[key], None)
        if file.tell() + numel * itemsize[key] > length:
            raise ValueError(f"{path}: the file ends within its tensors")
        file.seek(numel * itemsize[key], 1)
    return _located(result, path, places)


def _located(value: object, path: Path, places: Mapping[str, tuple]) -> object:
    """The object with regions in place of stored tensors, mappings of names only; a pickled module as its mapping."""
    visited = 0

    def locate(value: object, depth: int) -> object:
        nonlocal visited
        visited += 1
        # A pickle can share parts so often that walking through it would never end.
        if depth > 64 or visited > 5_000_000:
            raise ValueError(f"{path}: nested too deep, or too large, for a checkpoint")
        if isinstance(value, StoredTensor):
            if value.key not in places or value.dtype is None:
                raise ValueError(f"{path}: the values of a tensor (storage {value.key!r:.50}) are missing")
            offset, nbytes, crc32 = places[value.key]
            return Region(path, offset, nbytes, value.dtype, value.shape, value.strides, value.first, crc32)
        if isinstance(value, Stub) and isinstance(value.state, Mapping) and "_parameters" in value.state:
            parts = [value.state.get(part) for part in ("_parameters", "_buffers", "_modules")]
            value = {name: item for part in parts if isinstance(part, Mapping) for name, item in part.items()}
        if isinstance(value, Mapping):
            return {name: locate(item, depth + 1) for name, item in value.items() if type(name) is str}
        return value

    return locate(value, 0)


def weights_in(value: object, source: str) -> dict[str, Region]:
    """The tensors of a checkpoint's state dict, by their dotted names; optimizer state and all else is ignored."""
    if hasattr(value, "read"):
        return {"tensor": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{source}: holds a {type(value).__name__}, not a state dict; save model.state_dict()")
    for key in _WEIGHT_KEYS:
        if isinstance(value.get(key), Mapping):
            return weights_in(value[key], source)
    found = _flattened({name: item for name, item in value.items() if not _of_optimizer(str(name), item)}, source)
    if not found:
        raise ValueError(f"{source}: no weights found; it has {', '.join(map(repr, list(value)[:8])) or 'no entry'}")
    return found


def _of_optimizer(name: str, item: object) -> bool:
    """True for optimizer_states and its kin, flat ones (optim.state.0) too; not for the weight optimal.bias."""
    if hasattr(item, "read"):
        return name.partition(".")[0] in ("optim", "optimizer", "optimizers", "optimizer_state", "optimizer_states")
    return name.startswith("optim")


def _flattened(value: Mapping, source: str, prefix: str = "") -> dict[str, Region]:
    regions: dict[str, Region] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            inner = _flattened(item, source, f"{prefix}{name}.")
        elif isinstance(item, WrappedTensor):
            kind = getattr(item.args[0], "path", "tensor of others") if item.args else "tensor of others"
            advice = "save x.full_tensor(), or name the folder of a distributed checkpoint"
            raise ValueError(f"{source}: {prefix}{name} is a {kind}, which may be a part of the weight: {advice}")
        else:
            inner = {prefix + name: item} if hasattr(item, "read") else {}
        if repeated := regions.keys() & inner.keys():
            raise ValueError(f"{source}: two tensors are named {sorted(repeated)[0]!r}")
        regions |= inner
    return regions

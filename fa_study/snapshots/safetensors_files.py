"""Where the tensors of a safetensors file lie.

The file: 8 bytes N (little endian), N bytes of JSON {name: {dtype, shape, data_offsets}}, and the data without gaps.
Reading the header here, and mapping one tensor at a time, keeps a checkpoint's memory at the tensors in use.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from fa_study.snapshots.regions import Region

_HEADER_LIMIT = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def safetensors_regions(path: Path) -> dict[str, Region]:
    """{name: region}; ValueError for a file that is cut off, damaged or of another kind."""
    try:
        with open(path, "rb") as file:
            total = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > min(total - 8, _HEADER_LIMIT):
                raise ValueError(f"a header of {length} bytes in a file of {total}")
            header = json.loads(file.read(length).decode(), object_pairs_hook=_unique)
        return _regions(path, header, 8 + length, total)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error


def _regions(path: Path, header: dict, start: int, total: int) -> dict[str, Region]:
    if not isinstance(header.pop("__metadata__", {}) or {}, dict):
        raise ValueError("its __metadata__ is no mapping")
    regions, spans = {}, []
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name!r} has dtype {entry['dtype']!r}; known are {', '.join(_DTYPES)}")
        dtype, shape = getattr(torch, _DTYPES[entry["dtype"]]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        region = Region(path, start + begin, end - begin, dtype, shape)
        if region.nbytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} of shape {shape} has {region.nbytes} bytes")
        regions[name] = region
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise ValueError("its tensors overlap or leave gaps")
        position = end
    if start + position != total:
        raise ValueError(f"its header describes {start + position} bytes, the file has {total}")
    return regions


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name occurs twice")
    return mapping

"""Reads the records of an offline W&B run's .wandb file, for which wandb itself has no reader any more."""

from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER = 7
BLOCK = 32768
CHUNK_HEADER = 7  # checksum (4 bytes), length (2), kind (1)
WHOLE, LAST = 1, 4  # kinds of chunk behind which a record is complete


def read_records(path: Path) -> list[Record]:
    """All records, in the order they were written. A record is split where it meets the end of a block."""
    data, position, chunks, records = path.read_bytes(), FILE_HEADER, b"", []
    while position < len(data):
        if BLOCK - position % BLOCK < CHUNK_HEADER:  # padding
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        chunks += data[position + CHUNK_HEADER : position + CHUNK_HEADER + length]
        position += CHUNK_HEADER + length
        if kind in (WHOLE, LAST):
            records.append(Record.FromString(chunks))
            chunks = b""
    return records

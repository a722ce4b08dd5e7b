"""Arrays, tables and documents that say how long they are: NumPy, HDF5, safetensors, Arrow, Parquet, PDF, EDF."""

from __future__ import annotations

import ast
import json
import re
import struct

from penstock.errors import PenstockError
from penstock.media.probes.nifti import begins_with
from penstock.media.probes.reader import Broken, FileReader, Reader, Truncated

# What is read of a header whose length the file itself tells.
LONGEST_HEADER = 2 << 20
LONGEST_NPY = 64 << 10
_TAIL = 2048


def npy(reader: Reader, path: str) -> None:
    """An array: its header's shape and type give its length."""
    import numpy as np

    head = reader.exactly(10, "the header")
    if head[:6] != b"\x93NUMPY":
        raise Broken(f"it is not NumPy's: {begins_with(head)}")
    if head[6] == 1:
        (length,) = struct.unpack("<H", head[8:])
    else:
        length = int.from_bytes(head[8:] + reader.exactly(2, "the header"), "little")
    if length > LONGEST_NPY:
        raise Broken(f"its header says it is {length:,} bytes long")
    said = ast.literal_eval(reader.exactly(length, "the header").decode("latin-1" if head[6] < 3 else "utf-8"))
    dtype = np.lib.format.descr_to_dtype(said["descr"])
    if dtype.hasobject:
        reader.drain()  # pickles, which are not opened: they can run anything
        return
    values = 1
    for size in said["shape"]:
        values *= size
    reader.skip(values * dtype.itemsize, f"its array of {' x '.join(map(str, said['shape']))}")
    reader.drain()


def hdf5(reader: Reader, path: str) -> None:
    """The superblock says where the file ends."""
    head = reader.read(4096)
    start = next((at for at in (0, 512, 1024, 2048) if head[at : at + 8] == b"\x89HDF\r\n\x1a\n"), None)
    if start is None:
        raise Broken(f"it is not HDF5: {begins_with(head)}")
    if len(head) < start + 14:
        raise Truncated(f"it ends at byte {len(head):,}, inside its first block")
    version = head[start + 8]
    if version <= 1:
        wide, base_at = head[start + 13], start + (24 if version == 0 else 28)
        end_at = base_at + 2 * wide
    else:
        wide, base_at = head[start + 9], start + 12
        end_at = base_at + 2 * wide
    end = int.from_bytes(head[end_at : end_at + wide], "little") + start
    reader.drain()
    if not wide or len(head) < end_at + wide:
        raise Truncated(f"it ends at byte {len(head):,}, inside its first block")
    if reader.position < end:
        raise Truncated(f"it says it ends at byte {end:,}, and it ends at {reader.position:,}")


def safetensors(reader: Reader, path: str) -> None:
    length = int.from_bytes(reader.exactly(8, "the header"), "little")
    if length > LONGEST_HEADER:
        if isinstance(reader, FileReader) and length > reader.size - 8:
            raise Broken(f"its header says it is {length:,} bytes long, more than the file")
        reader.drain()
        return
    said = json.loads(reader.exactly(length, "the header"))
    ends = [tensor["data_offsets"][1] for name, tensor in said.items() if name != "__metadata__"]
    reader.skip(max(ends, default=0), f"its {len(ends):,} tensors")
    if extra := reader.drain():
        raise Broken(f"{extra:,} bytes follow its last tensor")


def arrow_file(reader: Reader, path: str) -> None:
    """Arrow's file format has its mark at both ends; a stream ends with an empty message."""
    head = reader.peek(8)
    reader.drain()
    if head[:6] == b"ARROW1" and isinstance(reader, FileReader):
        if reader.at(reader.size - 6, 6) != b"ARROW1":
            raise Truncated("it has no ARROW1 at its end")
    elif head[:4] == b"\xff\xff\xff\xff" and isinstance(reader, FileReader):
        if reader.at(reader.size - 8, 8) != b"\xff\xff\xff\xff\0\0\0\0":
            raise Truncated("its stream has no end mark")
    elif head[:4] != b"FEA1":
        raise Broken(f"it is not Arrow's: {begins_with(head)}")


def parquet(reader: Reader, path: str) -> None:
    """The footer, and every page of every column chunk, which must fill the chunk and hold the values it counts."""
    reader.drain()
    if not isinstance(reader, FileReader):
        return
    from penstock.parquet.footer import open_parquet
    from penstock.parquet.pages import walk

    try:
        with open_parquet(path) as (fd, footer):
            for group in range(footer.row_groups):
                for chunk in footer.chunks(group):
                    for _ in walk(fd, chunk, path=path):
                        pass
    except PenstockError as error:
        raise (Truncated if "cut short" in error.what else Broken)(f"it {error.what}") from error


def pdf(reader: Reader, path: str) -> None:
    """The header, the end mark, and the table of objects where the end says it is."""
    head = reader.peek(1024)
    mark = head.find(b"%PDF-")
    if mark < 0:
        raise Broken(f"it is no PDF: {begins_with(head)}")
    reader.drain()
    if not isinstance(reader, FileReader):
        return
    tail = reader.at(max(0, reader.size - _TAIL), _TAIL)
    if b"%%EOF" not in tail:
        raise Truncated("it has no end mark (%%EOF)")
    found = re.findall(rb"startxref\s+(\d+)", tail)
    if not found:
        raise Truncated("its end does not say where its table of objects is")
    place = int(found[-1])
    if place >= reader.size:
        raise Truncated(f"its table of objects should be at byte {place:,}, and it ends at {reader.size:,}")
    # Offsets are from the header, which some servers put a few lines before.
    tables = (reader.at(place, 64).lstrip(), reader.at(place + mark, 64).lstrip())
    if not any(table.startswith(b"xref") or re.match(rb"\d+\s+\d+\s+obj", table) for table in tables):
        raise Broken(f"there is no table of objects at byte {place:,}, where its end says it is")


def edf(reader: Reader, path: str) -> None:
    """EDF and BDF: a header, and as many records of as many samples as it says."""
    head = reader.exactly(256, "the header")
    each = 3 if head[:1] == b"\xff" else 2
    if head[:1] not in (b"0", b"\xff"):
        raise Broken(f"it is not EDF: {begins_with(head)}")
    own, records, signals = int(head[184:192]), int(head[236:244]), int(head[252:256])
    if not 0 < signals < 10_000:
        raise Broken(f"its header counts {signals:,} signals")
    rest = reader.exactly(256 * signals, "the header")
    samples = sum(int(rest[216 * signals + 8 * at : 216 * signals + 8 * at + 8]) for at in range(signals))
    reader.skip(own - 256 - 256 * signals, "the header")
    if records >= 0:  # -1 while it is being recorded
        reader.skip(records * samples * each, f"its {records:,} records")
    reader.drain()

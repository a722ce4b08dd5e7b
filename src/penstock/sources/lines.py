"""Blocks of whole lines from plain, .gz and .zst files, at most two blocks in memory at a time.

The law: a line belongs to the range in which it starts, so ranges that tile a file give every line exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.errors import BadFile, BadRow, UsageError

BOM = b"\xef\xbb\xbf"
LOOK = 64 << 10
STEP = 1 << 20
# Arrow's zstd refuses frames beyond 128 MiB; for a `--long=27` file it held that window and 12 MB (measured).
LARGEST_WINDOW = 1 << 27

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ENDINGS = {".gz": "gzip", ".zst": "zstd"}

Fill = Callable[[memoryview], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Whole lines, blank ones and the line ends included. `offset` is that of the first byte, decompressed."""

    offset: int
    data: bytes
    lines: int


def compression_of(path: str) -> str | None:
    """What the file's ending says: "gzip", "zstd" or None.

    >>> compression_of("a.jsonl.zst"), compression_of("a.jsonl")
    ('zstd', None)
    """
    return _ENDINGS.get(Path(path).suffix.lower())


def blocks(
    path: str,
    *,
    start: int = 0,
    stop: int | None = None,
    compression: str | None = None,
    size: int = 4 << 20,
    longest: int | None = None,
) -> Iterator[Block]:
    """The lines that start in [start, stop), in blocks of at most `size` bytes; a longer line is a block of its own.

    A line of more than `longest` bytes is a BadRow. Compressed files are read whole.
    """
    with Path(path).open("rb") as file:
        _check_magic(file, path, compression)
        if compression is None:
            end = os.fstat(file.fileno()).st_size
            first, last = _line_start(file, start), end if stop is None else _line_start(file, min(stop, end))
            file.seek(first)
            yield from _cut(_plain(file, path, last), path, offset=first, size=size, longest=longest)
        elif start or stop is not None:
            raise UsageError("only plain text can be read from the middle", where=path)
        else:
            yield from _cut(_inflated(file, path, compression), path, offset=0, size=size, longest=longest)


def zstd_window(path: str) -> int:
    """Bytes of history the first frame's decompression keeps, from its header: what a reader must hold.

    RFC 8878, 3.1.1.1. Skippable frames before it are stepped over.
    """
    with Path(path).open("rb") as file:
        head = file.read(18)
        while len(head) >= 8 and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:
            file.seek(int.from_bytes(head[4:8], "little") + 8 - len(head), os.SEEK_CUR)
            head = file.read(18)
    if not head:
        return 0
    if len(head) < 6 or head[:4] != _ZSTD:
        raise BadFile("has no zstd frame", where=path)
    descriptor = head[4]
    if not descriptor & 0x20:
        base = 1 << (10 + (head[5] >> 3))
        return base + (base >> 3) * (head[5] & 7)
    at = 5 + (0, 1, 2, 4)[descriptor & 3]
    width = 1 << (descriptor >> 6)
    content = int.from_bytes(head[at : at + width], "little")
    return content + 256 if width == 2 else content


def _check_magic(file: BufferedReader, path: str, compression: str | None) -> None:
    head = file.read(4)
    file.seek(0)
    skippable = head[1:] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    found = "gzip" if head[:2] == _GZIP else "zstd" if head == _ZSTD or skippable else None
    if compression and found != compression:
        holds = "is empty" if not head else f"begins with {head.hex(' ')}"
        raise BadFile(f"is not {compression}: it {holds}", where=path, do="fetch it again, or correct its ending")
    if found and not compression:
        ending = ".gz" if found == "gzip" else ".zst"
        raise BadFile(f"holds {found} data, not text", where=path, do=f"rename it to end in {ending}")


def _line_start(file: BufferedReader, at: int) -> int:
    """Offset of the first line that starts at or after `at`."""
    if at == 0:
        return 0
    file.seek(at - 1)
    here = at - 1
    while chunk := file.read(LOOK):
        if (found := chunk.find(b"\n")) >= 0:
            return here + found + 1
        here += len(chunk)
    return max(here, at)


def _plain(file: BufferedReader, path: str, last: int) -> Fill:
    def fill(into: memoryview) -> int:
        into = into[: max(last - file.tell(), 0)]
        got = file.readinto(into)
        if got < len(into):
            raise BadFile(f"ended at byte {file.tell()} of {last} while it was read", where=path)
        return got

    return fill


def _inflated(file: BufferedReader, path: str, compression: str) -> Fill:
    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression)
    done = 0

    def fill(into: memoryview) -> int:
        nonlocal done
        try:
            got: int = stream.readinto(into)
        except OSError as error:
            raise _damaged(path, compression, str(error), at=file.tell(), done=done) from error
        done += got
        return got

    return fill


def _damaged(path: str, compression: str, reason: str, *, at: int, done: int) -> BadFile:
    if "too much memory" in reason:
        what = f"needs a zstd window of {zstd_window(path)} bytes, more than the {LARGEST_WINDOW} that can be read"
        return BadFile(what, where=path, do="compress it again with zstd --long=27 or less")
    kind = "is cut short" if "Truncated" in reason else "is damaged"
    what = f"{compression} data {kind} before compressed byte {at}, after {done} bytes of text ({reason})"
    return BadFile(what, where=path, do="fetch it again")


def _cut(fill: Fill, path: str, *, offset: int, size: int, longest: int | None) -> Iterator[Block]:
    buffer = bytearray(max(size, len(BOM) + 1))
    held = fill(memoryview(buffer)[: len(BOM)]) if offset == 0 else 0
    if buffer.startswith(BOM):
        held, offset = 0, len(BOM)
    ended = False
    while not ended:
        while held < len(buffer) and (got := fill(memoryview(buffer)[held:])):
            held += got
        ended = held < len(buffer)
        cut = held if ended else buffer.rfind(b"\n", 0, held) + 1
        if ended or cut:
            data, held = _take(buffer, cut, held)
        else:
            data, held = _long_line(buffer, fill, path, held=held, offset=offset, longest=longest)
        if data:
            _check_longest(data, path, offset=offset, longest=longest)
            yield Block(offset=offset, data=data, lines=data.count(b"\n") + (not data.endswith(b"\n")))
            offset += len(data)
        del data  # else the next block would be made beside this one


def _take(buffer: bytearray, cut: int, held: int) -> tuple[bytes, int]:
    """The first `cut` bytes; what is held beyond them moves to the front."""
    view = memoryview(buffer)
    data = bytes(view[:cut])
    view[: held - cut] = view[cut:held]
    return data, held - cut


def _long_line(
    buffer: bytearray, fill: Fill, path: str, *, held: int, offset: int, longest: int | None
) -> tuple[bytes, int]:
    """The one line the full buffer begins."""
    line = BytesIO()  # grows in place and gives its bytes away without a copy: a long line is held once
    while held:
        line.write(memoryview(buffer)[:held])
        if longest is not None and line.tell() > longest:
            raise _too_long(path, offset=offset, length=line.tell(), longest=longest)
        held = fill(memoryview(buffer))
        if end := buffer.find(b"\n", 0, held) + 1:
            rest, held = _take(buffer, end, held)
            line.write(rest)
            return line.getvalue(), held
    return line.getvalue(), 0


def _check_longest(data: bytes, path: str, *, offset: int, longest: int | None) -> None:
    at = 0
    while longest is not None and len(data) - at > longest:
        # All lines up to the last line end within reach are short enough: one search for many lines.
        end = data.rfind(b"\n", at, at + longest) + 1
        if not end:
            length = (data.find(b"\n", at) + 1 or len(data)) - at
            raise _too_long(path, offset=offset + at, length=length, longest=longest)
        at = end


def _too_long(path: str, *, offset: int, length: int, longest: int) -> BadRow:
    what = f"the line that starts at byte {offset} has {length} bytes or more, over the longest allowed, {longest}"
    return BadRow(what, where=path, do="split the line, or allow longer ones")


def longest_line(data: bytes) -> int:
    """Length of the longest line, its line end included.

    >>> longest_line(b"a\\nbcd\\ne")
    4
    """
    longest = begun = 0
    for at in range(0, len(data), STEP):
        ends = at + 1 + np.flatnonzero(np.frombuffer(data, np.uint8, min(STEP, len(data) - at), at) == ord("\n"))
        if len(ends):
            longest, begun = max(longest, int(np.diff(ends, prepend=begun).max())), int(ends[-1])
    return max(longest, len(data) - begun)

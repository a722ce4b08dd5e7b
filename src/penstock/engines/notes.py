"""What a worker notes as it goes, in a page of shared memory: it can still be read when the worker has been killed."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass

_NUMBERS = struct.Struct("<5Q")
_STEP, _WHERE = 256, 1024
SIZE = 4096


@dataclass(frozen=True)
class Place:
    """Where a worker is: the step, the file, and the rows of the batch in hand."""

    rows_read: int
    bytes_read: int
    rows_written: int
    first_row: int
    stop_row: int
    step: str
    where: str


class Notes:
    """One worker's page. The worker writes, the supervisor reads."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SIZE)
        self._numbers = [0, 0, 0, 0, 0]

    def begin(self) -> None:
        self._numbers = [0, 0, 0, 0, 0]
        self._page[:SIZE] = bytes(SIZE)

    def at(self, step: str, *, where: str | None = None, rows: tuple[int, int] | None = None) -> None:
        """Say what is about to be done, before it can go wrong."""
        if rows is not None:
            self._numbers[3:5] = rows
        self._put(step, where)

    def count(self, *, rows_read: int = 0, bytes_read: int = 0, rows_written: int = 0) -> None:
        numbers = self._numbers
        numbers[0] += rows_read
        numbers[1] += bytes_read
        numbers[2] += rows_written
        self._page[: _NUMBERS.size] = _NUMBERS.pack(*numbers)

    def _put(self, step: str, where: str | None) -> None:
        start = _NUMBERS.size
        self._page[:start] = _NUMBERS.pack(*self._numbers)
        self._page[start : start + _STEP] = _fixed(step, _STEP)
        if where is not None:
            self._page[start + _STEP : start + _STEP + _WHERE] = _fixed(where, _WHERE)

    def read(self) -> Place:
        start = _NUMBERS.size
        step = _text(self._page[start : start + _STEP])
        where = _text(self._page[start + _STEP : start + _STEP + _WHERE])
        read, size, written, first, stop = _NUMBERS.unpack_from(self._page)
        return Place(read, size, written, first, stop, step, where)

    def close(self) -> None:
        self._page.close()


def new_page() -> int:
    """A descriptor of fresh shared memory that a worker can inherit."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("penstock-notes")
    else:
        fd, name = tempfile.mkstemp(prefix="penstock-notes")
        os.unlink(name)
    os.ftruncate(fd, SIZE)
    return fd


def _fixed(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size].ljust(size, b"\0")


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")

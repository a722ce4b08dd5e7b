"""Virtual files: small byte strings and ranges of files on disk, read as one seekable stream that exists nowhere.

A range is read when the stream comes to it and goes straight into the reader's buffer, so no value is ever held. What
was planned is what is read: a file that has changed, shrunk or gone since is named, never sent.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from penstock.errors import SourceChanged

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from penstock.files import Writing

BUFFER = 1 << 20
# What is behind the reader leaves the page cache in stretches of this size: a kernel memory limit counts cache too.
STRETCH = 8 << 20
# A file below this is not worth a system call to drop it: the kernel reclaims clean pages by itself.
_LIGHT = 64 << 10
# From here on a range is worth `Writing.copy`, which starts a thread to hash behind the writing.
_COPY, _COPY_STRETCH = 4 << 20, 64 << 20
_SAMPLE = 512

_LINUX = sys.platform == "linux"
_AGAIN = "put it back as it was, or plan again"


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of a file. `size` and `modified` (ns) are the whole file's when it was planned, checked when opened."""

    path: str
    offset: int
    length: int
    size: int | None = None
    modified: int | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all there is of its file: then nothing comes back to it."""
        return self.offset == 0 and self.length == self.size


Part = bytes | memoryview | Range


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of the stream whose parts are made when they are needed, and made again for every pass."""

    length: int
    make: Callable[[], Sequence[Part]]


@dataclass(frozen=True, slots=True)
class Digest:
    """What one pass over a file tells: `sample` is its first 512 bytes, `stretches` the SHA-256 of each asked for."""

    sha256: str
    size: int
    sample: bytes
    stretches: tuple[str, ...] = ()


class Opens(Protocol):
    """What a virtual shard is to those who only read it."""

    def open(self) -> VirtualFile: ...


class VirtualFile(io.BufferedIOBase):
    """The sections as one binary file object. It holds the parts of one section and has at most two files open.

    `keep_cache` leaves what was read in the page cache, for who reads it again at once. An object is for one thread;
    any number of them can be open over the same sections.
    """

    def __init__(self, sections: Sequence[Section], *, name: str = "", keep_cache: bool = False) -> None:
        self.name = name
        self._sections = sections
        self._starts = list(accumulate((section.length for section in sections), initial=0))
        self.size = self._starts[-1]
        self._keep = keep_cache or not _LINUX
        self.on_read: Callable[[int], None] = lambda at: None  # hears how far the stream is, as it is read
        self._at = 0
        self._section = -1
        self._parts: Sequence[Part] = ()
        self._ends: list[int] = []  # where each part of the section ends in the stream
        self._part = 0
        # One place for a file that is read whole and never returned to, one for a file of many ranges: so the file the
        # other columns come from stays open while a thousand images pass by.
        self._open: dict[bool, _Source] = {}

    def __len__(self) -> int:
        return self.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_not_closed()
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_not_closed()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if at < 0:
            raise ValueError(f"negative seek position {at}")
        if at != self._at:
            self._at = at
            self._find()
        return at

    def read(self, size: int | None = -1, /) -> bytes:
        self._check_not_closed()
        left = self.size - self._at if size is None or size < 0 else size
        pieces = []
        while left > 0 and (piece := self._piece(left)):
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read1(self, size: int = -1, /) -> bytes:
        self._check_not_closed()
        return self._piece(BUFFER if size < 0 else size)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        self._check_not_closed()
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and (step := self._step(len(view) - done)):
            part, skip, count = step
            if isinstance(part, Range):
                count = self._source(part).read_into(view[done : done + count], part.offset + skip)
            else:
                view[done : done + count] = memoryview(part)[skip : skip + count]
            self._advance(count)
            done += count
        return done

    def readinto1(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        piece = self.read1(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def write(self, buffer: ReadableBuffer, /) -> int:
        raise io.UnsupportedOperation("write")

    def close(self) -> None:
        self._close_sources()
        self._parts = ()
        self._section = -1
        super().close()

    def write_to(self, out: Writing) -> None:
        """Append what is left of the stream to a file that is being written."""
        while step := self._step(_COPY_STRETCH):
            part, skip, count = step
            if isinstance(part, Range) and count >= _COPY:
                source = self._source(part)
                try:
                    out.copy(source.fd, part.offset + skip, count)
                except EOFError as error:
                    raise source.cut_short() from error
                self._advance(count)
            else:
                out.write(self._piece(BUFFER))

    def _check_not_closed(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def _step(self, limit: int) -> tuple[Part, int, int] | None:
        """The part the stream is in, how far, and how much of it is left up to `limit`; None at the end."""
        if self._at >= self.size:
            return None
        if not self._in_section():
            self._load()
        part = self._parts[self._part]
        left = self._ends[self._part] - self._at
        length = part.length if isinstance(part, Range) else len(part)
        return part, length - left, min(left, limit)

    def _piece(self, limit: int) -> bytes:
        """Up to `limit` bytes of one part; none at the end only."""
        step = self._step(limit) if limit > 0 else None
        if step is None:
            return b""
        part, skip, count = step
        if isinstance(part, Range):
            piece = self._source(part).read(count, part.offset + skip)
        else:
            piece = bytes(part[skip : skip + count])
        self._advance(len(piece))
        return piece

    def _in_section(self) -> bool:
        return self._section >= 0 and self._starts[self._section] <= self._at < self._starts[self._section + 1]

    def _load(self) -> None:
        """Make the parts of the section the stream is in."""
        self._parts, self._ends = (), []  # before the next ones are made: never two sections at once
        index = bisect_right(self._starts, self._at) - 1
        section, start = self._sections[index], self._starts[index]
        self._section = -1
        parts = section.make()
        lengths = (part.length if isinstance(part, Range) else len(part) for part in parts)
        ends = list(accumulate(lengths, initial=start))[1:]
        if (ends[-1] if ends else start) != start + section.length:
            raise SourceChanged("its parts are not those it was laid out with", where=self.name, do="plan again")
        self._section, self._parts, self._ends = index, parts, ends
        self._part = 0
        if self._at == start:
            self._pass_empty()
        else:
            self._find()

    def _find(self) -> None:
        """After a jump: the part the stream is in, if its section is at hand."""
        if self._in_section():
            self._part = bisect_right(self._ends, self._at)

    def _advance(self, count: int) -> None:
        self._at += count
        self.on_read(self._at)
        part = self._parts[self._part]
        if self._at < self._ends[self._part]:
            if isinstance(part, Range) and not self._keep:
                self._open[part.whole].drop_behind(self._at - self._ends[self._part] + part.length + part.offset)
            return
        if isinstance(part, Range):
            self._leave(part)
        self._part += 1
        self._pass_empty()

    def _pass_empty(self) -> None:
        """Parts without bytes are passed over, but an empty file must still be there, and empty."""
        while self._part < len(self._parts) and self._ends[self._part] == self._at:
            part = self._parts[self._part]
            if isinstance(part, Range):
                self._source(part)
                self._leave(part)
            self._part += 1

    def _source(self, part: Range) -> _Source:
        """The part's file, opened if it is not."""
        whole = part.whole
        found = self._open.get(whole)
        if found is None or (found.path, found.size, found.modified) != (part.path, part.size, part.modified):
            if found is not None:
                del self._open[whole]
                found.close()
            found = self._open[whole] = _Source(part)
        found.reads += 1
        return found

    def _leave(self, part: Range) -> None:
        """The part has been read to its end: it must still be what was opened, unless that was a moment ago."""
        whole = part.whole
        source = self._open[whole]
        if source.reads > 1 or part.length > BUFFER:
            source.check()
        if not self._keep:
            source.drop_behind(part.offset + part.length, at_end=True)
        if whole:
            del self._open[True]
            source.close()

    def _close_sources(self) -> None:
        for source in self._open.values():
            source.close()
        self._open.clear()


class _Source:
    """One open source file, which must be what was planned."""

    def __init__(self, part: Range) -> None:
        self.path, self.size, self.modified = part.path, part.size, part.modified
        try:
            self.fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SourceChanged("is gone since it was planned", where=part.path, do=_AGAIN) from error
        except OSError as error:
            raise _unreadable(part.path, error) from error
        self.reads = 0
        self._dropped = part.offset
        try:
            self.check()
            if _LINUX and part.length >= BUFFER:
                os.posix_fadvise(self.fd, part.offset, part.length, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            raise SourceChanged("is not a regular file", where=self.path, do=_AGAIN)
        if self.size is not None and found.st_size != self.size:
            raise SourceChanged(
                f"has {found.st_size:,} bytes, {self.size:,} when it was planned", where=self.path, do=_AGAIN
            )
        if self.modified is not None and found.st_mtime_ns != self.modified:
            raise SourceChanged("was modified after it was planned", where=self.path, do=_AGAIN)

    def read(self, count: int, offset: int) -> bytes:
        try:
            data = os.pread(self.fd, count, offset)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if not data:
            raise self.cut_short()
        return data

    def read_into(self, view: memoryview, offset: int) -> int:
        try:
            got = os.preadv(self.fd, [view], offset)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if not got:
            raise self.cut_short()
        return got

    def cut_short(self) -> SourceChanged:
        return SourceChanged(
            f"ends at byte {os.fstat(self.fd).st_size:,}, inside a range it had when it was planned",
            where=self.path,
            do=_AGAIN,
        )

    def drop_behind(self, offset: int, *, at_end: bool = False) -> None:
        """Let go of the cache up to `offset`, a stretch at a time."""
        if offset < self._dropped:  # after a jump back
            self._dropped = offset
        behind = offset - self._dropped
        if behind >= STRETCH or (at_end and behind >= _LIGHT):
            os.posix_fadvise(self.fd, self._dropped, behind, os.POSIX_FADV_DONTNEED)
            self._dropped = offset

    def close(self) -> None:
        os.close(self.fd)


def _unreadable(path: str, error: OSError) -> SourceChanged:
    return SourceChanged(f"cannot be read any more ({error.strerror})", where=path, do="see to it, then run again")


def lay_out(shard: Opens, out: Writing) -> None:
    """Write a virtual shard as the real file it stands for."""
    with shard.open() as file:
        file.write_to(out)


def digest(
    file: io.BufferedIOBase,
    *,
    stretches: Sequence[tuple[int, int]] = (),
    on_bytes: Callable[[int], None] | None = None,
) -> Digest:
    """Hash a file from where it stands to its end, and each (offset, length) of `stretches` by itself, in one pass.

    Offsets count from where the file stands; stretches may overlap. `on_bytes` hears how many bytes each step took.
    """
    whole, own = hashlib.sha256(), [hashlib.sha256() for _ in stretches]
    waiting = sorted(range(len(stretches)), key=lambda i: stretches[i][0], reverse=True)
    under_way: list[int] = []
    buffer = memoryview(bytearray(BUFFER))
    at, sample = 0, b""
    while count := file.readinto(buffer):
        whole.update(buffer[:count])
        if len(sample) < _SAMPLE:
            sample += bytes(buffer[: min(count, _SAMPLE - len(sample))])
        while waiting and stretches[waiting[-1]][0] < at + count:
            under_way.append(waiting.pop())
        for i in under_way:
            start, length = stretches[i]
            own[i].update(buffer[max(0, start - at) : min(count, start + length - at)])
        at += count
        under_way = [i for i in under_way if sum(stretches[i]) > at]
        if on_bytes is not None:
            on_bytes(count)
    return Digest(whole.hexdigest(), at, sample, tuple(one.hexdigest() for one in own))

"""A file, or what a compressed file inflates to, read once from its start to its end in pieces of a megabyte.

Every probe reads through this, so that no probe holds more than a few pieces whatever the file is, and what passes is
hashed on the way: one open and one read give the verdict and the digest.
"""

from __future__ import annotations

import bz2
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.media.annex import Hash

PIECE = 1 << 20
# What is handed to a decompressor at once. It copies what it has not used yet at every call, so a piece that inflates
# a thousandfold must not be large.
FEED = 64 << 10
# xz asks for its dictionary before it starts; `xz -9` takes 64 MiB. zstd's limit is Arrow's (sources/lines.py).
XZ_MEMORY = 72 << 20


class Broken(Exception):
    """What is wrong with a file: a kind of problem, and the reason in plain words."""

    problem = "undecodable"


class Truncated(Broken):
    """It ends before it should."""

    problem = "truncated"


class Reader:
    """Bytes in order. A piece that was given stays valid until the next is asked for."""

    def __init__(self) -> None:
        self.position = 0  # of the next byte that will be given
        self._held: memoryview = memoryview(b"")

    def more(self) -> memoryview:
        """The next bytes of the source; empty at its end."""
        raise NotImplementedError

    def piece(self, most: int = PIECE) -> memoryview:
        """Some bytes, at most so many; none only at the end."""
        held = self._held or self.more()
        given, self._held = held[:most], held[most:]
        self.position += len(given)
        return given

    def pieces(self, count: int, what: str) -> Iterator[memoryview]:
        """Exactly so many bytes, piece by piece."""
        while count > 0:
            given = self.piece(min(count, PIECE))
            if not given:
                raise Truncated(f"it ends at byte {self.position:,}, {count:,} bytes before the end of {what}")
            count -= len(given)
            yield given

    def read(self, count: int) -> bytes:
        """So many bytes, fewer only at the end. For headers: it holds what it gives."""
        given = bytes(self.piece(count))
        while len(given) < count and (next_piece := self.piece(count - len(given))):
            given += next_piece
        return given

    def exactly(self, count: int, what: str) -> bytes:
        """So many bytes, which must be there."""
        given = self.read(count)
        if len(given) < count:
            raise Truncated(f"it ends at byte {self.position:,}, inside {what}")
        return given

    def skip(self, count: int, what: str) -> None:
        """Pass over bytes that must be there."""
        for _ in self.pieces(count, what):
            pass

    def peek(self, count: int) -> bytes:
        """The bytes that come next, without taking them."""
        if len(self._held) < count:
            head = bytes(self._held)
            while len(head) < count and (next_piece := self.more()):
                head += next_piece
            self._held = memoryview(head)
        return bytes(self._held[:count])

    def drain(self) -> int:
        """Read what is left; how many bytes that was."""
        start = self.position
        while self.piece():
            pass
        return self.position - start


class FileReader(Reader):
    """An open file. Whatever passes goes through the hashes."""

    def __init__(self, fd: int, *, path: str, hashes: Sequence[Hash] = ()) -> None:
        super().__init__()
        self.fd, self.path = fd, path
        self.size = os.fstat(fd).st_size
        self._hashes = hashes
        self._buffer = memoryview(bytearray(max(1, min(PIECE, self.size + 1))))

    def more(self) -> memoryview:
        got = self._buffer[: os.readv(self.fd, [self._buffer])]
        for one in self._hashes:
            one.update(got)
        return got

    def at(self, offset: int, count: int) -> bytes:
        """Bytes at a place, beside the reading in order: for formats that keep their table of contents at the end."""
        return os.pread(self.fd, count, offset) if offset >= 0 else b""


class Inflated(Reader):
    """What a compressed stream holds, its checksums verified, members and frames one after the other."""

    name = ""

    def __init__(self, source: Reader) -> None:
        super().__init__()
        self._source = source
        self._left = memoryview(b"")  # compressed, not used yet
        self._codec: Any = None
        self._members = 0

    def start(self) -> Any:
        raise NotImplementedError

    def inflate(self, data: memoryview) -> tuple[bytes, memoryview]:
        """At most a piece of output from some input, and the input not used."""
        raise NotImplementedError

    def more(self) -> memoryview:
        while True:
            if not self._left:
                self._left = self._source.piece(FEED)
                if not self._left and self._codec is None:
                    if not self._members:
                        raise Truncated(f"it holds no {self.name} data")
                    return self._left
            if self._codec is None:
                if self._members and self._padding():
                    continue
                self._codec = self.start()
                self._members += 1
            ended = not self._left
            try:
                out, self._left = self.inflate(self._left)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
                raise self._damaged(error) from error
            if self._codec.eof:
                self._codec = None
            elif ended and not out:
                raise Truncated(
                    f"its {self.name} data ends at byte {self._source.position:,}, after {self.position:,} bytes of"
                    " content and before its end mark"
                )
            if out:
                return memoryview(out)

    def _damaged(self, error: Exception) -> Broken:
        place = f"near byte {self._source.position:,}"
        if isinstance(error, lzma.LZMAError) and "emory" in str(error):
            return Broken(f"its xz data needs more than {XZ_MEMORY:,} bytes of memory, which is not granted")
        if self._members > 1 and self._codec is not None:
            return Broken(f"what follows its {self.name} data {place} is damaged or not {self.name} ({error})")
        return Broken(f"its {self.name} data is damaged {place}, after {self.position:,} bytes of content ({error})")

    def _padding(self) -> bool:
        """Zero bytes after a member, as tapes and block devices leave them, are passed over."""
        rest = bytes(self._left).lstrip(b"\0")
        if len(rest) == len(self._left):
            return False
        self._left = memoryview(rest)
        return True


class Gzip(Inflated):
    name = "gzip"

    def start(self) -> Any:
        return zlib.decompressobj(wbits=31)

    def inflate(self, data: memoryview) -> tuple[bytes, memoryview]:
        out = self._codec.decompress(data, PIECE)
        return out, memoryview(self._codec.unconsumed_tail or self._codec.unused_data)


class _Keeping(Inflated):
    """bz2 and xz keep what they have not used themselves, and want no more until they have."""

    def inflate(self, data: memoryview) -> tuple[bytes, memoryview]:
        codec = self._codec
        taken, kept = (data, memoryview(b"")) if codec.needs_input else (memoryview(b""), data)
        out = codec.decompress(taken, PIECE)
        return out, memoryview(codec.unused_data + bytes(kept)) if codec.eof else kept


class Bzip2(_Keeping):
    name = "bzip2"

    def start(self) -> Any:
        return bz2.BZ2Decompressor()


class Xz(_Keeping):
    name = "xz"

    def start(self) -> Any:
        return lzma.LZMADecompressor(memlimit=XZ_MEMORY)


class Zstd(Reader):
    """Frames of zstd, through Arrow: Python 3.11 has no zstd of its own."""

    def __init__(self, source: Reader) -> None:
        super().__init__()
        import pyarrow as pa

        self._source = source
        if not source.peek(4):
            raise Truncated("it holds no zstd data")
        self._stream = pa.CompressedInputStream(pa.PythonFile(_AsFile(source), mode="r"), "zstd")

    def more(self) -> memoryview:
        try:
            return memoryview(self._stream.read(PIECE))
        except OSError as error:
            said = str(error)
            if "Truncated" in said:
                raise Truncated(
                    f"its zstd data ends at byte {self._source.position:,}, after {self.position:,} bytes of content"
                    " and before its end mark"
                ) from error
            raise Broken(f"its zstd data is damaged near byte {self._source.position:,} ({said})") from error


class _AsFile:
    """A reader as the file object Arrow takes."""

    closed = False

    def __init__(self, source: Reader) -> None:
        self._source = source

    def read(self, count: int = -1) -> bytes:
        return self._source.read(count if count >= 0 else PIECE)

    def close(self) -> None:
        pass

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


COMPRESSIONS: dict[str, type[Inflated] | type[Zstd]] = {
    ".gz": Gzip,
    ".bgz": Gzip,
    ".bz2": Bzip2,
    ".xz": Xz,
    ".zst": Zstd,
}
MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", ".gz"),
    (b"BZh", ".bz2"),
    (b"\xfd7zXZ\0", ".xz"),
    (b"\x28\xb5\x2f\xfd", ".zst"),
)

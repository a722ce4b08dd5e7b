"""Requests and answers of the loopback servers: bodies read and files sent in bounded memory."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

BUFFER = 1 << 20


class Chunked(io.RawIOBase):
    """The data inside a chunked body: HTTP's own, or the `aws-chunked` of S3 clients inside it."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream
        self._left = 0
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not self._left and not self._ended:
            self._left = int(_line(self._stream).partition(b";")[0], 16)
            if not self._left:
                self._ended = True
                while _line(self._stream):  # trailers
                    pass
        if not self._left:
            return 0
        got = self._stream.readinto(memoryview(into)[: self._left])
        if not got:
            raise ConnectionError("the client went away in the middle of a body")
        self._left -= got
        if not self._left:
            _line(self._stream)
        return got


class Body(io.RawIOBase):
    """A request's body, however it is sent. `count` says how many bytes of it were read."""

    def __init__(self, stream: io.BufferedIOBase, *, length: int, chunked: bool) -> None:
        self._stream = Chunked(stream) if chunked else stream
        self._left = sys.maxsize if chunked else length
        self._chunked = chunked
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not self._left:
            return 0
        got = self._stream.readinto(memoryview(into)[: self._left])
        if not got and not self._chunked:
            raise ConnectionError("the client went away in the middle of a body")
        self._left = self._left - got if got else 0
        self.count += got
        return got

    def drain(self, limit: int = sys.maxsize) -> None:
        """Read and forget up to `limit` bytes, so that the next request on this connection starts where it should."""
        buffer = memoryview(bytearray(min(limit, 1 << 16)))
        while limit and (got := self.readinto(buffer[:limit])):
            limit -= got


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file, sent by the kernel."""

    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class Request:
    method: str
    target: str  # path and query as sent
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: Body

    @property
    def parts(self) -> list[str]:
        """The path's segments: split first, unquoted after, because a revision may hold a quoted slash."""
        return [unquote(part) for part in self.path.strip("/").split("/")]

    def json(self) -> Any:
        return json.loads(self.body.readall() or b"null")


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes | FileRange = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.body.length if isinstance(self.body, FileRange) else len(self.body)


class Refused(Exception):
    """Ends a request with an error of the server's own form; `code` is the machine-readable word for it."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def json_answer(data: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})


def file_answer(path: Path, size: int, headers: Mapping[str, str], wanted: str | None) -> Answer:
    """A file, or the range of it a `Range` header asks for."""
    headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"} | dict(headers)
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if not found or not any(found.groups()):
        return Answer(200, FileRange(path, 0, size), headers)
    first, last = found.groups()
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= end:
        return Answer(416, b"", headers | {"Content-Range": f"bytes */{size}"})
    return Answer(
        206, FileRange(path, start, end - start), headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
    )


def read_in_buffers(stream: io.RawIOBase) -> Iterator[memoryview]:
    """A stream's bytes in one buffer used again and again."""
    buffer = memoryview(bytearray(BUFFER))
    while got := stream.readinto(buffer):
        yield buffer[:got]


def write_all(fd: int, piece: memoryview, at: int | None = None) -> None:
    """Write a whole buffer: at the file's end, or where `at` says."""
    while piece:
        done = os.write(fd, piece) if at is None else os.pwrite(fd, piece, at)
        piece = piece[done:]
        at = None if at is None else at + done


def replace_file(path: Path, data: bytes) -> None:
    """Whole or not at all, for a server that may be killed; nothing is flushed, because only the process dies here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    with open(fd, "wb") as out:
        out.write(data)
    os.replace(temporary, path)


def _line(stream: io.BufferedIOBase) -> bytes:
    line = stream.readline(65_536)
    if not line.endswith(b"\n"):
        raise ConnectionError("the client went away in the middle of a body")
    return line.strip()

"""Page headers, walked without reading the pages between them.

The footer does not tell how large a page is, and a page is what a reader must hold whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import BadFile
from penstock.parquet import thrift
from penstock.parquet.footer import ENCODINGS, Chunk, dotted
from penstock.parquet.thrift import STRUCT, CutShortError, Struct, ThriftError, integer

KINDS = ("DATA", "INDEX", "DICTIONARY", "DATA_V2")
# Where each kind's own struct is in the header, and the encoding in that.
_OWN = {"DATA": (5, 2), "DICTIONARY": (7, 2), "DATA_V2": (8, 4)}

# A header takes 20 to 60 bytes, with statistics of long strings thousands.
_FIRST_READ = 512
# Arrow's limit too: what is longer is no header.
_HEADER_LIMIT = 16 << 20


@dataclass(frozen=True, slots=True)
class Page:
    """One page: what its header says, and where its payload starts."""

    kind: str
    num_values: int
    stored: int
    bytes: int
    encoding: str
    offset: int


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What it takes to read one column chunk: its largest data page and its dictionary."""

    pages: int
    largest: int
    largest_values: int
    densest: float  # most bytes a value, as a mean over one page
    dictionary: int
    dictionary_values: int


def walk(fd: int, chunk: Chunk, *, path: str) -> Iterator[Page]:
    """Every page of a chunk in order. They must fill the chunk and hold as many values as the footer says."""
    at, end = chunk.offset, chunk.offset + chunk.stored
    buffer, start = b"", at
    values = 0
    while at < end:
        try:
            page, buffer, start = _next(fd, at, end, buffer, start)
        except (ThriftError, OSError) as error:
            raise _damaged(path, chunk, f"the page at byte {at:,} cannot be read: {error}") from error
        yield page
        at = page.offset + page.stored
        values += page.num_values if page.kind.startswith("DATA") else 0
    if values != chunk.num_values:
        raise _damaged(path, chunk, f"its pages hold {values:,} values, not {chunk.num_values:,}")


def page_facts(fd: int, chunk: Chunk, *, path: str) -> PageFacts:
    pages = largest = largest_values = dictionary = dictionary_values = 0
    densest = 0.0
    for page in walk(fd, chunk, path=path):
        pages += 1
        if page.kind == "DICTIONARY":
            dictionary, dictionary_values = page.bytes, page.num_values
            continue
        densest = max(densest, page.bytes / max(1, page.num_values))
        if page.bytes > largest or not largest_values:
            largest, largest_values = page.bytes, page.num_values
    return PageFacts(pages, largest, largest_values, densest, dictionary, dictionary_values)


def _next(fd: int, at: int, end: int, buffer: bytes, start: int) -> tuple[Page, bytes, int]:
    """The page whose header is at `at`, and a buffer, with its start, that may hold the next header too."""
    length = 0
    while True:
        try:
            header, stop = thrift.read_struct(buffer, at - start)
            return _page(header, start + stop, end), buffer, start
        except CutShortError:
            if length >= min(end - at, _HEADER_LIMIT):
                raise
        length = max(_FIRST_READ, 4 * length)
        buffer, start = os.pread(fd, min(length, end - at), at), at


def _page(header: Struct, offset: int, end: int) -> Page:
    code, size, stored = integer(header, 1), integer(header, 2), integer(header, 3)
    if not 0 <= code < len(KINDS):
        raise ThriftError(f"there is no page of kind {code}")
    if size < 0 or stored < 0:
        raise ThriftError(f"a size of {min(size, stored):,}")
    if offset + stored > end:
        raise ThriftError(f"its {stored:,} bytes go beyond the end of the chunk")
    kind = KINDS[code]
    if kind not in _OWN:
        return Page(kind, 0, stored, size, "", offset)
    own, encoding = _OWN[kind]
    struct, _ = thrift.read_struct(thrift.raw(header, own, STRUCT))
    values, coded = integer(struct, 1), integer(struct, encoding)
    if values < 0:
        raise ThriftError(f"a count of {values:,} values")
    name = ENCODINGS[coded] if 0 <= coded < len(ENCODINGS) else f"UNKNOWN_{coded}"
    return Page(kind, values, stored, size, name, offset)


def _damaged(path: str, chunk: Chunk, what: str) -> BadFile:
    return BadFile(f"column {dotted(chunk.path)}: {what}", where=path, do="fetch or write it again")

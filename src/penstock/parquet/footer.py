"""A Parquet footer: what the file holds and where, checked against the file's bounds before it is believed.

The raw bytes are kept and row groups decoded one at a time; of each only four numbers stay, in arrays. So a file of
ten thousand row groups opens in the memory of its footer.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.errors import BadFile, NotFound
from penstock.parquet import thrift
from penstock.parquet.thrift import BINARY, LIST, STRUCT, Struct, ThriftError, integer, integer_or_none

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
# Real footers reach tens of megabytes. The length is a number from the file, and is allocated before it can be checked.
FOOTER_LIMIT = 256 << 20
# The path of every leaf is kept, so a deep schema costs its depth squared.
SCHEMA_DEPTH = 256

PHYSICAL = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
ENCODINGS = (
    "PLAIN",
    "GROUP_VAR_INT",
    "PLAIN_DICTIONARY",
    "RLE",
    "BIT_PACKED",
    "DELTA_BINARY_PACKED",
    "DELTA_LENGTH_BYTE_ARRAY",
    "DELTA_BYTE_ARRAY",
    "RLE_DICTIONARY",
    "BYTE_STREAM_SPLIT",
)
REPETITIONS = ("REQUIRED", "OPTIONAL", "REPEATED")


@dataclass(frozen=True, slots=True)
class SchemaElement:
    """One node of the schema tree. A leaf has a physical type, a group has children."""

    name: str
    physical: str | None
    type_length: int | None
    repetition: str | None
    num_children: int
    converted: int | None
    scale: int | None
    precision: int | None
    field_id: int | None
    logical: bytes | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group: where its pages are, and what the footer says of them."""

    leaf: int
    path: tuple[str, ...]
    physical: str
    codec: str
    encodings: tuple[str, ...]
    num_values: int
    offset: int
    stored: int
    bytes: int
    decoded: int | None
    has_dictionary: bool
    column_index: tuple[int, int] | None
    offset_index: tuple[int, int] | None
    # The length is None where an old writer left it out; the filter's own header tells it.
    bloom_filter: tuple[int, int | None] | None


@dataclass(frozen=True, slots=True, eq=False)
class Footer:
    """What one file says of itself. Lengths: `bytes` is uncompressed, `stored` as it lies in the file."""

    path: str
    size: int
    rows: int
    schema: tuple[SchemaElement, ...]
    columns: tuple[str, ...]
    leaves: tuple[tuple[str, ...], ...]
    key_values: dict[str, bytes]
    created_by: str
    raw: bytes = field(repr=False)
    top: Struct = field(repr=False)  # every field but the row groups
    _starts: array[int] = field(repr=False)
    _rows: array[int] = field(repr=False)
    _bytes: array[int] = field(repr=False)
    _stored: array[int] = field(repr=False)

    @property
    def row_groups(self) -> int:
        return len(self._starts)

    def group_rows(self, index: int) -> int:
        return self._rows[index]

    def group_bytes(self, index: int) -> int:
        """Uncompressed bytes; from the chunks where the writer left the total out."""
        return self._bytes[index] or sum(chunk.bytes for chunk in self.chunks(index))

    def group_stored(self, index: int) -> int:
        """Bytes in the file; from the chunks where the writer left the total out."""
        return self._stored[index] or sum(chunk.stored for chunk in self.chunks(index))

    def chunks(self, index: int) -> tuple[Chunk, ...]:
        """The column chunks of a row group, one for each leaf, each within the file's bounds."""
        return tuple(chunk for chunk, _, _ in self.parts(index))

    def parts(self, index: int) -> list[tuple[Chunk, Struct, Struct]]:
        """Each column chunk with its struct and its metadata's as they were written, for who writes another footer."""
        place = f"row group {index}: "
        with damage(self.path, lambda: place):
            kind, raw_chunks = thrift.read_list(thrift.raw(self.group(index), 1, LIST))
            if len(raw_chunks) != len(self.leaves) or (raw_chunks and kind != STRUCT):
                raise ThriftError(f"{len(raw_chunks):,} column chunks for {len(self.leaves):,} columns")
            end = self.size - 8 - len(self.raw)
            parts = []
            for leaf, (path, raw) in enumerate(zip(self.leaves, raw_chunks, strict=True)):
                place = f"row group {index}, column {dotted(path)}: "
                outer, _ = thrift.read_struct(raw)
                meta, _ = thrift.read_struct(thrift.raw(outer, 3, STRUCT)) if 3 in outer else ({}, 0)
                chunk = _chunk(leaf, path, outer, meta)
                _check_bounds(chunk, end)
                parts.append((chunk, outer, meta))
            return parts

    def group(self, index: int) -> Struct:
        """The row group's own struct, as it was written."""
        return thrift.read_struct(self.raw, self._starts[index])[0]


def read_footer(path: str) -> Footer:
    """Read what a file says of itself; `BadFile` if it cannot be true."""
    with open_parquet(path) as (_, footer):
        return footer


@contextmanager
def open_parquet(path: str) -> Iterator[tuple[int, Footer]]:
    """The file's descriptor, while the block lasts, and its footer."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadFile("is not a regular file", where=path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound("there is no such file", where=path) from error
    except OSError as error:
        raise BadFile(f"cannot be read ({error.strerror})", where=path) from error
    try:
        yield fd, _read(fd, path)
    finally:
        os.close(fd)


def dotted(path: tuple[str, ...]) -> str:
    """A column's name for a message, which stays one line whatever the name holds."""
    name = ".".join(path)
    return name if name.isprintable() else ascii(name)


def read_exactly(fd: int, offset: int, length: int, path: str) -> bytes:
    """Read a range that must be there."""
    try:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                raise BadFile(
                    f"ends at byte {offset + len(data):,}, inside a range it should hold", where=path, do=_AGAIN
                )
            data += more
    except OSError as error:
        raise BadFile(f"cannot be read at byte {offset:,} ({error.strerror})", where=path) from error
    return data


_AGAIN = "fetch or write it again"


def _read(fd: int, path: str) -> Footer:
    size = os.fstat(fd).st_size
    if size == 0:
        raise BadFile("is empty (0 bytes), not a Parquet file", where=path, do=_AGAIN)
    tail = read_exactly(fd, max(0, size - 8), min(8, size), path)
    head = read_exactly(fd, 0, min(4, size), path)
    if tail[-4:] == ENCRYPTED:
        raise _encrypted(path)
    if size < 12 or head != MAGIC or tail[4:] != MAGIC:
        end = "end" if head == MAGIC else "start"
        raise BadFile(f"is cut short or not Parquet (no PAR1 at its {end})", where=path, do=_AGAIN)
    length = int.from_bytes(tail[:4], "little")
    if length > size - 12:
        raise BadFile(
            f"is cut short or not Parquet (a footer of {length:,} bytes in a file of {size:,})", where=path, do=_AGAIN
        )
    if length > FOOTER_LIMIT:
        raise BadFile(
            f"has a footer of {length:,} bytes, more than the {FOOTER_LIMIT:,} that are read",
            where=path,
            do="write it with larger row groups or fewer columns",
        )
    raw = read_exactly(fd, size - 8 - length, length, path)
    with damage(path):
        return _parse(path, size, raw)


def _parse(path: str, size: int, raw: bytes) -> Footer:
    top: Struct = {}
    starts, rows, sizes, stored = array("q"), array("q"), array("q"), array("q")
    last = pos = 0
    while True:
        last, kind, pos = thrift.field(raw, pos, last)
        if kind == thrift.STOP:
            break
        if last in top:
            raise ThriftError(f"field {last} is there twice")
        if (last, kind) == (4, LIST):
            pos = _pass_over_groups(raw, pos, starts, rows, sizes, stored)
            top[last] = kind, b""
        else:
            end = pos if kind <= thrift.FALSE else thrift.skip(raw, pos, kind)
            top[last] = kind, raw[pos:end]
            pos = end
    if top.pop(4, None) is None:
        raise ThriftError("it has no list of row groups")
    if 8 in top or 9 in top:
        raise _encrypted(path)
    schema = tuple(_element(item) for item in thrift.read_list(thrift.raw(top, 2, LIST))[1])
    columns, leaves = _tree(schema)
    total = integer(top, 3)
    if total != sum(rows):
        raise ThriftError(f"it counts {total:,} rows, its row groups {sum(rows):,}")
    return Footer(
        path=path,
        size=size,
        rows=total,
        schema=schema,
        columns=columns,
        leaves=leaves,
        key_values=_key_values(top),
        created_by=thrift.string(thrift.raw(top, 6, BINARY)).decode(errors="replace") if 6 in top else "",
        raw=raw,
        top=top,
        _starts=starts,
        _rows=rows,
        _bytes=sizes,
        _stored=stored,
    )


def _pass_over_groups(
    raw: bytes, pos: int, starts: array[int], rows: array[int], sizes: array[int], stored: array[int]
) -> int:
    """Note the place and the totals of each row group, decoding nothing else; where the list ends."""
    count, kind, pos = thrift.list_head(raw, pos)
    if count and kind != STRUCT:
        raise ThriftError(f"row groups are of kind {kind}, not {STRUCT}")
    for _ in range(count):
        starts.append(pos)
        totals = {2: 0, 3: -1, 6: 0}
        last = 0
        while True:
            last, kind, pos = thrift.field(raw, pos, last)
            if kind == thrift.STOP:
                break
            if last in totals:
                totals[last] = thrift.read_integer(kind, raw, pos)
            if kind > thrift.FALSE:
                pos = thrift.skip(raw, pos, kind)
        if totals[3] < 0:
            raise ThriftError(f"row group {len(rows)} has no count of its rows")
        rows.append(totals[3])
        sizes.append(max(0, totals[2]))
        stored.append(max(0, totals[6]))
    return pos


def _element(raw: bytes) -> SchemaElement:
    struct, _ = thrift.read_struct(raw)
    physical = integer_or_none(struct, 1)
    repetition = integer_or_none(struct, 3)
    return SchemaElement(
        name=_text(thrift.raw(struct, 4, BINARY)),
        physical=None if physical is None else PHYSICAL[_within(physical, PHYSICAL)],
        type_length=integer_or_none(struct, 2),
        repetition=None if repetition is None else REPETITIONS[_within(repetition, REPETITIONS)],
        num_children=integer_or_none(struct, 5) or 0,
        converted=integer_or_none(struct, 6),
        scale=integer_or_none(struct, 7),
        precision=integer_or_none(struct, 8),
        field_id=integer_or_none(struct, 9),
        logical=thrift.raw(struct, 10, STRUCT) if 10 in struct else None,
    )


def _tree(schema: tuple[SchemaElement, ...]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The names of the top-level columns, and the path of every leaf."""
    if not schema or schema[0].physical is not None:
        raise ThriftError("the schema has no root")
    columns: list[str] = []
    leaves: list[tuple[str, ...]] = []
    path: list[str] = []
    waiting = [schema[0].num_children]  # children still to come, at each level
    for element in schema[1:]:
        while waiting and waiting[-1] == 0:
            waiting.pop()
            del path[-1:]
        if not waiting:
            raise ThriftError("the schema has elements that are no one's child")
        if waiting[-1] < 0 or len(waiting) > SCHEMA_DEPTH:
            raise ThriftError("the schema is not a tree" if waiting[-1] < 0 else "the schema nests too deep")
        if len(waiting) == 1:
            columns.append(element.name)
        waiting[-1] -= 1
        if element.physical is not None:
            leaves.append((*path, element.name))
        else:
            path.append(element.name)
            waiting.append(element.num_children)
    if any(waiting):
        raise ThriftError("the schema lacks some of its elements")
    return tuple(columns), tuple(leaves)


def _key_values(top: Struct) -> dict[str, bytes]:
    found = {}
    for raw in thrift.read_list(thrift.raw(top, 5, LIST))[1] if 5 in top else ():
        struct, _ = thrift.read_struct(raw)
        value = thrift.string(thrift.raw(struct, 2, BINARY)) if 2 in struct else b""
        found[_text(thrift.raw(struct, 1, BINARY))] = value
    return found


def _chunk(leaf: int, path: tuple[str, ...], outer: Struct, meta: Struct) -> Chunk:
    if 1 in outer:
        raise ThriftError("its data is in another file")
    if 8 in outer or 9 in outer:
        raise ThriftError("it is encrypted")
    if 3 in meta and (said := _path(thrift.raw(meta, 3, LIST))) != path:
        raise ThriftError(f"it says it is column {dotted(said)}")
    encodings = _encodings(thrift.raw(meta, 2, LIST))
    data, dictionary = integer(meta, 9), integer_or_none(meta, 11) or 0
    # Some old writers put 0 here, or a place after the data: then the dictionary, if any, is the first page. In an
    # empty row group of Arrow's it is the only page, and the data's place is 0.
    before = 0 < dictionary < data or data == 0 < dictionary
    bloom = integer_or_none(meta, 14) or 0
    return Chunk(
        leaf=leaf,
        path=path,
        physical=PHYSICAL[_within(integer(meta, 1), PHYSICAL)],
        codec=_named(integer(meta, 4), CODECS),
        encodings=encodings,
        num_values=_natural(integer(meta, 5)),
        offset=dictionary if before else data,
        stored=_natural(integer(meta, 7)),
        bytes=_natural(integer(meta, 6)),
        decoded=_decoded(meta),
        has_dictionary=before or "RLE_DICTIONARY" in encodings or "PLAIN_DICTIONARY" in encodings,
        column_index=_extent(outer, 6, 7),
        offset_index=_extent(outer, 4, 5),
        bloom_filter=(bloom, integer_or_none(meta, 15)) if bloom > 0 else None,
    )


def _decoded(meta: Struct) -> int | None:
    """Bytes of the values themselves, where the writer counted them (BYTE_ARRAY only)."""
    if 16 not in meta:
        return None
    statistics, _ = thrift.read_struct(thrift.raw(meta, 16, STRUCT))
    return integer_or_none(statistics, 1)


def _extent(struct: Struct, offset: int, length: int) -> tuple[int, int] | None:
    at, size = integer_or_none(struct, offset), integer_or_none(struct, length)
    return (at, size) if at and size else None


def _check_bounds(chunk: Chunk, end: int) -> None:
    """Nothing may lie outside the stretch between the magic and the footer."""
    bloom = chunk.bloom_filter and (chunk.bloom_filter[0], chunk.bloom_filter[1] or 0)
    extents = (chunk.offset, chunk.stored), chunk.column_index, chunk.offset_index, bloom
    for extent, name in zip(extents, ("column chunk", "column index", "offset index", "bloom filter"), strict=True):
        if extent is not None:
            at, length = extent
            if at < 0 or length < 0 or at + length > end or (length and at < len(MAGIC)):
                raise ThriftError(f"its {name} of {length:,} bytes at {at:,} is outside the {end:,} bytes of data")


@lru_cache(1024)  # the same few in every row group
def _encodings(payload: bytes) -> tuple[str, ...]:
    kind, items = thrift.read_list(payload)
    return tuple(_named(thrift.read_integer(kind, item), ENCODINGS) for item in items)


@lru_cache(1024)
def _path(payload: bytes) -> tuple[str, ...]:
    return tuple(_text(name) for name in thrift.read_list(payload)[1])


def _named(code: int, names: tuple[str, ...]) -> str:
    """The name of a code; a newer format's codes are no reason not to move the bytes."""
    return names[code] if 0 <= code < len(names) else f"UNKNOWN_{code}"


def _within(code: int, names: tuple[str, ...]) -> int:
    if not 0 <= code < len(names):
        raise ThriftError(f"there is no type {code}")
    return code


def _natural(value: int) -> int:
    if value < 0:
        raise ThriftError(f"a size of {value:,}")
    return value


def _text(payload: bytes) -> str:
    return thrift.string(payload).decode()


def _encrypted(path: str) -> BadFile:
    return BadFile("is encrypted Parquet, which is not read", where=path, do="decrypt it with the tool that wrote it")


@contextmanager
def damage(path: str, place: Callable[[], str] = str) -> Iterator[None]:
    """Say of which file, row group and column it is that something does not hold."""
    try:
        yield
    except (ThriftError, UnicodeDecodeError) as error:
        raise BadFile(f"{place()}its footer is damaged ({error})", where=path, do=_AGAIN) from error

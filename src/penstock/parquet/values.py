"""Pages of media: levels and lengths made from references, values as ranges of the files they refer to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import BadFile, SourceChanged, UsageError
from penstock.media.kinds import LARGEST_VALUE, steps_of
from penstock.parquet import thrift
from penstock.parquet.footer import Chunk
from penstock.parquet.levels import Shape, encode, numbers, shape_of, valid, with_presence
from penstock.parquet.places import Medium
from penstock.parquet.stream import Part, Range
from penstock.parquet.thrift import BINARY, I32, I64, LIST, STRUCT, Struct

PAGE = 1 << 20
# Arrow's own limit: an offset index over a column of nulls should still lead to a row.
PAGE_ROWS = 20_000
# A page holds whole rows, so that an offset index can lead to them. A row larger than this has its row group to itself,
# where an index leads nowhere, and a reader should not have to hold all of its values in one page.
LONE_ROW = 64 << 20

_BYTE_ARRAY, _PLAIN, _RLE, _DATA_PAGE, _UNCOMPRESSED = 6, 0, 3, 0, 0


@dataclass(frozen=True, slots=True)
class Made:
    """Where a row group's media leaf goes; `inline` if some of its values came without a file."""

    medium: Medium
    inline: bool


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """One media leaf of one row group: its levels, the size of every entry, and the references themselves."""

    shape: Shape
    sizes: npt.NDArray[np.int64]
    references: pa.StructArray


def read_values(file: pq.ParquetFile, index: int, made: Made, *, path: str, row: int = 0) -> Values:
    """Read the references of one media leaf; `row` is the row group's first, for messages."""
    medium = made.medium
    members = ("file", "size", "modified", "bytes") if made.inline else ("file", "size", "modified")
    table = file.read_row_group(index, columns=[".".join((*medium.at, one)) for one in members], use_threads=False)
    column = table.column(medium.column).combine_chunks()
    shape, references, field = shape_of(column, table.schema.field(medium.column), steps_of(medium.within))
    has_file = valid(references.field("file"))
    there = has_file | valid(references.field("bytes")) if made.inline else has_file
    whole = valid(references)
    if medium.plain:
        there &= whole
        if field.nullable:
            shape = with_presence(shape, there)
        elif not there[shape.places[shape.places >= 0]].all():
            raise BadFile(f"column {medium.name} may not be null, and has a value without bytes", where=path)
    else:
        if field.nullable:
            shape = with_presence(shape, whole)
        shape = with_presence(shape, there)
    slots = np.where(valid(references.field("size")), numbers(references.field("size")), -1)
    if made.inline:
        slots = np.where(has_file, slots, numbers(pc.binary_length(references.field("bytes"))))
    alive = shape.places >= 0
    sizes = np.zeros(len(alive), np.int64)
    sizes[alive] = slots[shape.places[alive]]
    wrong = np.flatnonzero((sizes < 0) | (sizes > LARGEST_VALUE))
    if len(wrong):
        number = int(wrong[0])
        at = row + int(np.count_nonzero(shape.repetition[: number + 1] == 0)) - 1
        source = references.field("file")[int(shape.places[number])].as_py()
        size = int(sizes[number])
        what = "a file of unknown size" if size < 0 else f"{size:,} bytes; a Parquet page holds up to {LARGEST_VALUE:,}"
        raise UsageError(
            f"column {medium.name}, row {at:,}: {what}",
            where=source or "",
            do="leave it out, or split it",
        )
    return Values(shape, sizes, references)


@dataclass(frozen=True, slots=True)
class _Page:
    """A page's entries from `first` to `stop`, and all of it that comes before the values."""

    first: int
    stop: int
    head: bytes
    data: int  # bytes of the values with their lengths


def _pages(values: Values) -> Iterator[_Page]:
    shape = values.shape
    if not len(values.sizes):
        return
    costs = values.sizes + 4 * (shape.places >= 0)
    total = np.concatenate(([0], np.cumsum(costs)))
    for first, stop in _cuts(shape.repetition, costs, total):
        levels = encode(shape.repetition[first:stop], shape.max_repetition)
        levels += encode(shape.definition[first:stop], shape.max_definition)
        data = int(total[stop] - total[first])
        yield _Page(first, stop, _page_header(stop - first, len(levels) + data) + levels, data)


def _cuts(
    repetition: npt.NDArray[np.uint8], costs: npt.NDArray[np.int64], total: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Where pages begin and end: at rows, and at every value of a row that is too large for one page."""
    rows = np.flatnonzero(repetition == 0)
    large = np.add.reduceat(costs, rows) > LONE_ROW
    units = rows
    if len(rows) < len(costs) and large.any():
        units = np.flatnonzero((repetition == 0) | np.repeat(large, np.diff(rows, append=len(costs))))
    ends = np.append(units[1:], len(costs))
    filled = total[ends]
    first = 0
    while first < len(units):
        stop = int(np.searchsorted(filled, total[units[first]] + PAGE, side="right"))
        stop = min(max(stop, first + 1), first + PAGE_ROWS, len(units))
        yield int(units[first]), int(ends[stop - 1])
        first = stop


def _page_header(entries: int, length: int) -> bytes:
    own: Struct = {
        number: (I32, thrift.zigzag(value)) for number, value in ((1, entries), (2, _PLAIN), (3, _RLE), (4, _RLE))
    }
    size = I32, thrift.zigzag(length)
    return thrift.write_struct(
        {1: (I32, thrift.zigzag(_DATA_PAGE)), 2: size, 3: size, 5: (STRUCT, thrift.write_struct(own))}
    )


def describe(values: Values, medium: Medium, leaf: int, at: int) -> tuple[Chunk, Struct, Struct, bytes]:
    """A media chunk that starts at `at`: what the footer says of it, and its offset index if it can have one."""
    shape = values.shape
    row_at = np.cumsum(shape.repetition == 0) - 1
    size = pages = 0
    aligned = True
    locations, unencoded = [], []
    for page in _pages(values):
        length = len(page.head) + page.data
        aligned = aligned and shape.repetition[page.first] == 0
        location: Struct = {
            1: (I64, thrift.zigzag(at + size)),
            2: (I32, thrift.zigzag(length)),
            3: (I64, thrift.zigzag(int(row_at[page.first]))),
        }
        locations.append(thrift.write_struct(location))
        unencoded.append(int(values.sizes[page.first : page.stop].sum()))
        size += length
        pages += 1
    entries = len(shape.places)
    statistics: Struct = {3: (I64, thrift.zigzag(int(np.count_nonzero(shape.places < 0))))}
    sizes: Struct = {1: (I64, thrift.zigzag(sum(unencoded)))}
    for number, levels, highest in (
        (2, shape.repetition, shape.max_repetition),
        (3, shape.definition, shape.max_definition),
    ):
        if highest:
            counts = np.bincount(levels, minlength=highest + 1).tolist()
            sizes[number] = LIST, thrift.write_list(I64, map(thrift.zigzag, counts))
    encodings = [thrift.zigzag(_PLAIN), thrift.zigzag(_RLE)]
    of_pages: Struct = {
        1: (I32, thrift.zigzag(_DATA_PAGE)),
        2: (I32, thrift.zigzag(_PLAIN)),
        3: (I32, thrift.zigzag(pages)),
    }
    meta: Struct = {
        1: (I32, thrift.zigzag(_BYTE_ARRAY)),
        2: (LIST, thrift.write_list(I32, encodings)),
        3: (LIST, thrift.write_list(BINARY, [thrift.binary(name.encode()) for name in medium.path])),
        4: (I32, thrift.zigzag(_UNCOMPRESSED)),
        5: (I64, thrift.zigzag(entries)),
        6: (I64, thrift.zigzag(size)),
        7: (I64, thrift.zigzag(size)),
        9: (I64, thrift.zigzag(0)),  # set when its place is
        12: (STRUCT, thrift.write_struct(statistics)),
        13: (LIST, thrift.write_list(STRUCT, [thrift.write_struct(of_pages)])),
        16: (STRUCT, thrift.write_struct(sizes)),
    }
    chunk = Chunk(
        leaf=leaf,
        path=medium.path,
        physical="BYTE_ARRAY",
        codec="UNCOMPRESSED",
        encodings=("PLAIN", "RLE"),
        num_values=entries,
        offset=0,
        stored=size,
        bytes=size,
        decoded=sum(unencoded),
        has_dictionary=False,
        column_index=None,
        offset_index=None,
        bloom_filter=None,
    )
    # A column index needs the least and the greatest value of each page; nobody reads media to tell. An offset index
    # may only point at pages that begin with a row.
    index: Struct = {
        1: (LIST, thrift.write_list(STRUCT, locations)),
        2: (LIST, thrift.write_list(I64, map(thrift.zigzag, unencoded))),
    }
    return chunk, {}, meta, thrift.write_struct(index) if aligned else b""


def group_parts(path: str, size: int, modified: int, index: int, recipe: Sequence[Part | Made]) -> list[Part]:
    """The parts of one row group, made from its recipe."""
    parts: list[Part] = []
    try:
        found = os.stat(path)
    except OSError as error:
        raise SourceChanged("is gone since it was planned", where=path, do="plan again") from error
    if (found.st_size, found.st_mtime_ns) != (size, modified):
        raise SourceChanged("was modified after it was planned", where=path, do="plan again")
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for item in recipe:
            if isinstance(item, Made):
                _add_values(parts, read_values(file, index, item, path=path))
            else:
                parts.append(item)
    return parts


def _add_values(parts: list[Part], values: Values) -> None:
    """The pages of one media leaf: levels and lengths as they are, values as ranges of their files."""
    there = values.shape.places >= 0
    before = np.concatenate(([0], np.cumsum(there))).tolist()
    places = values.shape.places[there]
    sizes = values.sizes[there]
    lengths = sizes.astype("<u4").tobytes()
    indices = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)])
    files, stamps = (values.references.field(name).take(indices).to_pylist() for name in ("file", "modified"))
    for page in _pages(values):
        literal = page.head
        for i in range(before[page.first], before[page.stop]):
            parts.append(literal + lengths[4 * i : 4 * i + 4])
            literal = b""
            if files[i] is None:
                parts.append(memoryview(values.references.field("bytes")[int(places[i])].as_buffer()).cast("B"))
            else:
                size = int(sizes[i])
                parts.append(Range(files[i], 0, size, size, stamps[i]))
        if literal:
            parts.append(literal)

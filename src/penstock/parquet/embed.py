"""Virtual shards: row groups of Parquet files regrouped, with the values of media columns taken from their own files.

A shard is laid out by numbers alone: what each page will hold is known from the references, so its size and footer are
there before a byte of media is read. All that is kept is the footer and a recipe for each row group; the parts are made
again when the stream comes to them. So memory depends neither on the size of a value nor on that of the shard.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.errors import UsageError
from penstock.media.weights import KEY
from penstock.parquet import thrift
from penstock.parquet.footer import MAGIC, Footer, damage, read_exactly
from penstock.parquet.splice import (
    STALE,
    Job,
    Piece,
    Span,
    each,
    edited,
    kept_key_values,
    move,
    moved_index,
    prepare,
    row_group,
    set_key_values,
    set_orders,
    write_footer,
)
from penstock.parquet.stream import Part, Range, Section, VirtualFile
from penstock.parquet.thrift import BINARY, I16, I32, I64, LIST, STRUCT, Struct, integer, integer_or_none

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from penstock.media.kinds import Leaf
    from penstock.parquet.places import Medium
    from penstock.parquet.values import Made

# Below this the bytes of a range are no larger than what it takes to describe it.
_LITERAL = 256
# A row group's place in the file and its number: both optional, and set to what they come to be where they are there.
_PLACED: Struct = {5: (I64, thrift.zigzag(0)), 7: (I16, thrift.zigzag(0))}


@dataclass(frozen=True, slots=True)
class VirtualShard:
    """A Parquet file that need not exist. `bytes` counts its column chunks uncompressed; `row_groups` has the offset,
    length and rows of each."""

    size: int
    rows: int
    bytes: int
    row_groups: tuple[tuple[int, int, int], ...]
    sections: tuple[Section, ...]

    def open(self, *, name: str = "", keep_cache: bool = False) -> VirtualFile:
        """The shard as a seekable binary file object; see `VirtualFile`."""
        return VirtualFile(self.sections, name=name, keep_cache=keep_cache)


def virtual_shard(
    spans: Sequence[Span],
    *,
    leaves: Sequence[Leaf] = (),
    columns: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    key_values: Mapping[str, str | bytes] | None = None,
    schema_from: str | None = None,
) -> VirtualShard:
    """The row groups of `spans` as one Parquet file.

    Without `leaves`, the places of media values, it is what `splice` would write, byte for byte. With them the spans
    are of reference files, and each value's bytes are those of the file it refers to.
    """
    job = prepare(spans, columns, rename or {}, schema_from)
    if KEY in job.first.key_values and not leaves:
        raise UsageError("is a file of references to media", where=job.first.path, do="say which columns are media")
    out = _Recorded()
    if leaves:
        groups, size = _embed(job, out, leaves, key_values or {})
    else:
        moved = move(job, out, key_values or {})
        groups, size = moved.groups, moved.bytes
    return VirtualShard(out.tell(), job.rows, size, tuple(_extents(groups)), tuple(out.finish()))


def _extents(groups: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    at = len(MAGIC)
    for raw in groups:
        group, _ = thrift.read_struct(raw)
        length = integer(group, 6)
        yield at, length, integer(group, 3)
        at += length


class _Recorded:
    """A splice that is not written: the sections it would consist of."""

    def __init__(self) -> None:
        self._sections: list[Section] = []
        self._parts: list[Part] = []
        self._pending = bytearray()
        self._at = self._section_at = 0

    def write(self, data: bytes) -> None:
        self._pending += data
        self._at += len(data)

    def tell(self) -> int:
        return self._at

    def take(self, fd: int, offset: int, length: int, path: str) -> None:
        if length < _LITERAL:
            self.write(read_exactly(fd, offset, length, path))
        else:
            self._end_literal()
            _append(self._parts, range_of(fd, offset, length, path))
            self._at += length

    def section(self, section: Section) -> None:
        """Append a stretch whose parts are made later."""
        self._end_section()
        self._sections.append(section)
        self._at += section.length
        self._section_at = self._at

    def finish(self) -> list[Section]:
        self._end_section()
        return self._sections

    def _end_literal(self) -> None:
        if self._pending:
            self._parts.append(bytes(self._pending))
            self._pending = bytearray()

    def _end_section(self) -> None:
        self._end_literal()
        if self._parts:
            self._sections.append(Section(self._at - self._section_at, partial(_as_they_are, tuple(self._parts))))
            self._parts = []
            self._section_at = self._at


def _as_they_are(parts: Sequence[Part]) -> Sequence[Part]:
    return parts


def range_of(fd: int, offset: int, length: int, path: str) -> Range:
    """A range of an open file, which must stay as it is now."""
    found = os.fstat(fd)
    return Range(path, offset, length, found.st_size, found.st_mtime_ns)


def _append(parts: list[Part], new: Range) -> None:
    """Append a range, or make the last one longer if it goes on where that ends."""
    last = parts[-1] if parts else b""
    if isinstance(last, Range) and last == Range(
        new.path, last.offset, new.offset - last.offset, new.size, new.modified
    ):
        parts[-1] = Range(new.path, last.offset, last.length + new.length, new.size, new.modified)
    else:
        parts.append(new)


def _embed(
    job: Job, out: _Recorded, leaves: Sequence[Leaf], key_values: Mapping[str, str | bytes]
) -> tuple[list[bytes], int]:
    """Lay the whole file out, a row group at a time; the row groups' structs, and their uncompressed size."""
    import pyarrow.parquet as pq

    from penstock.parquet.places import plan_leaves, stored_elements
    from penstock.parquet.values import group_parts

    out.write(MAGIC)
    schema = _stored_schema(job, leaves)
    groups: list[bytes] = []
    indexes: list[list[tuple[bytes, bytes]]] = []
    rows = size = 0
    for fd, footer, span in each(job):
        plan = plan_leaves(job, footer, leaves)
        if span.first == span.stop:
            continue
        with pq.ParquetFile(footer.path, pre_buffer=False) as file:
            for index in range(span.first, span.stop):
                group = _lay_group(file, fd, footer, index, plan, at=out.tell(), row=rows)
                with damage(footer.path):
                    struct = footer.group(index) | _PLACED
                    groups.append(row_group(job, struct, group.pieces, out.tell(), len(groups)))
                indexes.append(group.indexes)
                stat = os.fstat(fd)
                make = partial(group_parts, footer.path, stat.st_size, stat.st_mtime_ns, index, tuple(group.recipe))
                out.section(Section(sum(chunk.stored for chunk, _, _ in group.pieces), make))
                rows += footer.group_rows(index)
                size += sum(chunk.bytes for chunk, _, _ in group.pieces)
    for number, of_group in enumerate(indexes):
        edits: list[Struct] = [{} for _ in of_group]
        for which, fields in ((0, (6, 7)), (1, (4, 5))):  # column indexes first, then offset indexes
            for pair, edit in zip(of_group, edits, strict=True):
                if pair[which]:
                    edit[fields[0]] = I64, thrift.zigzag(out.tell())
                    edit[fields[1]] = I32, thrift.zigzag(len(pair[which]))
                    out.write(pair[which])
        groups[number] = edited(groups[number], outers=edits)
    with damage(job.first.path):
        top = dict(job.first.top)
        top[2] = LIST, stored_elements(job, leaves)
        top[6] = BINARY, thrift.binary(f"penstock version {__version__}".encode())
        kept = {key: value for key, value in kept_key_values(job).items() if key not in STALE and key != KEY}
        values = {**kept, **key_values}
        set_key_values(top, {"ARROW:schema": arrow_schema(schema, values), **values})
        set_orders(job, top, [leaf for leaf, _ in plan_leaves(job, job.first, leaves)])
        write_footer(job, out, top, groups)
    return groups, size


def arrow_schema(schema: pa.Schema, key_values: Mapping[str, str | bytes]) -> bytes:
    """The value of `ARROW:schema`. Arrow shows its readers no key-values but those in here, `datasets` among them."""
    return base64.b64encode(schema.with_metadata(dict(key_values) or None).serialize().to_pybytes())


def _stored_schema(job: Job, leaves: Sequence[Leaf]) -> pa.Schema:
    """The Arrow schema of the shard."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from penstock.media.kinds import kinds_of, mark, stored_schema

    schema = pq.read_schema(job.first.path)
    fields = []
    for name in job.columns:
        field = schema.field(name)
        kinds = {leaf.within: leaf.kind for leaf in leaves if leaf.column == name}
        forgotten = kinds_of(field).keys() - kinds.keys()
        if forgotten:
            raise UsageError(
                f"column {name}{min(forgotten)} holds references to media, and was not named as such",
                where=job.first.path,
            )
        fields.append((mark(field, kinds) if kinds else field).with_name(job.rename.get(name, name)))
    return stored_schema(pa.schema(fields))


@dataclass(slots=True)
class _Group:
    """A row group laid out: its chunks for the footer, their indexes, and the recipe for its parts."""

    pieces: list[Piece]
    indexes: list[tuple[bytes, bytes]]  # of each chunk: column index, offset index
    recipe: list[Part | Made]


def _lay_group(
    file: pq.ParquetFile,
    fd: int,
    footer: Footer,
    index: int,
    plan: Sequence[tuple[int, Medium | None]],
    *,
    at: int,
    row: int,
) -> _Group:
    from penstock.parquet.values import Made, describe, read_values

    found = footer.parts(index)
    group = _Group([], [], [])
    ranges: list[Part] = []
    for leaf, medium in plan:
        chunk, outer, meta = found[leaf]
        if medium is None or (not medium.plain and _all_null(found[medium.file_leaf])):
            # Values that all came inline lie in their pages already, with the levels that are stored.
            column_index = chunk.column_index if medium is None else None
            if medium is not None:
                _strip_bounds(meta)
            offset_index = chunk.offset_index and moved_index(
                read_exactly(fd, *chunk.offset_index, footer.path), chunk, at, footer.path
            )
            _append(ranges, range_of(fd, chunk.offset, chunk.stored, footer.path))
            group.indexes.append(
                (read_exactly(fd, *column_index, footer.path) if column_index else b"", offset_index or b"")
            )
        else:
            made = Made(medium, inline=not _all_null(found[medium.bytes_leaf]))
            values = read_values(file, index, made, path=footer.path, row=row)
            chunk, outer, meta, offset_index = describe(values, medium, leaf, at)
            group.recipe += [*ranges, made]
            ranges = []
            group.indexes.append((b"", offset_index))
        group.pieces.append((chunk, outer, meta))
        at += chunk.stored
    group.recipe += ranges
    return group


def _all_null(piece: Piece) -> bool:
    """Whether the footer says that a chunk has no value at all."""
    chunk, _, meta = piece
    if 12 not in meta:
        return False
    statistics, _ = thrift.read_struct(thrift.raw(meta, 12, STRUCT))
    return integer_or_none(statistics, 3) == chunk.num_values


def _strip_bounds(meta: Struct) -> None:
    """Leave of a chunk's statistics only how many nulls there are: the first kilobytes of an image bound nothing."""
    if 12 in meta:
        statistics, _ = thrift.read_struct(thrift.raw(meta, 12, STRUCT))
        meta[12] = STRUCT, thrift.write_struct({number: statistics[number] for number in statistics if number == 3})

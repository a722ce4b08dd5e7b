"""Splicing: column chunks are moved as they are and a new footer says where. Nothing is decompressed.

Each pass over the spans holds one source footer at a time; of the new one only its bytes are kept. So memory grows with
the footer that is written, and with nothing else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from penstock.errors import BadFile, SchemaClash, UsageError
from penstock.files import Writing
from penstock.parquet import thrift
from penstock.parquet.footer import (
    FOOTER_LIMIT,
    MAGIC,
    Chunk,
    Footer,
    SchemaElement,
    damage,
    dotted,
    open_parquet,
    read_exactly,
)
from penstock.parquet.thrift import BINARY, I16, I32, I64, LIST, STRUCT, Struct, ThriftError, integer, integer_or_none

# These describe every column, in forms that cannot be edited here; a stale one misleads readers, none at all does not.
STALE = frozenset({"ARROW:schema", "pandas", "org.apache.spark.sql.parquet.row.metadata", "iceberg.schema"})

Piece = tuple[Chunk, Struct, Struct]

# Below this a range goes through the writer's buffer: one write for many small row groups.
_SMALL = 64 << 10


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive row groups of one file."""

    path: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Spliced:
    """What a splice wrote: `stored` and `bytes` count the column chunks, as they lie in the file and uncompressed."""

    rows: int
    row_groups: int
    stored: int
    bytes: int


class Out(Protocol):
    """Where a splice goes: a file that is written, or the list of what would be in it."""

    def write(self, data: bytes) -> object: ...

    def tell(self) -> int: ...

    def take(self, fd: int, offset: int, length: int, path: str) -> None:
        """Append a range of an open file."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a splice has to do, once every footer has been looked at."""

    spans: tuple[Span, ...]
    footers: tuple[int, ...]  # a hash of the footer of each span's file, for it is read again in every pass
    first: Footer
    columns: tuple[str, ...]
    rename: Mapping[str, str]
    rows: int
    row_groups: int
    ordered: bool


@dataclass(slots=True)
class Moved:
    """What the first pass leaves: the row groups' new structs, still as bytes, and what else there is to move."""

    groups: list[bytes]
    stored: int = 0
    bytes: int = 0
    blooms: bool = False
    indexes: bool = False


def splice(
    spans: Sequence[Span],
    out: Writing,
    *,
    columns: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    key_values: Mapping[str, str | bytes] | None = None,
    schema_from: str | None = None,
) -> Spliced:
    """Write the row groups of `spans` as one Parquet file, with all columns or the given ones in the given order.

    `rename` maps old names to new. `key_values` adds to, or takes the place of, the first file's; where the columns
    change and it brings no new `ARROW:schema`, there is none. No spans: an empty file with the schema of `schema_from`.
    """
    job = prepare(spans, columns, rename or {}, schema_from)
    moved = move(job, _Copied(out), key_values or {})
    return Spliced(rows=job.rows, row_groups=job.row_groups, stored=moved.stored, bytes=moved.bytes)


def move(job: Job, out: Out, key_values: Mapping[str, str | bytes]) -> Moved:
    """The splice itself: data, bloom filters, page indexes, footer."""
    out.write(MAGIC)
    moved = _move_chunks(job, out)
    if moved.blooms:
        _move_blooms(job, out, moved)
    if moved.indexes:
        _move_indexes(job, out, moved)
    with damage(job.first.path):
        # The writer's name stays the first file's: readers go by it to tell whether old statistics can be trusted.
        top = dict(job.first.top)
        top[2] = LIST, _schema(job)
        _set_key_values(job, top, key_values)
        set_orders(job, top, _leaves(job, job.first))
        write_footer(job, out, top, moved.groups)
    return moved


class _Copied:
    """A splice that is written to a file."""

    def __init__(self, out: Writing) -> None:
        self._out = out
        self.write, self.tell = out.write, out.tell

    def take(self, fd: int, offset: int, length: int, path: str) -> None:
        if length < _SMALL:
            self.write(read_exactly(fd, offset, length, path))
            return
        try:
            self._out.copy(fd, offset, length)
        except EOFError as error:
            raise BadFile(f"is cut short ({error})", where=path, do="fetch or write it again") from error


def why_not(footers: Iterable[Footer], *, columns: Sequence[str] | None = None) -> str | None:
    """Why these files cannot be spliced into one: which column, which two files. None if they can.

    With `columns`, only those need to agree. Their order in each file is free.
    """
    first: Footer | None = None
    for footer in footers:
        first = first or footer
        reason = _why_not_one(footer) or _why_not_two(first, footer, columns)
        if reason is not None:
            return reason
    return None


def _why_not_one(footer: Footer) -> str | None:
    twice = _first_repeated(footer.columns)
    if twice is not None:
        return f"{footer.path} has two columns named {dotted((twice,))}"
    if _parquet_mr(footer.created_by) < (1, 2, 9):
        return f"{footer.path} is of a parquet-mr before 1.2.9, whose sizes leave out some bytes (PARQUET-816)"
    return None


def _why_not_two(a: Footer, b: Footer, columns: Sequence[str] | None) -> str | None:
    mine, theirs = subtrees(a), subtrees(b)
    for one, other, trees in ((a, b, theirs), (b, a, mine)):
        for name in one.columns if columns is None else columns:
            if name not in trees:
                which = f", which {one.path} has" if columns is None else ""
                return f"{other.path} has no column {dotted((name,))}{which}"
    for name in a.columns if columns is None else columns:
        x, y = a.schema[mine[name][0]], b.schema[theirs[name][0]]
        if x != y:
            left, right = next((p, q) for p, q in zip((*x, None), (*y, None), strict=False) if p != q)
            return f"column {dotted((name,))} is {_describe(left)} in {a.path}, {_describe(right)} in {b.path}"
    # Readers go by the writer's name to tell which binary statistics are wrong (PARQUET-251), and a file has only one.
    if a.created_by != b.created_by and min(_parquet_mr(a.created_by), _parquet_mr(b.created_by)) < (1, 8, 0):
        return f"{a.path} and {b.path} are of different writers, one of them a parquet-mr before 1.8.0 (PARQUET-251)"
    return None


def _describe(element: SchemaElement | None) -> str:
    if element is None:
        return "shorter"
    kind = element.physical or f"group of {element.num_children}"
    length = f"({element.type_length})" if element.physical == "FIXED_LEN_BYTE_ARRAY" else ""
    details = {
        "converted": element.converted,
        "scale": element.scale,
        "precision": element.precision,
        "id": element.field_id,
        "logical": element.logical and element.logical.hex(),
    }
    said = "".join(f" {name} {value}" for name, value in details.items() if value is not None)
    return f"{(element.repetition or '').lower()} {kind}{length} {dotted((element.name,))}{said}".strip()


def _parquet_mr(created_by: str) -> tuple[int, ...]:
    """The version of the Java writer; of any other writer, one beyond all comparison."""
    match = re.match(r"parquet-mr version (\d+)\.(\d+)\.(\d+)", created_by)
    return tuple(map(int, match.groups())) if match else (1 << 30,)


def subtrees(footer: Footer) -> dict[str, tuple[slice, range]]:
    """For each top-level column: its schema elements, and its leaves."""
    found = {}
    start, leaf = 1, 0
    for name in footer.columns:
        stop, waiting, leaves = start, 1, 0
        while waiting:
            element = footer.schema[stop]
            leaves += element.physical is not None
            waiting += (element.num_children if element.physical is None else 0) - 1
            stop += 1
        found[name] = slice(start, stop), range(leaf, leaf + leaves)
        start, leaf = stop, leaf + leaves
    return found


def _leaves(job: Job, footer: Footer) -> list[int]:
    """The leaves of this file that go into the output, in its order."""
    trees = subtrees(footer)
    return [leaf for name in job.columns for leaf in trees[name][1]]


def prepare(
    spans: Sequence[Span], columns: Sequence[str] | None, rename: Mapping[str, str], schema_from: str | None
) -> Job:
    """Look at every footer once: they must agree, and hold the row groups asked for."""
    first: Footer | None = None
    hashes: list[int] = []
    rows = row_groups = 0
    ordered = True
    sources = [*spans] if spans or schema_from is None else [Span(schema_from, 0, 0)]
    for path, of_file in groupby(sources, lambda span: span.path):
        with open_parquet(path) as (_, footer):
            first = first or footer
        _check_names(footer, columns, rename)
        reason = why_not((first, footer), columns=columns)
        if reason is not None:
            raise SchemaClash(reason, do="splice only the columns they share, or decode and write them anew")
        ordered = ordered and footer.top.get(7) == first.top.get(7)
        for span in of_file:
            if not 0 <= span.first <= span.stop <= footer.row_groups:
                raise UsageError(
                    f"has {footer.row_groups:,} row groups; {span.first:,} to {span.stop:,} were asked for", where=path
                )
            hashes.append(hash(footer.raw))
            row_groups += span.stop - span.first
            rows += sum(map(footer.group_rows, range(span.first, span.stop)))
    if first is None:
        raise UsageError("nothing to splice", do="pass spans, or schema_from for an empty file")
    chosen = first.columns if columns is None else tuple(columns)
    return Job(tuple(sources), tuple(hashes), first, chosen, rename, rows, row_groups, ordered)


def _check_names(footer: Footer, columns: Sequence[str] | None, rename: Mapping[str, str]) -> None:
    chosen = footer.columns if columns is None else tuple(columns)
    known = set(footer.columns)
    for name in (*chosen, *rename):
        if name not in known:
            choice = ", ".join(dotted((other,)) for other in footer.columns[:20])
            raise UsageError(f"has no column {dotted((name,))}", where=footer.path, do=f"choose from {choice}")
    twice = _first_repeated([rename.get(name, name) for name in chosen])
    if twice is not None and (columns is not None or rename):
        raise UsageError(f"two columns would be named {dotted((twice,))}", where=footer.path)
    if columns is not None and not chosen:
        raise UsageError("no columns are left", where=footer.path, do="choose one or more")


def _first_repeated(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def each(job: Job) -> Iterator[tuple[int, Footer, Span]]:
    """Open each span's file in turn."""
    pairs = zip(job.spans, job.footers, strict=True)
    for path, of_file in groupby(pairs, lambda pair: pair[0].path):
        with open_parquet(path) as (fd, footer):
            for span, seen in of_file:
                if hash(footer.raw) != seen:
                    raise BadFile("changed while it was read", where=path, do="run again when it is at rest")
                yield fd, footer, span


def _each_group(job: Job) -> Iterator[tuple[int, Footer, int, list[Piece]]]:
    """Every row group, and its chosen chunks in the output's order."""
    for fd, footer, span in each(job):
        leaves = _leaves(job, footer)
        for index in range(span.first, span.stop):
            parts = footer.parts(index)
            yield fd, footer, index, [parts[leaf] for leaf in leaves]


def _move_chunks(job: Job, out: Out) -> Moved:
    """Copy the data, and make the row groups' structs for where it comes to lie."""
    moved = Moved([])
    last, taken = (job.first, -1), 0
    for fd, footer, index, parts in _each_group(job):
        chunks = [chunk for chunk, _, _ in parts]
        stored, size = sum(chunk.stored for chunk in chunks), sum(chunk.bytes for chunk in chunks)
        # Ten thousand row groups that all claim the same bytes would fill a disk from one small file.
        taken = stored + (taken if last[0] is footer and last[1] < index else 0)
        last = footer, index
        if taken > footer.size:
            raise BadFile(
                f"row group {index}: its column chunks overlap others", where=footer.path, do="write it again"
            )
        with damage(footer.path):
            moved.groups.append(row_group(job, footer.group(index), parts, out.tell(), len(moved.groups)))
        moved.stored += stored
        moved.bytes += size
        moved.blooms |= any(chunk.bloom_filter for chunk in chunks)
        moved.indexes |= any(chunk.column_index or chunk.offset_index for chunk in chunks)
        start = end = chunks[0].offset if chunks else 0
        for chunk in chunks:
            if chunk.offset != end:
                out.take(fd, start, end - start, footer.path)
                start = chunk.offset
            end = chunk.offset + chunk.stored
        out.take(fd, start, end - start, footer.path)
    return moved


def _move_blooms(job: Job, out: Out, moved: Moved) -> None:
    for number, (fd, footer, _, parts) in enumerate(_each_group(job)):
        edits: list[Struct] = []
        for chunk, _, _ in parts:
            edits.append({})
            if chunk.bloom_filter is not None:
                at, said = chunk.bloom_filter
                length = said or _bloom_length(fd, at, footer)
                edits[-1] = {14: (I64, thrift.zigzag(out.tell())), 15: (I32, thrift.zigzag(length))}
                out.take(fd, at, length, footer.path)
        moved.groups[number] = edited(moved.groups[number], metas=edits)


def _bloom_length(fd: int, at: int, footer: Footer) -> int:
    """What the filter's own header says: its length, after the header's."""
    end = footer.size - 8 - len(footer.raw)
    try:
        header, length = thrift.read_struct(read_exactly(fd, at, min(64, end - at), footer.path))
        length += integer(header, 1)
    except ThriftError as error:
        raise BadFile(f"the bloom filter at byte {at:,} is damaged ({error})", where=footer.path) from error
    if not 0 < length <= end - at:
        raise BadFile(f"the bloom filter at byte {at:,} goes beyond the data", where=footer.path)
    return length


def _move_indexes(job: Job, out: Out, moved: Moved) -> None:
    """Column indexes as they are, offset indexes with their offsets moved. They stay together at the end of the file:
    some readers fetch the whole stretch from the first to the last of them."""
    at = len(MAGIC)
    for number, (fd, footer, _, parts) in enumerate(_each_group(job)):
        edits: list[Struct] = [{} for _ in parts]
        for (chunk, _, _), edit in zip(parts, edits, strict=True):
            if chunk.column_index is not None:
                edit[6] = I64, thrift.zigzag(out.tell())
                edit[7] = I32, thrift.zigzag(chunk.column_index[1])
                out.take(fd, *chunk.column_index, footer.path)
        for (chunk, _, _), edit in zip(parts, edits, strict=True):
            if chunk.offset_index is not None:
                index = moved_index(read_exactly(fd, *chunk.offset_index, footer.path), chunk, at, footer.path)
                edit[4] = I64, thrift.zigzag(out.tell())
                edit[5] = I32, thrift.zigzag(len(index))
                out.write(index)
            at += chunk.stored
        moved.groups[number] = edited(moved.groups[number], outers=edits)


def moved_index(data: bytes, chunk: Chunk, at: int, path: str) -> bytes:
    """The chunk's offset index, for a chunk that now starts at `at`."""
    try:
        index, _ = thrift.read_struct(data)
        kind, locations = thrift.read_list(thrift.raw(index, 1, LIST))
        moved = []
        for raw in locations:
            location, _ = thrift.read_struct(raw)
            if not _move(location, 1, chunk, at):
                raise ThriftError("a page outside its column chunk")
            moved.append(thrift.write_struct(location))
    except ThriftError as error:
        raise BadFile(
            f"column {dotted(chunk.path)}: its offset index is damaged ({error})", where=path, do="write it again"
        ) from error
    index[1] = LIST, thrift.write_list(kind, moved)
    return thrift.write_struct(index)


def _move(struct: Struct, number: int, chunk: Chunk, at: int) -> bool:
    """Set an offset into the chunk for its new place; False if it never pointed into it."""
    old = integer_or_none(struct, number)
    if old is None or not 0 <= old - chunk.offset <= chunk.stored:
        return False
    struct[number] = I64, thrift.zigzag(old - chunk.offset + at)
    return True


def row_group(job: Job, group: Struct, parts: list[Piece], start: int, number: int) -> bytes:
    """The struct of a row group that is number so-and-so of the output and starts at `start`."""
    chunks = [chunk for chunk, _, _ in parts]
    columns, at = [], start
    for chunk, outer, meta in parts:
        columns.append(_column(job, chunk, outer, meta, at))
        at += chunk.stored
    group[1] = LIST, thrift.write_list(STRUCT, columns)
    group[2] = I64, thrift.zigzag(sum(chunk.bytes for chunk in chunks))
    group[6] = I64, thrift.zigzag(at - start)
    if 4 in group:
        _set_sorting(group, [chunk.leaf for chunk in chunks])
    if 5 in group:
        group[5] = I64, thrift.zigzag(start)
    if group.pop(7, None) and number < 1 << 15:  # it is a 16-bit number, and optional
        group[7] = I16, thrift.zigzag(number)
    return thrift.write_struct(group)


def _column(job: Job, chunk: Chunk, outer: Struct, meta: Struct, at: int) -> bytes:
    """The struct of a chunk that starts at `at`. Where its indexes and bloom filter are is set when they have moved."""
    name, *inner = chunk.path
    if name in job.rename:
        path = [job.rename[name], *inner]
        meta[3] = LIST, thrift.write_list(BINARY, [thrift.binary(part.encode()) for part in path])
    _move(meta, 9, chunk, at)
    for number in (10, 11):  # an index page, a dictionary page: 0 or nonsense in some old files
        if not _move(meta, number, chunk, at):
            meta.pop(number, None)
    for number in (4, 5, 6, 7):
        outer.pop(number, None)
    for number in (14, 15):
        meta.pop(number, None)
    outer[2] = I64, thrift.zigzag(0)  # long deprecated; readers found anything there, so 0 is what it has to be
    outer[3] = STRUCT, thrift.write_struct(meta)
    return thrift.write_struct(outer)


def edited(raw: bytes, *, outers: Sequence[Struct] = (), metas: Sequence[Struct] = ()) -> bytes:
    """A row group's struct with fields of its column chunks set, or of their metadata."""
    group, _ = thrift.read_struct(raw)
    kind, columns = thrift.read_list(group[1][1])
    for i, column in enumerate(columns):
        outer, _ = thrift.read_struct(column)
        if metas:
            meta, _ = thrift.read_struct(outer[3][1])
            outer[3] = STRUCT, thrift.write_struct(meta | metas[i])
        columns[i] = thrift.write_struct(outer | outers[i] if outers else outer)
    group[1] = LIST, thrift.write_list(kind, columns)
    return thrift.write_struct(group)


def write_footer(job: Job, out: Out, top: Struct, groups: Sequence[bytes]) -> None:
    """End the file: `top` is the footer's struct but for its rows and row groups."""
    top[3] = I64, thrift.zigzag(job.rows)
    top[4] = LIST, thrift.write_list_head(STRUCT, job.row_groups)
    begin = out.tell()
    out.write(thrift.write_struct({number: top[number] for number in top if number <= 4})[:-1])
    for group in groups:
        out.write(group)
    out.write(thrift.write_struct({number: top[number] for number in top if number > 4}, last=4))
    length = out.tell() - begin
    if length > FOOTER_LIMIT:
        raise UsageError(f"the footer would take {length:,} bytes", where=job.first.path, do="write smaller shards")
    out.write(length.to_bytes(4, "little") + MAGIC)


def _set_sorting(group: Struct, leaves: list[int]) -> None:
    """Rows sorted by (a, b) without a are not sorted by b: keep what comes before the first column that is gone."""
    kept = []
    for raw in thrift.read_list(thrift.raw(group, 4, LIST))[1]:
        column, _ = thrift.read_struct(raw)
        leaf = integer(column, 1)
        if leaf not in leaves:
            break
        column[1] = I32, thrift.zigzag(leaves.index(leaf))
        kept.append(thrift.write_struct(column))
    if kept:
        group[4] = LIST, thrift.write_list(STRUCT, kept)
    else:
        del group[4]


def _schema(job: Job) -> bytes:
    elements = thrift.read_list(thrift.raw(job.first.top, 2, LIST))[1]
    trees = subtrees(job.first)
    root, _ = thrift.read_struct(elements[0])
    root[5] = I32, thrift.zigzag(len(job.columns))
    new = [thrift.write_struct(root)]
    for name in job.columns:
        top, *inner = elements[trees[name][0]]
        if name in job.rename:
            struct, _ = thrift.read_struct(top)
            struct[4] = BINARY, thrift.binary(job.rename[name].encode())
            top = thrift.write_struct(struct)
        new += [top, *inner]
    return thrift.write_list(STRUCT, new)


def set_orders(job: Job, top: Struct, leaves: Sequence[int]) -> None:
    """One column order for each leaf. Where the files differ in them there are none, and readers leave the statistics
    alone: better than to read them in a wrong order."""
    if 7 not in top:
        return
    kind, orders = thrift.read_list(thrift.raw(top, 7, LIST))
    if job.ordered and len(orders) == len(job.first.leaves):
        top[7] = LIST, thrift.write_list(kind, [orders[leaf] for leaf in leaves])
    else:
        del top[7]


def _set_key_values(job: Job, top: Struct, given: Mapping[str, str | bytes]) -> None:
    if given or _columns_changed(job):
        set_key_values(top, {**kept_key_values(job), **given})


def _columns_changed(job: Job) -> bool:
    return job.columns != job.first.columns or any(name in job.rename for name in job.columns)


def kept_key_values(job: Job) -> dict[str, str | bytes]:
    """The first file's key-values, as far as they hold for the columns that are left."""
    kept: dict[str, str | bytes] = dict(job.first.key_values)
    if _columns_changed(job):
        kept = {key: value for key, value in kept.items() if key not in STALE}
        features = _features(job, job.first.key_values.get("huggingface", b""))
        kept.pop("huggingface", None)
        if features is not None:
            kept["huggingface"] = features
    return kept


def set_key_values(top: Struct, values: Mapping[str, str | bytes]) -> None:
    top.pop(5, None)
    pairs = [
        thrift.write_struct({1: (BINARY, thrift.binary(key.encode())), 2: (BINARY, thrift.binary(_encoded(value)))})
        for key, value in values.items()
    ]
    if pairs:
        top[5] = LIST, thrift.write_list(STRUCT, pairs)


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _features(job: Job, value: bytes) -> bytes | None:
    """The features that `datasets` keeps in a file, of the chosen columns under their new names; None if unreadable."""
    try:
        content = json.loads(value)
        old = content["info"]["features"]
        content["info"]["features"] = {job.rename.get(name, name): old[name] for name in job.columns}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return json.dumps(content).encode()

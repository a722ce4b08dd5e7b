"""Files inside finished shards: what each is called, and where in the shard its bytes lie.

In a plain page a value is a length and its bytes, so a file of any size is a range of the shard and is never held. What
other writers compressed or encoded is decoded by Arrow, a row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from penstock.errors import BadFile
from penstock.media.bids.names import TEXTS
from penstock.parquet.footer import Chunk, Footer, open_parquet, read_exactly
from penstock.parquet.pages import Page, page_facts, walk

# What a batch of names and texts may hold.
BATCH_BYTES = 4 << 20
_AHEAD = 4 << 10  # lengths of small values lie close together
_LEVELS_LIMIT = 16 << 20  # a number from the file, of which an array is made

Steps = tuple[str, ...]  # "[]" into a list, else the name of a member


@dataclass(frozen=True)
class Files:
    """A place where a shard holds files: the leaf of their bytes, and the leaf of their names if they have any."""

    steps: Steps
    data: int
    name: int | None

    @property
    def column(self) -> str:
        return self.steps[0]

    @property
    def name_steps(self) -> Steps:
        return (*self.steps[:-1], "path")


@dataclass(frozen=True)
class Texts:
    """Texts that go with a scan: `member` names them; the name of each is kept, or follows from its scan's."""

    column: str
    steps: Steps  # to the struct they are members of; empty where rows are scans
    member: str
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """A value as it lies in a file."""

    offset: int
    length: int

    def __len__(self) -> int:
        return self.length


def files_in(schema: pa.Schema) -> tuple[list[Files], list[Texts]]:
    """Where a shard's files are: every `struct<bytes, path>`, every binary column, and the texts beside scans."""
    found: list[Files] = []
    texts: list[Texts] = []
    rows = _Node((), pa.struct(list(schema)))
    _look(rows, 0, found, texts)
    return found, texts


@dataclass(frozen=True)
class _Node:
    steps: Steps
    kind: pa.DataType


def _look(node: _Node, leaf: int, found: list[Files], texts: list[Texts]) -> int:
    """Note the places in one node of the schema whose first leaf is `leaf`; the first leaf after it."""
    kind = node.kind
    if isinstance(kind, pa.BaseExtensionType):
        return _look(_Node(node.steps, kind.storage_type), leaf, found, texts)
    if pt.is_struct(kind):
        return _look_in_struct(node, leaf, found, texts)
    if pt.is_map(kind):
        between = _look(_Node((*node.steps, "{}"), kind.key_type), leaf, [], [])
        return _look(_Node((*node.steps, "{}"), kind.item_type), between, [], [])
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return _look(_Node((*node.steps, "[]"), kind.value_type), leaf, found, texts)
    if _is_data(kind) and node.steps:
        found.append(Files(node.steps, leaf, None))
    return leaf + 1


def _look_in_struct(node: _Node, leaf: int, found: list[Files], texts: list[Texts]) -> int:
    kinds = {one.name: one.type for one in node.kind}
    places: dict[str, int] = {}
    own: list[Files] = []
    for name, kind in kinds.items():
        places[name] = leaf
        leaf = _look(_Node((*node.steps, name), kind), leaf, own, texts)
    named = "path" in kinds and _is_text(kinds["path"])
    for one in own:
        if named and one.steps == (*node.steps, "bytes"):
            one = Files(one.steps, one.data, places["path"])
        found.append(one)
    scans = [places["path"]] if named else []
    if "nifti" in kinds and pt.is_struct(kinds["nifti"]):
        scans += [places["nifti"] + at for at, one in enumerate(kinds["nifti"]) if one.name == "path"]
    if scans and (node.steps or "subject" in kinds):  # a scan's struct, or a row that is a scan
        for member in TEXTS:
            if member in kinds and _is_text(kinds[member]):
                kept = [places[f"{member}_path"]] if f"{member}_path" in kinds else []
                column = node.steps[0] if node.steps else "nifti"
                texts.append(Texts(column, node.steps, member, (*scans, places[member], *kept)))
    return leaf


def _is_data(kind: pa.DataType) -> bool:
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


# -- values ----------------------------------------------------------------------------------------------------------


@contextmanager
def open_shard(path: str) -> Iterator[Shard]:
    """A shard, while the block lasts. Arrow is told to hold no more of a chunk than a buffer."""
    with (
        open_parquet(path) as (fd, footer),
        pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, memory_map=False) as opened,
    ):
        yield Shard(fd, footer, opened)


class Shard:
    """An open shard: where its files are, and each of them, row group by row group."""

    def __init__(self, fd: int, footer: Footer, opened: pq.ParquetFile) -> None:
        self.fd, self.footer = fd, footer
        self.files, self.texts_beside = files_in(opened.schema_arrow)
        self._opened = opened
        self._group = -1
        self._chunks: tuple[Chunk, ...] = ()
        self._depths: dict[int, _Depth] = {}

    def chunk(self, group: int, leaf: int) -> Chunk:
        if group != self._group:
            self._group, self._chunks = group, self.footer.chunks(group)
        return self._chunks[leaf]

    def is_plain(self, group: int, place: Files) -> bool:
        """Whether the bytes of a place lie in the shard as they are."""
        chunk = self.chunk(group, place.data)
        return (
            chunk.codec == "UNCOMPRESSED"
            and not chunk.has_dictionary
            and all(
                page.kind == "DATA" and page.encoding == "PLAIN" and page.num_values <= _LEVELS_LIMIT
                for page in walk(self.fd, chunk, path=self.footer.path)
            )
        )

    def to_decode(self, group: int, place: Files) -> int:
        """Bytes of the largest page Arrow would hold to read a place; 0 where it does not have to."""
        if self.is_plain(group, place):
            return 0
        facts = page_facts(self.fd, self.chunk(group, place.data), path=self.footer.path)
        return facts.largest + facts.dictionary

    def values(self, group: int, place: Files) -> Iterator[tuple[str | None, Range | bytes | None]]:
        """Every value of a place in one row group: its name, and its bytes or where they lie; None for a null."""
        if self.is_plain(group, place):
            depth = self._depths.setdefault(place.data, _depth(self.footer, place.data))
            ranges = _ranges(self.fd, self.chunk(group, place.data), depth, self.footer.path)
            names = repeat(None) if place.name is None else self._names(group, place)
            for found, name in zip(ranges, names, strict=False):
                yield name, found
            return
        leaves = [place.data] if place.name is None else [place.data, place.name]
        for batch in self._opened.iter_batches(1, [group], self._columns(leaves), use_threads=False):
            data = inside(batch, place.steps)
            known = [None] * len(data) if place.name is None else inside(batch, place.name_steps).to_pylist()
            for name, value in zip(known, data, strict=True):
                yield name, value.as_py()

    def texts(self, group: int, place: Texts) -> Iterator[tuple[str, str, str | None]]:
        """Every text of a place in one row group: its scan's name, the text, and its own name if that was kept."""
        for batch in self._batches(group, place.leaves):
            kinds = {one.name for one in (inside(batch, place.steps).type if place.steps else batch.schema)}
            where = [steps for steps in (("nifti", "path"), ("path",)) if steps[0] in kinds]
            scans = [inside(batch, (*place.steps, *steps)).to_pylist() for steps in where]
            bodies = inside(batch, (*place.steps, place.member)).to_pylist()
            kept = f"{place.member}_path"
            own = inside(batch, (*place.steps, kept)).to_pylist() if kept in kinds else [None] * len(bodies)
            for at, (body, name) in enumerate(zip(bodies, own, strict=True)):
                scan = next((names[at] for names in scans if names[at] is not None), None)
                if body is not None and (scan is not None or name is not None):
                    yield scan or "", body, name

    def _names(self, group: int, place: Files) -> Iterator[str | None]:
        assert place.name is not None
        for batch in self._batches(group, (place.name,)):
            yield from inside(batch, place.name_steps).to_pylist()

    def _batches(self, group: int, leaves: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """The rows of a row group, some leaves of them only, a few at a time."""
        chunks = [self.chunk(group, leaf) for leaf in leaves]
        rows = self.footer.group_rows(group)
        size = sum(max(chunk.bytes, chunk.decoded or 0) for chunk in chunks)
        count = max(1, min(rows, rows * BATCH_BYTES // max(1, size)))
        yield from self._opened.iter_batches(count, [group], self._columns(leaves), use_threads=False)

    def _columns(self, leaves: Sequence[int]) -> list[str]:
        return [".".join(self.footer.leaves[leaf]) for leaf in leaves]


def inside(batch: pa.RecordBatch, steps: Sequence[str]) -> pa.Array:
    """The values at the end of some steps, one for each slot there is; parents' nulls are handed down."""
    array: Any = batch.column(batch.schema.get_field_index(steps[0]))
    for step in steps[1:]:
        array = array.flatten() if step == "[]" else pc.struct_field(array, [step])
    return array


# -- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Depth:
    """Levels of a leaf: the highest of each kind, and the definition from which a slot of the innermost list is."""

    definition: int
    repetition: int
    slot: int


def _depth(footer: Footer, leaf: int) -> _Depth:
    element = 0
    seen = -1

    def down(definition: int, repetition: int, slot: int) -> _Depth | None:
        nonlocal element, seen
        node = footer.schema[element]
        element += 1
        if node is not footer.schema[0]:
            definition += node.repetition != "REQUIRED"
            if node.repetition == "REPEATED":
                repetition, slot = repetition + 1, definition
        if node.physical is not None:
            seen += 1
            return _Depth(definition, repetition, slot) if seen == leaf else None
        for _ in range(node.num_children):
            if (found := down(definition, repetition, slot)) is not None:
                return found
        return None

    found = down(0, 0, 0)
    assert found is not None
    return found


def _ranges(fd: int, chunk: Chunk, depth: _Depth, path: str) -> Iterator[Range | None]:
    """Where each value of a plain chunk lies; None for a null. Lengths come from the file and are checked."""
    for page in walk(fd, chunk, path=path):
        definition, at = _page_levels(fd, page, depth, path)
        end = page.offset + page.stored
        buffer, start = b"", at
        for level in definition.tolist():
            if level < depth.definition:
                if level >= depth.slot:
                    yield None
                continue
            if at + 4 > start + len(buffer) and at + 4 <= end:
                buffer, start = read_exactly(fd, at, min(_AHEAD, end - at), path), at
            length = int.from_bytes(buffer[at - start : at - start + 4], "little")
            if at + 4 > end or at + 4 + length > end:
                raise _damaged(path, chunk, f"a value of {length:,} bytes at {at:,} goes beyond its page")
            yield Range(at + 4, length)
            at += 4 + length
        if at != end:
            raise _damaged(path, chunk, f"{end - at:,} bytes are left over in the page at {page.offset:,}")


def _page_levels(fd: int, page: Page, depth: _Depth, path: str) -> tuple[npt.NDArray[np.uint8], int]:
    """The definition levels of a page, and where its values start."""
    at = page.offset
    if depth.repetition:
        at += 4 + _length(fd, at, page, path)
    if not depth.definition:
        return np.zeros(page.num_values, np.uint8), at
    length = _length(fd, at, page, path)
    data = read_exactly(fd, at + 4, length, path)
    return _decode(data, depth.definition.bit_length(), page.num_values, path), at + 4 + length


def _length(fd: int, at: int, page: Page, path: str) -> int:
    found = int.from_bytes(read_exactly(fd, at, 4, path), "little")
    if found > min(page.offset + page.stored - at - 4, _LEVELS_LIMIT):
        raise BadFile(f"the levels of the page at byte {page.offset:,} are damaged", where=path, do=_AGAIN)
    return found


def _decode(data: bytes, width: int, count: int, path: str) -> npt.NDArray[np.uint8]:
    """Levels from their runs: repeats, or eights of packed bits."""
    parts: list[npt.NDArray[np.uint8]] = []
    at = done = 0
    while done < count:
        head = shift = 0
        while True:
            if at >= len(data) or shift > 35:
                raise BadFile("the levels of a page are damaged", where=path, do=_AGAIN)
            head |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                break
        if head & 1:
            size = (head >> 1) * width
            flat = np.unpackbits(np.frombuffer(data[at : at + size], np.uint8), bitorder="little")
            bits = flat[: len(flat) // width * width].reshape(-1, width)
            some = (bits << np.arange(width, dtype=np.uint8)).sum(axis=1).astype(np.uint8)[: count - done]
            at += size
        else:
            value = data[at] if at < len(data) else 0
            some = np.full(min(head >> 1, count - done), value, np.uint8)
            at += 1
        if not len(some):
            raise BadFile("the levels of a page are damaged", where=path, do=_AGAIN)
        parts.append(some)
        done += len(some)
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


_AGAIN = "fetch or write it again"


def _damaged(path: str, chunk: Chunk, what: str) -> BadFile:
    return BadFile(f"column {'.'.join(chunk.path)}: {what}", where=path, do=_AGAIN)

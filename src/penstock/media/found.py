"""Tables with media in flight: columns of paths and inline bytes turned into references, a batch at a time.

The one place where files are looked at before a plan is made: every file named is there, may be read, is a file and has
its content, or all that are not are named in one error. Lists keep their lengths, and null, empty and null within stay
three things. Slices are cut out before anything is looked at: a shard of one row looks at its own files alone.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.budget import format_size
from penstock.errors import NotFetched, NotFound, PenstockError, UsageError
from penstock.media.annex import not_fetched
from penstock.media.kinds import LARGEST_VALUE, REFERENCE, check_kind, mark

Rows: TypeAlias = npt.NDArray[np.int64]
Missing: TypeAlias = Literal["raise", "null"]
Kinds: TypeAlias = Mapping[str, str]  # places within a column ("", "[]", "[].nifti"), and their kinds

BATCH_ROWS = 16_384
BATCH_BYTES = 8 << 20
# git-annex takes files up to 32 KiB for pointers, but a key is a file name, so none is longer than this; and a million
# thumbnails of some KiB need not be opened to know that they are none.
POINTER_BYTES = 1024
# Local disks answer in 1 to 3 microseconds, and threads then only wait for each other; servers take 200 and more.
SLOW_STAT = 50e-6
SLOW_AFTER = 128
SLOW_THREADS = 16
SHOWN = 3
REMEMBERED = 10_000


@dataclass(frozen=True)
class Found:
    """A table whose media columns are references: its schema, its batches as often as asked, and what was known of it.

    `folders` were named whole by the user; `features` are Hugging Face features that the source declared.
    """

    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]]
    label: str
    folders: tuple[str, ...] = ()
    features: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plain:
    """A table as it was given: media columns still hold paths, bytes, or structs of both."""

    schema: pa.Schema
    pieces: Callable[[], Iterator[pa.RecordBatch]]
    label: str
    features: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """Where paths are looked for. `inside`: a path that leads out of `root` is refused, as a downloaded table of
    contents must not be able to publish /etc/passwd."""

    root: str
    inside: bool = False

    def find(self, text: str) -> str:
        return text if text[0] == "/" else f"{self.root}/{text}"


@dataclass(frozen=True)
class Problem:
    """One value that cannot be had, and what to do about it."""

    column: str
    row: int
    path: str
    do: str


@dataclass
class Wrong:
    """All that is wrong in one way: how many paths, and the first of them."""

    count: int = 0
    first: list[Problem] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def is_new(self, path: str) -> bool:
        """Counts a path, unless it was counted; which ones were is remembered of so many only."""
        if path in self.known:
            return False
        if len(self.known) < REMEMBERED:
            self.known.add(path)
        self.count += 1
        return True


def referred(
    plain: Plain,
    *,
    media: Mapping[str, Kinds],
    root: str,
    on_missing: Missing = "raise",
    folders: tuple[str, ...] = (),
) -> Found:
    """A table with the columns of `media` as references."""
    schema = reference_schema(plain.schema, media)

    def batches() -> Iterator[pa.RecordBatch]:
        looking = Looking(plain.label, on_missing=on_missing)
        yield from looking.batches(plain.pieces(), schema, media, Places(root))
        looking.end()

    return Found(schema, batches, plain.label, folders, plain.features)


def reference_schema(
    schema: pa.Schema, media: Mapping[str, Kinds], names: Mapping[str, str] | None = None
) -> pa.Schema:
    """The schema with references where media are. `names`: new names, by column or column and place of a member."""
    names = names or {}
    fields = []
    for one in schema:
        kinds = media.get(one.name)
        if kinds is None:
            fields.append(one)
            continue
        for kind in kinds.values():
            check_kind(kind)
        name = names.get(one.name, one.name)
        made = pa.field(name, reference_type(one.type, kinds, names, one.name), one.nullable)
        fields.append(mark(made, {_renamed(place, one.name, names): kind for place, kind in kinds.items()}))
    return pa.schema(fields)


def reference_type(
    kind: pa.DataType, kinds: Kinds, names: Mapping[str, str] | None = None, column: str = "", place: str = ""
) -> pa.DataType:
    """A column's type with references at the places of `kinds`."""
    names = names or {}
    if place in kinds:
        return REFERENCE
    if not any(one.startswith((f"{place}.", f"{place}[]")) for one in kinds):
        return kind
    if pt.is_struct(kind):
        members = []
        for one in kind:
            within = f"{place}.{one.name}"
            made = reference_type(one.type, kinds, names, column, within)
            members.append(pa.field(names.get(column + within, one.name), made, one.nullable))
        return pa.struct(members)
    if is_listed(kind):
        made = reference_type(kind.value_type, kinds, names, column, place + "[]")
        inner = pa.field(kind.value_field.name, made, kind.value_field.nullable)
        return pa.large_list(inner) if pt.is_large_list(kind) else pa.list_(inner)
    raise UsageError(f"column {column}{place} holds {kind}, where lists or structs of media were declared")


def is_listed(kind: pa.DataType) -> bool:
    return any(told(kind) for told in _LISTED)


def is_text(kind: pa.DataType) -> bool:
    return any(told(kind) for told in (pt.is_string, pt.is_large_string, pt.is_string_view))


_LISTED = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view)


class Looking:
    """Looks at the files of one table, and remembers what is wrong with it until its end."""

    def __init__(self, label: str, *, on_missing: Missing = "raise") -> None:
        if on_missing not in ("raise", "null"):
            raise UsageError(f"on_missing={on_missing!r} is not known", do="pass 'raise' or 'null'")
        self.label, self.on_missing = label, on_missing
        self.wrong: dict[str, Wrong] = {}
        self.rows = 0

    def batches(
        self,
        pieces: Iterable[pa.RecordBatch],
        schema: pa.Schema,
        media: Mapping[str, Kinds],
        places: Places,
    ) -> Iterator[pa.RecordBatch]:
        """Batches of `schema`. Once something is wrong nothing more is given, but the rest is still looked at: one
        error tells how many files are missing, not one after the other."""
        for piece in pieces:
            for batch in bounded(piece, media):
                columns = []
                for want, have, column in zip(schema, batch.schema, batch.columns, strict=True):
                    kinds = media.get(have.name)
                    if kinds is not None:
                        rows = np.arange(self.rows, self.rows + batch.num_rows, dtype=np.int64)
                        column = self._refer(column, want.type, kinds, "", _At(have.name, rows, places))
                    elif column.type != want.type:
                        column = column.cast(want.type)
                    columns.append(column)
                self.rows += batch.num_rows
                if not self.wrong:
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def end(self) -> None:
        """Raise what was found wrong, the files named."""
        if not self.wrong:
            return
        (what, wrong), *others = sorted(self.wrong.items(), key=lambda item: item[1].first[0].row)
        named = ", ".join(f"{one.path!r} (column {one.column}, row {one.row:,})" for one in wrong.first)
        more = f" and {wrong.count - len(wrong.first):,} more" if wrong.count > len(wrong.first) else ""
        also = "".join(f"; {other.count:,} {_plural(sort, other.count)}" for sort, other in others)
        kind: type[PenstockError] = {_GONE: NotFound, _ELSEWHERE: NotFetched}.get(what, UsageError)
        raise kind(
            f"{wrong.count:,} {_plural(what, wrong.count)}: {named}{more}{also}", where=self.label, do=wrong.first[0].do
        )

    def _refer(self, array: pa.Array, want: pa.DataType, kinds: Kinds, place: str, at: _At) -> pa.Array:
        """An array with references for paths and bytes, to the type that `reference_type` gave."""
        if place in kinds:
            return self._leaf(array, replace(at, place=place))
        if array.type == want:
            return array
        missing = pc.is_null(array)
        if pt.is_struct(array.type):
            # `flatten` hands the parents' nulls down: what lies below a null is nobody's path.
            made = [
                self._refer(child, new.type, kinds, f"{place}.{old.name}", at)
                for child, old, new in zip(array.flatten(), array.type, want, strict=True)
            ]
            return pa.StructArray.from_arrays(made, fields=list(want), mask=missing)
        array = as_list(array)
        spans = np.diff(numbers_of(array.offsets)) if len(array) else np.empty(0, dtype=np.int64)
        lengths = np.where(valid_bits(array), spans, 0)
        rows = np.repeat(at.rows, lengths)
        # `flatten`, never `values`: that is the whole of what this is a slice of, and datasets up to 5.1.0 put all of
        # a dataset's files into each of its shards that way (its issue 7894).
        values = self._refer(array.flatten(), want.value_type, kinds, place + "[]", replace(at, rows=rows))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        large = pt.is_large_list(want)
        offsets = numbers(ends.astype(np.int64 if large else np.int32))
        made_of = pa.LargeListArray if large else pa.ListArray
        return made_of.from_arrays(offsets, values, type=want, mask=missing)

    def _leaf(self, array: pa.Array, at: _At) -> pa.StructArray:
        inline, paths = _parts(array, at.name)
        self._check_inline(inline, paths, at)
        stands = pc.is_valid(inline)
        named = pc.if_else(stands, pa.nulls(len(array), pa.string()), paths)
        about = self._files(named, at)
        nothing = pc.is_null(about["file"])
        # An absolute path is of the machine it came from; datasets stores the name alone too.
        given = pc.replace_substring_regex(paths, pattern="^/.*/", replacement="")
        columns = [
            inline,
            pc.if_else(stands, given, about["path"]),
            about["file"],
            pc.if_else(stands, pc.binary_length(inline).cast(pa.int64()), about["size"]),
            about["modified"],
        ]
        return pa.StructArray.from_arrays(columns, fields=list(REFERENCE), mask=pc.and_(nothing, pc.invert(stands)))

    def _files(self, paths: pa.Array, at: _At) -> dict[str, pa.Array]:
        """What the file system says of each path; rows of the same path are looked at once."""
        coded = paths.dictionary_encode()
        texts: list[str] = coded.dictionary.to_pylist()
        seen = _look(texts, at.places)
        if any(isinstance(one, str) for one in seen):
            self._blame(texts, seen, coded.indices, at)
        right = [one if not isinstance(one, str) else None for one in seen]
        columns = {
            "path": strings([None if one is None else one[0].rpartition("/")[2] for one in right]),
            "file": strings([None if one is None else one[0] for one in right]),
            "size": numbers(np.array([0 if one is None else one[1] for one in right], dtype=np.int64)),
            "modified": numbers(np.array([0 if one is None else one[2] for one in right], dtype=np.int64)),
        }
        return {name: column.take(coded.indices) for name, column in columns.items()}

    def _blame(self, texts: Sequence[str], seen: Sequence[_Seen | str], indices: pa.Array, at: _At) -> None:
        """Note what is wrong with some paths, and the first rows they are in."""
        codes = np.where(valid_bits(indices), numbers_of(indices), -1)
        for number, (text, what) in enumerate(zip(texts, seen, strict=True)):
            if not isinstance(what, str) or (what == _GONE and self.on_missing == "null"):
                continue
            wrong = self.wrong.setdefault(what, Wrong())
            if wrong.is_new(text) and len(wrong.first) < SHOWN:
                row = int(at.rows[np.argmax(codes == number)])
                found = not_fetched(at.places.find(_local(text))) if what == _ELSEWHERE else None
                do = f"fetch the content first: {found.fetch_command}" if found is not None else _DO.get(what, "")
                wrong.first.append(Problem(at.name, row, text, do))

    def _check_inline(self, inline: pa.Array, paths: pa.Array, at: _At) -> None:
        lengths = pc.binary_length(inline)
        most = pc.max(lengths)
        if most.is_valid and most.as_py() > LARGEST_VALUE:
            at_most = pc.index(lengths, most).as_py()
            name = paths[at_most].as_py() or "bytes given inline"
            wrong = self.wrong.setdefault(_LARGE, Wrong())
            wrong.count += 1
            wrong.first.append(Problem(at.name, int(at.rows[at_most]), name, _DO[_LARGE]))


@dataclass(frozen=True)
class _At:
    """Where in a table some values are: their column, the row of each, and where their paths are looked for."""

    column: str
    rows: Rows
    places: Places
    place: str = ""

    @property
    def name(self) -> str:
        return self.column + self.place


_Seen: TypeAlias = tuple[str, int, int]  # file, size, ns

_GONE = "files do not exist"
_ELSEWHERE = "files are not fetched"
_FOLDER = "paths are folders, not files"
_ODD = "paths are neither files nor folders"
_CLOSED = "files may not be read"
_LARGE = f"files are larger than the {format_size(LARGEST_VALUE)} a Parquet value can be"
_REMOTE = "paths are not on this machine"
_OUTSIDE = "paths lead out of the folder they are listed in"
_EMPTY = "paths are empty"
_NUL = "paths hold a zero byte"
_DO = {
    _GONE: "correct the paths; relative ones start at root=, else at the table's folder, else here",
    _FOLDER: "name the files in it",
    _ODD: "leave them out",
    _CLOSED: "change their permissions",
    _LARGE: "split the files, or leave them out",
    _REMOTE: "fetch the files first: remote paths are not supported here",
    _OUTSIDE: "give paths relative to the metadata file, below its folder",
    _EMPTY: "make them null where there is no file",
    _NUL: "correct the paths",
}


def _plural(what: str, count: int) -> str:
    if count != 1:
        return what
    noun, verb, rest = what.split(" ", 2)
    verb = {"do": "does", "are": "is", "hold": "holds", "lead": "leads"}.get(verb, verb)
    one = {"folders, not files": "a folder, not a file", "neither files nor folders": "neither a file nor a folder"}
    return f"{noun.removesuffix('s')} {verb} {one.get(rest, rest)}"


def _look(texts: Sequence[str], places: Places) -> list[_Seen | str]:
    """Look at each file; in threads where the file system takes its time to answer."""
    started = time.perf_counter()
    seen = [_look_at(text, places) for text in texts[:SLOW_AFTER]]
    left = texts[SLOW_AFTER:]
    if not left:
        return seen
    if time.perf_counter() - started < SLOW_STAT * SLOW_AFTER:
        return seen + [_look_at(text, places) for text in left]
    with ThreadPoolExecutor(SLOW_THREADS) as pool:
        return seen + list(pool.map(_look_at, left, [places] * len(left), chunksize=64))


def _look_at(text: str, places: Places) -> _Seen | str:
    """A file's place, size and time of change, or what is wrong with it."""
    if not text:
        return _EMPTY
    if "://" in text:
        local = _local(text)
        if local is text or places.inside:
            return _REMOTE
        text = local
    if places.inside:
        normal = os.path.normpath(text)
        if normal[0] == "/" or normal == ".." or normal.startswith("../"):
            return _OUTSIDE
        text = normal
    file = places.find(text)
    try:
        about = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return _GONE if not_fetched(file) is None else _ELSEWHERE
    except PermissionError:
        return _CLOSED
    except OSError:  # a name too long, a link to itself
        return _GONE
    except ValueError:
        return _NUL
    if not stat.S_ISREG(about.st_mode):
        return _FOLDER if stat.S_ISDIR(about.st_mode) else _ODD
    if 0 < about.st_size < POINTER_BYTES and not_fetched(file) is not None:
        return _ELSEWHERE
    if about.st_size > LARGEST_VALUE:
        return _LARGE
    if not os.access(file, os.R_OK):
        return _CLOSED
    return file, about.st_size, about.st_mtime_ns


def _local(text: str) -> str:
    """datasets names a compressed scan of its nifti folders "gzip://T1w.nii::/data/T1w.nii.gz": the file is the last
    of these. Anything else with a scheme is given back as it is."""
    if text.startswith("gzip://") and "::" in text:
        last = text.rpartition("::")[2]
        if last and "://" not in last:
            return last
    return text


def bounded(batch: pa.RecordBatch, media: Mapping[str, Kinds]) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of at most `BATCH_ROWS` rows and media values and `BATCH_BYTES`, or of one row."""
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield from _halves(batch.slice(start, BATCH_ROWS), media)


def _halves(batch: pa.RecordBatch, media: Mapping[str, Kinds]) -> Iterator[pa.RecordBatch]:
    rows = batch.num_rows
    if rows > 1 and (batch.nbytes > BATCH_BYTES or _most_values(batch, media) > BATCH_ROWS):
        yield from _halves(batch.slice(0, rows // 2), media)
        yield from _halves(batch.slice(rows // 2), media)
    else:
        yield batch


def _most_values(batch: pa.RecordBatch, media: Mapping[str, Kinds]) -> int:
    lists = [batch.column(name) for name in media if is_listed(batch.schema.field(name).type)]
    return max((pc.sum(pc.list_value_length(one)).as_py() or 0 for one in lists), default=0)


def _parts(array: pa.Array, name: str) -> tuple[pa.Array, pa.Array]:
    """Inline bytes and paths of media values, however they are given; both null for a null."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _parts(array.storage, name)
    if pt.is_dictionary(kind):
        return _parts(array.cast(kind.value_type), name)
    if pt.is_null(kind):
        return pa.nulls(len(array), pa.binary()), pa.nulls(len(array), pa.string())
    if is_text(kind):
        return pa.nulls(len(array), pa.binary()), array.cast(pa.string())
    if pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind) or pt.is_fixed_size_binary(kind):
        return array.cast(pa.binary()), pa.nulls(len(array), pa.string())
    if pt.is_struct(kind) and {one.name for one in kind} <= {"bytes", "path"}:
        children = dict(zip([one.name for one in kind], array.flatten(), strict=True))
        inline = children.get("bytes", pa.nulls(len(array), pa.binary()))
        paths = children.get("path", pa.nulls(len(array), pa.string()))
        return inline.cast(pa.binary()), paths.cast(pa.string())
    raise UsageError(
        f"column {name} holds {kind}, not paths",
        do="media columns hold paths, bytes, {'bytes', 'path'} or lists of these",
    )


def _renamed(place: str, column: str, names: Mapping[str, str]) -> str:
    """A place within a column, with the new names of the members on its way."""
    made, old = "", ""
    for part in place.replace("[]", ".[]").split(".")[1:]:
        if part == "[]":
            made, old = made + "[]", old + "[]"
        else:
            old = f"{old}.{part}"
            made = f"{made}.{names.get(column + old, part)}"
    return made


def as_list(array: pa.Array) -> pa.Array:
    """A list array of any sort as one with offsets."""
    kind = array.type
    if pt.is_list(kind) or pt.is_large_list(kind):
        return array
    if pt.is_fixed_size_list(kind):
        return array.cast(pa.list_(kind.value_field))
    # Arrow 26 casts slices of list views wrongly (their last lists come out empty), so this is done by hand.
    lengths = np.where(valid_bits(array), numbers_of(array.sizes), 0).astype(np.int64)
    offsets = numbers(np.concatenate([[0], np.cumsum(lengths)]))
    return pa.LargeListArray.from_arrays(
        offsets, array.flatten(), type=pa.large_list(kind.value_field), mask=pc.is_null(array)
    )


def strings(texts: Sequence[str | None]) -> pa.StringArray:
    """An array of strings. `pa.array` would import pandas where that is installed, and its 40 MB."""
    data = [b"" if text is None else text.encode() for text in texts]
    ends = np.zeros(len(data) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, data), dtype=np.int32, count=len(data)), out=ends[1:])
    valid = None
    if any(text is None for text in texts):
        valid = _bits(np.fromiter((text is not None for text in texts), dtype=np.bool_, count=len(data)))
    return pa.Array.from_buffers(pa.string(), len(data), [valid, pa.py_buffer(ends), pa.py_buffer(b"".join(data))])


def numbers(values: npt.NDArray[Any]) -> pa.Array:
    """An array of integers, without pandas."""
    kind = pa.int64() if values.dtype == np.int64 else pa.int32()
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """The integers of an array, without pandas; whatever lies there for a null."""
    kind = np.dtype(str(array.type))
    if not len(array):
        return np.empty(0, dtype=kind)  # an array of nothing may have no buffer either
    return np.frombuffer(array.buffers()[1], dtype=kind, count=len(array), offset=array.offset * kind.itemsize)


def valid_bits(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Which values are not null."""
    bits = array.buffers()[0]
    if bits is None:
        return np.ones(len(array), dtype=np.bool_)
    first, last = array.offset // 8, -(-(array.offset + len(array)) // 8)
    spread = np.unpackbits(np.frombuffer(bits, dtype=np.uint8)[first:last], bitorder="little")
    return spread[array.offset % 8 :][: len(array)].astype(np.bool_)


def _bits(flags: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))

"""Tables in memory: Arrow, pandas and polars frames, columns and rows of plain Python, and Hugging Face datasets.

Each is given on a stretch at a time, its media columns as references. A `datasets` object is read from its own Arrow
table, nothing decoded, with its selections and slices; no library is imported that the object did not bring along.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import BadRow, UsageError
from penstock.media.found import (
    BATCH_BYTES,
    BATCH_ROWS,
    Found,
    Kinds,
    Missing,
    Plain,
    numbers,
    numbers_of,
    referred,
)
from penstock.media.kinds import KINDS, STORED, kinds_of
from penstock.publish.features import METADATA_KEY, declared_features
from penstock.schemas import conform, unify

# What a stream of examples is asked for at a time: an example may hold a decoded scan, and nobody can tell beforehand.
STREAM_ROWS = 64

_OF_FEATURES = {feature: kind for kind, feature in KINDS.items() if feature is not None}
# Files to `datasets`, but no kind here: their paths would be published and their bytes lost.
_UNKNOWN_FILES = ("BioSequence", "BioStructure")

_Column: TypeAlias = Any  # a list, tuple, numpy array, Arrow array or pandas series


def frame_batches(frame: object) -> Found | None:
    """An in-memory table as batches with references, or None if it is no such thing."""
    plain = plain_of(frame)
    return None if plain is None else with_declared(plain, root=os.getcwd())


def frame_splits(frames: object) -> dict[str, object] | None:
    """The splits of a `DatasetDict`, or of a plain dict of tables; None if it is neither."""
    if not isinstance(frames, dict) or not frames or not all(isinstance(name, str) for name in frames):
        return None
    if all(_is_frame(one) for one in frames.values()):
        return dict(frames)
    return None


def with_declared(
    plain: Plain, *, root: str, media: Mapping[str, Kinds] | None = None, on_missing: Missing = "raise"
) -> Found:
    """A table whose own features, and `media` before them, say which columns are files."""
    declared = {name: places_of(feature) for name, feature in plain.features.items() if name in plain.schema.names}
    marked = {one.name for one in plain.schema if kinds_of(one)}  # references made before stay as they are
    kinds = {name: places for name, places in declared.items() if places and name not in marked}
    return referred(plain, media={**kinds, **(media or {})}, root=root, on_missing=on_missing)


def places_of(feature: object, place: str = "") -> dict[str, str]:
    """Where a Hugging Face feature, in its JSON form, has files, and of what kind.

    >>> places_of({"feature": {"decode": False, "_type": "Nifti"}, "_type": "List"})
    {'[]': 'nifti'}
    """
    if isinstance(feature, list):
        return places_of(feature[0], place + "[]") if feature else {}
    if not isinstance(feature, Mapping):
        return {}
    name = feature.get("_type")
    if not isinstance(name, str):
        members = [places_of(inner, f"{place}.{member}") for member, inner in feature.items()]
        return {within: kind for one in members for within, kind in one.items()}
    if name in _OF_FEATURES:
        return {place: _OF_FEATURES[name]}
    if name in _UNKNOWN_FILES:
        raise UsageError(
            f"the feature {name} holds files, and is not one Penstock stores",
            do=f"cast the column to strings or bytes; what is stored: {', '.join(_OF_FEATURES)}",
        )
    return places_of(feature["feature"], place + "[]") if "feature" in feature else {}


def plain_of(frame: object, *, media: Collection[str] = ()) -> Plain | None:
    """An in-memory table as it is; columns of Python values named in `media` may hold paths, bytes, dicts and lists.

    None for what is no table: a path, a list of paths, a function.
    """
    if isinstance(frame, pa.RecordBatch):
        frame = pa.Table.from_batches([frame])
    if isinstance(frame, pa.Table):
        return _arrow(frame)
    if isinstance(frame, pa.RecordBatchReader):
        return _reader(frame)
    match _library_and_class(frame):
        case "pandas", "DataFrame":
            return _pandas(frame, media)
        case "polars", "DataFrame":
            return _polars(frame)
        case "polars", "LazyFrame":
            raise UsageError("a polars LazyFrame has no rows yet", do="call .collect() on it, or write it to Parquet")
        case "datasets", "Dataset":
            return _dataset(frame)
        case "datasets", "IterableDataset":
            return _stream(frame)
    if isinstance(frame, Mapping) and frame and all(_is_column(column) for column in frame.values()):
        return _python({str(name): column for name, column in frame.items()}, media, "a dict of columns")
    if isinstance(frame, list) and frame and all(isinstance(row, Mapping) for row in frame):
        return _rows(frame, media)
    return None


def _is_frame(one: object) -> bool:
    known = [("pandas", "DataFrame"), ("polars", "DataFrame"), ("datasets", "Dataset"), ("datasets", "IterableDataset")]
    return isinstance(one, pa.Table) or _library_and_class(one) in known


def _is_column(one: object) -> bool:
    return isinstance(one, list | tuple | np.ndarray | pa.Array | pa.ChunkedArray) or _library_and_class(one) in [
        ("pandas", "Series"),
        ("polars", "Series"),
    ]


def _library_and_class(thing: object) -> tuple[str, str]:
    """("pandas", "DataFrame") for one, or for a subclass of it."""
    for base in type(thing).__mro__:
        library = base.__module__.partition(".")[0]
        if library in ("pandas", "polars", "datasets"):
            # The outermost class of the library that users know: geopandas' frame is a pandas.DataFrame.
            return library, base.__name__
    return "", ""


def _arrow(table: pa.Table, label: str = "an Arrow table") -> Plain:
    _check_names(table.column_names, label)
    features = declared_features((table.schema.metadata or {}).get(METADATA_KEY))

    def pieces() -> Iterator[pa.RecordBatch]:
        return map(_unwrapped, table.to_batches(max_chunksize=BATCH_ROWS))

    return Plain(_plain_schema(table.schema), pieces, label, features)


def _reader(reader: pa.RecordBatchReader) -> Plain:
    label = "a stream of Arrow batches"
    _check_names(reader.schema.names, label)
    left = [reader]

    def pieces() -> Iterator[pa.RecordBatch]:
        if not left:
            raise UsageError("can be read once, and was", where=label, do="make a new one, or read_all() it first")
        return map(_unwrapped, left.pop())

    features = declared_features((reader.schema.metadata or {}).get(METADATA_KEY))
    return Plain(_plain_schema(reader.schema), pieces, label, features)


def _polars(frame: Any) -> Plain:
    level = sys.modules["polars"].CompatLevel.oldest()  # without it, string views, which Parquet readers do not know

    def pieces() -> Iterator[pa.RecordBatch]:
        for part in frame.iter_slices(BATCH_ROWS):
            yield from part.to_arrow(compat_level=level).to_batches()

    return Plain(frame.head(0).to_arrow(compat_level=level).schema, pieces, "a polars frame")


def _pandas(frame: Any, media: Collection[str]) -> Plain:
    # An index with a name is data; the numbers that a filter leaves behind are not.
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    label = "a pandas frame"
    _check_names(list(frame.columns), label)
    return _python({name: frame[name] for name in frame.columns}, media, label)


def _rows(rows: Sequence[Mapping[Any, Any]], media: Collection[str]) -> Plain:
    # Of every row: Arrow's own from_pylist knows the first row's columns alone.
    names = dict.fromkeys(str(name) for row in rows for name in row)
    return _python({name: _Member(rows, name) for name in names}, media, "a list of rows")


@dataclass(frozen=True)
class _Member:
    """One column of a list of rows, as a sequence."""

    rows: Sequence[Mapping[Any, Any]]
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> list[object]:
        return [row.get(self.name) for row in self.rows[part]]


def _python(columns: Mapping[str, _Column], media: Collection[str], label: str) -> Plain:
    """A table of columns that Python or pandas holds; types are told by all values, a stretch at a time."""
    lengths = {name: len(column) for name, column in columns.items()}
    count = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != count:
            what = f"column {next(iter(lengths))!r} has {count:,} values, column {name!r} has {length:,}"
            raise UsageError(what, where=label)
    objects = {name: column for name, column in columns.items() if name in media and _holds_objects(column)}
    fields = []
    for name, column in columns.items():
        if name in objects:
            kind = pa.list_(STORED) if _is_listed(column, name, label) else STORED
        else:
            kind = _type_of(column, count, name, label)
        fields.append(pa.field(name, kind))
    schema = pa.schema(fields)

    def pieces() -> Iterator[pa.RecordBatch]:
        for start in range(0, count, BATCH_ROWS):
            part = slice(start, min(count, start + BATCH_ROWS))
            arrays = [
                _media_array(_values(columns[one.name], part), one, start, label)
                if one.name in objects
                else _array(columns[one.name], part, one.type)
                for one in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return Plain(schema, pieces, label)


def _holds_objects(column: _Column) -> bool:
    dtype = getattr(column, "dtype", None)
    return isinstance(column, list | tuple | _Member) or (dtype is not None and str(dtype) == "object")


def _type_of(column: _Column, count: int, name: str, label: str) -> pa.DataType:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column.type
    known = pa.schema([])
    for start in range(0, count, BATCH_ROWS) or [0]:
        try:
            kind = _array(column, slice(start, start + BATCH_ROWS), None).type
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"column {name!r} cannot be made an Arrow column ({error})",
                where=label,
                do="give its values one type, or name it in media= if it holds files",
            ) from None
        known = unify(known, pa.schema([(name, kind)]), a_where=f"{label}, above row {start:,}", b_where=label)
        if not _holds_objects(column):
            break
    return known.field(0).type


def _values(column: _Column, part: slice) -> list[object]:
    if hasattr(column, "iloc"):
        column = column.iloc
    return list(column[part])


def _array(column: _Column, part: slice, kind: pa.DataType | None) -> pa.Array:
    """A stretch of a column as Arrow; NaN stays NaN, except where pandas means null by it."""
    if isinstance(column, pa.Array):
        return column[part]
    if isinstance(column, pa.ChunkedArray):
        return column[part].combine_chunks()
    if hasattr(column, "to_arrow"):  # a polars series
        made = column[part].to_arrow()
        return made if kind is None else made.cast(kind)
    pandas = hasattr(column, "iloc")
    values = column.iloc[part] if pandas else column[part]
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    try:
        made = pa.array(values, type=kind, from_pandas=pandas)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        made = pa.array([_as_text(value) for value in values], type=kind, from_pandas=pandas)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def _as_text(value: object) -> object:
    """Path objects as strings, lists of them too."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_as_text(one) for one in value] if isinstance(value, list | tuple) else value


def _is_absent(value: object) -> bool:
    """None, and what pandas has for it."""
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )


def _is_listed(column: _Column, name: str, label: str) -> bool:
    """Whether a column of Python values holds lists of files or files."""
    lists = singles = -1
    count = len(column)
    for start in range(0, count, BATCH_ROWS):
        for row, value in enumerate(_values(column, slice(start, start + BATCH_ROWS)), start):
            if _is_absent(value):
                continue
            if isinstance(value, list | tuple | np.ndarray):
                lists = row if lists < 0 else lists
            else:
                singles = row if singles < 0 else singles
        if lists >= 0 and singles >= 0:
            raise UsageError(
                f"column {name!r} holds a list in row {lists:,} and a single value in row {singles:,}",
                where=label,
                do="make every value a list",
            )
    return lists >= 0


def _media_array(values: Sequence[object], want: pa.Field, first: int, label: str) -> pa.Array:
    """Python values of a media column as structs of bytes and path, or lists of them."""
    if not pt.is_list(want.type):
        return _media_values(values, list(range(first, first + len(values))), want.name, label)
    flat: list[object] = []
    rows: list[int] = []
    lengths = np.zeros(len(values), dtype=np.int64)
    absent = np.zeros(len(values), dtype=np.bool_)
    for at, value in enumerate(values):
        if _is_absent(value):
            absent[at] = True
            continue
        assert isinstance(value, list | tuple | np.ndarray)
        flat += value
        rows += [first + at] * len(value)
        lengths[at] = len(value)
    offsets = numbers(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    made = _media_values(flat, rows, f"{want.name}[]", label)
    return pa.ListArray.from_arrays(offsets, made, type=want.type, mask=_flags(absent))


def _media_values(values: Sequence[object], rows: Sequence[int], name: str, label: str) -> pa.StructArray:
    inline: list[bytes | None] = []
    paths: list[str | None] = []
    for value, row in zip(values, rows, strict=True):
        given: bytes | None = None
        path: object = None
        if _is_absent(value):
            pass
        elif isinstance(value, str | os.PathLike):
            path = os.fspath(value)
        elif isinstance(value, bytes | bytearray | memoryview):
            given = bytes(value)
        elif isinstance(value, Mapping) and {"bytes", "path"} & set(value):
            given = None if _is_absent(value.get("bytes")) else bytes(value["bytes"])
            path = None if _is_absent(value.get("path")) else os.fspath(value["path"])
        else:
            raise UsageError(
                f"a {type(value).__name__} stands where a file is meant",
                where=f"{label}, column {name}, row {row:,}",
                do="pass paths, bytes, {'bytes': …, 'path': …} or lists of these",
            )
        paths.append(_utf8(path, name, row, label))
        inline.append(given)
    absent = np.fromiter((a is None and b is None for a, b in zip(inline, paths, strict=True)), np.bool_, len(paths))
    return pa.StructArray.from_arrays(
        [pa.array(inline, pa.binary()), pa.array(paths, pa.string())], fields=list(STORED), mask=_flags(absent)
    )


def _utf8(path: object, name: str, row: int, label: str) -> str | None:
    """A path that Arrow and Parquet can hold: their strings are UTF-8, file names are any bytes."""
    if path is None or isinstance(path, str):
        if path is not None and not path.isascii():
            try:
                path.encode()
            except UnicodeEncodeError:
                raise _not_utf8(path, f"{label}, column {name}, row {row:,}") from None
        return path
    raise _not_utf8(os.fsdecode(path) if isinstance(path, bytes) else str(path), f"{label}, column {name}, row {row:,}")


def _not_utf8(path: str, where: str) -> UsageError:
    shown = os.fsencode(path).decode("utf-8", "backslashreplace")
    return UsageError(f"the file name {shown!r} is not UTF-8", where=where, do="rename the file")


def _flags(values: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def _dataset(dataset: Any) -> Plain:
    """A `datasets.Dataset`: its Arrow table as it lies, and the rows that select, filter, shuffle and shard left."""
    table: pa.Table = dataset.data.table
    chosen = dataset._indices  # there is no other way to them; the name is the same since datasets 1.0

    def pieces() -> Iterator[pa.RecordBatch]:
        if chosen is None:
            return map(_unwrapped, table.to_batches(max_chunksize=BATCH_ROWS))
        return map(_unwrapped, _gather(table, chosen.column(0)))

    return Plain(_plain_schema(table.schema), pieces, "a datasets.Dataset", dict(dataset.features.to_dict()))


def _gather(table: pa.Table, chosen: pa.ChunkedArray) -> Iterator[pa.RecordBatch]:
    """Rows of a table by number, in their order. `Table.take` would make one array of a column's chunks first: the
    whole dataset, for every stretch of rows."""
    batches = table.to_batches()
    starts = np.concatenate([[0], np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)])
    per_row = table.nbytes / max(1, table.num_rows)
    at_once = int(min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, per_row))))
    for chunk in chosen.chunks:
        rows = numbers_of(chunk).astype(np.int64)
        for start in range(0, len(rows), at_once):
            yield _picked(batches, starts, rows[start : start + at_once])


def _picked(
    batches: Sequence[pa.RecordBatch], starts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> pa.RecordBatch:
    order = np.argsort(rows, kind="stable")
    held = rows[order]
    of = np.searchsorted(starts, held, side="right") - 1
    edges = np.flatnonzero(np.diff(of)) + 1
    parts = [
        batches[of[part[0]]].take(numbers(held[part] - starts[of[part[0]]]))
        for part in np.split(np.arange(len(held)), edges)
    ]
    if len(parts) == 1 and (order[:-1] < order[1:]).all():
        return parts[0]
    back = np.empty(len(order), dtype=np.int64)
    back[order] = np.arange(len(order))
    return pa.concat_batches(parts).take(numbers(back))


def _stream(stream: Any) -> Plain:
    """A `datasets.IterableDataset`: examples as Arrow, undecoded."""
    label = "a datasets.IterableDataset"
    known = stream if stream.features is not None else stream._resolve_features()
    schema = _plain_schema(known.features.arrow_schema)
    # Of examples that are Python's, datasets 5.2.0 makes an Arrow table each and joins them before it casts them: one
    # null among strings, and it fails. One at a time there is nothing to join.
    at_once = 1 if stream._ex_iterable.iter_arrow is None else STREAM_ROWS

    def pieces() -> Iterator[pa.RecordBatch]:
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for table in stream.with_format("arrow").iter(at_once):
            for batch in table.to_batches():
                held.append(_conformed(_unwrapped(batch), schema, f"{label}, row {rows:,}"))
                rows += batch.num_rows
                size += batch.nbytes
                if size >= BATCH_BYTES or len(held) == BATCH_ROWS:
                    yield pa.concat_batches(held)
                    held, size = [], 0
        if held:
            yield pa.concat_batches(held)

    return Plain(schema, pieces, label, dict(known.features.to_dict()))


def _conformed(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    try:
        return conform(batch, schema)
    except pa.ArrowException as error:
        raise BadRow(
            f"a value is of another type than in the first rows ({error})",
            where=where,
            do="give the stream features: .cast(Features(…))",
        ) from None


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    """Columns as they are stored: extension types as their storage; features are kept apart from the schema."""
    return pa.schema([one.with_type(_storage(one.type)) for one in schema])


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _unwrapped(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [one.storage if isinstance(one, pa.ExtensionArray) else one for one in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=_plain_schema(batch.schema))


def _check_names(names: Iterable[str], label: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"has two columns named {name!r}", where=label, do="rename one of them")
        seen.add(name)

"""Tables of paths: a CSV, TSV, JSON lines or Parquet file, or a frame, whose columns name files or lists of files.

A table file is streamed twice, once for its types and once for its rows, in bounded memory. Types in text are told by
all of the rows, not by the first block; what begins with a zero, as subjects' numbers do, stays text.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.errors import BadFile, NotFound, UsageError
from penstock.media.found import Found, Kinds, Missing, Plain, as_list, is_listed, is_text
from penstock.media.frames import places_of, plain_of, with_declared
from penstock.media.kind_of import kind_of
from penstock.media.kinds import KINDS, check_kind, kinds_of
from penstock.publish.features import METADATA_KEY, declared_features
from penstock.sources import format_of

Media: TypeAlias = Mapping[str, str] | Sequence[str] | None

TEXT_BLOCK = 4 << 20
READ_BUFFER = 1 << 20
DECODE_BYTES = 8 << 20
# Values whose endings tell a column's kind.
LOOKED_AT = 100
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_BOOLEANS = r"^(true|false|True|False|TRUE|FALSE)$"
_NAMES = r"^[+-]?0[0-9]"  # 007 is a name
_LONG = r"^[+-]?[0-9]{16}"  # and a number that float64 would round may be one


def files_table(
    table: object,
    *,
    media: Media = None,
    root: str | os.PathLike[str] | None = None,
    on_missing: Missing = "raise",
) -> Found:
    """A table with its columns of paths as references.

    `media` maps columns to kinds; given names alone, or nothing, kinds are told by the files' endings. Relative paths
    start at `root`, else at the table file's folder, else at the current one. A file that is not there is an error
    naming it, or with on_missing="null" a null.
    """
    names = _names(media)
    if isinstance(table, str | os.PathLike):
        where = os.fspath(table)
        if "://" in where and not os.path.exists(where):
            raise UsageError("remote paths are not read yet", where=where, do="fetch the file first")
        where = os.path.abspath(where)
        plain = table_file(where, text=names or ())
        base = os.path.dirname(where)
    else:
        made = plain_of(table, media=names or ())
        if made is None:
            raise UsageError(
                f"a {type(table).__name__} is no table of paths",
                do="pass a CSV, TSV, JSON lines or Parquet file, a frame, a dict of columns or a list of rows",
            )
        plain, base = made, os.getcwd()
    start = base if root is None else os.path.abspath(os.fspath(root))
    if not os.path.isdir(start):
        raise NotFound("there is no such folder", where=start, do="correct root=")
    kinds = _kinds(plain, media, start)
    return with_declared(plain, media=kinds, root=start, on_missing=on_missing)


def table_file(path: str, *, text: Collection[str] = ()) -> Plain:
    """A table file as it is. The columns of `text` are strings, whatever they look like."""
    if os.path.isdir(path):
        raise UsageError("is a folder, not a table of paths", where=path, do="read it as a folder of media")
    if not os.path.exists(path):
        raise NotFound("there is no such file", where=path, do="check the path")
    separator = _SEPARATORS.get(Path(path).suffix.lower())
    if separator is not None:
        return _csv(path, separator, frozenset(text))
    format = format_of(path)
    if format == "parquet":
        return _parquet(path)
    if format == "jsonl":
        return _jsonl(path)
    raise UsageError(
        "its ending tells no table Penstock knows", where=path, do="name a .csv, .tsv, .jsonl or .parquet file"
    )


def _names(media: Media) -> list[str] | None:
    if media is None:
        return None
    if isinstance(media, str):
        raise UsageError("media= takes a dict or a list", do=f"pass media=[{media!r}]")
    for kind in media.values() if isinstance(media, Mapping) else ():
        check_kind(kind)
    return list(media)


def _kinds(plain: Plain, media: Media, root: str) -> dict[str, Kinds]:
    """The places of media in each column that has any, with their kinds."""
    known = {one.name for one in plain.schema if kinds_of(one)}
    known |= {name for name, feature in plain.features.items() if places_of(feature)}
    names = _names(media)
    for name in names or ():
        if name not in plain.schema.names:
            raise UsageError(
                f"there is no column {name!r}", where=plain.label, do=f"one of {', '.join(plain.schema.names)}"
            )
    if isinstance(media, Mapping):
        return {name: {_place(plain.schema.field(name).type): kind} for name, kind in media.items()}
    kinds: dict[str, Kinds] = {}
    looking = [one for one in plain.schema if (one.name in names if names is not None else one.name not in known)]
    heads = _heads(plain, [one.name for one in looking if _may_hold_paths(one.type, named=names is not None)])
    for one in looking:
        paths = heads.get(one.name, [])
        told = {kind_of(path) for path in paths}
        if len(told) == 1 and None not in told and (names is not None or _is_there(paths[0], root)):
            kinds[one.name] = {_place(one.type): str(told.pop())}
        elif names is not None:
            shown = f"such as {paths[0]!r}" if paths else "has no path to tell by"
            raise UsageError(
                f"the endings of column {one.name!r} do not tell what it holds ({shown})",
                where=plain.label,
                do=f"say it: media={{{one.name!r}: …}}, one of {', '.join(KINDS)}",
            )
    if not kinds and not known:
        raise UsageError(
            "no column holds paths of files whose endings tell what they are",
            where=plain.label,
            do=f"say which do: media={{'column': 'image'}}; relative paths start at {root}, or at root=",
        )
    return kinds


def _place(kind: pa.DataType) -> str:
    return "[]" if is_listed(kind) else ""


def _may_hold_paths(kind: pa.DataType, *, named: bool) -> bool:
    inner = kind.value_type if is_listed(kind) or pt.is_dictionary(kind) else kind
    return is_text(inner) or (named and pt.is_struct(inner) and inner.get_field_index("path") >= 0)


def _heads(plain: Plain, names: Sequence[str]) -> dict[str, list[str]]:
    """The first paths of some columns."""
    heads: dict[str, list[str]] = {name: [] for name in names}
    if not names:
        return heads
    for batch in plain.pieces():
        for name, found in heads.items():
            if len(found) < LOOKED_AT:
                found += _paths_in(batch.column(name), LOOKED_AT - len(found))
        if all(heads.values()):
            break
    return heads


def _paths_in(array: pa.Array, most: int) -> list[str]:
    if is_listed(array.type):
        array = as_list(array).flatten()
    if pt.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pt.is_struct(array.type):
        array = array.flatten()[array.type.get_field_index("path")]
    return list(array.drop_null()[:most].to_pylist())


def _is_there(path: str, root: str) -> bool:
    """A file, or a link to content that is to be fetched: a column of addresses or of labels has neither."""
    return os.path.lexists(os.path.join(root, path)) if "\0" not in path else False


def _parquet(path: str) -> Plain:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as opened:
            schema = opened.schema_arrow
            stated = (opened.metadata.metadata or {}).get(METADATA_KEY)
            groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
            densest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=0)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    at_once = int(min(16_384, max(1, DECODE_BYTES // max(1, densest))))

    def pieces() -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER) as opened:
                yield from opened.iter_batches(at_once, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error

    return Plain(schema.remove_metadata(), pieces, os.path.basename(path), declared_features(stated))


def _jsonl(path: str) -> Plain:
    from penstock.sources.json_rows import check_wide, infer, parse, unify
    from penstock.sources.lines import blocks, compression_of

    name = os.path.basename(path)
    compression = compression_of(path)
    schema = pa.schema([])
    wide: dict[str, str] = {}
    line = 0
    for block in blocks(path, compression=compression, size=TEXT_BLOCK):
        found = infer(block, where=name, first_line=line)
        schema = unify(schema, found.schema, a_where=name, b_where=name)
        wide = dict(found.wide) | wide
        check_wide(schema, wide)
        line += block.lines
    if not schema.names:
        raise BadFile("holds no rows", where=path, do="check the file")

    def pieces() -> Iterator[pa.RecordBatch]:
        line = 0
        for block in blocks(path, compression=compression, size=TEXT_BLOCK):
            yield parse(block, schema, where=name, first_line=line).batch
            line += block.lines

    return Plain(schema, pieces, name)


def _csv(path: str, separator: str, text: frozenset[str]) -> Plain:
    from pyarrow import csv

    def opened(types: Mapping[str, pa.DataType] | None) -> Any:
        return csv.open_csv(
            path,
            read_options=csv.ReadOptions(use_threads=False, block_size=TEXT_BLOCK),
            parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True),
        )

    try:
        if os.stat(path).st_size == 0:
            raise BadFile("is empty (0 bytes)", where=path, do="check the file")
        names = opened(None).schema.names
        for number, name in enumerate(names):
            if name in names[:number]:
                raise UsageError(f"has two columns named {name!r}", where=path, do="rename one of them")
        told = {name: _Told(number=name not in text) for name in names}
        with opened(dict.fromkeys(names, pa.string())) as reader:
            for batch in reader:
                for name, column in zip(names, batch.columns, strict=True):
                    told[name].look(column)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    schema = pa.schema([(name, one.type) for name, one in told.items()])

    def pieces() -> Iterator[pa.RecordBatch]:
        try:
            with opened({one.name: one.type for one in schema}) as reader:
                yield from reader
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error

    return Plain(schema, pieces, os.path.basename(path))


class _Told:
    """What a column of text can be, given all that was seen of it."""

    def __init__(self, *, number: bool) -> None:
        self.whole = self.fraction = self.boolean = number
        self.seen = self.long = False

    def look(self, column: pa.StringArray) -> None:
        values = column.drop_null()
        if not len(values):
            return
        self.seen = True
        self.boolean = self.boolean and pc.all(pc.match_substring_regex(values, _BOOLEANS)).as_py()
        if self.whole or self.fraction:
            values = pc.utf8_trim_whitespace(values)
            self.long = self.long or pc.any(pc.match_substring_regex(values, _LONG)).as_py()
            if pc.any(pc.match_substring_regex(values, _NAMES)).as_py():
                self.whole = self.fraction = False
        self.whole = self.whole and _castable(values, pa.int64())
        self.fraction = self.fraction and (self.whole or _castable(values, pa.float64()))

    @property
    def type(self) -> pa.DataType:
        if not self.seen:
            return pa.string()
        if self.whole:
            return pa.int64()
        if self.fraction and not self.long:
            return pa.float64()
        return pa.bool_() if self.boolean else pa.string()


def _castable(values: pa.StringArray, kind: pa.DataType) -> bool:
    try:
        values.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _unreadable(path: str, error: BaseException) -> BadFile:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadFile(f"cannot be read ({reason})", where=path, do="correct it, or fetch it again")

"""Which files a check is about: paths, folders, globs, or the paths in the columns of a table.

They come one by one, in no order that is promised, so that a tree of any size is walked and not held.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import BadFile, BadRow, NotFound, UsageError
from penstock.media import annex

if TYPE_CHECKING:
    import pyarrow as pa

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_ROWS = 4096
_NULLS = ("", "n/a")  # the second is how BIDS writes it


@dataclass(frozen=True, slots=True)
class Meant:
    """A file that is meant: where it is, its name relative to what was named, and its bytes (0 where it is not)."""

    path: str
    name: str
    bytes: int
    relative: bool = False  # a table gave it relative to its own folder


def meant(source: Paths, *, columns: Sequence[str] = ()) -> Iterator[Meant]:
    """Every file the words stand for. With columns, the words are tables and the files what those columns name."""
    words = words_of(source)
    if not words:
        raise UsageError("nothing to check was named", do="name files, folders, a glob, or a table with its column")
    for word in words:
        if columns:
            yield from _in_table(word, columns)
        elif os.path.isdir(word):
            yield from walk(word)
        elif glob.has_magic(word) and not os.path.lexists(word):
            yield from _in_glob(word)
        else:
            yield Meant(word, os.path.basename(word), _size(word))


def roots(source: Paths) -> list[str]:
    """The folders among the words: names are relative to them."""
    return [word for word in words_of(source) if os.path.isdir(word)]


def words_of(source: Paths) -> list[str]:
    if isinstance(source, str | os.PathLike):
        return [os.fspath(source)]
    if not isinstance(source, Sequence) or not all(isinstance(one, str | os.PathLike) for one in source):
        raise UsageError(f"checks paths, and {type(source).__name__} is none", do="pass a path or a list of paths")
    return [os.fspath(one) for one in source]


def walk(root: str) -> Iterator[Meant]:
    """Every file below a folder. Hidden names (.git, .datalad) are other tools' bookkeeping and passed by."""
    about = os.stat(root)
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(root, "", ((about.st_dev, about.st_ino),))]
    while waiting:
        folder, below, above = waiting.pop()
        try:
            entries = os.scandir(folder)
        except OSError:
            # Opening it as a file says why it cannot be read.
            yield Meant(folder, below or os.path.basename(folder), 0)
            continue
        with entries:
            empty = True
            for entry in entries:
                empty = False
                if entry.name.startswith("."):
                    continue
                name = f"{below}/{entry.name}" if below else entry.name
                try:
                    is_folder = entry.is_dir()
                except OSError:
                    is_folder = False
                if not is_folder:
                    yield Meant(name if root == "." else entry.path, name, _size(entry))
                    continue
                about = entry.stat()
                own = (about.st_dev, about.st_ino)
                if own not in above:  # a link to a folder above it has no end
                    waiting.append((entry.path, name, (*above, own)))
        if empty and below and annex.submodule_command(folder) is not None:
            yield Meant(folder, below, 0)


def _in_glob(pattern: str) -> Iterator[Meant]:
    plain = []
    for part in pattern.split("/")[:-1]:
        if glob.has_magic(part):
            break
        plain.append(part)
    root = "/".join(plain) or ("/" if pattern.startswith("/") else ".")
    for found in glob.iglob(pattern, recursive=True):
        if not os.path.isdir(found):
            yield Meant(found, os.path.relpath(found, root), _size(found))


def _size(where: str | os.DirEntry[str]) -> int:
    try:
        return (os.stat(where) if isinstance(where, str) else where.stat()).st_size
    except OSError:
        return 0


# -- tables -------------------------------------------------------------------------------------------------------


def _in_table(table: str, columns: Sequence[str]) -> Iterator[Meant]:
    folder = os.path.dirname(table)
    for path in _paths_in(table, columns):
        relative = not os.path.isabs(path) and "://" not in path
        there = os.path.join(folder, path) if relative else path
        yield Meant(there, path, _size(there), relative)


def _paths_in(table: str, columns: Sequence[str]) -> Iterator[str]:
    """The paths of a table, read a few thousand rows at a time."""
    if not os.path.isfile(table):
        raise NotFound("there is no such table", where=table, do="check the path; --column is for tables of paths")
    lower = table.lower()
    if lower.endswith((".jsonl", ".ndjson")):
        rows: Iterable[dict[str, Any]] = _json_rows(table, columns)
    elif lower.endswith(".parquet"):
        rows = _parquet_rows(table, columns)
    elif lower.endswith((".csv", ".tsv", ".csv.gz", ".tsv.gz")):
        rows = _text_rows(table, columns, "\t" if ".tsv" in lower else ",")
    else:
        raise UsageError("is no table that is read here", where=table, do="name a .csv, .tsv, .parquet or .jsonl file")
    for row in rows:
        for column in columns:
            yield from _paths(row.get(column), table, column)


def _paths(value: Any, table: str, column: str) -> Iterator[str]:
    if value is None or value in _NULLS:
        return
    if isinstance(value, str):
        if value.startswith("["):  # a list, as tables of text hold it
            try:
                yield from _paths(json.loads(value), table, column)
                return
            except ValueError:
                pass
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _paths(one, table, column)
    elif isinstance(value, dict) and isinstance(value.get("path"), str):
        yield value["path"]
    else:
        raise UsageError(
            f"column {column} holds {type(value).__name__} values, not paths", where=table, do="name a column of paths"
        )


def _missing_column(table: str, column: str, names: Sequence[str]) -> UsageError:
    return UsageError(f"has no column {column}; it has {', '.join(map(str, names))}", where=table)


def _json_rows(table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    with open(table, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadRow(f"line {number:,} is no JSON ({error})", where=table, do="mend the line") from error
            if not isinstance(row, dict):
                raise BadRow(f"line {number:,} is no JSON object", where=table, do="mend the line")
            seen |= row.keys() & set(columns)
            yield row
    if absent := [column for column in columns if column not in seen]:
        raise _missing_column(table, absent[0], sorted(seen) or ["none of those named"])


def _parquet_rows(table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(table) as file:
            names = file.schema_arrow.names
            for column in columns:
                if column not in names:
                    raise _missing_column(table, column, names)
            for batch in file.iter_batches(_ROWS, columns=list(columns)):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise BadFile(f"cannot be read ({error})", where=table) from error


def _text_rows(table: str, columns: Sequence[str], mark: str) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import csv

    try:
        with csv.open_csv(table, parse_options=csv.ParseOptions(delimiter=mark)) as probe:
            names = probe.schema.names
        for column in columns:
            if column not in names:
                raise _missing_column(table, column, names)
        types: dict[str, pa.DataType] = dict.fromkeys(columns, pa.string())
        convert = csv.ConvertOptions(include_columns=list(columns), column_types=types, strings_can_be_null=True,
                                     null_values=list(_NULLS))  # fmt: skip
        options = csv.ParseOptions(delimiter=mark, newlines_in_values=True)
        with csv.open_csv(table, parse_options=options, convert_options=convert) as rows:
            for batch in rows:
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise BadFile(f"cannot be read as a table ({error})", where=table) from error

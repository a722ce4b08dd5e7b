"""Folders of media: a row for each file, its class from its folder, or a metadata file beside that lists them.

What `imagefolder` and the like of Hugging Face `datasets` read, to the same columns and in bytewise order of the names.
A folder is walked twice, once to know what is in it and once for its rows, and one folder's names are held at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import NotFound, UsageError
from penstock.media.files import table_file
from penstock.media.found import (
    BATCH_ROWS,
    Found,
    Looking,
    Places,
    Plain,
    is_listed,
    is_text,
    numbers,
    reference_schema,
    strings,
)
from penstock.media.kind_of import ENDINGS, ending_of, kind_of
from penstock.media.kinds import check_kind
from penstock.schemas import conform, unify
from penstock.sources import format_of

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Folder names that mean a split, alone or set off by one of "-._ 0123456789", as datasets has them.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SET_OFF = "-._ 0123456789"
# Entries that tell what a folder is, where only a guess is asked for.
GLANCE = 1000


@dataclass
class _Seen:
    """What a walk found: media by kind, class names and depths, metadata files, and what cannot be read."""

    kinds: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    depths: set[int] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)
    metadata: list[str] = field(default_factory=list)
    archive: str = ""


def media_folder(
    folder: str | os.PathLike[str],
    *,
    kind: str | None = None,
    drop_labels: bool | None = None,
    drop_metadata: bool | None = None,
) -> Found:
    """One folder, all of it, as one split.

    Without `kind` its files say what it holds. `label` is there when files lie in more than one class folder, all
    equally deep, and no metadata file is beside them; `drop_labels` says otherwise either way.
    """
    one = os.path.abspath(os.fspath(folder))
    return _found({"": one}, kind=kind, drop_labels=drop_labels, drop_metadata=drop_metadata)[""]


def media_splits(
    folder: str | os.PathLike[str],
    *,
    kind: str | None = None,
    drop_labels: bool | None = None,
    drop_metadata: bool | None = None,
) -> dict[str, Found]:
    """Every split of a folder, with the same columns and the same numbers for the same classes."""
    folders = folder_splits(folder) or {"train": os.path.abspath(os.fspath(folder))}
    return _found(folders, kind=kind, drop_labels=drop_labels, drop_metadata=drop_metadata)


def folder_splits(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The splits a folder has as folders in it (train, test, …, or these within `data`); none if it is one split."""
    root = os.path.abspath(os.fspath(folder))
    _check_folder(root)
    inner = [name for name in _folders_in(root) if _holds_media(f"{root}/{name}")]
    if inner == ["data"] and not _has_own_files(root):
        return folder_splits(f"{root}/data")
    splits: dict[str, str] = {}
    others = []
    for name in inner:
        split = split_of(name)
        if split is None:
            others.append(name)
        elif split in splits:
            raise UsageError(
                f"{os.path.basename(splits[split])} and {name} both mean the split {split!r}",
                where=root,
                do="rename one of them, or read them one by one",
            )
        else:
            splits[split] = f"{root}/{name}"
    if not others:
        return {split: splits[split] for split in SPLITS if split in splits}
    if len(splits) > 1:
        # Classes may be called "train" and "bus", but where "train" and "test" are, "extra" is a mistake: datasets
        # leaves it out without a word.
        named = " and ".join(os.path.basename(path) for path in splits.values())
        raise UsageError(
            f"{named} are splits, but {others[0]} holds media too and is none",
            where=root,
            do="move it elsewhere, or read the folders one by one",
        )
    return {}


def split_of(name: str) -> str | None:
    """The split a folder's name means.

    >>> split_of("train"), split_of("my-val-2024"), split_of("trains")
    ('train', 'validation', None)
    """
    lower = name.lower()  # datasets takes Train and Test for classes
    for split, words in SPLITS.items():
        for word in words:
            at = lower.find(word)
            while at >= 0:
                after = at + len(word)
                if (at == 0 or lower[at - 1] in _SET_OFF) and (after == len(lower) or lower[after] in _SET_OFF):
                    return split
                at = lower.find(word, at + 1)
    return None


def is_media_folder(folder: str | os.PathLike[str]) -> str | None:
    """The kind of media a folder holds, at a glance: from its first thousand files. None for a folder of tables."""
    root = os.path.abspath(os.fspath(folder))
    if not os.path.isdir(root):
        return None
    kinds: Counter[str] = Counter()
    looked = 0
    for _, names in _walk(root, sort=False):
        for name in names:
            kind = kind_of(name)
            if kind is not None:
                kinds[kind] += 1
            elif name not in METADATA and format_of(name) is not None:
                return None
            looked += 1
            if looked >= GLANCE and kinds:
                return kinds.most_common(1)[0][0]
    return kinds.most_common(1)[0][0] if kinds else None


def _found(
    folders: Mapping[str, str], *, kind: str | None, drop_labels: bool | None, drop_metadata: bool | None
) -> dict[str, Found]:
    if kind is not None:
        check_kind(kind)
        if kind not in ENDINGS:
            raise UsageError(f"a folder of kind {kind!r} has no endings to tell its files by", do="use read_files")
    for folder in folders.values():
        _check_folder(folder)
    seen = {split: _survey(folder, kind) for split, folder in folders.items()}
    column = kind or _kind_told(seen, folders)
    listed = any(one.metadata for one in seen.values())
    if listed and not drop_metadata:
        return _from_metadata(folders, seen, column)
    for split, one in seen.items():
        if not one.kinds[column]:
            raise NotFound(f"holds no {column} files", where=folders[split], do=f"its endings: {_shown(one.endings)}")
    labels = sorted(set().union(*(one.labels for one in seen.values())))
    depths = set().union(*(one.depths for one in seen.values()))
    # As datasets has it: where there is a metadata file there are no labels, even if it is left unread.
    labelled = not listed and ((len(labels) > 1 and len(depths) == 1) if drop_labels is None else not drop_labels)
    schema = reference_schema(pa.schema([(column, pa.string())]), {column: {"": column}})
    features: dict[str, Any] = {}
    if labelled:
        schema = schema.append(pa.field("label", pa.int64()))
        features["label"] = {"names": labels, "_type": "ClassLabel"}
    codes = {label: number for number, label in enumerate(labels)} if labelled else None
    return {
        split: Found(
            schema, _rows_of(folder, column, schema, codes), _name(folder), (os.path.realpath(folder),), features
        )
        for split, folder in folders.items()
    }


def _rows_of(
    folder: str, kind: str, schema: pa.Schema, codes: Mapping[str, int] | None
) -> Callable[[], Iterator[pa.RecordBatch]]:
    def batches() -> Iterator[pa.RecordBatch]:
        looking = Looking(_name(folder))
        yield from looking.batches(_listed(folder, kind, codes), schema, {kind: {"": kind}}, Places(folder))
        looking.end()

    return batches


def _listed(folder: str, kind: str, codes: Mapping[str, int] | None) -> Iterator[pa.RecordBatch]:
    """The names of a folder's files and the numbers of their classes, many folders to a batch."""
    endings = ENDINGS[kind]
    paths: list[str] = []
    labels: list[int] = []

    def batch() -> pa.RecordBatch:
        columns = [strings(paths)]
        if codes is not None:
            columns.append(numbers(np.array(labels, dtype=np.int64)))
        return pa.RecordBatch.from_arrays(columns, names=[kind, "label"][: len(columns)])

    for within, names in _walk(folder):
        code = 0 if codes is None else codes.get(os.path.basename(f"{folder}/{within}".rstrip("/")), -1)
        for name in names:
            if ending_of(name) not in endings:
                continue
            paths.append(_utf8(within + name, folder))
            labels.append(code)
            if len(paths) == BATCH_ROWS:
                yield batch()
                paths, labels = [], []
    if paths:
        yield batch()


def _walk(folder: str, *, sort: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Folders below a folder ("" for itself, "cats/"), each with a run of its file names, in bytewise order of paths.

    Hidden names and folders like __pycache__ are other tools' bookkeeping. Links to folders are not followed, as
    datasets does not; links to files are files, even to ones that are not there: an annex has such.
    """
    below: list[Iterator[str]] = []
    within: list[str] = []

    def enter(name: str) -> None:
        path = "".join(within) + name
        within.append(name)
        found = _entries(f"{folder}/{path}")
        # A folder sorts as its name with "/" after it: so "a-b" comes before all of "a", as in a list of whole paths.
        below.append(iter(sorted(found) if sort else found))

    enter("")
    run: list[str] = []
    while below:
        name = next(below[-1], None)
        if name is not None and not name.endswith("/"):
            run.append(name)
            if len(run) < BATCH_ROWS:
                continue
        if run:
            yield "".join(within), run
            run = []
        if name is None:
            below.pop()
            within.pop()
        elif name.endswith("/"):
            enter(name)


def _entries(path: str) -> Iterator[str]:
    """Names in one folder, folders with a "/" after them."""
    try:
        entries = os.scandir(path)
    except PermissionError:
        raise UsageError("may not be read", where=path, do="change its permissions") from None
    with entries:
        for entry in entries:
            name = entry.name
            if name[0] == ".":
                continue
            if entry.is_dir(follow_symlinks=False):
                if not name.startswith("__"):
                    yield name + "/"
            elif not entry.is_symlink() or not entry.is_dir():
                yield name


def _survey(folder: str, kind: str | None) -> _Seen:
    seen = _Seen()
    for within, names in _walk(folder, sort=False):
        held = False
        for name in names:
            ending = ending_of(name)
            found = kind_of(name) if kind is None or ending not in ENDINGS[kind] else kind
            if found is not None:
                seen.kinds[found] += 1
                held = held or kind is None or found == kind
            elif name in METADATA:
                seen.metadata.append(within + name)
            elif ending == ".zip":
                seen.archive = seen.archive or within + name
            if len(seen.endings) < GLANCE or ending in seen.endings:
                seen.endings[ending] += 1
        if held:
            seen.labels.add(os.path.basename(f"{folder}/{within}".rstrip("/")))
            seen.depths.add(within.count("/"))
    if seen.archive:
        raise UsageError(
            f"holds an archive ({seen.archive}), whose files would be left out", where=folder, do="unpack it first"
        )
    seen.metadata.sort()
    return seen


def _kind_told(seen: Mapping[str, _Seen], folders: Mapping[str, str]) -> str:
    kinds: Counter[str] = Counter()
    for one in seen.values():
        kinds.update(one.kinds)
    where = os.path.commonpath(list(folders.values()))
    if not kinds:
        endings: Counter[str] = Counter()
        for one in seen.values():
            endings.update(one.endings)
        raise NotFound("holds no media files", where=where, do=f"its endings: {_shown(endings)}; pass kind=")
    if len(kinds) > 1:
        told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        raise UsageError(
            f"holds files of more than one kind ({told})",
            where=where,
            do="pass kind= to read one of them, or make a table of paths and use read_files",
        )
    return next(iter(kinds))


def _shown(endings: Counter[str]) -> str:
    return (
        ", ".join(f"{count:,} {ending or 'without ending'}" for ending, count in endings.most_common(5)) or "no files"
    )


def _from_metadata(folders: Mapping[str, str], seen: Mapping[str, _Seen], kind: str) -> dict[str, Found]:
    """Rows as the metadata files give them; files that they do not list are no rows."""
    lists: dict[str, list[str]] = {}
    for split, folder in folders.items():
        if not seen[split].metadata:
            raise UsageError(
                "has no metadata file, and another split has one",
                where=folder,
                do="add one, or pass drop_metadata=True",
            )
        lists[split] = [f"{folder}/{_utf8(name, folder)}" for name in seen[split].metadata]
    every = [path for paths in lists.values() for path in paths]
    endings = sorted({os.path.splitext(path)[1] for path in every})
    if len(endings) > 1:
        raise UsageError(
            f"has metadata in {' and '.join(endings)}", where=_name(os.path.commonpath(every)), do="use one of them"
        )
    plains = {path: table_file(path, text=_names_in_head(path) if endings == [".csv"] else ()) for path in every}
    given = pa.schema([])
    for path, plain in plains.items():
        given = unify(given, plain.schema, a_where=every[0], b_where=path)
    media, names = _file_columns(given, kind)
    if not media:
        raise UsageError(
            "names no files",
            where=every[0],
            do="add a column file_name, *_file_name, file_names or *_file_names, relative to it",
        )
    schema = reference_schema(given, media, names)
    doubled = [name for name, count in Counter(schema.names).items() if count > 1]
    if doubled:
        raise UsageError(f"two columns would be named {doubled[0]!r}", where=every[0], do="rename one of them")
    found = {}
    for split, paths in lists.items():
        batches = _joined({path: plains[path] for path in paths}, given, schema, media)
        found[split] = Found(schema, batches, _name(folders[split]), (os.path.realpath(folders[split]),))
    return found


def _joined(
    plains: Mapping[str, Plain], given: pa.Schema, schema: pa.Schema, media: Mapping[str, Mapping[str, str]]
) -> Callable[[], Iterator[pa.RecordBatch]]:
    def batches() -> Iterator[pa.RecordBatch]:
        for path, plain in plains.items():
            looking = Looking(path)
            pieces = (conform(piece, given) for piece in plain.pieces())
            yield from looking.batches(pieces, schema, media, Places(os.path.dirname(path), inside=True))
            looking.end()

    return batches


def _names_in_head(path: str) -> list[str]:
    """The columns of a CSV file that name files: numbers or not, they are names."""
    from pyarrow import csv

    try:
        names = csv.open_csv(path, read_options=csv.ReadOptions(use_threads=False)).schema.names
    except pa.ArrowException:
        return []  # told by who reads the rows
    return [name for name in names if _member_name(name, pa.string(), "") is not None]


def _file_columns(schema: pa.Schema, kind: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The columns that name files: places of their media, and the names that columns and members get."""
    media: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}

    def visit(column: str, place: str, of: pa.DataType, name: str) -> None:
        new = _member_name(name, of, kind) if name else None
        if new is not None:
            names[column + place] = new
            media.setdefault(column, {})[place + ("[]" if is_listed(of) else "")] = kind
        elif pt.is_struct(of):
            for one in of:
                visit(column, f"{place}.{one.name}", one.type, one.name)
        elif is_listed(of):
            visit(column, place + "[]", of.value_type, "")

    for one in schema:
        visit(one.name, "", one.type, one.name)
    return media, names


def _member_name(name: str, of: pa.DataType, kind: str) -> str | None:
    """What a column that names files is called once it holds them; None for another column."""
    if is_text(of) and (name == "file_name" or name.endswith("_file_name")):
        return name[: -len("_file_name")] or kind
    if is_listed(of) and is_text(of.value_type) and (name == "file_names" or name.endswith("_file_names")):
        return name[: -len("_file_names")] or f"{kind}s"
    return None


def _check_folder(folder: str) -> None:
    if not os.path.isdir(folder):
        raise NotFound("there is no such folder", where=folder, do="check the path")


def _folders_in(folder: str) -> list[str]:
    return sorted(name[:-1] for name in _entries(folder) if name.endswith("/"))


def _has_own_files(folder: str) -> bool:
    return any(kind_of(name) or name in METADATA for name in _entries(folder) if not name.endswith("/"))


def _holds_media(folder: str) -> bool:
    return any(kind_of(name) or name in METADATA for _, names in _walk(folder, sort=False) for name in names)


def _name(folder: str) -> str:
    return os.path.basename(folder.rstrip("/")) or folder


def _utf8(path: str, folder: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise UsageError(f"the file name {shown!r} is not UTF-8", where=folder, do="rename the file") from None
    return path

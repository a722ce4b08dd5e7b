"""Paths on this machine: a file, a glob, a folder, a list of them; in bytewise order of their relative names."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import BadFile, NotFound, SourceChanged, UsageError
from penstock.sources import FORMATS, format_of
from penstock.sources.base import SourceFile

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
HEAD_TAIL = 64 << 10


@dataclass(frozen=True)
class Found:
    """The files meant, fingerprinted; their format; and the folders that were named whole."""

    files: tuple[SourceFile, ...]
    format: str
    folders: tuple[str, ...]


def find(paths: Paths, *, format: str | None) -> Found:
    """Every file that the user's words stand for, in order."""
    if format is not None and format not in FORMATS:
        raise UsageError(f"format {format!r} is not known; one of {', '.join(FORMATS)}")
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise NotFound("no input was named", do="pass a path, a glob or a folder")
    named = [found for one in given for found in _expand(os.fspath(one), format)]
    formats: dict[str, str] = {}
    for _, name in named:
        formats.setdefault(format or format_of(name) or "", name)
    if "" in formats:
        raise UsageError(
            "its ending tells no format Penstock knows",
            where=formats[""],
            do=f"pass format= (--input-format): {', '.join(FORMATS)}",
        )
    if len(formats) > 1:
        a, b = list(formats)[:2]
        raise UsageError(
            f"{formats[a]} is {a} and {formats[b]} is {b}",
            where=_word(given),
            do="pass format= (--input-format) to read one of them",
        )
    folders = tuple(os.path.realpath(one) for one in given if Path(one).is_dir())
    return Found(tuple(_stat(path, name) for path, name in named), next(iter(formats)), folders)


def check_unchanged(file: SourceFile) -> None:
    """Refuse to read a file that is not the one that was planned."""
    try:
        now = os.stat(file.path)
    except OSError:
        raise SourceChanged("is gone", where=file.name, do="put it back, or plan again with --restart") from None
    if (now.st_size, now.st_mtime_ns, now.st_ino) != (file.bytes, file.modified, file.inode):
        raise SourceChanged("changed since this run was planned", where=file.name, do="plan again with --restart")


def _expand(path: str, format: str | None) -> list[tuple[str, str]]:
    """(absolute path, name to show) of every file that one word of the user's stands for."""
    where = Path(path)
    if "://" in path and not where.exists():
        raise UsageError("remote paths are not read yet", where=path, do="fetch the files first")
    if where.is_dir():
        endings = FORMATS.get(format, ("",)) if format else tuple(e for ends in FORMATS.values() for e in ends)
        # Hidden and underscored names are other tools' bookkeeping; every reader of folders passes them by.
        found = [
            below
            for below in where.rglob("*")
            if below.name.lower().endswith(endings)
            and below.is_file()
            and not any(part.startswith((".", "_")) for part in below.relative_to(where).parts)
        ]
        if not found:
            raise NotFound("holds no data files", where=path, do=f"name a folder with {', '.join(FORMATS)} files in it")
        named = [(str(file.absolute()), file.relative_to(where).as_posix()) for file in found]
        return sorted(named, key=lambda pair: os.fsencode(pair[1]))
    if glob.has_magic(path) and not where.exists():
        root = Path(*(_plain := _until_magic(where)))
        matches = [m for m in glob.glob(path, recursive=True) if Path(m).is_file()]
        if not matches:
            raise NotFound(
                "matches no file", where=path, do="check the pattern; quote it so that the shell leaves it alone"
            )
        named = [(os.path.abspath(m), os.path.relpath(m, root) if _plain else m) for m in matches]
        return sorted(named, key=lambda pair: os.fsencode(pair[1]))
    if not where.exists():
        raise NotFound("there is no such file or folder", where=path, do="check the path")
    return [(str(where.absolute()), where.name)]


def _until_magic(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts


def _stat(path: str, name: str) -> SourceFile:
    try:
        with open(path, "rb", buffering=0) as f:
            about = os.fstat(f.fileno())
            if about.st_size == 0:
                raise BadFile("is empty (0 bytes)", where=name, do="fetch it again, or leave it out")
            digest = hashlib.sha256(f.read(min(HEAD_TAIL, about.st_size)))
            if about.st_size > HEAD_TAIL:
                f.seek(max(HEAD_TAIL, about.st_size - HEAD_TAIL))
                digest.update(f.read(HEAD_TAIL))
    except PermissionError:
        raise UsageError("may not be read", where=path, do="change its permissions") from None
    return SourceFile(path, name, about.st_size, about.st_mtime_ns, about.st_ino, digest.hexdigest()[:32])


def _word(given: Sequence[str | os.PathLike[str]]) -> str:
    return os.fspath(given[0]) if len(given) == 1 else f"{len(given)} inputs"

"""What a check is held against: how many files of a kind or a name there must be, and which, with their digests.

On the command line `nifti=902` or `sub-*/func/*_bold.nii.gz=1402`; in a file JSON, a table, or what `sha256sum` prints.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import NotFound, UsageError
from penstock.media.probes import KINDS

Given = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str]]
_DIGESTS = {32: "md5", 40: "sha1", 56: "sha224", 64: "sha256", 96: "sha384", 128: "sha512"}
_COUNT = re.compile(r"(.+)=(\d+)", re.DOTALL)
_SUM = re.compile(r"\\?([0-9a-fA-F]{32,128}) [ *](.+)")
_FORM = '{"counts": {"nifti": 902}, "files": {"sub-01/anat/sub-01_T1w.nii.gz": "<sha256>"}}'


@dataclass(frozen=True)
class Expected:
    """Counts by kind or pattern, and files by name: each with what `check_files.Item.expected` takes, or nothing.

    Names are held in memory, about 250 bytes each.
    """

    counts: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] | None = None


def expected(given: Given | None) -> Expected:
    """What was asked for, from words, a file, or a mapping."""
    if given is None:
        return Expected()
    if isinstance(given, Mapping):
        return _from_mapping(given, "expect")
    words = [os.fspath(given)] if isinstance(given, str | os.PathLike) else [os.fspath(one) for one in given]
    counts: dict[str, int] = {}
    files: dict[str, str] | None = None
    for word in words:
        if not os.path.exists(word) and (match := _COUNT.fullmatch(word)):
            one = Expected({_known(match[1], word): int(match[2])})
        else:
            one = _from_file(word)
        counts |= one.counts
        if one.files is not None:
            files = {**(files or {}), **one.files}
    return Expected(counts, files)


def is_kind(word: str) -> bool:
    return word in KINDS


def pattern(glob: str) -> re.Pattern[str]:
    """A glob as a pattern for relative names: `*` stays within a folder, `**` does not. Without a slash it is for the
    last part of a name, in any folder.

    >>> bool(pattern("sub-*/anat/*.nii.gz").fullmatch("sub-01/anat/T1w.nii.gz"))
    True
    >>> bool(pattern("*_bold.nii.gz").fullmatch("sub-01/func/sub-01_bold.nii.gz"))
    True
    """
    written = glob if "/" in glob else f"**/{glob}"
    made = ""
    at = 0
    while at < len(written):
        if written.startswith("**/", at):
            made, at = made + "(?:.*/)?", at + 3
        elif written.startswith("**", at):
            made, at = made + ".*", at + 2
        elif written[at] == "*":
            made, at = made + "[^/]*", at + 1
        elif written[at] == "?":
            made, at = made + "[^/]", at + 1
        elif written[at] == "[" and (end := written.find("]", at + 2)) > 0:
            inside = written[at + 1 : end].replace("\\", "\\\\")
            made, at = made + "[" + ("^" + inside[1:] if inside[0] == "!" else inside) + "]", end + 1
        else:
            made, at = made + re.escape(written[at]), at + 1
    return re.compile(made, re.DOTALL)


def _known(word: str, where: str) -> str:
    """A kind or a pattern. A plain word that is neither is a slip of the pen."""
    if is_kind(word) or re.search(r"[*?\[/.]", word):
        return word
    raise UsageError(
        f"{word!r} is no kind of file", where=where, do=f"one of {', '.join(KINDS)}; or a pattern such as '*.nii.gz'"
    )


def _from_file(path: str) -> Expected:
    if not os.path.isfile(path):
        raise NotFound(
            "is neither KIND=N, PATTERN=N nor a file", where=path, do="write --expect nifti=902, or name a file"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read ({error})", where=path) from error
    if path.lower().endswith(".json"):
        try:
            return _from_mapping(json.loads(text), path)
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"is no JSON ({error})", where=path) from error
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and all(_SUM.fullmatch(line) for line in lines):
        found = [match for line in lines if (match := _SUM.fullmatch(line))]
        return Expected(files={_clean(match[2]): _digest(match[1], path) for match in found})
    return _from_table(lines, path)


def _from_table(lines: Iterable[str], path: str) -> Expected:
    rows = csv.DictReader(lines, delimiter="\t" if path.lower().endswith((".tsv", ".txt")) else ",")
    names = [name for name in rows.fieldnames or () if name]
    if "path" in names:
        files = {}
        for row in rows:
            words = [f"size:{_number(row['size'], path)}"] if row.get("size") else []
            words += [_digest(row[one], path) for one in _DIGESTS.values() if row.get(one)][:1]
            files[_clean(row["path"])] = ";".join(words)
        return Expected(files=files)
    if len(names) == 2 and names[1] == "count":
        counts = {_known(row[names[0]], path): _number(row["count"], path) for row in rows}
        return Expected(counts)
    raise UsageError(
        "is no expectation: its columns are " + (", ".join(names) or "none"),
        where=path,
        do="give it columns `path` (and `sha256`, `size`), or `kind` and `count`, or write JSON: " + _FORM,
    )


def _from_mapping(given: Mapping[str, Any], where: str) -> Expected:
    """{"counts": …, "files": …}, or counts alone."""
    if not isinstance(given, Mapping):
        raise UsageError("is no JSON object", where=where, do="write it as " + _FORM)
    if not given.keys() <= {"counts", "files"}:
        given = {"counts": given}
    counts = {_known(str(word), where): _number(count, where) for word, count in given.get("counts", {}).items()}
    listed = given.get("files")
    if listed is None:
        return Expected(counts)
    if not isinstance(listed, Mapping):
        listed = dict.fromkeys(listed)
    return Expected(counts, {_clean(str(name)): _file(about, where) for name, about in listed.items()})


def _file(about: Any, where: str) -> str:
    if about is None or about == "":
        return ""
    if isinstance(about, str):
        return _digest(about, where)
    if isinstance(about, Mapping):
        words = [f"size:{_number(about['size'], where)}"] if "size" in about else []
        return ";".join(words + [_digest(about[one], where) for one in _DIGESTS.values() if one in about][:1])
    raise UsageError(f"a file is given as {about!r}", where=where, do="write it as " + _FORM)


def _digest(digest: str, where: str) -> str:
    word = str(digest).rpartition(":")[2].lower()
    algorithm = _DIGESTS.get(len(word))
    if algorithm is None or not re.fullmatch("[0-9a-f]+", word):
        raise UsageError(f"{digest!r} is no digest", where=where, do="give SHA-256 or MD5 in hexadecimal")
    return f"{algorithm}:{word}"


def _number(value: Any, where: str) -> int:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise UsageError(f"{value!r} is no count", where=where, do="write it as " + _FORM)
    return int(value)


def _clean(name: str) -> str:
    return os.path.normpath(name)

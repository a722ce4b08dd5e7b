"""The files of one folder, with size and time from one stat each, contents that are not here noted, links followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import BadFile
from penstock.media.annex import LARGEST_POINTER, fetch_command, not_fetched
from penstock.media.bids.selection import Ignore

# The tools' own, and no part of the dataset. In a subdataset `.git` is a file.
TOOLS = (".git", ".datalad")
# Names kept of what is wrong; the rest is counted.
PROBLEMS_KEPT = 100
AWAY = "is not fetched"


class File(NamedTuple):
    """One file: its path in the tree, where it lies, how long it was and when it was last changed (ns)."""

    path: str
    file: str
    size: int
    modified: int


@dataclass(frozen=True)
class Problem:
    """A file that cannot be read as it is: its path in the tree, what is wrong, and what to do."""

    path: str
    what: str
    do: str


@dataclass
class Look:
    """What is watched for while folders are listed: what to pass over, and what was met."""

    ignore: Ignore
    again: bool = False  # a second look: what is not here is known
    ignored: int = 0
    problem_count: int = 0
    problems: list[Problem] = field(default_factory=list)

    def passes_over(self, folder: str, path: str) -> bool:
        """Whether a folder is ignored as a whole; what is in it is counted."""
        if not self.ignore(path + "/"):
            return False
        self.ignored += sum(len(files) for _, _, files in os.walk(folder))
        return True

    def problem(self, path: str, what: str, do: str) -> None:
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(Problem(path, what, do))


def below(
    folder: str,
    inside: str,
    look: Look,
    *,
    enter: Callable[[str], bool] = lambda path: True,
    above: tuple[tuple[int, int], ...] = (),
) -> Iterator[File]:
    """Every file in a folder and the folders in it that may be entered, in bytewise order of names.

    `inside` is the folder's path in the tree; links are followed, so content in an annex is where its link is.
    """
    try:
        about = os.stat(folder)
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=_bytewise)
    except OSError as error:
        raise BadFile(f"cannot be listed ({error.strerror})", where=folder) from error
    here = (about.st_dev, about.st_ino)
    if here in above:
        raise BadFile("is a link back to a folder above it", where=folder, do="remove the link")
    for entry in entries:
        path = f"{inside}/{entry.name}" if inside else entry.name
        if entry.name in TOOLS:
            continue
        try:
            path.encode()
        except UnicodeEncodeError:
            raise BadFile(f"has a name that is not UTF-8: {path!a}", where=folder, do="rename it") from None
        if entry.is_dir():
            if not enter(path):
                continue
            if not look.passes_over(entry.path, path):
                yield from below(entry.path, path, look, enter=enter, above=(*above, here))
        elif look.ignore(path):
            look.ignored += 1
        else:
            yield _file(entry, path, look)


def folders_in(folder: str) -> list[str]:
    """Names of the folders in a folder, in bytewise order; none if it is not there."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as listing:
        return [entry.name for entry in sorted(listing, key=_bytewise) if entry.is_dir() and entry.name not in TOOLS]


def _bytewise(entry: os.DirEntry[str]) -> bytes:
    return os.fsencode(entry.name)


def _file(entry: os.DirEntry[str], path: str, look: Look) -> File:
    try:
        about = entry.stat()
    except OSError:
        about = None
    if about is not None and not stat.S_ISREG(about.st_mode):
        look.problem(path, "is neither a file nor a folder", "remove it, or name it in .bidsignore")
        return File(path, entry.path, 0, 0)
    # A pointer is at least its path long; empty files are common in trees that only show a layout.
    if about is None or (15 < about.st_size < LARGEST_POINTER and not look.again):
        away = not_fetched(entry)
        if away is not None:
            look.problem(path, f"{AWAY} ({away.how})", away.fetch_command)
            return File(path, entry.path, away.size or 0, 0)
        if about is None:
            look.problem(path, "is a link to nothing", "restore its target, or remove it")
            return File(path, entry.path, 0, 0)
    assert about is not None
    return File(path, entry.path, about.st_size, about.st_mtime_ns)


def fetch_all(root: str, first: Problem) -> str:
    """The command that fetches all of a tree, where one file of it is to be fetched; else what that one needs."""
    if not first.what.startswith(AWAY):
        return first.do
    return fetch_command(os.path.join(root, "."), lfs="lfs" in first.what)

"""One subject's files as rows: by session, with what was derived from them, and what lies beside the rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.media.bids.folders import File, Look, below
from penstock.media.bids.scans import Above, Gathered, gather
from penstock.media.bids.selection import Keep
from penstock.media.bids.tables import Table, read_table


@dataclass(frozen=True)
class Source:
    """The tree itself, or one of its derivatives, whose columns bear its name."""

    name: str  # "" for the tree itself
    base: str  # its path in the tree
    above: Above

    @property
    def prefix(self) -> str:
        return f"{self.name}_" if self.name else ""

    def of(self, subject: str) -> str:
        """The path of a subject's folder."""
        return f"{self.base}/sub-{subject}" if self.base else f"sub-{subject}"


@dataclass(frozen=True, slots=True)
class Part:
    """What one source has for one row: the path of its folder, its session, and what was found in it."""

    source: Source
    session: str | None
    base: str
    found: Gathered

    def files(self) -> dict[str, int]:
        """The part's files with their sizes, each once; texts from folders above have their place there."""
        files = {file.path: file.size for file in self.found.others}
        for scan in self.found.scans:
            for file in (scan.file, *scan.texts.values(), *scan.others):
                if file.path.startswith(self.base + "/"):
                    files[file.path] = file.size
        return files


@dataclass(slots=True)
class Row:
    """A session's parts, or a subject's."""

    session: str | None
    parts: list[Part] = field(default_factory=list)


@dataclass
class Subject:
    """A subject's rows, in bytewise order of their sessions; the files in none; the table of its sessions."""

    label: str
    rows: list[Row] = field(default_factory=list)
    beside: list[File] = field(default_factory=list)
    visits: Table = field(default_factory=Table)
    left_out: int = 0


def read_subject(
    root: str, label: str, sources: Sequence[Source], look: Look, *, by_subject: bool, sidecars: bool, keep: Keep
) -> Subject:
    """What a tree has of one subject."""
    made = Subject(label)
    rows: dict[str | None, Row] = {}
    for source in sources:
        base = source.of(label)
        folder = os.path.join(root, base)
        if not os.path.isdir(folder) or look.ignore(base + "/"):
            continue
        loose, sessions = _by_session(below(folder, base, look), base)
        if not source.name:
            for file in loose:
                if file.path == f"{base}/sub-{label}_sessions.tsv":
                    made.visits = read_table(file.file, key="session_id", prefix="ses-")
        in_row = by_subject or not sessions.keys() - {None}
        if in_row:
            sessions[None] = loose + sessions.get(None, [])
        else:
            made.beside += loose
        for session, files in sessions.items():
            under = base if session is None else f"{base}/ses-{session}"
            above = source.above if in_row and session is None else source.above.and_below(loose)
            found = gather(files, under, above, sidecars=sidecars, keep=keep)
            made.left_out += found.left_out
            if found:
                key = _key(session, rows, by_subject=by_subject, derived=bool(source.name))
                rows.setdefault(key, Row(key)).parts.append(Part(source, session, under, found))
    made.rows = [rows[key] for key in sorted(rows, key=lambda key: (key is not None, os.fsencode(key or "")))]
    return made


def _by_session(files: Iterator[File], base: str) -> tuple[list[File], dict[str | None, list[File]]]:
    """A subject's files: those in its folder itself, and those in a session's folder or (None) a datatype's."""
    loose: list[File] = []
    sessions: dict[str | None, list[File]] = {}
    for file in files:
        first, slash, _ = file.path[len(base) + 1 :].partition("/")
        if slash:
            sessions.setdefault(first.removeprefix("ses-") if first.startswith("ses-") else None, []).append(file)
        else:
            loose.append(file)
    return loose, sessions


def _key(session: str | None, rows: dict[str | None, Row], *, by_subject: bool, derived: bool) -> str | None:
    """The session of the row that some files go into. What was derived from a subject's only session often has no
    session folder of its own."""
    if by_subject:
        return None
    if derived and session is None and len(rows) == 1:
        return next(iter(rows))
    return session

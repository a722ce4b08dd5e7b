"""A BIDS tree as rows: looked through once for its columns and its bytes, and again, subject by subject, for the rows.

Every file is in one row, or beside the rows, or counted as left out; only one subject's files are held at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from penstock.budget import format_size
from penstock.errors import NotFetched, NotFound, SourceChanged, UsageError
from penstock.media.bids.batches import Maker
from penstock.media.bids.columns import Facts, Layout, layout
from penstock.media.bids.folders import AWAY, File, Look, Problem, below, fetch_all, folders_in
from penstock.media.bids.scans import Above
from penstock.media.bids.selection import Ignore, Keep, selection
from penstock.media.bids.subjects import Row, Source, Subject, read_subject
from penstock.media.bids.tables import Table, Types, read_table
from penstock.media.bids.texts import read_texts

ROWS = ("session", "subject", "file")


@dataclass(frozen=True)
class BesideFile:
    """A file that is in no row: its path in the tree, where it lies, its size."""

    path_in_tree: str
    file: str
    size: int


def scan_bids(
    root: str | os.PathLike[str],
    *,
    row: str = "session",
    sidecars: bool = True,
    derivatives: bool | str | Iterable[str] = False,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> BidsTree:
    """Look a BIDS tree through.

    Parameters
    ----------
    root
        The folder that holds `sub-…` folders.
    row
        What is a row: a "session" (a subject without sessions is one), a "subject", or a "file" (a scan with what goes
        with it).
    sidecars
        Whether sidecars, events, bval and bvec are read as texts beside their scan, with inherited metadata merged;
        else they are kept as files.
    derivatives
        Folders of `derivatives/` to take too, by name; True for all.
    include, exclude
        Words (a suffix, a datatype, the name of a folder) or globs on paths in the tree. Companions go with their scan.
    """
    if row not in ROWS:
        raise UsageError(f'row is "session", "subject" or "file", not {row!r}')
    where = os.path.abspath(os.fspath(root))
    if not os.path.isdir(where):
        raise NotFound("there is no such folder", where=where)
    asked = derivatives if isinstance(derivatives, bool) else _names(derivatives)
    keep = Keep(selection(include, name="include"), selection(exclude, name="exclude"))
    return BidsTree(where, row=row, sidecars=sidecars, derivatives=asked, keep=keep)


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


class BidsTree:
    """A tree that has been looked through: its schema and counts are known, `batches` gives its rows."""

    def __init__(self, root: str, *, row: str, sidecars: bool, derivatives: bool | tuple[str, ...], keep: Keep) -> None:
        self.root, self.row = root, row
        self.rows = 0
        self.files = 0  # in rows, each once
        self.bytes = 0  # of these
        self.left_out = 0  # by `include` and `exclude`
        self.beside: list[BesideFile] = []
        self._sidecars, self._keep = sidecars, keep
        self._look = Look(_ignored(root))
        self._facts: dict[str, Facts] = {}
        self._visits = Types()
        self._sources, self.derivatives_left_out = self._find_sources(derivatives)
        self.subjects = self._find_subjects()
        for label in self.subjects:
            self._see(self._read(label, self._look))
        self.beside.sort(key=lambda file: file.path_in_tree)
        self._layout = self._lay_out()
        self.schema: pa.Schema = self._layout.schema

    @property
    def problems(self) -> list[Problem]:
        """The first of the files that cannot be read as they are; `problem_count` is how many there are."""
        return self._look.problems

    @property
    def problem_count(self) -> int:
        return self._look.problem_count

    @property
    def ignored(self) -> int:
        """Files that `.bidsignore` names."""
        return self._look.ignored

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Scans of each column, and rows that have any."""
        return {name: (self._facts[name].files, self._facts[name].rows) for name in self._layout.scans}

    @cached_property
    def description(self) -> dict[str, Any]:
        """What `dataset_description.json` says; nothing where there is none."""
        try:
            with open(os.path.join(self.root, "dataset_description.json"), encoding="utf-8-sig") as f:
                found = json.load(f)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def check(self) -> None:
        """Refuse a tree of which something is not here: the first, how many, and what fetches them all."""
        if not self.problems:
            return
        first, more = self.problems[0], self.problem_count - 1
        kind = NotFetched if first.what.startswith(AWAY) else NotFound
        raise kind(
            first.what + (f"; {more:,} more cannot be read" if more else ""),
            where=os.path.join(self.root, first.path),
            do=fetch_all(self.root, first),
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in bytewise order of subject and session, some at a time."""
        self.check()
        maker = Maker(self._layout)
        look = Look(self._look.ignore, again=True)
        for label in self.subjects:
            yield from maker.add(self._read(label, look))
        yield from maker.end()
        if (maker.rows, maker.files) != (self.rows, self.files):
            raise SourceChanged(
                f"had {self.files:,} files in {self.rows:,} rows when it was looked through, and now {maker.files:,} in"
                f" {maker.rows:,}",
                where=self.root,
                do="run it again",
            )

    def summary(self) -> str:
        """What was found, for people."""
        lines = [
            f"{self.root}: {len(self.subjects):,} subjects, {self.rows:,} rows (one per {self.row}),"
            f" {self.files:,} files, {format_size(self.bytes)}"
        ]
        lines += [f"  {name}: {files:,} in {rows:,} rows" for name, (files, rows) in self.counts.items()]
        if self.beside:
            lines.append(
                f"beside the rows: {len(self.beside):,} files, {format_size(sum(f.size for f in self.beside))}"
            )
        if self.derivatives_left_out:
            lines.append(f"derivatives not asked for: {', '.join(self.derivatives_left_out)}")
        if self.ignored:
            lines.append(f"named in .bidsignore: {self.ignored:,} files")
        if self.left_out:
            lines.append(f"left out by include and exclude: {self.left_out:,} files")
        if self.problem_count:
            lines.append(f"cannot be read: {self.problem_count:,} files, the first {self.problems[0].path}")
        return "\n".join(lines)

    def _find_sources(self, asked: bool | tuple[str, ...]) -> tuple[list[Source], list[str]]:
        """The tree and the derivatives asked for, with what lies beside their subjects; and those not asked for."""
        derived = os.path.join(self.root, "derivatives")
        folders = folders_in(derived)
        # Some trees have no folder for the tool: then `derivatives` itself is the one derivative.
        bases = {name: f"derivatives/{name}" for name in folders if not name.startswith("sub-")}
        if len(bases) < len(folders):
            bases["derivatives"] = "derivatives"
        names = list(bases) if asked is True else list(asked or ())
        for name in names:
            if name not in bases:
                raise NotFound(
                    f"has no derivatives named {name!r}",
                    where=self.root,
                    do=f"there are {', '.join(bases)}" if bases else "it has none at all",
                )
        top = self._beside_subjects("", lambda path: path != "derivatives" and not path.startswith("sub-"))
        sources = [Source("", "", Above(file for file in top if "/" not in file.path))]
        if names:
            self._beside_subjects("derivatives", lambda path: False)
        for name in names:
            base, own = bases[name], Above()
            if base != "derivatives":
                subjects = f"{base}/sub-"
                found = self._beside_subjects(base, lambda path, subjects=subjects: not path.startswith(subjects))
                own = Above(file for file in found if file.path.count("/") == base.count("/") + 1)
            sources.append(Source(name, base, own))
        return sources, [name for name in bases if name not in names]

    def _beside_subjects(self, base: str, enter: Callable[..., bool]) -> list[File]:
        """Put beside the rows what lies in a source but in no subject's folder."""
        found = list(below(os.path.join(self.root, base), base, self._look, enter=enter))
        self._put_beside(found)
        return found

    def _find_subjects(self) -> list[str]:
        found: set[str] = set()
        for source in self._sources:
            for name in folders_in(os.path.join(self.root, source.base)):
                label = name.removeprefix("sub-")
                path = source.of(label)
                if label != name and not self._look.passes_over(os.path.join(self.root, path), path):
                    found.add(label)
        if not found:
            raise NotFound(
                "holds no folder named sub-…, so it is no BIDS tree",
                where=self.root,
                do="name the folder that holds the subjects",
            )
        return sorted(found, key=os.fsencode)

    def _read(self, label: str, look: Look) -> Subject:
        return read_subject(
            self.root,
            label,
            self._sources,
            look,
            by_subject=self.row == "subject",
            sidecars=self._sidecars,
            keep=self._keep,
        )

    def _put_beside(self, files: Iterable[File]) -> None:
        for file in files:
            if self._keep.companion(file.path):
                self.beside.append(BesideFile(file.path, file.file, file.size))
            else:
                self.left_out += 1

    def _see(self, subject: Subject) -> None:
        self._put_beside(subject.beside)
        self._visits.see(subject.visits)
        self.left_out += subject.left_out
        for row in subject.rows:
            self._see_row(row)

    def _see_row(self, row: Row) -> None:
        by_file = self.row == "file"
        columns: set[str] = set()
        for part in row.parts:
            moved: set[str] = set()
            for scan in part.found.scans:
                texts = read_texts(scan, part.base, moved)
                name = "" if by_file else part.source.prefix + scan.column
                facts = self._facts.setdefault(name, Facts(source=self._sources.index(part.source)))
                facts.see(scan, texts)
                columns.add(name)
            if by_file and part.found.others:
                self._facts.setdefault("", Facts()).members |= {"bytes", "path"}
            files = part.files()
            self.files += len(files)
            self.bytes += sum(files.values())
            self.rows += len(part.found.scans) + len(part.found.others) if by_file else 0
        self.rows += not by_file
        for name in columns:
            self._facts[name].rows += 1

    def _lay_out(self) -> Layout:
        path = os.path.join(self.root, "participants.tsv")
        there = os.path.isfile(path) and not self._look.ignore("participants.tsv")
        participants = read_table(path, key="participant_id", prefix="sub-") if there else Table()
        return layout(
            self._facts,
            participants,
            self._visits,
            row=self.row,
            derived=len(self._sources) > 1,
        )


def _ignored(root: str) -> Ignore:
    try:
        with open(os.path.join(root, ".bidsignore"), encoding="utf-8", errors="surrogateescape") as f:
            return Ignore(f.read())
    except FileNotFoundError:
        return Ignore()

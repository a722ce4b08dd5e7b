"""Verifying: what a place shows against the receipt that travels with it. Every size and digest, and samples read back.

One missing, extra or different file is a failure, and so is nothing to verify. Only the receipt is needed, so any
machine can do it; memory is a buffer and a footer, whatever the dataset weighs.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from penstock import memory, receipt
from penstock.errors import BadFile, UsageError
from penstock.meter import Status, Watcher
from penstock.publish.card import NAME as README
from penstock.publish.card import Card, named_files, read_card, visible_files
from penstock.publish.retry import Patience
from penstock.publish.shown import Shown, shown_at
from penstock.sources import format_of

STATE = ".penstock"
# A footer is mostly within the last 64 KiB; else one more range is asked for.
TAIL = 64 << 10
FOOTER_LIMIT = 256 << 20
STRETCH_LIMIT = 64 << 20
# Decoded at most: of a row group those columns that are not heavier. Media are compared by digest, not decoded.
COLUMN_LIMIT, GROUP_LIMIT = 16 << 20, 64 << 20

_RECEIPT = re.compile(rf"{re.escape(STATE)}/(?:{re.escape(receipt.NAME)}|[^/]+/[^/]+\.json)")


@dataclass(frozen=True)
class Problem:
    """One thing that is not as the receipt says: `problem` is missing, extra, different, unseen, unreadable or no
    receipt."""

    problem: str
    path: str
    detail: str


@dataclass(frozen=True)
class Verified:
    """What was compared, and what was wrong."""

    target: str
    revision: str
    receipts: int
    files: int  # whose size and digest were compared
    bytes: int
    rows: int
    read: int  # bytes that were read for it
    samples: int  # files of which a stretch, a footer or rows were read back
    unlisted: int  # visible files of splits that have no receipt: nothing is said of them
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and self.files > 0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": [asdict(one) for one in self.problems], "ok": self.ok}


@dataclass(frozen=True)
class Entry:
    """A file as a receipt lists it."""

    path: str
    bytes: int
    sha256: str
    rows: int | None = None
    sample: tuple[int, int, str] | None = None


@dataclass(frozen=True)
class Promise:
    """One receipt: the files of a split, or of a folder that was written."""

    receipt: str
    config: str | None
    split: str | None
    shards: tuple[Entry, ...]
    beside: tuple[Entry, ...] = ()

    @property
    def files(self) -> tuple[Entry, ...]:
        return (*self.shards, *self.beside)


def verify(
    target: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    sample: int = 8,
    seed: int = 0,
    full: bool = False,
    endpoint: str | None = None,
    patience: Patience | None = None,
    watch: Watcher | None = None,
) -> Verified:
    """Compare a folder or a dataset repository with its receipts.

    Parameters
    ----------
    target
        A folder that Penstock wrote, "org/name" on the Hugging Face Hub, or "s3://bucket/prefix".
    revision
        A branch, tag or commit of a repository.
    sample
        Of how many shards a stretch and the footer are read back (of a folder: rows are decoded too); `seed` picks.
    full
        Read every remote file to its end and hash it, in place of asking the Hub for its digest. A folder always is.
    """
    if sample < 0:
        raise UsageError(f"sample must be 0 or more, not {sample}")
    shown = shown_at(target, revision=revision, token=token, endpoint=endpoint, patience=patience)
    return _Verifying(shown, sample=sample, seed=seed, full=full, watch=watch).run()


@dataclass
class _Verifying:
    """One place being verified."""

    shown: Shown
    sample: int
    seed: int
    full: bool
    watch: Watcher | None
    problems: list[Problem] = field(default_factory=list)
    compared: int = 0
    read: int = 0
    samples: int = 0
    started: float = field(default_factory=time.monotonic)
    total: int = 0
    allowed: int = 0

    def run(self) -> Verified:
        promises = list(self._promises())
        entries = {one.path: one for promise in promises for one in promise.files}
        self.total = sum(one.bytes for one in entries.values())
        if self.watch is not None:
            from penstock.budget import usable_memory

            self.allowed = usable_memory()
        if not promises and not self.problems:
            self._wrong(
                "no receipt",
                STATE,
                "there is no receipt to compare with: it was not written or published with Penstock, or not to its end",
            )
        good = [path for path, entry in entries.items() if self._compare(entry)]
        self._read_back([entries[path] for path in good if entries[path].rows is not None])
        self._look_for_others(promises, entries)
        return Verified(
            target=self.shown.name,
            revision=self.shown.revision,
            receipts=len(promises),
            files=self.compared,
            bytes=self.total,
            rows=sum(one.rows or 0 for one in entries.values()),
            read=self.read,
            samples=self.samples,
            unlisted=self._unlisted(promises, entries),
            seconds=round(time.monotonic() - self.started, 2),
            problems=tuple(sorted(self.problems, key=lambda one: (_ORDER.index(one.problem), one.path))),
        )

    # -- receipts -------------------------------------------------------------------------------------------------

    def _promises(self) -> Iterator[Promise]:
        for path in sorted(self.shown.files):
            if not _RECEIPT.fullmatch(path):
                continue
            size = self.shown.files[path].size
            try:
                if size > STRETCH_LIMIT:
                    raise ValueError(f"it is {size:,} bytes long")
                yield _promise(path, json.loads(self.shown.stretch(path, 0, size)))
                self.read += size
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                self._wrong("unreadable", path, f"the receipt is damaged: {str(error)[:200]}")
            except BadFile as error:
                self._wrong("unreadable", path, error.what)

    # -- files ----------------------------------------------------------------------------------------------------

    def _compare(self, entry: Entry) -> bool:
        """Whether a file is there and is the one that was promised."""
        found = self.shown.files.get(entry.path)
        if found is None:
            return self._wrong("missing", entry.path, f"{entry.bytes:,} bytes are promised")
        self.compared += 1
        if found.size != entry.bytes:
            return self._wrong("different", entry.path, f"{found.size:,} bytes, not {entry.bytes:,}")
        digest = found.sha256
        if digest is None or self.full:
            try:
                digest = self.shown.digest(entry.path, self._passed)
            except BadFile as error:
                return self._wrong("unreadable", entry.path, error.what)
        if digest != entry.sha256:
            return self._wrong("different", entry.path, f"SHA-256 {digest[:12]}…, not {entry.sha256[:12]}…")
        return True

    def _read_back(self, shards: Sequence[Entry]) -> None:
        """Stretches against the receipt, footers against its row counts, and rows of a folder decoded."""
        pick = random.Random(self.seed)
        chosen = set(pick.sample(range(len(shards)), min(self.sample, len(shards))))
        for at, shard in enumerate(shards):
            local = self.shown.local(shard.path)
            if at not in chosen and not self.full and local is None:
                continue
            try:
                if at in chosen and shard.sample is not None and not self._stretch_is(shard.path, shard.sample):
                    continue
                if format_of(shard.path) == "parquet":
                    self._rows_are(shard, local, decode=pick.random() if at in chosen else None)
                self.samples += at in chosen
            except BadFile as error:
                self._wrong("unreadable", shard.path, error.what)

    def _stretch_is(self, path: str, promised: tuple[int, int, str]) -> bool:
        offset, length, digest = promised
        got = self.shown.stretch(path, offset, length)
        self._passed(len(got))
        if sha256(got).hexdigest() == digest:
            return True
        return self._wrong("different", path, f"{length:,} bytes at {offset:,} do not read back as they were sent")

    def _rows_are(self, shard: Entry, local: Path | None, *, decode: float | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            about = pq.read_metadata(pa.BufferReader(self._footer(shard)))
            if about.num_rows != shard.rows:
                self._wrong("different", shard.path, f"{about.num_rows:,} rows, not {shard.rows:,}")
            elif local is not None and decode is not None and about.num_row_groups:
                group = int(decode * about.num_row_groups)
                with pq.ParquetFile(local, pre_buffer=False, buffer_size=1 << 20) as file:
                    columns = _light_columns(about.row_group(group))
                    found = file.read_row_group(group, columns=columns).num_rows if columns else None
                if found not in (None, about.row_group(group).num_rows):
                    self._wrong("unreadable", shard.path, f"row group {group} gives {found:,} rows")
        except (pa.ArrowException, OSError, ValueError) as error:
            self._wrong("unreadable", shard.path, f"cannot be read as Parquet: {' '.join(str(error).split())[:200]}")

    def _footer(self, shard: Entry) -> bytes:
        """The end of a Parquet file from its footer on, with what a reader wants to see before it."""
        tail = self.shown.stretch(shard.path, max(0, shard.bytes - TAIL), min(TAIL, shard.bytes))
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > min(shard.bytes, FOOTER_LIMIT):
            raise BadFile(f"has a footer of {length:,} bytes", where=shard.path)
        if length > len(tail):
            tail = self.shown.stretch(shard.path, shard.bytes - length, length)
        self._passed(len(tail))
        return b"PAR1" + tail[-length:]

    # -- what nobody promised -------------------------------------------------------------------------------------

    def _look_for_others(self, promises: Sequence[Promise], entries: Mapping[str, Entry]) -> None:
        files = list(self.shown.files)
        for promise in promises:
            if promise.config is None or promise.split is None:
                for path in files:
                    if path not in entries and format_of(path) is not None and not _hidden(path):
                        self._wrong("extra", path, f"{promise.receipt} does not list it")
                continue
            if not self.shown.carded:
                for path in sorted(_told_by_name(promise, files) - set(entries)):
                    self._wrong("extra", path, f"{promise.receipt} does not list it")
                continue
            if (card := self._card) is None:
                continue
            named = named_files(card, files, config_name=promise.config, split=promise.split)
            folders = {str(PurePosixPath(one.path).parent) for one in promise.shards} - {"."}
            inside = {path for path in files if str(PurePosixPath(path).parent) in folders} & _data(files)
            elsewhere = named_files(card, files) - named
            for path in sorted(((named | inside) - elsewhere) - set(entries)):
                self._wrong("extra", path, f"{promise.receipt} does not list it")
            for one in promise.shards:
                if one.path in self.shown.files and one.path not in named:
                    where = f"split {promise.split!r} of config {promise.config!r}"
                    self._wrong("unseen", one.path, f"the card does not name it for {where}: nobody would load it")

    def _unlisted(self, promises: Sequence[Promise], entries: Mapping[str, Entry]) -> int:
        if not self.shown.carded or self._card is None or not any(promise.config is not None for promise in promises):
            return 0
        extra = {one.path for one in self.problems}
        return len(visible_files(self._card, list(self.shown.files)) - set(entries) - extra)

    @cached_property
    def _card(self) -> Card | None:
        """What names the files of splits; an empty one where there is no README, None where it cannot be read."""
        found = self.shown.files.get(README)
        if found is None:
            return Card()
        try:
            text = self.shown.stretch(README, 0, min(found.size, STRETCH_LIMIT)).decode("utf-8", "replace")
            card = read_card(text)
            named_files(card, ())
        except BadFile as error:
            self._wrong("unreadable", README, error.what)
            return None
        return card

    # -- notes ----------------------------------------------------------------------------------------------------

    def _wrong(self, problem: str, path: str, detail: str) -> bool:
        self.problems.append(Problem(problem, path, detail))
        return False

    def _passed(self, count: int) -> None:
        self.read += count
        if self.watch is not None:
            seconds = time.monotonic() - self.started
            self.watch(
                Status(
                    "verify", self.read, self.total, self.compared, 0, 0, memory.anonymous(), self.allowed, 1, seconds
                )
            )


_ORDER = ("no receipt", "missing", "different", "extra", "unseen", "unreadable")


def _promise(path: str, stated: Any) -> Promise:
    """A receipt as it is believed: whole, and naming files below the place itself."""
    if stated["format"] != receipt.FORMAT:
        raise ValueError(f"its format is {stated['format']!r}, not {receipt.FORMAT}")
    shards = tuple(_entry(one, rows=True) for one in stated["shards"])
    if path == f"{STATE}/{receipt.NAME}":
        return Promise(path, None, None, shards)
    beside = tuple(_entry(one, rows=False) for one in stated.get("beside", ()))
    return Promise(path, str(stated["config"]), str(stated["split"]), shards, beside)


def _entry(stated: Mapping[str, Any], *, rows: bool) -> Entry:
    path, size, digest = stated["path"], stated["bytes"], stated["sha256"]
    if not isinstance(path, str) or path.startswith("/") or not path or ".." in path.split("/"):
        raise ValueError(f"{path!r} is no path of a file here")
    if not isinstance(size, int) or size < 0 or not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
        raise ValueError(f"{path}: no size and digest")
    return Entry(path, size, digest, int(stated["rows"]) if rows else None, _stretch(stated.get("sample"), size))


def _stretch(stated: Mapping[str, Any] | None, size: int) -> tuple[int, int, str] | None:
    if stated is None:
        return None
    offset, length, digest = int(stated["offset"]), int(stated["length"]), str(stated["sha256"])
    if not 0 <= offset <= offset + length <= size or length > STRETCH_LIMIT:
        raise ValueError(f"a sample of {length:,} bytes at {offset:,} in a file of {size:,}")
    return offset, length, digest


def _light_columns(group: Any) -> list[str]:
    """Columns of a row group that may be decoded here."""
    chosen, held = [], 0
    for at in range(group.num_columns):
        chunk = group.column(at)
        if chunk.total_uncompressed_size <= COLUMN_LIMIT and held + chunk.total_uncompressed_size <= GROUP_LIMIT:
            held += chunk.total_uncompressed_size
            chosen.append(chunk.path_in_schema)
    return chosen


def _told_by_name(promise: Promise, files: Iterable[str]) -> set[str]:
    """The files that have the names a store gives the shards of a split."""
    folders = {str(PurePosixPath(one.path).parent) for one in promise.shards}
    name = re.compile(rf"{re.escape(str(promise.split))}-\d{{5,}}-[0-9a-f]{{12}}\.parquet")
    paths = {path: PurePosixPath(path) for path in files}
    return {path for path, at in paths.items() if str(at.parent) in folders and name.fullmatch(at.name)}


def _data(files: Iterable[str]) -> set[str]:
    return {path for path in files if format_of(path) is not None}


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))

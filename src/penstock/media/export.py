"""Export: the files in a dataset's media columns, or the whole BIDS tree it was made of, given back byte for byte.

Bytes go from ranges of a shard to files without being held. What is there already is passed over, so a run that was
stopped goes on; names are the dataset's, and are not trusted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from pathlib import Path

from penstock import memory as measuring
from penstock.budget import Budget, resolve_budget
from penstock.errors import BadRow, Busy, NotFound, UsageError
from penstock.files import disk_errors
from penstock.journal import Journal, held
from penstock.media.bids.names import companion
from penstock.media.shards import BIDS_FOLDER, Shards, find_shards
from penstock.media.stored import Files, Range, Shard, Texts, open_shard
from penstock.media.target import STATE, Counts, Target

# Reading one value back with Arrow takes its page compressed, decoded, and as an array (a page of 400 MB: 1.95 times).
DECODED = 3


@dataclass(frozen=True)
class Exported:
    """What an export gave: all `files` and their bytes, of which `written` in this run, and `numbered` under a name
    that sets them apart from others of the same name."""

    files: int
    bytes: int
    written: int
    numbered: int
    shards: int
    seconds: float

    def as_json(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """An export at one moment: bytes of shards read so far, of all there are, and files given."""

    done: int
    total: int
    files: int
    shard: str


def export(
    source: str | PathLike[str],
    dest: str | PathLike[str],
    *,
    bids: bool = False,
    columns: str | Iterable[str] | None = None,
    split: str | None = None,
    config: str | None = None,
    memory: str | int | None = None,
    verify: bool = False,
    revision: str | None = None,
    token: str | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Exported:
    """Give the files of a dataset back as they were.

    Parameters
    ----------
    source
        A folder of shards, one Parquet file, or a dataset on the Hub ("org/name").
    dest
        Where the files go. What lies there already, from a run that was stopped, is not written again.
    bids
        The whole tree a BIDS dataset was made of, in its own layout; else each column's files in a folder of its name.
    columns
        Only these columns. A column of plain bytes has to be named.
    split, config
        Of what the dataset's card names; all splits of the default config when left out.
    verify
        Compare files that are there already by their content, not only by their size.
    """
    started = time.monotonic()
    chosen = None if columns is None else frozenset([columns] if isinstance(columns, str) else columns)
    if bids and chosen is not None:
        raise UsageError("a BIDS tree is exported whole; leave out either bids or columns")
    budget = resolve_budget(memory)
    folder = Path(dest)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    state = folder / STATE
    shards = find_shards(
        fspath(source), config=config, split=split, scratch=state / "fetched", revision=revision, token=token
    )
    plan = {"source": shards.label, "version": shards.version, "shards": list(shards.names), "bids": bids}
    try:
        with held(state), Journal(state, plan=plan, key=_key(plan)) as journal:
            run = _Run(Target(folder, numbered=not bids, verify=verify), chosen, budget, journal)
            counts = run.all(shards, bids=bids, watch=watch or _nobody)
    except Busy:
        raise
    except BaseException:
        if not shards.version:  # of a folder's shards nothing is noted down that would help the next run
            shutil.rmtree(state, ignore_errors=True)
        raise
    shutil.rmtree(state)
    return Exported(**asdict(counts), shards=len(shards.names), seconds=round(time.monotonic() - started, 3))


def _nobody(progress: Progress) -> None:
    pass


def _key(plan: object) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:32]


class _Run:
    """One export: shard by shard, row group by row group, place by place."""

    def __init__(self, target: Target, columns: frozenset[str] | None, budget: Budget, journal: Journal) -> None:
        self._target, self._columns, self._budget, self._journal = target, columns, budget, journal
        self._unnamed: dict[str, int] = {}  # values met so far in columns whose values have no name
        self._without = 0
        self._first_without = ""

    def all(self, shards: Shards, *, bids: bool, watch: Callable[[Progress], None]) -> Counts:
        counts = self._target.counts
        # What lies beside comes first: texts that scans inherit are among it, and then known.
        wanted = [*(shards.beside if bids else ()), *shards.names]
        total = sum(shards.sizes[name] for name in wanted)
        done = 0
        for name in wanted:
            watch(Progress(done, total, counts.files, name))
            # A commit's shard that is done need not be fetched again. Where files are numbered it must be: their
            # numbers depend on all names before them.
            finished = self._journal.records.get(f"shard/{name}") if bids and shards.version else None
            if finished is not None:
                counts.files += int(finished["files"])
                counts.bytes += int(finished["bytes"])
                if name in shards.beside:
                    self._target.meet(name.removeprefix(BIDS_FOLDER))
            else:
                before = counts.files, counts.bytes
                with shards.here(name) as path:
                    if name in shards.names:
                        self._shard(path, name, bids=bids)
                    else:
                        self._beside(path, name)
                if shards.version:
                    self._target.flush()
                    made = {"files": counts.files - before[0], "bytes": counts.bytes - before[1]}
                    self._journal.commit(f"shard/{name}", made)
            done += shards.sizes[name]
        self._target.flush()
        self._complain(shards.label)
        if not counts.files:
            raise NotFound("holds no media files", where=shards.label, do=_NAME_IT)
        return counts

    def _beside(self, path: str, name: str) -> None:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            self._target.put(name.removeprefix(BIDS_FOLDER), Range(0, size), fd=file.fileno(), where=name, shared=True)

    def _shard(self, path: str, name: str, *, bids: bool) -> None:
        with open_shard(path) as shard:
            files = [place for place in shard.files if self._is_wanted(place)]
            texts = [place for place in shard.texts_beside if self._columns is None or place.column in self._columns]
            if bids and "subject" not in shard.footer.columns:
                raise UsageError("was not made of a BIDS tree: no column `subject`", where=name, do="leave out --bids")
            self._check(shard, files, name)
            for group in range(shard.footer.row_groups):
                for place in files:
                    self._files(shard, group, place, "" if bids else place.column, name)
                for beside in texts:
                    self._texts(shard, group, beside, "" if bids else beside.column, name)

    def _is_wanted(self, place: Files) -> bool:
        if self._columns is None:
            return place.name is not None
        return place.column in self._columns

    def _check(self, shard: Shard, files: Sequence[Files], name: str) -> None:
        """Refuse a shard whose values have to be decoded and would not fit, before anything of it is written."""
        missing = sorted((self._columns or frozenset()) - set(shard.footer.columns))
        if missing:
            raise UsageError(
                f"has no column {missing[0]!r}", where=name, do=f"its columns are {', '.join(shard.footer.columns)}"
            )
        groups = range(shard.footer.row_groups)
        largest = max((shard.to_decode(group, place) for group in groups for place in files), default=0)
        if largest:
            self._budget.check(
                measuring.anonymous() + DECODED * largest, what=f"a page of {largest:,} bytes", where=name
            )

    def _files(self, shard: Shard, group: int, place: Files, under: str, where: str) -> None:
        whose = f"{where}, column {place.column}"
        for name, value in shard.values(group, place):
            if place.name is None or (name is None and value is not None):
                key = ".".join(place.steps)
                self._unnamed[key] = self._unnamed.get(key, 0) + 1
                name = f"{self._unnamed[key] - 1:08d}.bin"
            if value is None:
                if name is not None and place.name is not None:
                    self._without += 1
                    self._first_without = self._first_without or f"{whose}: {name}"
                continue
            assert name is not None
            self._target.put(f"{under}/{name}" if under else name, value, fd=shard.fd, where=whose)

    def _texts(self, shard: Shard, group: int, place: Texts, under: str, where: str) -> None:
        for scan, text, kept in shard.texts(group, place):
            name = kept if kept is not None else companion(scan, place.member)
            whose = f"{where}, column {place.column}"
            self._target.put(f"{under}/{name}" if under else name, text.encode(), where=whose, shared=True)

    def _complain(self, label: str) -> None:
        if self._without:
            raise BadRow(
                f"{self._without:,} values name a file but do not hold it, the first {self._first_without}",
                where=label,
                do="all others are exported; these were never embedded",
            )


_NAME_IT = "name columns of plain bytes with --column"

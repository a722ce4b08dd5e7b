"""The folder a run writes to: what may be there before, what lies there meanwhile, what is there at the end.

Until every shard is made, nothing is visible in it but the hidden state folder.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock import receipt
from penstock.errors import DestinationConflict
from penstock.files import disk_errors, sync_folder
from penstock.journal import Journal, clear, recorded
from penstock.receipt import Receipt
from penstock.sinks.base import Fragment
from penstock.sources.base import SourceFile

STATE = ".penstock"
WORK = "work"  # the record that tells where fragments lie
_SHARD_NAME = re.compile(r"part-\d{5,}-of-\d{5,}\.[a-z.]+")


class Destination:
    """A destination, its state folder, and the work folder where fragments lie until they have a name."""

    def __init__(self, folder: Path, *, scratch: Path | None, key: str) -> None:
        self.folder = folder
        self.state = folder / STATE
        base = (self.state if scratch is None else scratch / f"penstock-{key[:16]}").absolute()
        self.work = base / "work"
        # A run that is gone on with elsewhere still has its fragments where it began.
        if (begun := recorded(self.state, WORK).get("folder")) is not None and (self.state / begun).is_dir():
            self.work = (self.state / begun).absolute()

    def start_over(self) -> None:
        """Discard what was done here: shards, journal and receipt. Whatever else lies here stays."""
        for entry in self.folder.iterdir():
            if _SHARD_NAME.fullmatch(entry.name):
                entry.unlink()
        clear(self.state)

    def prepare(self, journal: Journal) -> None:
        """Make the work folder; disbelieve records whose files are gone; take away files that no record speaks of."""
        with disk_errors(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
        # By name inside the destination, which may be moved; by its whole path outside.
        inside = self.work.parent == self.state.absolute()
        if journal.records.get(WORK, {}).get("folder") != (folder := self.work.name if inside else str(self.work)):
            journal.commit(WORK, {"folder": folder})
        if not self._being_named() and not any(key.startswith("shard/") for key in journal.records):
            for key, record in list(journal.records.items()):
                if not all(self._has(fragment) for fragment in record.get("fragments", ())):
                    del journal.records[key]
        self.sweep(fragment_names(journal))

    def _has(self, fragment: dict[str, Any]) -> bool:
        path = self.work / fragment["name"]
        return path.exists() and bool(path.stat().st_size == fragment["stored"])

    def _being_named(self) -> bool:
        return any(_SHARD_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())

    def leftovers(self) -> bool:
        """Whether a run was killed after its receipt and before it had cleaned up."""
        return any(entry.name != receipt.NAME for entry in self.state.iterdir())

    def sweep(self, known: Collection[str]) -> None:
        """Take away halves of files, and fragments whose task did not commit."""
        for entry in self.work.iterdir():
            if entry.name not in known:
                entry.unlink()
        self.sweep_halves()

    def sweep_halves(self) -> None:
        for folder in (self.work, self.state):
            for entry in folder.glob(".*.tmp"):
                entry.unlink()

    def elsewhere(self) -> bool:
        """Whether work lies on another file system, from where nothing can be renamed into place."""
        return self.work.stat().st_dev != self.folder.stat().st_dev

    def held(self) -> int:
        """Bytes of fragments that lie here already. Those of a push may go, sent, while they are counted."""
        total = 0
        for entry in self.work.iterdir() if self.work.exists() else ():
            with suppress(FileNotFoundError):
                total += entry.stat().st_size
        return total

    def nearest(self) -> Path:
        """The lowest folder of the work folder's path that exists: it tells the file system."""
        return next(folder for folder in (self.work, *self.work.parents) if folder.exists())

    def name_shards(self, shards: Sequence[Fragment], ending: str) -> list[dict[str, Any]]:
        """Rename every shard into view. May be done again after a crash at any point of it."""
        listed = []
        with disk_errors(self.folder):
            for at, shard in enumerate(shards):
                target = self.folder / f"part-{at:05d}-of-{len(shards):05d}{ending}"
                staged = next((p for p in (self.work / shard.name, self.state / shard.name) if p.exists()), None)
                if staged is not None:
                    staged.replace(target)
                elif not target.exists():
                    raise DestinationConflict(
                        "a committed shard is gone", where=str(target), do="run again with --restart"
                    )
                listed.append({"path": target.name, "rows": shard.rows, "bytes": shard.stored, "sha256": shard.sha256})
            sync_folder(self.folder)
        return listed

    def clean(self) -> None:
        """The receipt is there: everything that was only needed while running goes."""
        shutil.rmtree(self.work, ignore_errors=True)
        if (own := self.work.parent) != self.state.absolute():
            with suppress(OSError):  # somebody else's file in it: then it stays
                own.rmdir()
        for entry in self.state.iterdir():
            if entry.name != receipt.NAME:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def check_destination(folder: Path, files: Iterable[SourceFile], *, sources: Iterable[str]) -> None:
    """Refuse a destination that is a file, lies in a source folder, or holds what is not ours."""
    if folder.exists() and not folder.is_dir():
        raise DestinationConflict("is a file", where=str(folder), do="name a folder: shards are written into it")
    target = folder.resolve()
    for source in sources:
        if target.is_relative_to(source):
            raise DestinationConflict(f"lies inside the source {source}", where=str(folder), do="choose another folder")
    for file in files:
        if Path(file.path).resolve().is_relative_to(target):
            raise DestinationConflict(
                f"the source file {file.name} lies inside the destination",
                where=str(folder),
                do="choose another folder",
            )
    if folder.exists() and not (folder / STATE).exists():
        other = next((entry.name for entry in sorted(folder.iterdir())), None)
        if other is not None:
            raise DestinationConflict(
                f"already holds other content ({other})", where=str(folder), do="choose an empty or a new folder"
            )


def fragment_names(journal: Journal) -> Collection[str]:
    return {fragment["name"] for record in journal.records.values() for fragment in record.get("fragments", ())}


def check_still_there(found: Receipt, folder: Path) -> None:
    """A receipt says it is done: its shards must be there, as long as they were."""
    for shard in found.shards:
        path = folder / shard["path"]
        if not path.exists() or path.stat().st_size != shard["bytes"]:
            raise DestinationConflict(
                "was written by this plan, and is gone or changed since", where=str(path), do="run again with --restart"
            )

"""A folder as a place to publish to: the layout of a repository on the Hub, so `load_dataset("./folder")` reads it.

Shards are laid out under `.penstock/work`, on the same disk, and renamed when all of them are there. The card names
them in one rename: that is when they become visible. What they replace goes next, the receipt comes last. Nothing goes
that no receipt of Penstock's lists: whatever else lies in the folder stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from penstock.destination import STATE
from penstock.errors import DestinationConflict, RemoteFailed, SourceChanged, UsageError
from penstock.files import BUFFER, Writing, disk_errors, sync_folder, write_whole
from penstock.publish.last import last_of, listed, listed_by
from penstock.publish.place import README, Look, Notes, Published, RemoteFile, Sealed, Sent, Streams, Wish

if TYPE_CHECKING:
    from penstock.journal import Journal, Record
    from penstock.publish.card import Card

WORK = "work"
# A shard's folder is named by the digests of all its shards: what lies there under such a name is what was laid out.
_BY_CONTENT = re.compile(r"-[0-9a-f]{8}/\d{5,}-of-\d{5,}\.parquet$")


class FolderPlace:
    """A folder on this machine."""

    visible = "at once, with the card; the receipt comes last"

    def __init__(self, to: str, *, stopped: threading.Event | None = None) -> None:
        self.folder = Path(os.path.abspath(_path(to)))
        self.stopped = stopped or threading.Event()
        self._own = ""  # of the work folder: that of the push under way
        self._named: Mapping[str, str] = {}  # what it has begun to rename, and to what

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def title(self) -> str:
        return f"./{self.folder.name}"  # a card travels: a path of this machine has no place in it

    def describe(self) -> dict[str, Any]:
        return {"to": self.name, "at": "folder"}

    def address(self) -> str:
        return self.name

    def state(self, look: Look) -> str:
        return "exists" if look.exists else "will be created"

    def shard_path(self, folder: str, split: str, at: int, sha256: str) -> str:
        return ""

    # -- before any work ------------------------------------------------------------------------------------------

    def check(self, sources: Iterable[str] = ()) -> Look:
        """Say now what would stop the push later: a file in its place, no right to write, a source that lies in it."""
        if self.folder.exists() and not self.folder.is_dir():
            raise DestinationConflict("is a file", where=self.name, do="name a folder")
        target = self.folder.resolve()
        for source in sources:
            path = Path(source).resolve()
            if path.is_relative_to(target):
                raise DestinationConflict(
                    f"the source {source} lies inside the destination", where=self.name, do="choose another folder"
                )
            if path.is_dir() and target.is_relative_to(path):
                raise DestinationConflict(
                    f"lies inside the source {source}", where=self.name, do="choose another folder"
                )
        above = next(one for one in (self.folder, *self.folder.parents) if one.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            raise UsageError("cannot write here", where=str(above), do="choose a folder you may write to")
        return Look(exists=self.folder.exists())

    def prepare(self, look: Look, journal: Journal) -> None:
        """Make it; take away what a push that was killed left without an entry in its journal."""
        self._own = journal.state.name
        self._named = journal.records.get("naming", {}).get("paths", {})
        with disk_errors(self._work / self._own):
            (self._work / self._own).mkdir(parents=True, exist_ok=True)
        known = {record["mode"] for key, record in journal.records.items() if key.startswith("task/sent/")}
        for entry in (self._work / self._own).iterdir():
            if f"{self._own}/{entry.name}" not in known:
                entry.unlink()

    # -- content, invisible ---------------------------------------------------------------------------------------

    def send(self, sealed: Sealed, stream: Callable[[], BufferedIOBase], notes: Notes) -> str:
        """Lay content out beside the folder's own; where it lies."""
        # By what it is for as well: two files of the same content are two files.
        mode = f"{self._own}/{sealed.sha256}-{hashlib.sha256(sealed.path.encode()).hexdigest()[:8]}"
        path = self._work / mode
        buffer = memoryview(bytearray(BUFFER))
        with stream() as opened, Writing(path) as out:
            while count := opened.readinto(buffer):
                if self.stopped.is_set():
                    raise RemoteFailed("laying out was stopped", where=sealed.path)
                out.write(buffer[:count])
            out.commit()
        if out.sha256() != sealed.sha256:
            path.unlink()
            raise SourceChanged(
                "a source of it is not what was hashed before",
                where=sealed.path,
                do="put it back as it was, or pass --restart (restart=True)",
            )
        return mode

    def present(self, content: Sequence[Sealed]) -> list[bool]:
        """Laid out and waiting, or renamed already by a push that was killed in the midst of it."""
        return [
            _size(self._work / one.mode) == one.size
            or (one.mode in self._named and _size(self.folder / self._named[one.mode]) == one.size)
            for one in content
        ]

    def holds(self, files: Sequence[Sealed]) -> bool:
        return all(self._holds(one) for one in files)

    def discard(self, records: Mapping[str, Record]) -> None:
        for key, record in records.items():
            if key.startswith("task/sent/"):
                (self._work / record["mode"]).unlink(missing_ok=True)

    # -- visible --------------------------------------------------------------------------------------------------

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(self, sent: Sequence[Sent], wish: Wish, journal: Journal, streams: Streams, fresh: Card) -> Published:
        """Rename everything, then show it with the card, then take away what it replaces, then put the receipts."""
        files = [one for split in sent for one in split.files]
        with self._held(), disk_errors(self.folder):
            look = self.look()
            last = last_of(self, wish, sent, look, fresh, journal.records.get("card"))
            own = {wish.receipt_path(one.name) for one in sent}
            others = {path for receipt in self._receipts() for path in listed_by(self.read(receipt))}
            self._check_clashes([one for split in sent for one in split.beside], others)
            journal.commit("naming", {"paths": {one.mode: one.path for one in files}})
            if last.pin is not None:
                # A push that goes on must start from the card as it was before this one touched it.
                journal.commit("card", {"text": last.card_before, "pin": last.pin})
                self._put(README, last.pin)
            self._rename(files)
            self._put(README, last.texts[README])
            gone = {path for one in sent for path in listed(self, wish, one.name, look)}
            gone -= {one.path for one in files}
            gone -= {path for receipt in self._receipts() - own for path in listed_by(self.read(receipt))}
            for path in sorted(gone):
                self._remove(path)
            for path in sorted(own):
                self._put(path, last.texts[path])
            shutil.rmtree(self._work / self._own, ignore_errors=True)
            with suppress(OSError):  # another config's push is under way in it
                self._work.rmdir()
        return Published()

    def look(self) -> Look:
        """Every file in the folder."""
        files: dict[str, RemoteFile] = {}
        for above, folders, names in os.walk(self.folder):
            inside = Path(above).relative_to(self.folder)
            if inside.as_posix() == STATE:
                folders[:] = [name for name in folders if name != WORK]
            for name in names:
                with suppress(OSError):  # a link to nowhere
                    files[(inside / name).as_posix()] = RemoteFile(os.stat(os.path.join(above, name)).st_size, None, "")
        return Look(exists=self.folder.exists(), files=files)

    def read(self, path: str, *, revision: str | None = None) -> bytes | None:
        try:
            return (self.folder / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _rename(self, files: Sequence[Sealed]) -> None:
        """May be done again after a crash at any point of it."""
        folders: set[Path] = set()
        for one in files:
            staged, target = self._work / one.mode, self.folder / one.path
            if _size(staged) is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                staged.replace(target)
                folders.add(target.parent)
            elif _size(target) != one.size:
                raise DestinationConflict("is gone since it was laid out", where=str(target), do="run again")
        for folder in folders:
            sync_folder(folder)

    def _put(self, path: str, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text.encode())

    def _remove(self, path: str) -> None:
        target = self.folder / path
        target.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            target.parent.rmdir()

    def _check_clashes(self, beside: Sequence[Sealed], ours: set[str]) -> None:
        for one in beside:
            if os.path.lexists(self.folder / one.path) and one.path not in ours and not self._holds(one):
                raise DestinationConflict(
                    f"another {one.path} is there, and the dataset brings its own",
                    where=self.name,
                    do="move it away, or choose another folder, and run again: what was laid out stays",
                )

    def _holds(self, one: Sealed) -> bool:
        path = self.folder / one.path
        if _size(path) != one.size:
            return False
        if _BY_CONTENT.search(one.path):
            return True
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest() == one.sha256

    def _receipts(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in (self.folder / STATE).glob("*/*.json")}

    @property
    def _work(self) -> Path:
        return self.folder / STATE / WORK

    @contextmanager
    def _held(self) -> Iterator[None]:
        """One push at a time changes the card; others wait for the moment that takes."""
        fd = os.open(self.folder / STATE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _path(to: str) -> str:
    if not to.startswith("file:"):
        return os.path.expanduser(to)
    parts = urlsplit(to)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"names another machine, {parts.netloc}", where=to, do="name it file:///A/PATH")
    return unquote(parts.path)


def _size(path: Path) -> int | None:
    """Bytes of a file; None where there is no file."""
    return path.stat().st_size if path.is_file() else None

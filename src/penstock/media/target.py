"""A folder that files of a dataset are put into. Names come from the dataset and are not trusted.

No name leads out of the folder, through a link or otherwise; nothing that lies there is overwritten; a file is there
whole or not at all, so running again goes on where it stopped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import BadRow, DestinationConflict, SourceChanged
from penstock.files import BUFFER, Writing, disk_errors
from penstock.media.stored import Range

STATE = ".penstock-export"
# From this size on a file is copied by the buffer and flushed on its own; smaller ones wait for each other.
LARGE = 1 << 20
WAITING_FILES, WAITING_BYTES = 1_024, 64 << 20


@dataclass
class Counts:
    """What has been put there: `written` of all `files`, and of these `numbered` under a name of their own."""

    files: int = 0
    bytes: int = 0
    written: int = 0
    numbered: int = 0


class Target:
    """The folder, and the names met so far: some 100 bytes for each file.

    Files are made in the state folder and moved to their place once they are on the disk, small ones many at a time: a
    flush for each took 8 ms, five minutes for the 40,000 files of 900 sessions.
    """

    def __init__(self, folder: Path, *, numbered: bool, verify: bool) -> None:
        self.folder = folder
        self.counts = Counts()
        self._numbered, self._verify = numbered, verify
        self._met: dict[int, int] = {}  # hash of a name to how many had it
        self._folders: set[Path] = {folder}
        self._making = folder / STATE / "made"
        self._waiting: dict[Path, Path] = {}  # place to where the file is until the next flush
        self._waiting_bytes = self._made = 0
        shutil.rmtree(self._making, ignore_errors=True)
        with disk_errors(self._making):
            self._making.mkdir(parents=True)

    def put(self, name: str, value: Range | bytes, *, fd: int = -1, where: str, shared: bool = False) -> None:
        """Put one file there. `shared` ones are named by several rows, and are the same each time."""
        path = safe(name, where=where)
        met = self.meet(path)
        if met and self._numbered and not (shared and self._holds(self.folder / path, value, fd)):
            path = self._next(path)
            self.counts.numbered += 1
            met = False
        target = self.folder / path
        about = self._about(target)
        if about is None:
            self._write(target, value, fd, where)
            self.counts.written += 1
        else:
            same = stat.S_ISREG(about.st_mode) and about.st_size == len(value)
            if not same or ((met or self._verify) and not self._holds(target, value, fd)):
                raise self._conflict(path, met, where)
        if about is None or not met:
            self.counts.files += 1
            self.counts.bytes += len(value)

    def flush(self) -> None:
        """Move what waits to its place, once it is on the disk."""
        if not self._waiting:
            return
        with disk_errors(self.folder):
            _to_disk(self.folder)
            for target, made in self._waiting.items():
                os.replace(made, target)
        self._waiting, self._waiting_bytes = {}, 0

    def meet(self, path: str) -> bool:
        """Note a name; whether it was met before. Without case, since not every file system tells by it."""
        key = hash(path.casefold())
        self._met[key] = self._met.get(key, 0) + 1
        return self._met[key] > 1

    def _next(self, path: str) -> str:
        """The name for one more file of a name: "scan.nii.gz", "scan-2.nii.gz". The same in every run."""
        folder, slash, name = path.rpartition("/")
        stem, dot, ending = name.partition(".") if not name.startswith(".") else (name, "", "")
        count = self._met[hash(path.casefold())]
        while True:
            made = f"{folder}{slash}{stem}-{count}{dot}{ending}"
            key = hash(made.casefold())
            if key not in self._met:
                self._met[key] = 1
                return made
            count += 1

    def _holds(self, target: Path, value: Range | bytes, fd: int) -> bool:
        """Whether what lies at a place is this."""
        try:
            held = os.open(self._waiting.get(target, target), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            if os.fstat(held).st_size != len(value):
                return False
            for at in range(0, len(value), BUFFER):
                length = min(BUFFER, len(value) - at)
                want = os.pread(fd, length, value.offset + at) if isinstance(value, Range) else value[at : at + length]
                if os.pread(held, length, at) != want:
                    return False
            return True
        finally:
            os.close(held)

    def _write(self, target: Path, value: Range | bytes, fd: int, where: str) -> None:
        self._make_folder(target.parent)
        self._made += 1
        made = self._making / str(self._made)
        if len(value) >= LARGE:
            with Writing(made) as out:
                try:
                    out.write(value) if isinstance(value, bytes) else out.copy(fd, value.offset, value.length)
                except EOFError as error:
                    raise SourceChanged(f"was cut short while it was read ({error})", where=where) from error
                out.commit()
            os.replace(made, target)
            return
        data = value if isinstance(value, bytes) else os.pread(fd, value.length, value.offset)
        if len(data) != len(value):
            raise SourceChanged("was cut short while it was read", where=where)
        with disk_errors(target):
            made.write_bytes(data)
        self._waiting[target] = made
        self._waiting_bytes += len(data)
        if len(self._waiting) >= WAITING_FILES or self._waiting_bytes >= WAITING_BYTES:
            self.flush()

    def _make_folder(self, folder: Path) -> None:
        """Make a folder below the target, each part of its path a real folder."""
        if folder in self._folders:
            return
        self._make_folder(folder.parent)
        if folder in self._waiting:
            raise DestinationConflict("is a file where a folder has to be", where=str(folder))
        with disk_errors(folder):
            try:
                folder.mkdir()
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(folder).st_mode):
                    raise DestinationConflict(
                        "is a link or a file where a folder has to be", where=str(folder), do="choose an empty folder"
                    ) from None
        self._folders.add(folder)

    def _about(self, target: Path) -> os.stat_result | None:
        try:
            return os.lstat(self._waiting.get(target, target))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _conflict(self, path: str, met: bool, where: str) -> BadRow | DestinationConflict:
        if met:
            return BadRow(f"two files of the dataset are named {path!r} and differ", where=where)
        return DestinationConflict(
            "is there already, and is another file",
            where=str(self.folder / path),
            do="choose an empty folder, or remove it",
        )


def _to_disk(folder: Path) -> None:
    """Have the kernel write what it holds for the file system of a folder."""
    if sys.platform != "linux":
        os.sync()
        return
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)


def safe(name: str, *, where: str) -> str:
    """A name from a dataset as a path below a folder; refused if it leads anywhere else.

    >>> safe("sub-01/anat/sub-01_T1w.nii.gz", where="")
    'sub-01/anat/sub-01_T1w.nii.gz'
    """
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts) or parts[0] == STATE:
        raise BadRow(f"holds a file named {name!r}, which is no path below a folder", where=where, do=_DO)
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        raise BadRow(f"holds a file named {name[:60]!r}…, too long for a file system", where=where, do=_DO)
    return name


_DO = "do not trust this dataset; other columns can be exported with --column"

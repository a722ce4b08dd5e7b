"""Files become visible only complete: temporary name, flush, rename. The one place where that is done.

A writer hands finished stretches to the disk as it goes, because a kernel memory limit counts dirty pages too and the
page cache belongs to the user; it hashes what passes, so that a receipt costs no second read.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import sys
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

from penstock.errors import DiskFull, UsageError

BUFFER = 1 << 20
STRETCH = 8 << 20
COPY_BUFFERS = 4
# Stretches whose write-back may still be under way. With 4 x 8 MiB a splice ran in a kernel limit of 49 MB.
WINDOW = 4

_LINUX = sys.platform == "linux"
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


class Writing:
    """An open file under a temporary name. `commit` makes it durable and visible; a block left without it removes it.

    It is a write-only binary file object, so Arrow and the standard library can write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.closed = False  # as file objects have it: an encoder may always write
        self._ended = False
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._written = 0
        self._started = 0
        with disk_errors(path):
            self._fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(self._buffer) + len(view) < BUFFER:
            self._buffer += view
        else:
            self._drain()
            if len(view) < BUFFER:
                self._buffer += view
            else:
                self._put(view)
        return len(view)

    def copy(self, fd: int, offset: int, length: int) -> None:
        """Append a range of another open file, a buffer at a time, hashing each on a second core behind the writing."""
        self._drain()
        end = offset + length
        free: SimpleQueue[memoryview] = SimpleQueue()
        full: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        for _ in range(COPY_BUFFERS):
            free.put(memoryview(bytearray(min(BUFFER, length))))

        def hash_behind() -> None:
            while (item := full.get()) is not None:
                buffer, count = item
                self._hash.update(buffer[:count])
                free.put(buffer)

        hasher = Thread(target=hash_behind, daemon=True)
        hasher.start()
        try:
            while offset < end:
                buffer = free.get()
                got = os.preadv(fd, [buffer[: end - offset]], offset)
                if not got:
                    raise EOFError(f"{end - offset:,} bytes missing at offset {offset:,}")
                self._store(buffer[:got])
                full.put((buffer, got))
                offset += got
        finally:
            full.put(None)
            hasher.join()

    def tell(self) -> int:
        return self._written + len(self._buffer)

    def flush(self) -> None:
        """Nothing to do before `commit`: only a whole file is worth having."""

    def close(self) -> None:
        """Nothing either: encoders close what they write to, and only `commit` may end a file."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def commit(self) -> None:
        with disk_errors(self.path):
            self._drain()
            os.fdatasync(self._fd) if _LINUX else os.fsync(self._fd)
            if _LINUX:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._end()
            self.temporary.replace(self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Give up: the temporary file is removed. After `commit` this does nothing."""
        if not self._ended:
            self._end()
            self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.discard()

    def _end(self) -> None:
        os.close(self._fd)
        self._ended = True

    def _drain(self) -> None:
        if self._buffer:
            full, self._buffer = self._buffer, bytearray()
            self._put(memoryview(full))

    def _put(self, view: memoryview) -> None:
        self._hash.update(view)
        self._store(view)

    def _store(self, view: memoryview) -> None:
        with disk_errors(self.path):
            while view:
                done = os.write(self._fd, view)
                self._written += done
                view = view[done:]
            if _LINUX:
                while self._written - self._started >= STRETCH:
                    _hand_to_disk(self._fd, self._started)
                    self._started += STRETCH


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that it is there complete or not at all."""
    with Writing(path) as out:
        out.write(data)
        out.commit()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def on_tmpfs(path: Path) -> bool:
    """Whether what is written here is held in memory."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    real = path.resolve()
    above = [(mount[1], mount[2]) for mount in mounts if real.is_relative_to(mount[1].replace("\\040", " "))]
    return max(above, key=lambda mount: len(mount[0]), default=("", ""))[1] in ("tmpfs", "ramfs")


class disk_errors:  # noqa: N801 (a context manager reads as a word)
    """Turn what the disk says into errors that say what to do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                "no space left on the disk",
                where=str(self.path.parent),
                do="free some space and run the same command again: what is committed stays",
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
            raise UsageError(
                f"cannot write here ({os.strerror(error.errno)})",
                where=str(self.path.parent),
                do="choose a folder you may write to",
            ) from error


def _hand_to_disk(fd: int, start: int) -> None:
    """Start write-back of one stretch; wait for the one `WINDOW` before it and drop its pages."""
    _sync_file_range(fd, start, STRETCH, _WRITE)
    old = start - WINDOW * STRETCH
    if old >= 0:
        _sync_file_range(fd, old, STRETCH, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        os.posix_fadvise(fd, old, STRETCH, os.POSIX_FADV_DONTNEED)


if _LINUX:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def _sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
        if _libc.sync_file_range(fd, offset, length, flags) != 0:
            code = ctypes.get_errno()
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # others: this file system has no such call
                raise OSError(code, os.strerror(code))
else:

    def _sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
        raise AssertionError("only called on Linux")

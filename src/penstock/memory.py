"""Measuring: anonymous memory of a process or a tree, as the kernel counts it. The one place where it is read.

Anonymous memory is the gauge, not RSS: mapped file pages are reclaimable, and counting them has sent people after
leaks that were not there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

_LINUX = sys.platform == "linux"


def anonymous(pid: int | None = None) -> int:
    """Bytes of anonymous memory a process holds; 0 when it is gone.

    >>> anonymous() > 1_000_000
    True
    """
    if _LINUX:
        return _status(pid or os.getpid(), b"RssAnon:")
    import psutil

    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def data_size(pid: int | None = None) -> int:
    """Bytes that `RLIMIT_DATA` counts for a process: private writable mappings, touched or not."""
    return _status(pid or os.getpid(), b"VmData:") if _LINUX else 0


def children(pid: int) -> list[int]:
    """Processes a process has started, all the way down (Linux; elsewhere through psutil)."""
    if not _LINUX:
        import psutil

        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            return []
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as f:
                    below = [int(word) for word in f.read().split()]
            except OSError:
                continue
            found += below
            waiting += below
    return found


def tree(pid: int) -> int:
    """Anonymous memory of a process and all it has started: a user's function may start processes of its own."""
    return anonymous(pid) + sum(anonymous(child) for child in children(pid))


def release() -> None:
    """Give freed memory back to the system: after one large batch an allocator held 1.2 GB with nothing in it."""
    gc.collect()
    trim()


def trim() -> None:
    """The same without looking for garbage: cheap enough to do for every row group, so that a long task stays flat."""
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()
    if _LINUX:
        _libc.malloc_trim(0)


if _LINUX:
    _libc = ctypes.CDLL(None)


def _status(pid: int, field: bytes) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as f:
            text = f.read()
    except OSError:
        return 0
    at = text.find(field)
    # A process that has ended but was not yet waited for has no memory lines.
    return int(text[at + len(field) :].split(None, 1)[0]) * 1024 if at >= 0 else 0

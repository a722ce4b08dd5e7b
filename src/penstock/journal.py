"""What is done, durably: JSON lines, each with a checksum, written by the supervisor alone.

Nothing that is not in the journal counts; nothing in it is done twice. A torn last line is a crash in the middle of a
write and is ignored. It lies in the state folder of a destination, under a lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import Busy, DestinationConflict
from penstock.files import disk_errors, sync_folder

FORMAT = 1
NAME = "journal.jsonl"
LOCK = "lock"

Record = dict[str, Any]


@contextmanager
def held(state: Path) -> Iterator[None]:
    """Hold a state folder for this process alone; Busy if another does. The kernel lets go for the dead."""
    with disk_errors(state):
        state.mkdir(parents=True, exist_ok=True)
    while True:
        with disk_errors(state):
            fd = os.open(state / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file between our opening and locking it.
            if (state / LOCK).exists() and os.fstat(fd).st_ino == (state / LOCK).stat().st_ino:
                break
        except OSError:
            os.close(fd)
            raise Busy(
                "another run is writing here",
                where=str(state.parent),
                do="wait for it to end, or choose another destination",
            ) from None
        os.close(fd)
    try:
        yield
    finally:
        os.close(fd)


class Journal:
    """The journal of one run. `records` holds what earlier runs of the same plan committed, by key."""

    def __init__(self, state: Path, *, plan: Mapping[str, object], key: str) -> None:
        self.state = state
        self.path = state / NAME
        self.records: dict[str, Record] = {}
        self._load(plan, key)

    def _load(self, plan: Mapping[str, object], key: str) -> None:
        lines, good = _read(self.path)
        with disk_errors(self.path):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._fd, good)
        if not lines:
            self._append({"format": FORMAT, "plan": dict(plan), "plan_key": key})
            sync_folder(self.state)
            return
        head = lines[0]
        if head.get("plan_key") != key and not any(line.get("key", "").startswith("task/") for line in lines[1:]):
            # Another plan that had not yet written a row: there is nothing to lose, so it gives way.
            os.ftruncate(self._fd, 0)
            self._append({"format": FORMAT, "plan": dict(plan), "plan_key": key})
            return
        if head.get("plan_key") != key or head.get("format") != FORMAT:
            os.close(self._fd)
            raise DestinationConflict(
                "an unfinished run of another plan lies here: " + difference(head.get("plan", {}), plan),
                where=str(self.state.parent),
                do="run that command again to finish it, or pass --restart (restart=True) to discard its work",
            )
        self.records = {line["key"]: line for line in lines[1:]}

    def commit(self, key: str, record: Mapping[str, object]) -> None:
        """Record that something is done. When this returns, it is on the disk."""
        line = {"key": key, **record}
        self._append(line)
        self.records[key] = line

    def _append(self, record: Mapping[str, object]) -> None:
        with disk_errors(self.path):
            data = _line(record)
            start = os.fstat(self._fd).st_size
            try:
                done = os.write(self._fd, data)
                if done != len(data):
                    os.ftruncate(self._fd, start)
                    raise OSError(28, "No space left on device")
            except OSError:
                os.ftruncate(self._fd, start)
                raise
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1  # whoever comes late must fail, not write to what has this number by then

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def difference(old: Mapping[str, Any], new: Mapping[str, Any], *, at: str = "") -> str:
    """What differs between two plans, in words: the first few places.

    >>> difference({"sink": {"format": "parquet"}}, {"sink": {"format": "jsonl"}})
    'sink.format was "parquet", is now "jsonl"'
    """
    found = list(_differences(old, new, at))
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _differences(old: object, new: object, at: str) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        return [
            line
            for name in names
            for line in _differences(old.get(name), new.get(name), f"{at}.{name}" if at else str(name))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line for i, (a, b) in enumerate(zip(old, new, strict=True)) for line in _differences(a, b, f"{at}[{i}]")
        ]
    if old == new:
        return []
    _, is_input, name = at.partition(".inputs.")
    if is_input:
        return [f"input {name} " + ("is new" if old is None else "is gone" if new is None else "has changed")]
    return [f"{at} was {_short(old)}, is now {_short(new)}"]


def _short(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _line(record: Mapping[str, object]) -> bytes:
    body = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _read(path: Path) -> tuple[list[Record], int]:
    """The whole lines of a journal, up to the first that is torn, and how many bytes they take."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    lines: list[Record] = []
    good = 0
    for raw in data.splitlines(keepends=True):
        crc, _, body = raw.rstrip(b"\n").partition(b" ")
        if not raw.endswith(b"\n") or len(crc) != 8 or crc != b"%08x" % zlib.crc32(body):
            break
        lines.append(json.loads(body))
        good += len(raw)
    return lines, good


def clear(state: Path) -> None:
    """Forget everything in a held state folder."""
    for entry in state.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def recorded(state: Path, key: str) -> Record:
    """One record of whatever journal lies here, without opening it for writing."""
    lines, _ = _read(state / NAME)
    return next((line for line in reversed(lines) if line.get("key") == key), {})


def records(state: Path) -> dict[str, Record]:
    """The records of whatever journal lies here, whichever plan's it is."""
    lines, _ = _read(state / NAME)
    return {line["key"]: line for line in lines[1:]}

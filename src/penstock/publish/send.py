"""Sending: shard n+1 is hashed while shard n is on its way, each journalled as it is done.

Content is told by its SHA-256, so what a killed push has sent is never sent again, and what it had hashed is not hashed
again. Threads, not workers: hashing and sockets let go of the interpreter, and nothing here holds a value.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from queue import Queue
from typing import Any, Protocol

from penstock.journal import Journal
from penstock.parquet.stream import Range, Section, VirtualFile, digest
from penstock.publish.place import Notes, Sealed, SendsTogether
from penstock.publish.shards import Form, Recipe, sample_of
from penstock.sources.local import check_unchanged

UPLOADS = 2  # at once
WAITING = 2  # hashed, and not yet on its way
LEAVING_SECONDS = 3.0
TOGETHER = 100  # small files that go with one request
INSIDE = 10 << 20  # the most that goes inside a commit


@dataclass(frozen=True)
class Item:
    """Something to send: a shard, or a file that goes with the dataset as it is."""

    key: str  # in the journal
    name: str  # for messages, and the ending by which the Hub tells data from text
    open: Callable[[bool], VirtualFile]  # True: what is read will be read again soon
    stretch: Callable[[], tuple[int, int] | None]
    sent: Callable[[], None] = lambda: None  # it is safe now: what was built for it may go
    shard: tuple[str, int] | None = None  # its split and number


def shard_item(split: str, form: Form, recipe: Recipe) -> Item:
    """A shard, laid out when it is first needed."""
    made: list[Any] = []

    def shard() -> Any:
        if not made:
            for source in recipe.sources:
                check_unchanged(source)
            made.append(form.virtual(recipe.spans))
        return made[0]

    return Item(
        key=f"{split}/{recipe.at:06d}",
        name=f"{split}/{recipe.at:05d}.parquet",
        open=lambda keep: shard().open(keep_cache=keep),
        stretch=lambda: sample_of(shard(), at=recipe.at),
        sent=made.clear,
        shard=(split, recipe.at),
    )


def file_item(path: str, file: str, size: int, modified: int) -> Item:
    whole = Range(file, 0, size, size, modified)

    def opened(keep: bool) -> VirtualFile:
        return VirtualFile([Section(size, lambda: [whole])], name=path, keep_cache=keep)

    return Item(key=f"beside/{path}", name=path, open=opened, stretch=lambda: None)


class Sends(Protocol):
    """A place that takes content before it is visible."""

    def shard_path(self, folder: str, split: str, at: int, sha256: str) -> str: ...

    def send(self, sealed: Sealed, stream: Callable[[], BufferedIOBase], notes: Notes) -> str: ...


class Stopped(Exception):
    """Another thread has failed, or the user has had enough."""


class Sender:
    """One thread that hashes, some that send. `give` what there is, then `finish`."""

    def __init__(
        self,
        place: Sends,
        journal: Journal,
        *,
        folder: str,
        stopped: threading.Event,
        on_sent: Callable[[], None] = lambda: None,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._place, self._journal, self._stopped = place, journal, stopped
        self._folder = folder
        self._on_sent, self._on_bytes = on_sent, on_bytes  # a thing sent; bytes hashed, and once more as they are sent
        self._lock = threading.Lock()
        self._to_hash: Queue[Sequence[Item] | None] = Queue()
        self._to_send: Queue[list[tuple[Item, Sealed]] | None] = Queue(WAITING)
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(self._hash,), daemon=True)]
        self._threads += [
            threading.Thread(target=self._guarded, args=(self._send,), daemon=True) for _ in range(UPLOADS)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, item: Item) -> None:
        """Hash and send this, unless the journal says that it was."""
        self.give_all([item])

    def give_all(self, items: Sequence[Item]) -> None:
        """Hash and send these, in as few requests as the place can."""
        left = []
        for item in items:
            if f"task/sent/{item.key}" in self._journal.records:
                item.sent()
                self._on_bytes(2 * int(self._journal.records[f"task/hashed/{item.key}"]["size"]))
                self._on_sent()
            else:
                left.append(item)
        for at in range(0, len(left), TOGETHER):
            self._to_hash.put(left[at : at + TOGETHER])

    def check(self) -> None:
        """Raise what a thread has met."""
        if self._errors:
            raise self._errors[0]

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._to_hash.put(None)
        while any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(0.05)
            self.check()
        self.check()

    def stop(self) -> None:
        """Leave off: what is on its way is cut at the next byte that is read. Who waits for an answer is not waited for
        long."""
        self._stopped.set()
        self._to_hash.put(None)
        deadline = time.monotonic() + LEAVING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            if not self._stopped.is_set():  # else it is but an echo of the first
                self._errors.append(error)
            self._stopped.set()

    def _hash(self) -> None:
        try:
            while (items := self._next(self._to_hash)) is not None:
                self._put([(item, self._sealed(item)) for item in items])
        finally:
            for _ in range(UPLOADS):
                self._put(None)

    def _sealed(self, item: Item) -> Sealed:
        key = f"task/hashed/{item.key}"
        if (known := self._journal.records.get(key)) is None:
            stretch = item.stretch()
            with item.open(True) as stream:
                found = digest(stream, stretches=[stretch] if stretch else [], on_bytes=self._passed)
            known = {
                "sha256": found.sha256,
                "size": found.size,
                "sample": base64.b64encode(found.sample).decode(),
                "stretch": [*stretch, *found.stretches] if stretch else None,
                "git": _git_digest(item) if item.shard is None and found.size <= INSIDE else "",
            }
            self._record(key, known)
        else:
            self._on_bytes(int(known["size"]))
        name = item.name
        if item.shard is not None:
            name = self._place.shard_path(self._folder, *item.shard, known["sha256"]) or name
        return Sealed(name, known["sha256"], known["size"], base64.b64decode(known["sample"]))

    def _send(self) -> None:
        while (taken := self._next(self._to_send)) is not None:
            streams = [(sealed, _Stream(item, self._passed)) for item, sealed in taken]
            if len(taken) > 1 and isinstance(self._place, SendsTogether):
                modes = self._place.send_together(streams)
            else:
                modes = [
                    self._place.send(sealed, stream, _Notes(self._journal, self._lock, item.key))
                    for (item, sealed), (_, stream) in zip(taken, streams, strict=True)
                ]
            for (item, sealed), (_, stream), mode in zip(taken, streams, modes, strict=True):
                self._record(f"task/sent/{item.key}", {"mode": mode, "path": sealed.path})
                item.sent()
                stream.done(sealed.size)
                self._on_sent()

    def _record(self, key: str, record: dict[str, Any]) -> None:
        with self._lock:
            self._journal.commit(key, record)

    def _passed(self, count: int) -> None:
        if self._stopped.is_set():
            raise Stopped
        self._on_bytes(count)

    def _next(self, queue: Queue[Any]) -> Any:
        from queue import Empty

        while not self._stopped.is_set():
            try:
                return queue.get(timeout=0.1)
            except Empty:
                continue
        raise Stopped

    def _put(self, taken: list[tuple[Item, Sealed]] | None) -> None:
        from queue import Full

        while not self._stopped.is_set():
            try:
                self._to_send.put(taken, timeout=0.1)
                return
            except Full:
                continue


class _Stream:
    """Opens a thing that is being sent, as often as it must be, and counts each of its bytes once."""

    def __init__(self, item: Item, on_bytes: Callable[[int], None]) -> None:
        self._item, self._on_bytes, self._furthest = item, on_bytes, 0

    def __call__(self) -> BufferedIOBase:
        opened = self._item.open(False)
        opened.on_read = self.done
        return opened

    def done(self, at: int) -> None:
        self._on_bytes(max(0, at - self._furthest))
        self._furthest = max(self._furthest, at)


def _git_digest(item: Item) -> str:
    """What Git calls a file that goes inside a commit; the Hub tells no other digest of it."""
    with item.open(True) as stream:
        data = stream.read()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class _Notes:
    """The journal for one item: threads share it."""

    journal: Journal
    lock: threading.Lock
    item: str

    def get(self, name: str) -> dict[str, Any] | None:
        return self.journal.records.get(f"task/{name}/{self.item}")

    def put(self, name: str, record: Mapping[str, object]) -> None:
        with self.lock:
            self.journal.commit(f"task/{name}/{self.item}", record)


def sealed_at(journal: Journal, item_key: str, path: str | None = None) -> tuple[Sealed, dict[str, Any]]:
    """What the journal knows of something that was sent, under the path it gets, or was sent under."""
    hashed, sent = journal.records[f"task/hashed/{item_key}"], journal.records[f"task/sent/{item_key}"]
    name = path if path is not None else sent["path"]
    sample = base64.b64decode(hashed["sample"])
    sealed = Sealed(name, hashed["sha256"], hashed["size"], sample, sent["mode"], hashed["git"])
    return sealed, hashed

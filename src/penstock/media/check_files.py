"""One file of a check, read once to its end; and the job that reads many in a worker.

Law: whatever a file holds, it costs its worker a few pieces of a megabyte, and ends as a verdict, never as an error.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from penstock.engines.notes import Notes
from penstock.engines.task import Result
from penstock.media import annex
from penstock.media.annex import Hash, Key, NotFetched
from penstock.media.probes import TEXT, Broken, FileReader, kind_of, plan_of, probe

# Of a digest, what is kept to find contents that are the same: 128 bits tell any number of files apart.
KEPT = 16
NONE = bytes(KEPT)

AGAIN = "fetch or make it again"


@dataclass(frozen=True)
class Item:
    """A file to check: its path, and the size and digest someone said it has ("size:42;sha256:…", or nothing)."""

    path: str
    expected: str = ""


@dataclass(frozen=True)
class Found:
    """What is wrong with a file."""

    problem: str
    detail: str
    do: str = ""


@dataclass
class Verdict:
    """One file: what it counts as, its bytes, the digest where it was read whole, and what is wrong with it."""

    kind: str
    size: int = 0
    digest: bytes = NONE
    found: list[Found] = field(default_factory=list)


def check_file(item: Item, *, hashed: bool = True, count: Callable[[int], None] = lambda bytes_read: None) -> Verdict:
    """Open a file, read it to its end, and say what is wrong with it."""
    path = item.path
    verdict = Verdict(kind_of(path))
    try:
        about = os.lstat(path)
        key = annex.key_of_link(path) if stat.S_ISLNK(about.st_mode) else None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        verdict.found.append(_cannot_open(path, error))
        return verdict
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            verdict.found.append(_no_file(path, about))
            return verdict
        _check_open(fd, about, item, key, verdict, hashed=hashed, count=count)
    except OSError as error:
        verdict.digest = NONE
        verdict.found.append(
            Found(
                "unreadable", f"cannot be read ({error.strerror or error})", "look after the disk it is on, or " + AGAIN
            )
        )
    finally:
        os.close(fd)
    return verdict


def _check_open(
    fd: int,
    about: os.stat_result,
    item: Item,
    key: Key | None,
    verdict: Verdict,
    *,
    hashed: bool,
    count: Callable[[int], None],
) -> None:
    size = verdict.size = about.st_size
    if size == 0:
        do = annex_again(item.path) if key is not None else AGAIN + ", or leave it out"
        verdict.found.append(Found("zero-byte", "is empty (0 bytes)", do))
        return
    stated = _stated(item.expected) + ([_by_key(key)] if key is not None else [])
    main = hashlib.sha256() if hashed else None
    hashes = [one for one in (main, *(one.hash for one in stated)) if one is not None]
    reader = FileReader(fd, path=item.path, hashes=hashes)
    head = reader.peek(min(size, annex.LARGEST_POINTER))
    if key is None and size < annex.LARGEST_POINTER and (pointer := annex.pointer_in(head, item.path)) is not None:
        verdict.found.append(_not_fetched(pointer))
        return
    plan = plan_of(item.path, head)
    verdict.kind = plan.kind
    broken: Found | None = None
    try:
        verdict.kind = probe(reader, plan, item.path)
    except Broken as error:
        broken = Found(error.problem, str(error), AGAIN)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # A probe that trips has met what its format does not allow: that is the verdict, not a fault of the run.
        said = " ".join(str(error).split())[:200]
        broken = Found("undecodable", f"cannot be read as {verdict.kind} ({type(error).__name__}: {said})", AGAIN)
    reader.drain()
    count(reader.position)
    if reader.position != size:
        verdict.found.append(
            Found(
                "unreadable", f"changed while it was read: {size:,} bytes, then {reader.position:,}", "check it again"
            )
        )
        return
    wrong = [found for one in stated if (found := one.compare(item.path, size)) is not None]
    if broken is not None:
        right = key is not None and key.digest is not None and not wrong
        verdict.found.append(
            Found(broken.problem, broken.detail, "its digest is the one git-annex recorded: it was added like this, so"
                  " make it again") if right else broken
        )  # fmt: skip
    verdict.found += wrong
    if main is not None:
        verdict.digest = main.digest()[:KEPT]


@dataclass
class _Stated:
    """A size and a digest that a file must have, and the hash that will tell."""

    by: str
    size: int | None
    digest: str | None
    hash: Hash | None

    def compare(self, path: str, size: int) -> Found | None:
        again = annex_again(path) if self.by == "git-annex" else AGAIN
        if self.size is not None and size != self.size:
            return Found("wrong-size", f"has {size:,} bytes, and {self.by} says {self.size:,}", again)
        if self.hash is not None and self.digest is not None and (got := self.hash.hexdigest()) != self.digest:
            return Found("wrong-digest", f"has digest {got[:16]}…, and {self.by} says {self.digest[:16]}…", again)
        return None


def _by_key(key: Key) -> _Stated:
    return _Stated("git-annex", key.size, key.digest, key.hasher())


def _stated(expected: str) -> list[_Stated]:
    if not expected:
        return []
    words = dict(word.split(":", 1) for word in expected.split(";"))
    size = words.pop("size", None)
    digest = next(iter(words.items()), None)
    return [
        _Stated(
            "the expectation",
            None if size is None else int(size),
            digest[1] if digest else None,
            annex.new_hash(*digest) if digest else None,
        )
    ]


def annex_again(path: str) -> str:
    """How a content that is not what its key says is replaced."""
    fetch = annex.fetch_command(path)
    go, _, rest = fetch.rpartition("&& ")
    inner = rest.split(" get ", 1)[1]
    return f"{go + '&& ' if go else ''}git annex fsck {inner}; then {rest}"


def _not_fetched(pointer: NotFetched) -> Found:
    size = "" if pointer.size is None else f" of {pointer.size:,} bytes"
    return Found("not-fetched", f"its content{size} is not here ({pointer.how})", pointer.fetch_command)


def _no_file(path: str, about: os.stat_result) -> Found:
    if not stat.S_ISDIR(about.st_mode):
        return Found("unreadable", "is no regular file", "leave it out")
    if (command := annex.submodule_command(path)) is not None:
        return Found("not-fetched", "is a part of the dataset that is not here (an empty submodule)", command)
    return Found("unreadable", "is a folder where a file should be", "name the files in it, or leave it out")


def _cannot_open(path: str, error: OSError) -> Found:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if (pointer := annex.not_fetched(path)) is not None:
            return _not_fetched(pointer)
        if "://" in path:
            return Found("missing", "is an address, and only files are checked", "fetch it, and name the file")
        if os.path.islink(path):
            return Found(
                "missing", f"is a link to {os.readlink(path)}, which is not there", "put it back, or leave it out"
            )
        return Found("missing", "is not there", "put it back, or leave it out")
    if isinstance(error, PermissionError):
        return Found("unreadable", "may not be read", "change its permissions")
    return Found("unreadable", f"cannot be opened ({error.strerror or error})", "leave it out, or " + AGAIN)


# -- many files ---------------------------------------------------------------------------------------------------


def pack(items: Sequence[Item]) -> bytes:
    """Files as a task carries them: names in one tree shrink to about 15 bytes each."""
    return zlib.compress("\0".join(word for item in items for word in (item.path, item.expected)).encode(
        "utf-8", "surrogateescape"), 1)  # fmt: skip


def unpack(packed: bytes) -> Iterator[Item]:
    words = iter(zlib.decompress(packed).decode("utf-8", "surrogateescape").split("\0"))
    for path, expected in zip(words, words, strict=True):
        yield Item(path, expected)


@dataclass(frozen=True)
class CheckJob:
    """Reads the files of a task. `same`: which kinds may not be there twice ("none", "data", "all")."""

    same: str
    imports: tuple[str, ...]
    most_workers: ClassVar[int] = 1 << 16

    def warm_up(self) -> None:
        from importlib import import_module

        for name in self.imports:
            import_module(name)

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        packed, _ = payload
        kinds: dict[str, list[int]] = {}
        problems: list[tuple[int, str, str, str]] = []
        digests = bytearray()
        for at, item in enumerate(unpack(packed)):
            notes.at("check", where=item.path)
            verdict = check_file(
                item, hashed=self.same != "none", count=lambda size: notes.count(rows_written=1, bytes_read=size)
            )
            tally = kinds.setdefault(verdict.kind, [0, 0, 0, 0])
            there = not verdict.found or verdict.found[0].problem != "missing"
            tally[0] += there
            tally[1] += verdict.size
            tally[2] += bool(verdict.found) and there
            tally[3] += not there
            problems += [(at, one.problem, one.detail, one.do) for one in verdict.found]
            counts = self.same == "all" or (self.same == "data" and verdict.kind not in TEXT)
            digests += verdict.digest if counts and not verdict.found else NONE
        return {"kinds": kinds, "problems": problems, "digests": bytes(digests)}

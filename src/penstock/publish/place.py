"""A place to publish to: the Hub, an S3-style store, a folder. What each must be able to do, and what passes between.

Content goes first and nobody sees it; `publish` then shows all of it at once, in whatever way the place knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from penstock import receipt

if TYPE_CHECKING:
    from penstock.journal import Journal, Record
    from penstock.publish.card import Card

README = "README.md"

Streams = Mapping[str, Callable[[], BufferedIOBase]]  # by digest: what goes inside a commit is read once more


@dataclass(frozen=True)
class Sealed:
    """Content whose digest is known: what a commit names."""

    path: str  # in the repository
    sha256: str
    size: int
    sample: bytes = b""  # its first 512 bytes, by which the Hub tells text from binary
    # How the place holds it until it is shown. The Hub: "lfs", or "regular" for what goes inside the commit; a store:
    # its upload.
    mode: str = "lfs"
    git: str = ""  # Git's own digest, of what is small enough to go inside a commit


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository: LFS files tell their SHA-256, others only Git's own digest."""

    size: int
    sha256: str | None
    git: str


@dataclass(frozen=True)
class Look:
    """The repository at one moment."""

    exists: bool
    private: bool = False
    head: str | None = None
    files: Mapping[str, RemoteFile] | None = None

    def holds(self, sealed: Sealed) -> bool:
        found = (self.files or {}).get(sealed.path)
        if found is None or found.size != sealed.size:
            return False
        if found.sha256 is not None:
            return found.sha256 == sealed.sha256
        return sealed.mode == "regular" and sealed.git in ("", found.git)


@dataclass(frozen=True)
class Wish:
    """What a push is called where it goes: `push_to_hub`'s words."""

    config_name: str = "default"
    set_default: bool | None = None
    data_dir: str | None = None
    commit_message: str | None = None
    commit_description: str | None = None

    def folder(self) -> str:
        return self.data_dir or ("data" if self.config_name == "default" else self.config_name)

    def receipt_path(self, split: str) -> str:
        return f".penstock/{self.config_name}/{split}.json"

    def describe(self) -> dict[str, Any]:
        return {"config_name": self.config_name, "data_dir": self.data_dir, "set_default": self.set_default}


@dataclass(frozen=True)
class Sent:
    """A split whose content the place holds: what a commit, the card and the receipt say of it."""

    name: str
    folder: str
    shards: tuple[Sealed, ...]
    rows: tuple[int, ...]
    stretches: tuple[Sequence[Any] | None, ...]  # offset, length, SHA-256: what `verify` reads back
    beside: tuple[Sealed, ...]
    features: Mapping[str, Any]
    bytes: int
    inputs: tuple[dict[str, Any], ...]

    @property
    def files(self) -> tuple[Sealed, ...]:
        return (*self.shards, *self.beside)

    def published(self, wish: Wish) -> dict[str, Any]:
        """The receipt that travels with the dataset: nothing in it but what the content says."""
        return {
            "format": receipt.FORMAT,
            "config": wish.config_name,
            "split": self.name,
            "rows": sum(self.rows),
            "bytes": self.bytes,
            "inputs": list(self.inputs),
            "shards": [
                {
                    "path": sealed.path,
                    "rows": rows,
                    "bytes": sealed.size,
                    "sha256": sealed.sha256,
                    **({"sample": dict(zip(("offset", "length", "sha256"), stretch, strict=True))} if stretch else {}),
                }
                for sealed, rows, stretch in zip(self.shards, self.rows, self.stretches, strict=True)
            ],
            "beside": [{"path": one.path, "bytes": one.size, "sha256": one.sha256} for one in self.beside],
            "versions": receipt.versions(),
        }


@dataclass(frozen=True)
class Published:
    """Everything is visible: the commit that made it so, where there are commits, and how many this run made."""

    commit: str = ""
    commits: int = 0


class Notes(Protocol):
    """The journal, as far as one thing that is being sent may use it. What is put there is there after a kill."""

    def get(self, name: str) -> Record | None: ...

    def put(self, name: str, record: Mapping[str, object]) -> None: ...


@runtime_checkable
class SendsTogether(Protocol):
    """A place that takes many small files with few requests."""

    def send_together(self, content: Sequence[tuple[Sealed, Callable[[], BufferedIOBase]]]) -> list[str]:
        """As `send`, for each of them."""


class Place(Protocol):
    """Where a push goes."""

    stopped: threading.Event
    visible: str  # when everything becomes so, in the words of a plan; "" where commits tell

    @property
    def name(self) -> str:
        """As a user writes it."""

    @property
    def title(self) -> str:
        """As its card calls it."""

    def describe(self) -> dict[str, Any]:
        """What tells this place from any other: `to`, `at` and whatever else."""

    def address(self) -> str:
        """Where people find it."""

    def check(self, sources: Iterable[str] = ()) -> Look:
        """Say now what would stop the push later. `sources` are the files and folders that it reads."""

    def state(self, look: Look) -> str:
        """What the plan says of it: whether it exists."""

    def prepare(self, look: Look, journal: Journal) -> None:
        """Make it, where it is not there. The journal is that of the push that begins, or goes on."""

    def shard_path(self, folder: str, split: str, at: int, sha256: str) -> str:
        """What a shard will be called; "" where that hangs on all the others."""

    def send(self, sealed: Sealed, stream: Callable[[], BufferedIOBase], notes: Notes) -> str:
        """Take content that nobody sees yet; how the place holds it."""

    def present(self, content: Sequence[Sealed]) -> list[bool]:
        """Whether content that was sent, and is not visible yet, is still there."""

    def holds(self, files: Sequence[Sealed]) -> bool:
        """Whether all of these are visible."""

    def at_work(self) -> AbstractContextManager[None]:
        """Around all that a push does here."""

    def publish(self, sent: Sequence[Sent], wish: Wish, journal: Journal, streams: Streams, fresh: Card) -> Published:
        """Show everything, or find that it is shown already. `fresh` is the card of a place that has none."""

    def discard(self, records: Mapping[str, Record]) -> None:
        """Take away what an abandoned push had sent and nobody sees, as its journal tells."""

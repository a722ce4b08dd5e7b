"""Commits: as few as the Hub allows, all but the last adding files that no config names.

The last one carries the card, the receipts and the deletions, on the parent they were worked out against. A repository
that has moved on meanwhile is looked at again; a commit whose answer was lost is looked for before it is made again.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from penstock import receipt
from penstock.errors import DestinationConflict, RemoteFailed
from penstock.journal import Journal
from penstock.publish.card import Card, owned_files, pinned, read_card, visible_files, with_split
from penstock.publish.hub import FILES_PER_COMMIT, HubPlace, Look, ParentMoved, Sealed

COMMITS_PER_HOUR = 100  # the Hub stops at 128
README = "README.md"

Streams = Mapping[str, Callable[[], BufferedIOBase]]  # by digest: what goes inside a commit is read once more


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
class Last:
    """The last commit, worked out against one state of the repository."""

    texts: Mapping[str, str]
    deletes: tuple[str, ...]
    card_before: str | None
    pin: str | None  # a card for the commits before it, where without one every file would show

    def is_there(self, place: HubPlace, look: Look) -> bool:
        files = look.files or {}
        return not any(path in files for path in self.deletes) and all(
            path in files and place.read(path, revision=look.head) == text.encode() for path, text in self.texts.items()
        )


class Commits:
    """The commits of one push."""

    def __init__(
        self, place: HubPlace, wish: Wish, journal: Journal, sent: Sequence[Sent], streams: Streams, fresh: Card
    ) -> None:
        self.place, self.wish, self.journal, self.sent, self.streams = place, wish, journal, sent, streams
        self.fresh = fresh  # the card of a repository that has none
        self.made: list[str] = []
        if (pull := journal.records.get("pull")) is not None:
            place.revision = pull["revision"]

    def publish(self) -> str:
        """Make everything visible; the commit that did. Nothing is done where all of it is there already."""
        files = [one for split in self.sent for one in split.files]
        while True:
            look = self.place.look()
            last = self._last(look)
            missing = [one for one in files if not look.holds(one)]
            if not missing and last.is_there(self.place, look):
                return look.head or ""
            room = FILES_PER_COMMIT - len(last.texts) - 1
            parts = [missing[at : at + FILES_PER_COMMIT] for at in range(0, len(missing) - room, FILES_PER_COMMIT)]
            try:
                if parts:
                    self._add(parts, last)
                    continue
                return self._finish(missing, look, last)
            except ParentMoved:
                continue

    def _add(self, parts: Sequence[Sequence[Sealed]], last: Last) -> None:
        """Files that nobody sees yet."""
        for at, part in enumerate(parts):
            adds = [self._addition(one) for one in part]
            if at == 0 and last.pin is not None:
                # A push that goes on must start from the card as it was before this one touched it.
                self.journal.commit("card", {"text": last.card_before, "pin": last.pin})
                adds.append(_text(README, last.pin))

            def there(look: Look, part: Sequence[Sealed] = part) -> bool:
                return all(look.holds(one) for one in part)

            self._commit(adds, (), f"Add files ({at + 1} of {len(parts)})", parent=None, there=there)

    def _finish(self, rest: Sequence[Sealed], look: Look, last: Last) -> str:
        adds = [self._addition(one) for one in rest]
        adds += [_text(path, text) for path, text in last.texts.items()]

        def there(look: Look) -> bool:
            return all(look.holds(one) for one in rest) and last.is_there(self.place, look)

        message = self.wish.commit_message or "Upload dataset"
        return self._commit(adds, last.deletes, message, parent=look.head, there=there)

    def _commit(
        self,
        adds: Sequence[tuple[Sealed, Callable[[], BufferedIOBase] | None]],
        deletes: Sequence[str],
        message: str,
        *,
        parent: str | None,
        there: Callable[[Look], bool],
    ) -> str:
        self._pace()

        def went_through() -> str | None:
            look = self.place.look()
            return look.head if there(look) else None

        # A pull request whose opening was not answered cannot be told from another's: a second one may be opened.
        opening = self.place.create_pr and self.place.revision is None
        oid, pull = self.place.commit(
            adds,
            deletes,
            message=message,
            description=self.wish.commit_description,
            parent=parent,
            open_pr=opening,
            went_through=(lambda: None) if opening else went_through,
        )
        if pull is not None:
            self.place.revision = pull
            self.journal.commit("pull", {"revision": pull})
        self.journal.commit(f"commit/{oid}", {"at": time.time()})
        self.made.append(oid)
        return oid

    def _pace(self) -> None:
        """Stay under the Hub's commits an hour."""
        hour = (record["at"] for key, record in self.journal.records.items() if key.startswith("commit/"))
        recent = sorted(at for at in hour if at > time.time() - 3600)
        if len(recent) >= COMMITS_PER_HOUR and self.place.stopped.wait(max(0.0, recent[0] + 3600 - time.time())):
            raise RemoteFailed("the push was stopped", where=self.place.repo_id)

    def _addition(self, sealed: Sealed) -> tuple[Sealed, Callable[[], BufferedIOBase] | None]:
        """Content that goes inside the commit is read once more; the place has all other."""
        if sealed.mode == "lfs":
            return sealed, None
        if sealed.sha256 not in self.streams:
            raise RemoteFailed("the Hub wants it inside the commit, and it is no longer here", where=sealed.path)
        return sealed, self.streams[sealed.sha256]

    def _last(self, look: Look) -> Last:
        """The last commit as the repository stands now: the card, the receipts, what goes."""
        files = dict(look.files or {})
        stored = self.place.read(README, revision=look.head) if README in files else None
        now = None if stored is None else stored.decode("utf-8", "replace")
        noted = self.journal.records.get("card")
        before = noted["text"] if noted is not None and now == noted["pin"] else now
        card = read_card(before)
        new = {one.path for split in self.sent for one in split.files}
        old = [path for path in files if path not in new]
        made = card if card.data or card.body.strip() else self.fresh
        gone: set[str] = set()
        for one in self.sent:
            owned = owned_files(card, list(files), config_name=self.wish.config_name, split=one.name)
            gone |= (owned | self._listed(one, look)) - new
            made = with_split(
                made,
                config_name=self.wish.config_name,
                split=one.name,
                data_files=f"{one.folder}/*.parquet",
                features=one.features,
                num_examples=sum(one.rows),
                num_bytes=one.bytes,
                download_size=sum(sealed.size for sealed in one.shards),
                default=self.wish.set_default,
                deleted_size=sum(files[path].size for path in owned),
                files=old,
                together=[other.name for other in self.sent],
            )
        during = pinned(card, old)
        self._check_unseen(during, old, new - set(files))
        texts = {README: made.render()}
        for one in self.sent:
            stated = json.dumps(one.published(self.wish), indent=1, sort_keys=True)
            texts[self.wish.receipt_path(one.name)] = stated + "\n"
        pin = during.render()
        return Last(texts, tuple(sorted(gone)), before, pin if pin != now else None)

    def _check_unseen(self, card: Card, old: Sequence[str], new: set[str]) -> None:
        seen = visible_files(card, [*old, *sorted(new)]) & new
        if seen:
            raise DestinationConflict(
                f"a config of the card there names whatever lies in {min(seen).rpartition('/')[0]}/, so new files"
                " would show before they are all there",
                where=self.place.repo_id,
                do="narrow that pattern in the card, or pass data_dir= (--data-dir) for another folder",
            )

    def _listed(self, one: Sent, look: Look) -> set[str]:
        """Files that the receipt of the same split lists, as far as they are there."""
        files = look.files or {}
        path = self.wish.receipt_path(one.name)
        stored = self.place.read(path, revision=look.head) if path in files else None
        try:
            found = json.loads(stored) if stored is not None else {"shards": [], "beside": []}
            return {entry["path"] for entry in (*found["shards"], *found["beside"])} & set(files)
        except (ValueError, KeyError, TypeError):
            return set()  # not one of ours, or damaged: nothing goes on its word


def _text(path: str, text: str) -> tuple[Sealed, Callable[[], BufferedIOBase]]:
    data = text.encode()
    return Sealed(path, hashlib.sha256(data).hexdigest(), len(data), data[:512], "regular"), lambda: io.BytesIO(data)

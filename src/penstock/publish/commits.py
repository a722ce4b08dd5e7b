"""Commits: as few as the Hub allows, all but the last adding files that no config names.

The last one carries the card, the receipts and the deletions, on the parent they were worked out against. A repository
that has moved on meanwhile is looked at again; a commit whose answer was lost is looked for before it is made again.
"""

from __future__ import annotations

import hashlib
import io
import random
import time
from collections.abc import Callable, Sequence
from io import BufferedIOBase
from typing import TYPE_CHECKING

from penstock.errors import RemoteFailed
from penstock.journal import Journal
from penstock.publish.card import Card
from penstock.publish.last import Last, last_of
from penstock.publish.place import README, Look, Sealed, Sent, Streams, Wish

if TYPE_CHECKING:
    from penstock.publish.hub import HubPlace

# The Hub asks for 50 to 100 files a commit, and gives up on a commit after 60 seconds.
FILES_PER_COMMIT = 100
COMMITS_PER_HOUR = 100  # the Hub stops at 128


class ParentMoved(RemoteFailed):
    """Somebody else committed first: look again and make the commit anew."""


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
        moved = 0
        while True:
            look = self.place.look()
            last = last_of(self.place, self.wish, self.sent, look, self.fresh, self.journal.records.get("card"))
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
            except ParentMoved as error:
                moved += 1
                self._wait_for_rest(moved, error)

    def _wait_for_rest(self, moved: int, error: ParentMoved) -> None:
        """Others are committing too: give them a moment, and do not chase them for ever."""
        patience = self.place.patience
        if moved >= patience.attempts:
            raise RemoteFailed(
                f"other commits came first {moved} times",
                where=self.place.repo_id,
                do="run the same command again later: what was sent stays",
            ) from error
        if self.place.stopped.wait(patience.wait(moved - 1, None, jitter=random.random())):
            raise RemoteFailed("the push was stopped", where=self.place.repo_id) from error

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


def _text(path: str, text: str) -> tuple[Sealed, Callable[[], BufferedIOBase]]:
    data = text.encode()
    return Sealed(path, hashlib.sha256(data).hexdigest(), len(data), data[:512], "regular"), lambda: io.BytesIO(data)

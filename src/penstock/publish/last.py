"""The last change to what is published: the card, the receipts, and what goes, worked out against what is there now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import DestinationConflict
from penstock.publish.card import Card, owned_files, pinned, read_card, referenced_patterns, visible_files, with_split
from penstock.publish.place import README, Look, Sent, Wish


class Reads(Protocol):
    """A place whose small files can be read."""

    @property
    def name(self) -> str: ...

    def read(self, path: str, *, revision: str | None) -> bytes | None: ...


@dataclass(frozen=True)
class Last:
    """The last change, worked out against one state of the place."""

    texts: Mapping[str, str]
    deletes: tuple[str, ...]
    card_before: str | None
    pin: str | None  # a card for what comes before it, where without one every file would show

    def is_there(self, place: Reads, look: Look) -> bool:
        files = look.files or {}
        return not any(path in files for path in self.deletes) and all(
            path in files and place.read(path, revision=look.head) == text.encode() for path, text in self.texts.items()
        )


def last_of(
    place: Reads, wish: Wish, sent: Sequence[Sent], look: Look, fresh: Card, noted: Mapping[str, Any] | None
) -> Last:
    """The last change as the place stands now. `noted` tells the card as it was before this push touched it."""
    files = dict(look.files or {})
    stored = place.read(README, revision=look.head) if README in files else None
    now = None if stored is None else stored.decode("utf-8", "replace")
    before = noted["text"] if noted is not None and now == noted["pin"] else now
    card = read_card(before)
    new = {one.path for split in sent for one in split.files}
    old = [path for path in files if path not in new]
    made = card if card.data or card.body.strip() else fresh
    gone: set[str] = set()
    for one in sent:
        # Without configs files are found by their names, and half of a new state would be taken for the old one.
        known = list(files) if card.has_configs else old
        owned = owned_files(card, known, config_name=wish.config_name, split=one.name)
        gone |= (owned | listed(place, wish, one.name, look)) - new
        made = with_split(
            made,
            config_name=wish.config_name,
            split=one.name,
            data_files=f"{one.folder}/*.parquet",
            features=one.features,
            num_examples=sum(one.rows),
            num_bytes=one.bytes,
            download_size=sum(sealed.size for sealed in one.shards),
            default=wish.set_default,
            deleted_size=sum(files[path].size for path in owned),
            files=old,
            together=[other.name for other in sent],
        )
    if gone:
        gone -= _of_others(place, wish, sent, look)
    during = pinned(card, old)
    # A folder is named by its content: where the card names one already, a file that is missing only comes back.
    named = referenced_patterns(card).get(wish.config_name, {}) if card.has_configs else {}
    back = {file.path for one in sent if named.get(one.name) == [f"{one.folder}/*.parquet"] for file in one.shards}
    _check_unseen(place, during, old, new - set(files) - back)
    pin = during.render()
    return Last(
        {README: made.render(), **receipts(wish, sent)}, tuple(sorted(gone)), before, pin if pin != now else None
    )


def receipts(wish: Wish, sent: Sequence[Sent]) -> dict[str, str]:
    """The receipts that travel with a dataset, by path."""
    return {
        wish.receipt_path(one.name): json.dumps(one.published(wish), indent=1, sort_keys=True) + "\n" for one in sent
    }


def listed(place: Reads, wish: Wish, split: str, look: Look) -> set[str]:
    """Files that the receipt of the same split lists, as far as they are there."""
    files = look.files or {}
    path = wish.receipt_path(split)
    return listed_by(place.read(path, revision=look.head) if path in files else None) & set(files)


def _of_others(place: Reads, wish: Wish, sent: Sequence[Sent], look: Look) -> set[str]:
    """Files that receipts of other splits list: two splits of one tree share what lies beside it."""
    own = {wish.receipt_path(one.name) for one in sent}
    paths = [path for path in look.files or {} if path.startswith(".penstock/") and path.endswith(".json")]
    found: set[str] = set()
    for path in paths:
        if path not in own:
            found |= listed_by(place.read(path, revision=look.head))
    return found


def listed_by(stored: bytes | None) -> set[str]:
    """The files a receipt lists. One that is not ours, or damaged, lists none: nothing goes on its word."""
    try:
        found = json.loads(stored) if stored is not None else {"shards": [], "beside": []}
        return {str(entry["path"]) for entry in (*found["shards"], *found["beside"])}
    except (ValueError, KeyError, TypeError):
        return set()


def _check_unseen(place: Reads, card: Card, old: Sequence[str], new: set[str]) -> None:
    seen = visible_files(card, [*old, *sorted(new)]) & new
    if seen:
        raise DestinationConflict(
            f"a config of the card there names whatever lies in {min(seen).rpartition('/')[0]}/, so new files"
            " would show before they are all there",
            where=place.name,
            do="narrow that pattern in the card, or pass data_dir= (--data-dir) for another folder",
        )

"""Fragments into shards: neighbours that are too small are put together without decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from penstock.engines.notes import Notes
from penstock.engines.task import Result
from penstock.files import Writing
from penstock.sinks import sink_of
from penstock.sinks.base import Fragment


def group_sizes(sizes: Sequence[int], most: int) -> list[int]:
    """How many neighbours go together into each shard while they fit one: a rule that looks at sizes alone.

    >>> group_sizes([200, 200, 200, 500, 10, 20], 500)
    [2, 1, 1, 2]
    """
    groups: list[int] = []
    held = 0
    for size in sizes:
        if groups and held + size <= most:
            groups[-1] += 1
            held += size
        else:
            groups.append(1)
            held = size
    return groups


def group_fragments(fragments: Sequence[Fragment], most: int) -> list[list[Fragment]]:
    """Fragments by the shard they go into."""
    left = iter(fragments)
    return [list(islice(left, count)) for count in group_sizes([one.bytes for one in fragments], most)]


@dataclass(frozen=True)
class AssembleJob:
    """One task makes one shard of the fragments of a group."""

    format: str
    source: str
    target: str
    embeds: bool = False  # fragments refer to media, which are read and joined to them
    COST: ClassVar[int] = 12 << 20
    EMBED_COST: ClassVar[int] = 32 << 20
    most_workers: ClassVar[int] = 1  # as for splicing

    def warm_up(self) -> None:
        sink_of(self.format)
        if self.embeds:
            import penstock.parquet.values  # noqa: F401

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        (name, group), _ = payload
        notes.at("assemble", where=name)
        with Writing(Path(self.target) / name) as out:
            sink_of(self.format).assemble([Path(self.source) / fragment.name for fragment in group], out)
            out.commit()
        rows, size = sum(f.rows for f in group), sum(f.bytes for f in group)
        notes.count(bytes_read=size)
        return {"fragment": Fragment(name, rows, size, out.tell(), out.sha256()).as_record()}

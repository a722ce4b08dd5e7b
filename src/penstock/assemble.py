"""Fragments into shards: neighbours that are too small are put together without decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock.engines.notes import Notes
from penstock.engines.task import Result
from penstock.files import Writing
from penstock.sinks import sink_of
from penstock.sinks.base import Fragment


def group_fragments(fragments: Sequence[Fragment], max_bytes: int) -> list[list[Fragment]]:
    """Neighbours together while they fit one shard: a rule that looks at sizes alone.

    >>> sizes = [200, 200, 200, 500, 10, 20]
    >>> made = group_fragments([Fragment("f", 1, size, size, "") for size in sizes], 500)
    >>> [[f.bytes for f in group] for group in made]
    [[200, 200], [200], [500], [10, 20]]
    """
    groups: list[list[Fragment]] = []
    size = 0
    for fragment in fragments:
        if groups and size + fragment.bytes <= max_bytes:
            groups[-1].append(fragment)
            size += fragment.bytes
        else:
            groups.append([fragment])
            size = fragment.bytes
    return groups


@dataclass(frozen=True)
class AssembleJob:
    """One task makes one shard of the fragments of a group."""

    format: str
    source: str
    target: str
    COST: ClassVar[int] = 12 << 20
    most_workers: ClassVar[int] = 1  # as for splicing: the disk is the limit

    def warm_up(self) -> None:
        sink_of(self.format)

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        (name, group), _ = payload
        notes.at("assemble", where=name)
        with Writing(Path(self.target) / name) as out:
            sink_of(self.format).assemble([Path(self.source) / fragment.name for fragment in group], out)
            out.commit()
        rows, size = sum(f.rows for f in group), sum(f.bytes for f in group)
        notes.count(bytes_read=size)
        return {"fragment": Fragment(name, rows, size, out.tell(), out.sha256()).as_record()}

"""Shards that need not exist: which row groups each is made of, and what it weighs, before a byte is read.

Where nothing needs decoding the whole list is known from footers. Where rows must be made first, shards follow the
fragments as they come, by the same rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.chains import Chain, Write
from penstock.media.kinds import Leaf
from penstock.parquet.splice import Span
from penstock.sources.base import SourceFile
from penstock.splice import SplicePlan, plan_splice

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.parquet.embed import VirtualShard

STRETCH = 1 << 20  # what `verify` reads back of a shard


@dataclass(frozen=True)
class Form:
    """What all shards of a split have in common."""

    columns: tuple[str, ...] | None
    rename: Mapping[str, str]
    leaves: tuple[Leaf, ...]
    schema_from: str
    key_values: Mapping[str, str]
    schema: pa.Schema  # in flight: media as references
    features: Mapping[str, Any]  # as `datasets` words them

    def virtual(self, spans: Sequence[Span]) -> VirtualShard:
        from penstock.parquet.embed import virtual_shard

        return virtual_shard(
            spans,
            leaves=self.leaves,
            columns=self.columns,
            rename=self.rename,
            key_values=self.key_values,
            schema_from=self.schema_from,
        )


@dataclass(frozen=True)
class Recipe:
    """One shard: runs of row groups, in order."""

    at: int
    spans: tuple[Span, ...]
    rows: int
    bytes: int  # Arrow bytes, media included
    staged: tuple[str, ...] = field(default=())  # files that go once the shard has been sent
    sources: tuple[SourceFile, ...] = field(default=())  # as they were planned


def planned(chains: Sequence[Chain], write: Write, *, name: str) -> tuple[SplicePlan, list[Recipe]] | str:
    """All shards of a split from metadata alone, or why rows must be made first."""
    plan = plan_splice(chains, write, folder="", name=name)
    if isinstance(plan, str):
        return plan
    files = [file for chain in chains for file in chain.read.files]
    recipes = []
    for at, task in enumerate(plan.tasks):
        runs, rows, size = task.payload[1], *plan.weights[at]
        spans = tuple(Span(plan.job.paths[f], a, b) for f, a, b in runs)
        sources = tuple({f: files[f] for f, _, _ in runs}.values())
        recipes.append(Recipe(at, spans, rows, size, sources=sources))
    return plan, recipes


@dataclass(frozen=True)
class Made:
    """A row group of a fragment: what shards are put together from when rows are made."""

    path: str
    group: int
    rows: int
    bytes: int
    last: bool  # of its file


class Grouping:
    """Row groups as they come, put together into shards: a new one before the row group that would pass the limit."""

    def __init__(self, max_shard: int) -> None:
        self._max = max_shard
        self._held: list[Made] = []
        self._bytes = 0
        self._count = 0

    def add(self, made: Made) -> Iterator[Recipe]:
        if self._held and self._bytes + made.bytes > self._max:
            yield self._end()
        self._held.append(made)
        self._bytes += made.bytes

    def finish(self) -> Iterator[Recipe]:
        if self._held:
            yield self._end()

    def _end(self) -> Recipe:
        recipe = recipe_of(self._count, self._held)
        self._count += 1
        self._held, self._bytes = [], 0
        return recipe


def recipe_of(at: int, held: Sequence[Made]) -> Recipe:
    """A shard of row groups that were made."""
    return Recipe(
        at,
        tuple(_runs(held)),
        sum(made.rows for made in held),
        sum(made.bytes for made in held),
        # A file that reaches into the next shard goes with that one.
        staged=tuple(made.path for made in held if made.last),
    )


def groups_of(path: str) -> Iterator[Made]:
    """The row groups of one fragment, sized by footer and references."""
    from penstock.media.weights import group_weights
    from penstock.parquet.footer import read_footer

    footer = read_footer(path)
    weights = group_weights(footer) or [0] * footer.row_groups
    for group in range(footer.row_groups):
        size = footer.group_bytes(group) + weights[group]
        yield Made(path, group, footer.group_rows(group), size, last=group + 1 == footer.row_groups)


def _runs(held: Iterable[Made]) -> Iterator[Span]:
    run: Span | None = None
    for made in held:
        if run is not None and run.path == made.path and run.stop == made.group:
            run = Span(run.path, run.first, made.group + 1)
            continue
        if run is not None:
            yield run
        run = Span(made.path, made.group, made.group + 1)
    if run is not None:
        yield run


def sample_of(shard: VirtualShard, *, at: int) -> tuple[int, int]:
    """A stretch of a shard that is read back when it is verified: the start of one row group, told by its number."""
    if not shard.row_groups:
        return 0, min(shard.size, STRETCH)
    pick = int.from_bytes(hashlib.sha256(f"sample {at}".encode()).digest()[:8], "big") % len(shard.row_groups)
    offset, length, _ = shard.row_groups[pick]
    return offset, min(length, STRETCH)


def token_of(digests: Iterable[str]) -> str:
    """What tells one published state of a split from another: the same content has the same name, wherever it is
    published from."""
    total = hashlib.sha256()
    for digest in digests:
        total.update(bytes.fromhex(digest))
    return total.hexdigest()[:8]

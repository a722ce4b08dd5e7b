"""Reading in the caller's own process: batches, rows, counts. Bounded by the batch in hand, with no worker started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.chains import Chain, limit_rows, numbered
from penstock.errors import UsageError
from penstock.plan import branches_of, spans_of
from penstock.sources import source_of
from penstock.sources.base import Span
from penstock.stage import Schemas, flow
from penstock.steps.base import Step
from penstock.steps.limit import Limit

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


def batches(chains: Sequence[Chain]) -> Iterator[pa.RecordBatch]:
    """All rows, in order, as the plan cuts them."""
    counters: dict[int, _CountOff] = {}
    counted = []
    for chain in numbered(chains):
        steps: list[Step] = []
        for step in chain.steps:
            if isinstance(step, Limit):
                running = any(
                    not before.keeps_rows and not isinstance(before, Limit) for before in chain.steps[: len(steps)]
                )
                step = counters.setdefault(id(step), _CountOff(step.rows, renumber=chain.base if running else None))
            steps.append(step)
        counted.append(replace(chain, steps=tuple(steps)))
    branches, spans, files = branches_of(counted, {})
    for branch, own in zip(branches, spans, strict=True):
        limits = [step for step in branch.steps if isinstance(step, _CountOff)]
        own = _in_one_go(own) if source_of(branch.format).surveyed else own
        made = flow(branch, files, own, stop=lambda limits=limits: any(limit.left <= 0 for limit in limits))  # type: ignore[misc]
        for rows in made:
            yield rows.batch


def _in_one_go(spans: Sequence[Span]) -> list[Span]:
    """Text files whole: read from their start, the ordinals of their rows need no survey."""
    by_file: dict[int, list[Span]] = {}
    for span in spans:
        by_file.setdefault(span.file, []).append(span)
    return [replace(own[0], stop=own[-1].stop, first_row=0) for own in by_file.values()]


def exactly(batches: Iterator[pa.RecordBatch], size: int, *, drop_last: bool = False) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of exactly `size`, but the last."""
    import pyarrow as pa

    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"a batch holds at least 1 row, not {size!r}")
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        start = 0
        while rows + batch.num_rows - start >= size:
            end = start + size - rows
            held.append(batch.slice(start, end - start))
            yield held[0] if len(held) == 1 else pa.concat_batches(held)
            held, rows, start = [], 0, end
        if start < batch.num_rows:
            held.append(batch.slice(start))
            rows += batch.num_rows - start
    if held and not drop_last:
        yield held[0] if len(held) == 1 else pa.concat_batches(held)


def count(chains: Sequence[Chain]) -> int:
    """From footers where every row is kept; else by reading."""
    known = all(
        not source_of(chain.read.format).surveyed and all(s.keeps_rows or isinstance(s, Limit) for s in chain.steps)
        for chain in chains
    )
    if known:
        spans = limit_rows(chains, [spans_of(chain, at, {}) for at, chain in enumerate(chains)])
        return sum(span.rows if span.take < 0 else span.take for own in spans for span in own)
    return sum(batch.num_rows for batch in batches(chains))


def schema(chains: Sequence[Chain]) -> pa.Schema:
    """Of the last step; where only running can tell, the first batch is run."""
    branches, _, _ = branches_of(chains, {})
    known = Schemas(branches[0], {}).last()
    if known is not None:
        return known
    first = next(batches(chains), None)
    if first is None:
        raise UsageError("no row comes out, so only running a map could tell its schema; pass schema= to map")
    return first.schema


class _CountOff:
    """A limit where rows pass one after the other: it counts, and numbers them where a `write` would."""

    name: ClassVar[str] = "limit"
    keeps_rows: ClassVar[bool] = False
    moves_columns: ClassVar[bool] = False
    calls_user: ClassVar[bool] = False

    def __init__(self, rows: int, *, renumber: int | None) -> None:
        self.left = rows
        self._base = renumber
        self._passed = 0

    def describe(self) -> dict[str, Any]:
        return {"left": self.left}

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        return schema

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        kept = rows.head(self.left)
        first, count = self._passed, kept.batch.num_rows
        self.left -= count
        self._passed += count
        if self._base is None:
            return kept
        # Only running could count them off: a `write` would take them through a pass of their own, numbered anew.
        return replace(kept, file=self._base, first=first, stop=first + count, ordinals=None, parts=None)

    def cost(self, batch: int) -> int:
        return 0

"""Dataset to stages to tasks, with the bytes each will take. Pieces and shards come from here alone.

Memory, workers, engine and scratch change only how many tasks run at once: nothing in this room looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.assemble import group_sizes
from penstock.chains import Chain, Write, limit_rows
from penstock.engines.task import Task
from penstock.errors import UsageError
from penstock.sinks import sink_of
from penstock.sources import source_of
from penstock.sources.base import ReadOptions, SourceFile, Span, Surveyed
from penstock.splice import SpliceJob, plan_splice
from penstock.stage import BATCH_BYTES, Branch, Piece, Schemas, StageJob, even_share
from penstock.steps.base import Step
from penstock.steps.columns import MovesColumns
from penstock.steps.limit import Limit

if TYPE_CHECKING:
    import pyarrow as pa

# Small datasets are cut into about this many tasks, so that both cores work and a kill costs little; their fragments
# are then spliced into shards. From this many shards on, a task is a shard and nothing is put together.
TASKS_AT_LEAST = 16
SMALLEST_PIECE = 32 << 20
# Pieces are filled to this share of what they may hold: bytes projected from metadata are a little off.
FILL = 0.95
# A batch is joined from smaller ones, and allocators round up: measured on text, numbers, lists, and wide tables.
OVERHEAD = 26 << 20
# What supervisor and worker import between the survey and the pass after it: 8 MiB left the budget named 7 MB short.
LATER_IMPORTS = 24 << 20


@dataclass(frozen=True)
class Pass:
    """One wave of tasks over all input: a job, its tasks, and what they will make."""

    name: str
    job: StageJob | SpliceJob
    tasks: tuple[Task, ...]
    spliced: bool
    why: str  # why it is spliced, or why not
    rows: int  # -1: only running can tell
    bytes: int  # Arrow bytes in
    stored: int  # bytes out, projected
    shards: int


Surveys = Mapping[tuple[int, int, int], Surveyed]  # (chain, file, start) -> what was found there


def spans_of(chain: Chain, at: int, surveys: Surveys) -> list[Span]:
    """All of a chain's source; text sources exactly where they have been surveyed, else as file sizes suggest."""
    source = source_of(chain.read.format)
    spans: list[Span] = []
    row = 0
    for ordinal, file in enumerate(chain.read.files):
        before = row if chain.dense else 0
        row = before
        for span in source.spans(file, ordinal, chain.read.options.columns):
            found = surveys.get((at, ordinal, span.start))
            if found is not None:
                span = replace(span, first_row=row, rows=found.rows, bytes=found.bytes, row=found.longest)
                row += found.lines
            elif chain.dense:
                span = replace(span, first_row=before + span.first_row)
                row += span.rows
            spans.append(span)
    return spans


def schema_of(chain: Chain, at: int, surveys: Surveys) -> pa.Schema:
    """One schema for all files of a chain; two files that disagree on a column are named."""
    import pyarrow as pa

    from penstock.schemas import only, unify

    options = chain.read.options
    if (given := options.given_schema()) is not None:
        return given if options.columns is None else only(given, options.columns)
    source = source_of(chain.read.format)
    found = [
        (pa.ipc.read_schema(pa.py_buffer(surveyed.schema)), chain.read.files[file].name)
        for (chain_at, file, _), surveyed in sorted(surveys.items())
        if chain_at == at and options.infer == "full"
    ]
    if not found:
        found = [(source.schema(file, options), file.name) for file in chain.read.files]
    schema, name = found[0]
    for other, where in found[1:]:
        schema = unify(schema, other, a_where=name, b_where=where)
    return schema if options.columns is None else only(schema, options.columns)


def plan_pass(
    chains: Sequence[Chain], write: Write, *, folder: str, name: str = "p0", surveys: Surveys | None = None
) -> Pass:
    """The tasks that write these chains, spliced where nothing needs decoding."""
    spliced = plan_splice(chains, write, folder=folder, name=name)
    if isinstance(spliced, str):
        return _plan_stage(chains, write, folder=folder, name=name, surveys=surveys or {}, why=spliced)
    return Pass(
        name,
        spliced.job,
        spliced.tasks,
        spliced=True,
        why="nothing needs decoding",
        rows=spliced.rows,
        bytes=spliced.bytes,
        stored=spliced.stored,
        shards=len(spliced.tasks),
    )


def _plan_stage(chains: Sequence[Chain], write: Write, *, folder: str, name: str, surveys: Surveys, why: str) -> Pass:
    sink = sink_of(write.format)
    branches, spans, files = branches_of(chains, surveys)
    for branch in branches:
        if (last := Schemas(branch, {}).last()) is not None:
            sink.check(last)
    pieces = list(cut_pieces(spans, max_shard=write.max_shard))
    job = StageJob(files, branches, write.format, folder, write.max_shard)
    tasks = []
    for at, piece in enumerate(pieces):
        branch = branches[piece.branch]
        cost, heaviest = _cost(piece, branch.format, branch.steps, write)
        file = files[heaviest.file].name
        part = f"row group {heaviest.start}" if branch.format == "parquet" else f"byte {heaviest.start:,} on"
        tasks.append(
            Task(
                f"task/{name}/{at:06d}",
                (f"{name}-{at:06d}", piece),
                cost,
                label=f"{file} {part}",
                smallest_for=f"reading and writing {part}",
            )
        )
    total = sum(piece.bytes for piece in pieces)
    counted = all(step.keeps_rows or isinstance(step, Limit) for chain in chains for step in chain.steps)
    known = counted and all(span.rows >= 0 for one in spans for span in one)
    return Pass(
        name,
        job,
        tuple(tasks),
        spliced=False,
        why=why,
        rows=sum(s.rows if s.take < 0 else s.take for one in spans for s in one) if known else -1,
        bytes=total,
        stored=int(total * _stored_share(chains, write, total)),
        shards=_count_shards([piece.bytes for piece in pieces], write.max_shard),
    )


def branches_of(
    chains: Sequence[Chain], surveys: Surveys
) -> tuple[tuple[Branch, ...], list[list[Span]], tuple[SourceFile, ...]]:
    """Branches with one schema at their ends, their spans, and all files in one list."""
    from penstock.steps.conform import Conform

    branches = []
    spans = []
    files: list[SourceFile] = []
    for at, chain in enumerate(chains):
        schema, options = _pruned(chain, schema_of(chain, at, surveys))
        pruned = replace(chain, read=replace(chain.read, options=options))
        own = [replace(span, file=span.file + len(files)) for span in spans_of(pruned, at, surveys)]
        first = len(files)
        files += chain.read.files
        spans.append(own)
        steps = tuple(step for step in chain.steps if not isinstance(step, Limit))
        branches.append(Branch(chain.read.format, options, schema, steps, first, chain.base, chain.dense))
    ends = [Schemas(branch, {}).last() for branch in branches]
    if any(end is None for end in ends) and not _end_alike(branches):
        raise UsageError(
            "only running can tell the columns of a map in one of these datasets",
            where="concat",
            do="pass schema= to it",
        )
    if len(branches) > 1 and all(end is not None for end in ends):
        one = _one_schema(chains, [end for end in ends if end is not None])
        branches = [
            branch if end == one else replace(branch, steps=(*branch.steps, Conform(one)))
            for branch, end in zip(branches, ends, strict=True)
        ]
    return tuple(branches), limit_rows(chains, spans), tuple(files)


def _end_alike(branches: Sequence[Branch]) -> bool:
    """Whether all end with the very same steps, from the last whose schema only running can tell."""
    ends = []
    for branch in branches:
        unknown = [
            at
            for at, step in enumerate(branch.steps)
            if step.name == "map" and step.schema_after(branch.schema) is None
        ]
        ends.append([id(step) for step in branch.steps[max(unknown, default=len(branch.steps)) :]])
    return all(end == ends[0] for end in ends)


def _pruned(chain: Chain, schema: pa.Schema) -> tuple[pa.Schema, ReadOptions]:
    """Check the columns that steps name, and leave unread those that the first steps drop."""
    from penstock.schemas import only

    moved = [(name, name) for name in schema.names]
    kept: set[str] | None = None
    leading = True
    for step in chain.steps:
        if isinstance(step, MovesColumns):
            origin = {new: old for old, new in moved}
            moved = [(origin[before], after) for before, after in step.moved([new for _, new in moved])]
            kept = {old for old, _ in moved} if leading else kept
        elif not isinstance(step, Limit):
            leading = False
            if step.schema_after(schema) is not schema:
                break  # what columns there are from here on, only that step knows
    if kept is None or len(kept) == len(schema.names):
        return schema, chain.read.options
    names = tuple(name for name in schema.names if name in kept)
    return only(schema, names), replace(chain.read.options, columns=names)


def _one_schema(chains: Sequence[Chain], ends: Sequence[pa.Schema]) -> pa.Schema:
    from penstock.schemas import unify

    schema, name = ends[0], chains[0].read.files[0].name
    for chain, end in zip(chains[1:], ends[1:], strict=True):
        schema = unify(schema, end, a_where=name, b_where=chain.read.files[0].name)
    return schema


def cut_pieces(spans: Sequence[Sequence[Span]], *, max_shard: int) -> Iterator[Piece]:
    """Neighbouring spans into pieces: whole shards' worth, or equal parts of one where there are few shards."""
    total = sum(span.bytes for one in spans for span in one)
    shards = max(1, -(-total // int(max_shard * FILL)))
    parts = max(1, -(-TASKS_AT_LEAST // shards))
    target = max(min(SMALLEST_PIECE, int(max_shard * FILL)), total // (shards * parts))
    for branch, own in enumerate(spans):
        held: list[Span] = []
        size = 0
        for span in own:
            # A whole shard must not be passed; a part of one ends where it comes nearest to its share.
            if held and size + (span.bytes if parts == 1 else span.bytes // 2) > target:
                yield Piece(branch, tuple(held))
                held, size = [], 0
            held.append(span)
            size += span.bytes
        if held:
            yield Piece(branch, tuple(held))


def _cost(piece: Piece, format: str, chain: Sequence[Step], write: Write) -> tuple[int, Span]:
    """Projected bytes of a task, and the span that makes it so large.

    Reading, the batch in hand, the steps one after the other, and the writer: upper bounds, each measured.
    """
    source, sink = source_of(format), sink_of(write.format)
    heaviest = max(piece.spans, key=source.cost)
    # A batch holds 8 MiB, or one row that is larger;
    batch = max(BATCH_BYTES, heaviest.row)
    steps = max((step.cost(batch) for step in chain), default=0)
    cost = source.cost(heaviest) + batch + steps + sink.cost(batch, piece.bytes)
    return OVERHEAD + cost + cost // 32, heaviest


def least_cost(chains: Sequence[Chain], write: Write) -> int:
    """What a task of these chains takes if no row is larger than a batch, and a little over for what it imports."""
    costs = [
        _cost(Piece(at, (span,)), chain.read.format, chain.steps, write)[0]
        for at, chain in enumerate(chains)
        for span in spans_of(chain, at, {})
    ]
    return max(costs) + LATER_IMPORTS


def _count_shards(pieces: Sequence[int], max_shard: int) -> int:
    """Shards that pieces of these sizes will make if every row stays: cut evenly, then neighbours put together."""
    fragments: list[int] = []
    for size in pieces:
        share = even_share(size, max_shard)
        whole, rest = divmod(size, share)
        fragments += [share] * whole + [rest] * (rest > 0)
    return max(1, len(group_sizes(fragments, max_shard)))


def _stored_share(chains: Sequence[Chain], write: Write, total: int) -> float:
    """Bytes on disk per Arrow byte, guessed: as the source's where it is Parquet, else as zstd does on text."""
    if write.format == "jsonl":
        return 1.1
    if write.format == "parquet" and all(chain.read.format == "parquet" for chain in chains):
        return min(1.1, sum(file.bytes for chain in chains for file in chain.read.files) / max(1, total))
    return 0.45

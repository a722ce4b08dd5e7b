"""Dataset to stages to tasks, with the bytes each will take. Pieces and shards come from here alone.

Memory, workers, engine and scratch change only how many tasks run at once: nothing in this room looks at them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.assemble import group_sizes
from penstock.engines.task import Task
from penstock.errors import UsageError
from penstock.parquet import splice as splicing
from penstock.parquet.footer import Footer, read_footer
from penstock.sinks import sink_of
from penstock.sources import source_of
from penstock.sources.base import ReadOptions, SourceFile, Span, Surveyed
from penstock.splice import SpliceJob, moved_metadata
from penstock.stage import BATCH_BYTES, Branch, Piece, Schemas, StageJob, even_share
from penstock.steps.base import Step
from penstock.steps.columns import MovesColumns
from penstock.steps.limit import Limit

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1  # of plans: raised when the same words begin to mean other bytes
# Small datasets are cut into about this many tasks, so that both cores work and a kill costs little; their fragments
# are then spliced into shards. From this many shards on, a task is a shard and nothing is put together.
TASKS_AT_LEAST = 16
SMALLEST_PIECE = 32 << 20
# Pieces are filled to this share of what they may hold: bytes projected from metadata are a little off.
FILL = 0.95
# A batch is joined from smaller ones, and allocators round up: measured on text, numbers, lists, and wide tables.
OVERHEAD = 20 << 20


@dataclass(frozen=True)
class Read:
    """A source as the user named it: files of one format, and how to read them."""

    files: tuple[SourceFile, ...]
    format: str
    options: ReadOptions
    folders: tuple[str, ...] = ()  # folders named whole: a destination may not lie in them


@dataclass(frozen=True)
class Chain:
    """A source and the steps on it. A dataset is one or more of these, one after the other."""

    read: Read
    steps: tuple[Step, ...] = ()
    base: int = 0  # what its first file is called in the identity of its rows; see `numbered`
    dense: bool = False  # its files were made by a pass before: their rows are numbered through

    def place_of(self, step: Step) -> int | None:
        """Where a step stands in this chain: the very one, not one like it."""
        return next((at for at, own in enumerate(self.steps) if own is step), None)


@dataclass(frozen=True)
class Write:
    """Where rows go: what of `write`'s arguments the output bytes depend on."""

    format: str = "parquet"
    max_shard: int = 500_000_000
    rewrite: bool = False

    def describe(self) -> dict[str, Any]:
        return {"format": self.format, "max_shard_size": self.max_shard, "rewrite": self.rewrite}


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


def numbered(chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """Chains with their files numbered through: identities stay when a pass puts other files in their place."""
    made: list[Chain] = []
    base = 0
    for chain in chains:
        made.append(replace(chain, base=base))
        base += len(chain.read.files)
    return tuple(made)


def describe(chains: Sequence[Chain], write: Write | None) -> dict[str, Any]:
    """The plan in words and values: what the journal compares and the receipt shows."""
    sources: list[dict[str, Any]] = []
    for chain in chains:
        inputs: dict[str, str] = {}
        for file in chain.read.files:
            name = file.name if file.name not in inputs else f"{file.name} ({len(inputs)})"
            inputs[name] = fingerprint(file)
        sources.append(
            {
                "read": chain.read.format,
                **chain.read.options.describe(),
                "inputs": inputs,
                "steps": [{step.name: step.describe()} for step in chain.steps],
            }
        )
    made: dict[str, Any] = {"format": FORMAT, "sources": sources}
    if write is not None:
        made["write"] = write.describe()
    return made


def key_of(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def fingerprint(file: SourceFile) -> str:
    about = f"{file.bytes} {file.modified} {file.inode} {file.digest}"
    return hashlib.sha256(about.encode()).hexdigest()[:32]


# -- spans and schemas ------------------------------------------------------------------------------------------------


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


def limit_rows(chains: Sequence[Chain], spans: list[list[Span]]) -> list[list[Span]]:
    """Count off every limit that can be: rows known, and only row-keeping steps before it.

    A limit on a concatenation is the same `Limit` in each of its chains.
    """
    spans = [list(one) for one in spans]
    for limit in _limits(chains):
        left = limit.rows
        for at, chain in enumerate(chains):
            if chain.place_of(limit) is None:
                continue
            kept: list[Span] = []
            for span in spans[at]:
                if left <= 0:
                    break
                rows = span.rows if span.take < 0 else span.take
                kept.append(span if rows <= left else span.taking(left))
                left -= max(0, rows)
            spans[at] = kept
    return spans


def first_dynamic_limit(chains: Sequence[Chain]) -> Limit | None:
    """The first limit that only running can count off: a step before it may drop rows or make more."""
    for limit in _limits(chains):
        for chain in chains:
            before = chain.steps[: chain.place_of(limit) or 0]
            if any(not step.keeps_rows and not isinstance(step, Limit) for step in before):
                return limit
    return None


def _limits(chains: Sequence[Chain]) -> Iterator[Limit]:
    """Every limit once, in order: one on a concatenation is the same object in each of its chains."""
    seen: set[int] = set()
    for chain in chains:
        for step in chain.steps:
            if isinstance(step, Limit) and id(step) not in seen:
                seen.add(id(step))
                yield step


# -- tasks ------------------------------------------------------------------------------------------------------------


def plan_pass(
    chains: Sequence[Chain], write: Write, *, folder: str, name: str = "p0", surveys: Surveys | None = None
) -> Pass:
    """The tasks that write these chains, spliced where nothing needs decoding."""
    spliced = _plan_splice(chains, write, folder=folder, name=name)
    if isinstance(spliced, Pass):
        return spliced
    return _plan_stage(chains, write, folder=folder, name=name, surveys=surveys or {}, why=spliced)


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
        cost, heaviest = _cost(piece, branches[piece.branch], write)
        file = files[heaviest.file].name
        part = (
            f"row group {heaviest.start}"
            if branches[piece.branch].format == "parquet"
            else f"byte {heaviest.start:,} on"
        )
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


def _cost(piece: Piece, branch: Branch, write: Write) -> tuple[int, Span]:
    """Projected bytes of a task, and the span that makes it so large.

    Reading, the batch in hand, the steps one after the other, and the writer: upper bounds, each measured.
    """
    source, sink = source_of(branch.format), sink_of(write.format)
    heaviest = max(piece.spans, key=source.cost)
    # A batch holds 8 MiB, or one row that is larger;
    batch = max(BATCH_BYTES, heaviest.row)
    steps = max((step.cost(batch) for step in branch.steps), default=0)
    cost = source.cost(heaviest) + batch + steps + sink.cost(batch, piece.bytes)
    return OVERHEAD + cost + cost // 32, heaviest


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


# -- splicing ---------------------------------------------------------------------------------------------------------


def _plan_splice(chains: Sequence[Chain], write: Write, *, folder: str, name: str) -> Pass | str:
    """The pass that moves column chunks, or why it cannot."""
    if write.format != "parquet":
        return f"{write.format} is written row by row"
    if write.rewrite:
        return "rewrite was asked for"
    for chain in chains:
        if chain.read.format != "parquet":
            return f"{chain.read.format} must be parsed"
        for step in chain.steps:
            if not isinstance(step, MovesColumns | Limit):
                return f"{step.name} needs the rows"
    moves = [_moved(chain) for chain in chains]
    if any([new for _, new in move] != [new for _, new in moves[0]] for move in moves):
        return "the sources have other columns"
    if len(chains) > 1 and any(old != new for move in moves for old, new in move):
        return "columns are renamed in a concatenation"
    first: Footer | None = None
    spans: list[list[Span]] = []
    paths: list[str] = []
    stored = 0
    names = tuple(old for old, _ in moves[0])
    as_is = True
    longest = 0
    for chain in chains:
        own: list[Span] = []
        for file in chain.read.files:
            footer = read_footer(file.path)
            first = first or footer
            if (reason := splicing.why_not([first, footer], columns=names)) is not None:
                return reason
            longest = max(longest, len(footer.raw))
            as_is = as_is and names == footer.columns
            own += _light_spans(footer, len(paths), None if set(names) == set(footer.columns) else frozenset(names))
            paths.append(file.path)
            stored += file.bytes
        spans.append(own)
    assert first is not None
    limited = limit_rows(chains, spans)
    flat = [span for own in limited for span in own]
    if any(span.take >= 0 for span in flat):
        return "the limit falls inside a row group"
    changed = names != first.columns or any(old != new for old, new in moves[0])
    job = SpliceJob(
        paths=tuple(paths),
        folder=folder,
        columns=None if as_is else names,
        rename={old: new for old, new in moves[0] if old != new},
        key_values=moved_metadata(first, moves[0]) if changed else {},
        schema_from=paths[0],
    )
    cost = SpliceJob.COST + SpliceJob.FOOTER_COST * longest
    tasks = tuple(
        Task(f"task/{name}/{at:06d}", (f"{name}-{at:06d}", shard), cost, f"shard {at}", "splicing")
        for at, shard in enumerate(_splice_shards(flat, write.max_shard))
    )
    rows = sum(span.rows for span in flat)
    size = sum(span.bytes for span in flat)
    whole = sum(span.bytes for own in spans for span in own)
    return Pass(
        name, job, tasks, spliced=True, why="nothing needs decoding", rows=rows, bytes=size,
        stored=int(stored * size / whole) if whole else stored, shards=max(1, len(tasks)),
    )  # fmt: skip


def _moved(chain: Chain) -> list[tuple[str, str]]:
    """(name in the file, name written) of every column, after all steps."""
    names = list(chain.read.options.columns or read_footer(chain.read.files[0].path).columns)
    pairs = [(name, name) for name in names]
    for step in chain.steps:
        if isinstance(step, MovesColumns):
            origin = {new: old for old, new in pairs}
            pairs = [(origin[before], after) for before, after in step.moved([new for _, new in pairs])]
    return pairs


def _light_spans(footer: Footer, ordinal: int, wanted: frozenset[str] | None) -> Iterator[Span]:
    """Row groups sized by their footer alone: a splice holds no page."""
    row = 0
    for group in range(footer.row_groups):
        rows = footer.group_rows(group)
        if wanted is None:
            size = footer.group_bytes(group)
        else:
            size = sum(chunk.bytes for chunk in footer.chunks(group) if chunk.path[0] in wanted)
        yield Span(ordinal, group, group + 1, row, rows, bytes=size, heaviest=0, row=0)
        row += rows


def _splice_shards(spans: Sequence[Span], max_shard: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Row groups into shards: (file, first group, stop group) of each run of neighbours."""
    held: list[tuple[int, int, int]] = []
    size = 0
    for span in spans:
        if held and size + span.bytes > max_shard:
            yield tuple(held)
            held, size = [], 0
        if held and held[-1][0] == span.file and held[-1][2] == span.start:
            held[-1] = (span.file, held[-1][1], span.stop)
        else:
            held.append((span.file, span.start, span.stop))
        size += span.bytes
    if held or not spans:
        yield tuple(held)

"""Splicing: column chunks moved into shards, nothing decoded. Without Arrow throughout, so a worker takes 10 MB."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from penstock.chains import Chain, Write, limit_rows
from penstock.engines.notes import Notes
from penstock.engines.task import Result, Task
from penstock.files import Writing
from penstock.media.weights import group_weights, largest_row
from penstock.parquet import splice as parquet
from penstock.parquet.footer import Footer, read_footer
from penstock.sinks.base import Fragment
from penstock.sources.base import Span
from penstock.steps.columns import MovesColumns
from penstock.steps.limit import Limit

if TYPE_CHECKING:
    from penstock.media.kinds import Leaf
    from penstock.parquet.embed import VirtualShard


@dataclass(frozen=True)
class SpliceJob:
    """One task is one shard: runs of row groups, in order, and the files that media columns refer to."""

    paths: tuple[str, ...]
    folder: str
    columns: tuple[str, ...] | None
    schema_from: str
    rename: Mapping[str, str] = field(default_factory=dict)
    key_values: Mapping[str, str] = field(default_factory=dict)
    leaves: tuple[Leaf, ...] = ()
    COST: ClassVar[int] = 8 << 20
    FOOTER_COST: ClassVar[int] = 6  # footers: the one that is read, and the new one as it grows
    # One worker, which hashes on a second core behind its writing. Before it did, two gained 4 to 15 % over one, and
    # the peak depended on the number of shards.
    most_workers: ClassVar[int] = 1

    def warm_up(self) -> None:
        """Reserved memory is the interpreter; where media are embedded, Arrow too, which reads the references."""
        if self.leaves:
            import penstock.parquet.values  # noqa: F401

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        (stem, runs), _ = payload
        spans = [parquet.Span(self.paths[file], first, stop) for file, first, stop in runs]
        notes.at("splice", where=Path(self.schema_from).name if not runs else Path(spans[0].path).name)
        with Writing(Path(self.folder) / f"{stem}-0000.parquet") as out:
            made = self._lay_out(spans, out) if self.leaves else parquet.splice(spans, out, **self._form())
            out.commit()
        notes.count(rows_read=made.rows, bytes_read=made.bytes, rows_written=made.rows)
        fragment = Fragment(out.path.name, made.rows, made.bytes, out.tell(), out.sha256())
        return {
            "fragments": [fragment.as_record()],
            "read": made.rows,
            "written": made.rows,
            "dropped": {},
            "first_error": "",
        }

    def _form(self) -> dict[str, Any]:
        return {
            "columns": self.columns,
            "rename": self.rename,
            "key_values": self.key_values,
            "schema_from": self.schema_from,
        }

    def _lay_out(self, spans: Sequence[parquet.Span], out: Writing) -> VirtualShard:
        from penstock.parquet.embed import virtual_shard
        from penstock.parquet.stream import lay_out

        shard = virtual_shard(spans, leaves=self.leaves, **self._form())
        lay_out(shard, out)
        return shard


@dataclass(frozen=True)
class SplicePlan:
    """A job, its tasks, and what they will write: rows, Arrow bytes with media, bytes on disk."""

    job: SpliceJob
    tasks: tuple[Task, ...]
    rows: int
    bytes: int
    stored: int
    weights: tuple[tuple[int, int], ...]  # (rows, Arrow bytes with media) of each shard
    largest_row: int | None  # where reference files tell


def plan_splice(chains: Sequence[Chain], write: Write, *, folder: str, name: str) -> SplicePlan | str:
    """The tasks that move column chunks, or why that cannot be."""
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
    largest: int | None = None
    for chain in chains:
        own: list[Span] = []
        for file in chain.read.files:
            footer = read_footer(file.path)
            first = first or footer
            if (reason := parquet.why_not([first, footer], columns=names)) is not None:
                return reason
            longest = max(longest, len(footer.raw))
            as_is = as_is and names == footer.columns
            wanted = None if set(names) == set(footer.columns) else frozenset(names)
            media = group_weights(footer, wanted)
            own += _light_spans(footer, len(paths), wanted, media)
            if (row := largest_row(footer)) is not None:
                largest = max(largest or 0, row)
            paths.append(file.path)
            stored += file.bytes + sum(media or ())
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
        leaves=_leaves(paths[0], names) if group_weights(first) is not None else (),
    )
    cost = SpliceJob.COST + SpliceJob.FOOTER_COST * longest
    shards = list(_splice_shards(flat, write))
    tasks = tuple(
        Task(f"task/{name}/{at:06d}", (f"{name}-{at:06d}", _runs(shard)), cost, f"shard {at}", "splicing")
        for at, shard in enumerate(shards)
    )
    weights = tuple((sum(span.rows for span in shard), sum(span.bytes for span in shard)) for shard in shards)
    rows = sum(span.rows for span in flat)
    size = sum(span.bytes for span in flat)
    whole = sum(span.bytes for own in spans for span in own)
    share = size / whole if whole else 1.0
    return SplicePlan(job, tasks, rows, size, int(stored * share), weights, largest)


def _leaves(path: str, names: Sequence[str]) -> tuple[Leaf, ...]:
    """Where a reference file has media, among the columns that stay."""
    import pyarrow.parquet as pq

    from penstock.media.kinds import leaves_of

    return tuple(leaf for leaf in leaves_of(pq.read_schema(path)) if leaf.column in names)


def _moved(chain: Chain) -> list[tuple[str, str]]:
    """(name in the file, name written) of every column, after all steps."""
    names = list(chain.read.options.columns or read_footer(chain.read.files[0].path).columns)
    pairs = [(name, name) for name in names]
    for step in chain.steps:
        if isinstance(step, MovesColumns):
            origin = {new: old for old, new in pairs}
            pairs = [(origin[before], after) for before, after in step.moved([new for _, new in pairs])]
    return pairs


def _light_spans(
    footer: Footer, ordinal: int, wanted: frozenset[str] | None, weights: Sequence[int] | None
) -> Iterator[Span]:
    """Row groups sized by their footer, and by the files they refer to: a splice holds no page."""
    row = 0
    for group in range(footer.row_groups):
        rows = footer.group_rows(group)
        if wanted is None:
            size = footer.group_bytes(group)
        else:
            size = sum(chunk.bytes for chunk in footer.chunks(group) if chunk.path[0] in wanted)
        size += weights[group] if weights is not None else 0
        yield Span(ordinal, group, group + 1, row, rows, bytes=size, heaviest=0, row=0)
        row += rows


def _splice_shards(spans: Sequence[Span], write: Write) -> Iterator[list[Span]]:
    """Row groups into shards: a new one before the row group that would pass the limit, or as many as asked for."""
    if write.num_shards is not None:
        yield from even_shards(spans, write.num_shards)
        return
    held: list[Span] = []
    size = 0
    for span in spans:
        if held and size + span.bytes > write.max_shard:
            yield held
            held, size = [], 0
        held.append(span)
        size += span.bytes
    if held or not spans:
        yield held


class Weighs(Protocol):
    """A row group, to who only puts it into a shard."""

    @property
    def bytes(self) -> int: ...


W = TypeVar("W", bound=Weighs)


def even_shards(spans: Sequence[W], count: int) -> Iterator[list[W]]:
    """As many shards as were asked for, or as there are row groups, cut where their bytes come nearest to even."""
    count = max(1, min(count, len(spans)))
    total = sum(span.bytes for span in spans)
    start = passed = 0
    for at in range(1, count + 1):
        # Each of those still to come needs a row group of its own.
        stop, most = start + 1, len(spans) - (count - at)
        passed += spans[start].bytes if spans else 0
        while stop < most and (at == count or passed + spans[stop].bytes // 2 <= total * at // count):
            passed += spans[stop].bytes
            stop += 1
        yield list(spans[start:stop])
        start = stop


def _runs(shard: Sequence[Span]) -> tuple[tuple[int, int, int], ...]:
    """(file, first group, stop group) of each run of neighbours."""
    runs: list[tuple[int, int, int]] = []
    for span in shard:
        if runs and runs[-1][0] == span.file and runs[-1][2] == span.start:
            runs[-1] = (span.file, runs[-1][1], span.stop)
        else:
            runs.append((span.file, span.start, span.stop))
    return tuple(runs)


def moved_metadata(footer: Footer, moved: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Arrow's own schema, for the columns that stay: without it, types that Parquet has no word for would be lost.
    Features that `datasets` declared there go on with it."""
    import base64

    import pyarrow as pa

    from penstock.media.declare import KEY, declare
    from penstock.publish.features import declared_features

    made: dict[str, str] = {}
    if (stored := footer.key_values.get("ARROW:schema")) is not None:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored)))
        fields = [schema.field(old).with_name(new) for old, new in moved if old in schema.names]
        if len(fields) == len(moved):
            known = declared_features(footer.key_values.get(KEY.decode()))
            new = declare(pa.schema(fields), known={new: known[old] for old, new in moved if old in known})
            made["ARROW:schema"] = base64.b64encode(new.serialize().to_pybytes()).decode()
            if KEY in (new.metadata or {}):
                made[KEY.decode()] = new.metadata[KEY].decode()
    return made

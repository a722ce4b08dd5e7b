"""A stage: the steps between two exchanges, fused, run piece by piece in a worker. This is the job that tasks share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.engines.notes import Notes
from penstock.engines.task import Result
from penstock.errors import FunctionFailed, PenstockError
from penstock.sinks import sink_of
from penstock.sinks.base import FragmentWriter
from penstock.sources import source_of
from penstock.sources.base import ReadOptions, SourceFile, Span, Tally
from penstock.steps.base import Step

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


# The plan's batches: a user function that looks across its batch sees the same ones on every budget.
BATCH_BYTES = 8 << 20
BATCH_ROWS = 16_384
MEND = "what is committed stays; a function that is mended is another plan, and needs --restart"


@dataclass(frozen=True)
class Branch:
    """One source and the steps on it. A dataset that concatenates has several, each writing in its turn."""

    format: str
    options: ReadOptions
    schema: pa.Schema  # what the source is read as
    steps: tuple[Step, ...]
    first_file: int = 0  # its first file's place among all files of the plan
    base: int = 0  # and what that file is called in the identity of its rows
    dense: bool = False  # rows of all its files are numbered through: they were made by a pass before

    def file_of_identity(self, file: int) -> int:
        return self.base if self.dense else self.base + file - self.first_file


@dataclass(frozen=True)
class Piece:
    """What one task reads: spans of one branch, in order."""

    branch: int
    spans: tuple[Span, ...]

    @property
    def bytes(self) -> int:
        return sum(span.bytes for span in self.spans)

    @property
    def large(self) -> bool:
        """Whether a row of it may be larger than a batch."""
        return any(span.row > BATCH_BYTES for span in self.spans)


def even_share(size: int, most: int) -> int:
    """What each of the fewest equal parts of `size` may hold: a piece a little over a shard makes no crumb.

    >>> even_share(520, 500), even_share(90, 500)
    (273, 500)
    """
    parts = -(-size // most)
    return most if parts <= 1 else min(most, size // parts * 21 // 20)


class Schemas:
    """The schema after each step of a branch: known from the plan, or learned from a map's first batch."""

    def __init__(self, branch: Branch, learned: Mapping[int, pa.Schema]) -> None:
        self._branch = branch
        self._after: list[pa.Schema | None] = []
        self.known(learned)

    def known(self, learned: Mapping[int, pa.Schema]) -> None:
        schema: pa.Schema | None = self._branch.schema
        self._after = []
        for at, step in enumerate(self._branch.steps):
            schema = step.schema_after(schema) if schema is not None else None
            if schema is None:
                schema = learned.get(at)
            self._after.append(schema)

    def after(self, step: int) -> pa.Schema | None:
        return self._after[step]

    def last(self) -> pa.Schema | None:
        return self._after[-1] if self._after else self._branch.schema


@dataclass
class Counts:
    """Rows in, rows out, and why the others are gone."""

    read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_error: str = ""  # the first malformed row that was skipped

    def drop(self, reason: str, rows: int) -> None:
        if rows > 0:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows


def flow(
    branch: Branch,
    files: Sequence[SourceFile],
    spans: Sequence[Span],
    *,
    notes: Notes | None = None,
    learned: dict[int, pa.Schema] | None = None,
    on_learned: Callable[[int, pa.Schema], None] = lambda step, schema: None,
    counts: Counts | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Rows]:
    """The rows of some spans after all steps of their branch, a batch at a time."""
    from penstock.rows import cut_batches

    source = source_of(branch.format)
    learned = {} if learned is None else learned
    counts = counts or Counts()
    tally = Tally()
    schemas = Schemas(branch, learned)
    for ordinal, group in groupby(spans, key=lambda span: span.file):
        file = files[ordinal]
        if notes is not None:
            notes.at(f"read {branch.format}", where=file.name, rows=(0, 0))
        small = source.read(file, list(group), branch.schema, branch.options, tally)
        for read in cut_batches(small, file=branch.file_of_identity(ordinal)):
            if stop():
                return
            rows = read
            counts.read += rows.batch.num_rows
            if notes is not None:
                notes.count(rows_read=rows.batch.num_rows, bytes_read=rows.batch.nbytes)
            for at, step in enumerate(branch.steps):
                before = rows.batch.num_rows
                if before == 0:
                    break
                if notes is not None:
                    notes.at(f"step {at + 1} ({step.name})", rows=(rows.first, rows.stop))
                rows = _apply(step, at, rows, schemas.after(at), file)
                counts.drop(step.name, before - rows.batch.num_rows)
                if schemas.after(at) is None:
                    learned[at] = rows.batch.schema
                    schemas.known(learned)
                    on_learned(at, rows.batch.schema)
            if notes is not None:
                notes.at(f"read {branch.format}", rows=(rows.stop, rows.stop))
            if rows.batch.num_rows:
                yield rows
    counts.drop("malformed", tally.skipped)
    counts.first_error = tally.first_error


def _apply(step: Step, at: int, rows: Rows, schema: pa.Schema | None, file: SourceFile) -> Rows:
    """The step on one batch. What goes wrong is told with the step, the file, the rows and the user's own line."""
    place = f"step {at + 1} ({step.name}), {file.name} rows {rows.first:,} to {rows.stop - 1:,}"
    try:
        return step.apply(rows, schema)
    except MemoryError:
        raise
    except PenstockError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise type(error)(error.what + _line_of(error.__cause__), where=place, do=error.do or MEND) from error
    except (Exception, SystemExit) as error:
        if not step.calls_user:
            raise
        what = f"the function raised {type(error).__name__}: {error}{_line_of(error)}"
        raise FunctionFailed(what, where=place, do=MEND) from error


def _line_of(error: BaseException | None) -> str:
    """Where in the user's own code it broke: the last frame that is not ours."""
    import traceback

    if error is None:
        return ""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "penstock" not in Path(frame.filename).parts
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


@dataclass(frozen=True)
class StageJob:
    """Run a piece through its branch and write what comes out as fragments."""

    files: tuple[SourceFile, ...]
    branches: tuple[Branch, ...]
    format: str
    folder: str
    max_shard: int
    most_workers: ClassVar[int] = 1 << 16

    def warm_up(self) -> None:
        """Import all that a task will, and make each library allocate what it keeps."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        import penstock.kernels.formats
        import penstock.rows  # noqa: F401

        for branch in self.branches:
            source_of(branch.format)
            for step in branch.steps:
                if step.calls_user:
                    pa.array([0])  # imports pandas where it is installed: 32 MB that a user's function would meet later
                if (wanted := getattr(step, "format", "")) in ("pandas", "polars"):
                    __import__(wanted)
        sink_of(self.format)
        buffer = pa.BufferOutputStream()
        table = pa.table([pa.nulls(64, pa.string()), pa.nulls(64, pa.int64())], names=["text", "id"])
        with pq.ParquetWriter(buffer, table.schema, compression="zstd") as writer:
            writer.write_table(table)
        with pq.ParquetFile(pa.BufferReader(buffer.getvalue()), pre_buffer=False) as opened:
            for _ in opened.iter_batches(16, use_threads=False):
                pass

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        (stem, piece), shared = payload
        branch = self.branches[piece.branch]
        learned: dict[int, pa.Schema] = {
            at + len(branch.steps): schema for (own, at), schema in shared["learned"].items() if own == piece.branch
        }
        counts = Counts()
        written = 0
        writer: FragmentWriter | None = None
        sink = sink_of(self.format)
        try:
            with closing(
                flow(
                    branch,
                    self.files,
                    piece.spans,
                    notes=notes,
                    learned=learned,
                    on_learned=lambda at, schema: say((at - len(branch.steps), schema)),
                    counts=counts,
                )
            ) as batches:
                for rows in batches:
                    if writer is None:
                        most = even_share(piece.bytes, self.max_shard)
                        writer = FragmentWriter(
                            sink, Path(self.folder), stem, rows.batch.schema, max_bytes=most, large=piece.large
                        )
                    notes.at(f"write {self.format}", rows=(rows.first, rows.stop))
                    writer.write(rows.batch)
                    written += rows.batch.num_rows
                    notes.count(rows_written=rows.batch.num_rows)
            fragments = writer.finish() if writer is not None else []
        finally:
            if writer is not None:
                writer.close()
        return {
            "fragments": [fragment.as_record() for fragment in fragments],
            "read": 0 if branch.dense else counts.read,  # rows of a pass before were read there
            "written": written,
            "dropped": counts.dropped,
            "first_error": counts.first_error,
        }

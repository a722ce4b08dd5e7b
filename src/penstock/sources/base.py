"""What every source is: files, spans of them known from metadata alone, and a way to read spans in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from penstock.engines.notes import Notes

    Ordinals = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class SourceFile:
    """One input file as it was planned. A file that no longer matches is not read."""

    path: str
    name: str  # relative to what the user named: what receipts show
    bytes: int
    modified: int  # ns
    inode: int
    digest: str  # of its head and tail, where footers are
    by_content: bool = False  # a table that was spooled: its digest is of all of it, and where it lies says nothing


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one file: the least that a task can read by itself."""

    file: int  # ordinal of its file in the plan
    start: int  # row groups of a Parquet file, bytes of a text file
    stop: int
    first_row: int  # ordinal of its first row in its file
    rows: int  # -1: not known yet
    bytes: int  # Arrow bytes, projected from metadata
    heaviest: int  # the most bytes that must be held at once to read it: pages, a block of lines
    row: int  # the most that one row can take
    at_once: int = 0  # rows to decode at a time, where the format lets one choose
    take: int = -1  # rows to read from its start; -1: all

    def taking(self, rows: int) -> Span:
        share = rows / self.rows if self.rows > 0 else 1.0
        return replace(self, take=rows, bytes=int(self.bytes * share))


@dataclass(frozen=True)
class ReadOptions:
    """How a user asked for a source to be read."""

    columns: tuple[str, ...] | None = None
    on_error: str = "raise"
    infer: str = "full"
    schema: bytes | None = None  # a serialized Arrow schema the user passed

    def given_schema(self) -> pa.Schema | None:
        import pyarrow as pa

        return None if self.schema is None else pa.ipc.read_schema(pa.py_buffer(self.schema))

    def describe(self) -> dict[str, Any]:
        import hashlib

        given = hashlib.sha256(self.schema).hexdigest()[:16] if self.schema is not None else None
        return {"columns": list(self.columns) if self.columns is not None else None, "on_error": self.on_error,
                "infer": self.infer, "schema": given}  # fmt: skip


@dataclass
class Tally:
    """Rows a read left out, and why; filled in as it goes."""

    skipped: int = 0
    first_error: str = ""

    def skip(self, rows: int, error: str | None) -> None:
        self.skipped += rows
        self.first_error = self.first_error or error or ""


@dataclass(frozen=True)
class Small:
    """A batch as a source finds it handy to give, of any size, and the ordinals of its rows."""

    first: int
    batch: pa.RecordBatch
    ordinals: Ordinals | None = None  # None: consecutive from `first`


@dataclass(frozen=True)
class Surveyed:
    """What the survey found in one span of a text file."""

    rows: int
    lines: int
    longest: int
    schema: bytes
    skipped: int
    bytes: int  # of text, inflated


class Source(Protocol):
    """A format. Stateless: everything it knows of a file is in the `Span`s it gave."""

    format: str
    surveyed: bool  # text: types and rows are only known by reading

    def spans(self, file: SourceFile, ordinal: int, columns: Sequence[str] | None) -> list[Span]:
        """All of a file, in order, from metadata alone."""

    def schema(self, file: SourceFile, options: ReadOptions) -> pa.Schema:
        """The file's columns and types, from metadata or, for text, from its first few MiB."""

    def survey(self, file: SourceFile, span: Span, options: ReadOptions, notes: Notes) -> Surveyed:
        """Read a span of text for its types, rows and longest row."""

    def read(
        self, file: SourceFile, spans: Sequence[Span], schema: pa.Schema, options: ReadOptions, tally: Tally
    ) -> Iterator[Small]:
        """The rows of consecutive spans of one file."""

    def cost(self, span: Span) -> int:
        """Bytes one worker takes, at most, to read this span: what `read` holds beside the batches it has given."""

"""Parquet: spans are row groups, sized from footers and page headers, read a few MiB at a time.

With `pre_buffer=False` and a small `buffer_size`, a row group of 1.6 GB peaks at 85 MB; with the defaults at 834.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import BadFile, UsageError
from penstock.parquet.footer import Chunk, Footer, open_parquet, read_footer
from penstock.parquet.pages import page_facts
from penstock.sources.base import ReadOptions, Small, SourceFile, Span, Surveyed, Tally
from penstock.sources.local import check_unchanged

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.engines.notes import Notes

DECODE_BYTES = 2 << 20
READ_BUFFER = 1 << 20
# A chunk this small cannot hold a page that matters: its headers are not walked.
SMALL_CHUNK = 2 << 20
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


class ParquetSource:
    format = "parquet"
    surveyed = False

    def spans(self, file: SourceFile, ordinal: int, columns: Sequence[str] | None) -> list[Span]:
        spans = []
        row = 0
        with open_parquet(file.path) as (fd, footer):
            wanted = None if columns is None else frozenset(columns)
            held = len(footer.raw) * FOOTER_COST
            for group in range(footer.row_groups):
                rows = footer.group_rows(group)
                facts = _group_facts(fd, footer, group, wanted)
                spans.append(
                    Span(
                        ordinal,
                        group,
                        group + 1,
                        row,
                        rows,
                        bytes=facts.decoded,
                        heaviest=facts.held + held,
                        row=facts.largest,
                        at_once=max(1, min(16_384, int(DECODE_BYTES / max(1.0, facts.row)))),
                    )
                )
                row += rows
        return spans

    def schema(self, file: SourceFile, options: ReadOptions) -> pa.Schema:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(file.path)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from error
        return schema

    def survey(self, file: SourceFile, span: Span, options: ReadOptions, notes: Notes) -> Surveyed:
        raise AssertionError("Parquet needs no survey: its footer tells")

    def read(
        self, file: SourceFile, spans: Sequence[Span], schema: pa.Schema, options: ReadOptions, tally: Tally
    ) -> Iterator[Small]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from penstock.schemas import conform

        check_unchanged(file)
        names = [name for name in schema.names if name in read_footer(file.path).columns]
        try:
            with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=READ_BUFFER) as opened:
                for run in _runs(spans):
                    row, left = run[0].first_row, sum(span.rows if span.take < 0 else span.take for span in run)
                    batches = opened.iter_batches(
                        min(span.at_once for span in run),
                        row_groups=[group for span in run for group in range(span.start, span.stop)],
                        columns=names,
                        use_threads=False,
                    )
                    for batch in batches:
                        batch = conform(batch.slice(0, left), schema)
                        yield Small(row, batch)
                        row += batch.num_rows
                        left -= batch.num_rows
                        if left <= 0:
                            break
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from error

    def cost(self, span: Span) -> int:
        return span.heaviest + 4 * DECODE_BYTES + (6 << 20)


# Arrow's own picture of a footer, in footers: measured on files of 10,000 row groups.
FOOTER_COST = 10


class _Facts:
    """What reading a row group takes: bytes decoded, bytes held at once, the densest page's mean row, its largest."""

    def __init__(self) -> None:
        self.decoded = 0
        self.held = 0
        self.row = 0.0
        self.largest = 0


def _group_facts(fd: int, footer: Footer, group: int, wanted: frozenset[str] | None) -> _Facts:
    facts = _Facts()
    rows = max(1, footer.group_rows(group))
    for chunk in footer.chunks(group):
        if wanted is not None and chunk.path[0] not in wanted:
            continue
        page, dictionary, entry = chunk.bytes, 0, 0.0
        value = chunk.bytes / max(1, chunk.num_values)
        if chunk.bytes > SMALL_CHUNK or (chunk.has_dictionary and chunk.physical == "BYTE_ARRAY"):
            pages = page_facts(fd, chunk, path=footer.path)
            page, dictionary, value = pages.largest, pages.dictionary, pages.densest
            entry = dictionary / max(1, pages.dictionary_values)
        decoded = _decoded(chunk, entry)
        facts.decoded += decoded
        # A column holds its page as stored and as inflated, its dictionary likewise, and a stretch read ahead.
        facts.held += 2 * page + 2 * dictionary + min(READ_BUFFER, chunk.stored)
        fixed = _WIDTHS.get(chunk.physical) if chunk.num_values == rows else None
        facts.largest += max(page, dictionary) if fixed is None else fixed
        per_row = chunk.num_values / rows
        facts.row += max(decoded / rows, max(value, entry) * per_row)
    return facts


def _decoded(chunk: Chunk, entry: float) -> int:
    """Arrow bytes of a chunk: exact where the footer tells, else from its dictionary's mean entry, else as stored."""
    if (width := _WIDTHS.get(chunk.physical)) is not None:
        return chunk.num_values * width
    if chunk.decoded is not None:
        return chunk.decoded + 4 * chunk.num_values
    return max(chunk.bytes, int(entry * chunk.num_values))


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Neighbouring row groups that can be decoded as one: rows of about the same size, none cut short."""
    run: list[Span] = []
    for span in spans:
        if run and (run[-1].take >= 0 or not 0.5 <= span.at_once / run[0].at_once <= 2):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _unreadable(file: SourceFile, error: BaseException) -> BadFile | UsageError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadFile(f"cannot be decoded ({reason})", where=file.name, do="fetch it again, or leave it out")


SOURCE = ParquetSource()

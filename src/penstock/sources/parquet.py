"""Parquet: spans are row groups, sized from footers and page headers, read a few MiB at a time.

With `pre_buffer=False` and a small `buffer_size`, a row group of 1.6 GB peaks at 85 MB; with the defaults at 834.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import BadFile, UsageError
from penstock.parquet.footer import Chunk, Footer, open_parquet
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
        with open_parquet(file.path) as (fd, footer):
            names = [name for name in schema.names if name in footer.columns]
            wanted = frozenset(names)
            counts = {
                group: _rows_at_once(_group_facts(fd, footer, group, wanted), footer.group_rows(group))
                for span in spans
                for group in range(span.start, span.stop)
            }
        try:
            with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=READ_BUFFER) as opened:
                for span in spans:
                    row, left = span.first_row, span.rows if span.take < 0 else span.take
                    for group in range(span.start, span.stop):
                        batches = opened.iter_batches(
                            counts[group], row_groups=[group], columns=names, use_threads=False
                        )
                        for batch in batches:
                            batch = conform(batch.slice(0, left), schema)
                            yield Small(row, batch)
                            row += batch.num_rows
                            left -= batch.num_rows
                            if left <= 0:
                                break
                        if left <= 0:
                            break
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from error

    def cost(self, span: Span) -> int:
        return span.heaviest + 4 * DECODE_BYTES + (6 << 20)


# Arrow's own picture of a footer, in footers: measured on files of 10,000 row groups.
FOOTER_COST = 5


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


def _rows_at_once(facts: _Facts, rows: int) -> int:
    return max(1, min(rows, 16_384, int(DECODE_BYTES / max(1.0, facts.row))))


def _unreadable(file: SourceFile, error: BaseException) -> BadFile | UsageError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadFile(f"cannot be decoded ({reason})", where=file.name, do="fetch it again, or leave it out")


SOURCE = ParquetSource()

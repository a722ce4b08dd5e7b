"""JSON lines, plain or compressed: spans are byte ranges of plain files, whole files of compressed ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.sources.base import ReadOptions, Small, SourceFile, Span, Surveyed, Tally
from penstock.sources.local import check_unchanged

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.engines.notes import Notes
    from penstock.sources.json_rows import Others
    from penstock.sources.lines import Block

SPAN_BYTES = 32 << 20
BLOCK_BYTES = 4 << 20
SAMPLE_BYTES = 8 << 20
# A block while it is parsed: its text, what is left of the one before, and the columns growing out of it (measured).
BLOCK_COST = 5
LONG_LINE_COST = 4
# Text inflates by about this much where only reading can tell.
INFLATES = 4
_BLANK = re.compile(rb"^[ \t\r]*$", re.MULTILINE)


class JsonlSource:
    format = "jsonl"
    surveyed = True

    def spans(self, file: SourceFile, ordinal: int, columns: Sequence[str] | None) -> list[Span]:
        from penstock.sources.lines import compression_of, zstd_window

        kind = compression_of(file.path)
        if kind is None:
            edges = [*range(0, file.bytes, SPAN_BYTES), file.bytes]
            return [
                Span(ordinal, start, stop, -1, -1, bytes=stop - start, heaviest=0, row=0)
                for start, stop in pairwise(edges)
            ]
        window = zstd_window(file.path) if kind == "zstd" else 64 << 10
        return [Span(ordinal, 0, file.bytes, -1, -1, bytes=file.bytes * INFLATES, heaviest=2 * window, row=0)]

    def schema(self, file: SourceFile, options: ReadOptions) -> pa.Schema:
        """From the first few MiB."""
        from penstock.sources.json_rows import infer
        from penstock.sources.lines import blocks, compression_of

        schema: pa.Schema | None = None
        line = 0
        for block in blocks(file.path, compression=compression_of(file.path), size=BLOCK_BYTES):
            found = infer(block, where=file.name, first_line=line, on_error=options.on_error)
            schema = self._fold(schema, found.schema, file.name)
            line += block.lines
            if block.offset + len(block.data) >= SAMPLE_BYTES:
                break
        import pyarrow as pa

        return schema if schema is not None else pa.schema([])

    def survey(self, file: SourceFile, span: Span, options: ReadOptions, notes: Notes) -> Surveyed:
        import pyarrow as pa

        from penstock.sources.json_rows import check_wide, infer, parse
        from penstock.sources.lines import longest_line

        schema: pa.Schema | None = None
        wide: dict[str, str] = {}
        rows = lines = longest = size = skipped = 0
        infers = options.schema is None and options.infer == "full"
        check_unchanged(file)
        for block in self._blocks(file, span):
            notes.at("survey jsonl", rows=(lines, lines + block.lines))
            size += len(block.data)
            if infers:
                found = infer(block, where=file.name, first_line=self._line(lines, span), on_error=options.on_error)
                schema = self._fold(schema, found.schema, file.name)
                wide = dict(found.wide) | wide
                check_wide(schema, wide)
                rows += found.rows
                skipped += found.skipped
                longest = max(longest, found.longest)
            elif options.on_error == "skip":
                given = options.given_schema() or self.schema(file, options)
                parsed = parse(block, given, where=file.name, first_line=lines, on_error="skip", others="ignore")
                rows += parsed.batch.num_rows
                skipped += parsed.skipped
                longest = max(longest, longest_line(block.data))
            else:
                rows += block.lines - len(_BLANK.findall(block.data.removesuffix(b"\n"))) if block.data else 0
                longest = max(longest, longest_line(block.data))
            lines += block.lines
            notes.count(rows_read=block.lines, bytes_read=len(block.data))
        schema = schema if schema is not None else pa.schema([])
        return Surveyed(rows, lines, longest, schema.serialize().to_pybytes(), skipped, size)

    def read(
        self, file: SourceFile, spans: Sequence[Span], schema: pa.Schema, options: ReadOptions, tally: Tally
    ) -> Iterator[Small]:
        from penstock.sources.json_rows import parse

        check_unchanged(file)
        others: Others = "error" if options.columns is None and options.schema is None else "ignore"
        for span in spans:
            line = max(0, span.first_row)
            left = span.take if span.take >= 0 else 1 << 62
            for block in self._blocks(file, span):
                if left <= 0:
                    break
                parsed = parse(
                    block, schema, where=file.name, first_line=line, on_error=options.on_error, others=others
                )
                tally.skip(parsed.skipped, parsed.first_error)
                batch = parsed.batch.slice(0, left)
                ordinals = None if parsed.lines is None else parsed.lines[: batch.num_rows] + line
                yield Small(line, batch, ordinals)
                left -= batch.num_rows
                line += block.lines

    def cost(self, span: Span) -> int:
        block = max(BLOCK_BYTES, span.row)
        return span.heaviest + (BLOCK_COST if block <= BLOCK_BYTES else LONG_LINE_COST) * block + (12 << 20)

    def _blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        from penstock.sources.lines import blocks, compression_of

        kind = compression_of(file.path)
        if kind is None:
            return blocks(file.path, start=span.start, stop=span.stop, size=BLOCK_BYTES)
        return blocks(file.path, compression=kind, size=BLOCK_BYTES)

    def _line(self, lines: int, span: Span) -> int:
        return lines if span.start == 0 else -1

    def _fold(self, schema: pa.Schema | None, found: pa.Schema, where: str) -> pa.Schema:
        from penstock.schemas import unify

        return found if schema is None else unify(schema, found, a_where=where, b_where=where)


SOURCE = JsonlSource()

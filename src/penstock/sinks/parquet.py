"""Parquet: zstd, page index, content-defined chunking, row groups cut by Arrow bytes; fragments joined by splicing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import memory
from penstock.files import Writing
from penstock.sinks.base import Encoder

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.parquet.splice import Span

ROW_GROUP_BYTES = 32 << 20
ZSTD_LEVEL = 3
# Values longer than this on average are documents, not categories: a dictionary of them is thrown away after a megabyte
# of hashing, and their minimum and maximum only make the footer long.
LONG_VALUE = 128


class ParquetSink:
    format = "parquet"
    ending = ".parquet"

    def check(self, schema: pa.Schema) -> None:
        """Ask Arrow's own writer, on no rows."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from penstock.errors import UsageError

        for field in schema:
            try:
                pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
                raise UsageError(
                    f"Parquet cannot hold type {field.type} ({error})",
                    where=f"column {field.name!r}",
                    do="map or drop it",
                ) from None

    def encoder(self, out: Writing, schema: pa.Schema, *, large: bool) -> Encoder:
        from penstock.media.kinds import leaves_of
        from penstock.media.references import ReferenceEncoder

        return ReferenceEncoder(out, schema) if leaves_of(schema) else ParquetEncoder(out, schema, large=large)

    def assemble(self, paths: Sequence[Path], out: Writing) -> None:
        from penstock.media.weights import group_weights
        from penstock.parquet.footer import read_footer
        from penstock.parquet.splice import Span, splice

        footers = [read_footer(str(path)) for path in paths]
        spans = [Span(footer.path, 0, footer.row_groups) for footer in footers]
        if group_weights(footers[0]) is None:
            splice(spans, out)
        else:
            _embed(spans, out)

    def cost(self, batch: int, piece: int) -> int:
        """A row group of batches, and its largest column once more on its way through encoder and compressor."""
        group = min(ROW_GROUP_BYTES, piece)
        # Measured with zstd: 12 MB of buffers for ordinary columns; for a single large value, without dictionary and
        # statistics, 2 to 2.5 times itself (6 times with them).
        return group + (batch + (12 << 20) if batch <= 8 << 20 else 5 * batch // 2)


def _embed(spans: Sequence[Span], out: Writing) -> None:
    """Reference files into one shard, the files they refer to in their places."""
    import pyarrow.parquet as pq

    from penstock.media.kinds import leaves_of
    from penstock.parquet.embed import virtual_shard
    from penstock.parquet.stream import lay_out

    lay_out(virtual_shard(spans, leaves=leaves_of(pq.read_schema(spans[0].path))), out)


class ParquetEncoder:
    """Gathers a row group's batches and encodes them as they were handed in: Parquet's bytes depend on the chunking."""

    def __init__(self, out: Writing, schema: pa.Schema, *, large: bool) -> None:
        self._out, self._schema, self._large = out, schema, large
        self._writer: pa.parquet.ParquetWriter | None = None
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        from penstock.kernels.sizes import bins

        for part in bins(batch, carry_rows=self._rows, carry_bytes=self._bytes, max_bytes=ROW_GROUP_BYTES):
            if part.new and self._held:
                self._end_group()
            self._held.append(part.batch)
            self._rows += part.batch.num_rows
            self._bytes += part.bytes

    def finish(self) -> None:
        if self._held or self._writer is None:
            self._end_group()
        assert self._writer is not None
        self._writer.close()

    def _end_group(self) -> None:
        import pyarrow as pa

        table = pa.Table.from_batches(self._held, schema=self._schema)
        self._held = []
        self._rows = self._bytes = 0
        if self._writer is None:
            self._writer = open_writer(self._out, table, long_value=0 if self._large else LONG_VALUE)
        if table.num_rows:
            self._writer.write_table(table, row_group_size=1 << 40)
        del table
        memory.trim()


def open_writer(
    out: Writing, first: pa.Table, *, long_value: int = LONG_VALUE, plain: frozenset[str] = frozenset()
) -> pa.parquet.ParquetWriter:
    """Arrow's writer with our settings; what the first row group holds tells which columns get a dictionary. Leaves
    that are `plain` are stored as they are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    short = [leaf for leaf in _short_columns(first, long_value=long_value) if leaf not in plain]
    compressed = [leaf for field in first.schema for leaf in _leaves(field.name, field.type) if leaf not in plain]
    return pq.ParquetWriter(
        pa.PythonFile(out, mode="w"),
        first.schema,
        compression=dict.fromkeys(compressed, "zstd") if plain else "zstd",
        compression_level=dict.fromkeys(compressed, ZSTD_LEVEL) if plain else ZSTD_LEVEL,
        use_dictionary=short or False,
        write_statistics=short or False,
        write_page_index=True,
        use_content_defined_chunking=True,
        write_batch_size=1024,
    )


def _short_columns(table: pa.Table, *, long_value: int) -> Iterator[str]:
    """Paths of the leaves worth a dictionary and statistics, told by the first row group of a file."""
    import pyarrow as pa

    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        long = pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_binary(kind)
        long = long or pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
        if long and column.nbytes > long_value * len(column):
            continue
        yield from _leaves(name, kind)


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        yield from _leaves(path, kind.storage_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    else:
        yield path


def sink(format: str) -> ParquetSink:
    return ParquetSink()

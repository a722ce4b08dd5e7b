"""Reference files: Parquet whose media columns say where files lie, and whose row groups are cut by what they weigh.

Everything but the media is encoded as it will be published; the media are joined to it when a shard is laid out or
sent. What each row group weighs is in the file's metadata, so a plan of real bytes reads footers alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from penstock import memory
from penstock.files import Writing
from penstock.kernels.sizes import bins
from penstock.media.kinds import leaves_of
from penstock.media.sizes import check_sizes, leaf_bytes, real_bytes
from penstock.media.weights import KEY, stored_weights

ROW_GROUP_BYTES = 64 << 20
ROW_GROUP_ROWS = 16_384


class ReferenceEncoder:
    """Batches with references into one open file. An `Encoder`, as the Parquet sink has them."""

    def __init__(self, out: Writing, schema: pa.Schema, *, row_group_bytes: int = ROW_GROUP_BYTES) -> None:
        self._out, self._schema, self._most = out, schema, row_group_bytes
        self._leaves = leaves_of(schema)
        self._weights: dict[str, list[int]] = {leaf.column: [] for leaf in self._leaves}
        self._writer: pa.parquet.ParquetWriter | None = None
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._before = self._largest = 0

    def write(self, batch: pa.RecordBatch) -> None:
        check_sizes(batch, self._leaves, first_row=self._before)
        self._before += batch.num_rows
        sizes = real_bytes(batch)
        self._largest = max(self._largest, int(sizes.max(initial=0)))
        for part in bins(
            batch,
            carry_rows=self._rows,
            carry_bytes=self._bytes,
            max_rows=ROW_GROUP_ROWS,
            max_bytes=self._most,
            sizes=sizes,
        ):
            if part.new and self._held:
                self._end_group()
            self._held.append(part.batch)
            self._rows += part.batch.num_rows
            self._bytes += part.bytes

    def finish(self) -> None:
        if self._held or self._writer is None:
            self._end_group()
        assert self._writer is not None
        self._writer.add_key_value_metadata({KEY: stored_weights(self._weights, largest_row=self._largest)})
        self._writer.close()

    def _end_group(self) -> None:
        from penstock.sinks.parquet import open_writer

        table = pa.Table.from_batches(self._held, schema=self._schema)
        self._held = []
        self._rows = self._bytes = 0
        if self._writer is None:
            self._writer = open_writer(self._out, table)
        if not table.num_rows:
            return
        batch = table.combine_chunks().to_batches()[0]
        for column, weights in self._weights.items():
            weights.append(sum(int(leaf_bytes(batch, leaf).sum()) for leaf in self._leaves if leaf.column == column))
        self._writer.write_table(table, row_group_size=1 << 40)
        del table, batch
        memory.trim()


def write_references(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, row_group_bytes: int = ROW_GROUP_BYTES
) -> Writing:
    """A whole reference file; the `Writing` tells its length and digest."""
    with Writing(path) as out:
        encoder = ReferenceEncoder(out, schema, row_group_bytes=row_group_bytes)
        for batch in batches:
            encoder.write(batch)
        encoder.finish()
        out.commit()
    return out

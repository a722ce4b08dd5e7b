"""Reference files: Parquet whose media columns say where files lie, and whose row groups are cut by what they weigh.

Everything but the media is encoded as it will be published; the media are joined to it when a shard is laid out or
sent. What each row group weighs is in the file's metadata, so a plan of real bytes reads footers alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock import memory
from penstock.files import Writing
from penstock.kernels.sizes import bins, row_bytes
from penstock.media.kinds import leaves_of, steps_of
from penstock.media.sizes import check_sizes, media_bytes
from penstock.media.weights import KEY, stored_weights

ROW_GROUP_BYTES = 64 << 20
ROW_GROUP_ROWS = 16_384
GROUPS_PER_FILE = 16


Weighed = tuple[pa.RecordBatch, dict[str, int]]  # rows, and what the files of each media column weigh in them


class Cutter:
    """Batches into row groups by what their rows weigh. What no reader could give back is refused on the way."""

    def __init__(self, schema: pa.Schema, *, row_group_bytes: int = ROW_GROUP_BYTES) -> None:
        self._leaves, self._most = leaves_of(schema), row_group_bytes
        self._held: list[Weighed] = []
        self._rows = self._bytes = self._before = 0
        self.largest = 0  # row

    def add(self, batch: pa.RecordBatch) -> Iterator[list[Weighed]]:
        """Every row group that is full."""
        check_sizes(batch, self._leaves, first_row=self._before)
        self._before += batch.num_rows
        media = media_bytes(batch)
        sizes = row_bytes(batch) + sum(media.values())
        self.largest = max(self.largest, int(sizes.max(initial=0)))
        # `load_dataset` pools record batches of one row, a thousand of them, and fails when a column of these passes
        # 2 GiB (datasets 5.2.0, `ArrowWriter.write_row`). So two rows go together unless that would make a row group
        # of more than four times the size.
        sizes = np.where(sizes <= 2 * self._most, np.minimum(sizes, self._most // 2), sizes)
        for part in bins(
            batch,
            carry_rows=self._rows,
            carry_bytes=self._bytes,
            max_rows=ROW_GROUP_ROWS,
            max_bytes=self._most,
            sizes=sizes,
        ):
            if part.new and self._held:
                yield self._end()
            held = {column: int(weights[part.start : part.stop].sum()) for column, weights in media.items()}
            self._held.append((part.batch, held))
            self._rows += part.batch.num_rows
            self._bytes += part.bytes

    def finish(self) -> Iterator[list[Weighed]]:
        if self._held:
            yield self._end()

    def _end(self) -> list[Weighed]:
        full, self._held = self._held, []
        self._rows = self._bytes = 0
        return full


class ReferenceEncoder:
    """Batches with references into one open file. An `Encoder`, as the Parquet sink has them."""

    def __init__(self, out: Writing, schema: pa.Schema) -> None:
        self._out, self._schema = out, schema
        self._leaves = leaves_of(schema)
        self._weights: dict[str, list[int]] = {leaf.column: [] for leaf in self._leaves}
        self._writer: pa.parquet.ParquetWriter | None = None
        self._cutter = Cutter(schema)

    def write(self, batch: pa.RecordBatch) -> None:
        for group in self._cutter.add(batch):
            self.put(group)

    def finish(self, *, largest_row: int | None = None) -> None:
        for group in self._cutter.finish():
            self.put(group)
        if self._writer is None:
            self.put([])
        assert self._writer is not None
        largest = self._cutter.largest if largest_row is None else largest_row
        if self._leaves:  # a table without media is a Parquet file like any other
            self._writer.add_key_value_metadata({KEY: stored_weights(self._weights, largest_row=largest)})
        self._writer.close()

    def put(self, group: Sequence[Weighed]) -> None:
        """A row group, as it was cut."""
        from penstock.sinks.parquet import open_writer

        table = pa.Table.from_batches([batch for batch, _ in group], schema=self._schema)
        if self._writer is None:
            self._writer = open_writer(self._out, table, plain=self._left_out())
        if not table.num_rows:
            return
        for column, weights in self._weights.items():
            weights.append(sum(held[column] for _, held in group))
        self._writer.write_table(table, row_group_size=1 << 40)
        del table
        memory.trim()

    def _left_out(self) -> frozenset[str]:
        """What shards leave out of a reference: not worth compressing, which takes most of the time of a small row
        group (10 ms with 104 columns, 4 without)."""
        return frozenset(
            ".".join([leaf.column, *(_PARQUET.get(step, step) for step in steps_of(leaf.within)), member])
            for leaf in self._leaves
            for member in ("bytes", "file", "size", "modified")
        )


_PARQUET = {"[]": "list.element"}


def write_references(
    folder: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, row_group_bytes: int = ROW_GROUP_BYTES
) -> Iterator[Writing]:
    """Whole reference files of a few row groups each, under names of their order.

    A shard reads the footers of the files it is made of: one footer for all of a table would be read as often as there
    are shards, and 902 shards of 902 row groups took eleven minutes to lay out.
    """
    cutter = Cutter(schema, row_group_bytes=row_group_bytes)
    groups = chain(chain.from_iterable(map(cutter.add, batches)), cutter.finish())
    for count in itertools.count():
        first = list(islice(groups, 1))
        if count and not first:
            return
        with Writing(folder / f"{count:06d}.parquet") as out:
            encoder = ReferenceEncoder(out, schema)
            for group in chain(first, islice(groups, GROUPS_PER_FILE - 1)):
                encoder.put(group)
            encoder.finish(largest_row=cutter.largest)
            out.commit()
        yield out

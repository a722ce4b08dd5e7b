"""What rows with media weigh: their Arrow bytes, and the files their references stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.budget import format_size
from penstock.errors import UsageError
from penstock.kernels.sizes import Sizes, row_bytes
from penstock.media.kinds import LARGEST_VALUE, Leaf, leaves_of, references_in, steps_of

# Rows of one row group: values of a list column share 32-bit offsets in every reader that has `binary`, not
# `large_binary`, for media.
LARGEST_ROW = (1 << 31) - (1 << 20)


def real_bytes(batch: pa.RecordBatch) -> Sizes:
    """Bytes of each row as it will be stored: with the files it refers to, where columns are media."""
    return row_bytes(batch) + sum(media_bytes(batch).values())


def media_bytes(batch: pa.RecordBatch) -> dict[str, Sizes]:
    """Bytes of the files that each media column refers to, row by row."""
    found: dict[str, Sizes] = {}
    for leaf in leaves_of(batch.schema):
        sizes = leaf_bytes(batch, leaf)
        found[leaf.column] = found[leaf.column] + sizes if leaf.column in found else sizes
    return found


def leaf_bytes(batch: pa.RecordBatch, leaf: Leaf) -> Sizes:
    """Bytes of the files that one media leaf refers to, row by row. Inline bytes are counted where they lie."""
    column = batch.column(batch.schema.get_field_index(leaf.column))
    references = references_in(column, leaf)
    sizes = pc.if_else(
        pc.is_valid(pc.struct_field(references, ["file"])),
        pc.struct_field(references, ["size"]),
        pa.scalar(0, pa.int64()),
    )
    weights = sizes.fill_null(0).to_numpy(zero_copy_only=False)
    totals = np.zeros(batch.num_rows, dtype=np.int64)
    np.add.at(totals, _rows_of(column, leaf), weights)
    return totals


def _rows_of(column: pa.Array, leaf: Leaf) -> Sizes:
    """For each value of a leaf, lists flattened, the row it is in."""
    rows = np.arange(len(column), dtype=np.int64)
    array = column
    for step in steps_of(leaf.within):
        if step != "[]":
            array = pc.struct_field(array, [step])
            continue
        rows = rows[pc.list_parent_indices(array).to_numpy(zero_copy_only=False)]
        array = array.flatten()
    return rows


def check_sizes(batch: pa.RecordBatch, leaves: Sequence[Leaf], *, first_row: int) -> None:
    """Refuse, at plan time and by name, what no Parquet reader could give back."""
    for leaf in leaves:
        column = batch.column(batch.schema.get_field_index(leaf.column))
        references = references_in(column, leaf)
        sizes = pc.struct_field(references, ["size"])
        most = pc.max(sizes).as_py()
        if most is not None and most > LARGEST_VALUE:
            at = pc.index(sizes, pa.scalar(most, pa.int64())).as_py()
            row = first_row + int(_rows_of(column, leaf)[at])
            raise UsageError(
                f"a value of {format_size(most)} ({references[at]['path'].as_py()}) is more than the"
                f" {format_size(LARGEST_VALUE)} a Parquet page can hold",
                where=f"row {row:,}, column {leaf.path}",
                do="split the file, or leave it out",
            )
        if not pt.is_struct(column.type):
            totals = leaf_bytes(batch, leaf)
            if len(totals) and int(totals.max()) > LARGEST_ROW:
                row = int(totals.argmax())
                raise UsageError(
                    f"the files of one row add up to {format_size(int(totals[row]))}, more than the"
                    f" {format_size(LARGEST_ROW)} that readers hold in one list",
                    where=f"row {first_row + row:,}, column {leaf.path}",
                    do="make a row of each file (row='file', --row file), or of fewer of them",
                )

"""How many bytes each row takes, and where to cut rows into bins of bytes.

Sizes depend on the values of a row alone: not on how rows were sliced, chunked, encoded, or what lies under a null.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Sizes: TypeAlias = npt.NDArray[np.int64]

_VIEW = 16  # a string or binary view; values of up to 12 bytes live inside it
_INLINE = 12


def row_bytes(batch: pa.RecordBatch) -> Sizes:
    """Arrow bytes of each row: slots, offsets and data, with bools as one byte and validity as none.

    Dictionary and run-end encoded values count as if they were decoded.

    >>> row_bytes(pa.record_batch({"n": [1, None], "s": ["ab", None]})).tolist()
    [14, 12]
    """
    total = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        total += _sizes(column)
    return total


def cut(sizes: Sizes, *, carry_rows: int, carry_bytes: int, max_rows: int, max_bytes: int) -> list[int]:
    """Row indexes at which a new bin starts, going on from a bin that holds `carry_rows` and `carry_bytes`.

    A bin ends before the row that would take it over a limit; a row over `max_bytes` is a bin alone.

    >>> cut(np.array([4, 4, 9, 1]), carry_rows=1, carry_bytes=3, max_rows=10, max_bytes=8)
    [1, 2, 3]
    """
    ends = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    total = int(ends[-1])
    cuts: list[int] = []
    start = 0
    while start < len(sizes):
        room = min(int(ends[start]) + max_bytes - carry_bytes, total)
        by_bytes = int(np.searchsorted(ends, room, side="right")) - 1
        end = min(by_bytes, start + max_rows - carry_rows)
        # An empty bin takes its first row whatever its size, or no bin ever would.
        end = max(end, start if carry_rows else start + 1)
        if end < len(sizes):
            cuts.append(end)
        start, carry_rows, carry_bytes = end, 0, 0
    return cuts


def _sizes(array: pa.Array) -> Sizes:
    slot, varies = _slot(array.type)
    if not varies or len(array) == 0:
        return np.full(len(array), slot, dtype=np.int64)
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _sizes(array.storage)
    if pt.is_dictionary(kind):
        return _dictionary(array, slot)
    if pt.is_run_end_encoded(kind):
        places = np.arange(array.offset, array.offset + len(array))
        return _sizes(array.values)[np.searchsorted(array.run_ends.to_numpy(), places, side="right")]
    if pt.is_union(kind):
        return _union(array, slot)
    if pt.is_struct(kind):
        full = np.zeros(len(array), dtype=np.int64)
        for index in range(kind.num_fields):
            full += _sizes(array.field(index))
    elif pt.is_fixed_size_list(kind):
        width = kind.list_size
        full = _sizes(array.values.slice(array.offset * width, len(array) * width)).reshape(-1, width).sum(axis=1)
    elif pt.is_string_view(kind) or pt.is_binary_view(kind):
        full = _view(array)
    elif hasattr(array, "offsets"):
        full = slot + _children(array)
    else:
        full = slot + pc.binary_length(array).fill_null(0).to_numpy().astype(np.int64)
    return full if array.null_count == 0 else np.where(_valid(array), full, slot)


def _slot(kind: pa.DataType) -> tuple[int, bool]:
    """The bytes a null takes, and whether a value can take more."""
    if isinstance(kind, pa.BaseExtensionType):
        return _slot(kind.storage_type)
    if pt.is_dictionary(kind) or pt.is_run_end_encoded(kind):
        return _slot(kind.value_type)
    if pt.is_null(kind):
        return 0, False
    if pt.is_boolean(kind):
        return 1, False
    if pt.is_union(kind):
        return (5 if kind.mode == "dense" else 1), True
    if pt.is_struct(kind):
        parts = [_slot(kind.field(index).type) for index in range(kind.num_fields)]
        return sum(size for size, _ in parts), any(varies for _, varies in parts)
    if pt.is_fixed_size_list(kind):
        size, varies = _slot(kind.value_type)
        return size * kind.list_size, varies and kind.list_size > 0
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        return _VIEW, True
    if pt.is_list(kind) or pt.is_map(kind) or pt.is_string(kind) or pt.is_binary(kind):
        return 4, True
    if pt.is_large_list(kind) or pt.is_large_string(kind) or pt.is_large_binary(kind) or pt.is_list_view(kind):
        return 8, True
    if pt.is_large_list_view(kind):
        return 16, True
    return kind.bit_width // 8, False


def _dictionary(array: pa.DictionaryArray, slot: int) -> Sizes:
    # One more entry stands for null indices; whatever lies under them is not looked at.
    values = np.append(_sizes(array.dictionary), np.int64(slot))
    sizes: Sizes = values[array.indices.cast(pa.int64()).fill_null(len(values) - 1).to_numpy()]
    return sizes


def _union(array: pa.UnionArray, slot: int) -> Sizes:
    rows = slice(array.offset, array.offset + len(array))
    # pyarrow's own type_codes and offsets do not heed the slice
    buffers = array.buffers()
    codes = np.frombuffer(buffers[1], dtype=np.int8)[rows]
    full = np.full(len(array), slot, dtype=np.int64)
    for index, code in enumerate(array.type.type_codes):
        held = np.flatnonzero(codes == code)
        places = np.frombuffer(buffers[2], dtype=np.int32)[rows][held] if array.type.mode == "dense" else held
        full[held] += _sizes(array.field(index))[places]
    return full


def _view(array: pa.Array) -> Sizes:
    views = np.frombuffer(array.buffers()[1], dtype=np.int32)
    lengths = views[array.offset * 4 : (array.offset + len(array)) * 4 : 4].astype(np.int64)
    return _VIEW + np.where(lengths > _INLINE, lengths, 0)


def _children(array: pa.Array) -> Sizes:
    starts = array.offsets.to_numpy()
    if pt.is_list_view(array.type) or pt.is_large_list_view(array.type):
        counts = array.sizes.to_numpy().astype(np.int64)
    else:
        starts, counts = starts[:-1], np.diff(starts).astype(np.int64)
    if array.null_count:
        counts = np.where(_valid(array), counts, 0)
    parts = [array.keys, array.items] if pt.is_map(array.type) else [array.values]
    used = counts > 0
    if not used.any():
        return np.zeros(len(array), dtype=np.int64)
    low, high = int(starts[used].min()), int((starts[used] + counts[used]).max())
    starts = np.where(used, starts - low, 0)
    total = np.zeros(len(array), dtype=np.int64)
    for part in parts:
        slot, varies = _slot(part.type)
        if varies:
            ends = np.concatenate(([0], np.cumsum(_sizes(part.slice(low, high - low)))))
            total += ends[starts + counts] - ends[starts]
        else:  # a list of numbers is sized without eight bytes of scratch for each number
            total += counts * slot
    return total


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


@dataclass(frozen=True)
class Part:
    """Neighbouring rows of a batch that go into one bin."""

    batch: pa.RecordBatch
    start: int
    stop: int
    bytes: int
    new: bool  # they start a bin, rather than go on with the one that was carried


def bins(
    batch: pa.RecordBatch,
    *,
    carry_rows: int,
    carry_bytes: int,
    max_rows: int = 1 << 62,
    max_bytes: int,
    sizes: Sizes | None = None,
) -> Iterator[Part]:
    """Cut a batch at the bounds of its bins: see `cut`. `sizes` of its rows, where they weigh more than they hold."""
    if batch.num_rows == 0:
        return
    sizes = row_bytes(batch) if sizes is None else sizes
    starts = cut(sizes, carry_rows=carry_rows, carry_bytes=carry_bytes, max_rows=max_rows, max_bytes=max_bytes)
    edges = sorted({0, *starts, batch.num_rows})
    for begin, end in pairwise(edges):
        whole = begin == 0 and end == batch.num_rows
        part = batch if whole else batch.slice(begin, end - begin)
        yield Part(part, begin, end, int(sizes[begin:end].sum()), new=begin in starts)

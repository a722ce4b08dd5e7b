"""Definition and repetition levels: how a Parquet leaf says which of its values are there, and in which list.

Computed from the validity and the offsets of Arrow arrays, a whole column at a time, and encoded as data pages have
them. Null lists, empty lists and lists of nulls come out distinct, at any depth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

_Levels = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """One entry for each value of a leaf, and for each place where a null or an empty list stands in for values.

    `places` says which slot of the array at the end of the path an entry is, -1 for one that ended on the way.
    """

    definition: _Levels
    repetition: _Levels
    places: _Places
    max_definition: int
    max_repetition: int


def shape_of(column: pa.Array, field: pa.Field, steps: Iterable[str]) -> tuple[Shape, pa.Array, pa.Field]:
    """The levels from a column down to the array that `steps` lead to, but for its own nulls; that array, its field.

    A step is "[]" into a list, or the name of a struct's member. What is not nullable has no level.
    """
    rows = len(column)
    shape = Shape(np.zeros(rows, np.uint8), np.zeros(rows, np.uint8), np.arange(rows, dtype=np.int64), 0, 0)
    array = column
    for step in steps:
        if field.nullable:
            shape = with_presence(shape, valid(array))
        if step == "[]":
            shape = _into_list(shape, array)
            field, array = array.type.value_field, array.values
        else:
            index = array.type.get_field_index(step)
            field, array = array.type.field(index), array.field(index)
    return shape, array, field


def with_presence(shape: Shape, present: npt.NDArray[np.bool_]) -> Shape:
    """One optional level more: whether each slot of the last array has a value."""
    alive = shape.places >= 0
    there = np.zeros(len(alive), bool)
    there[alive] = present[shape.places[alive]]
    return Shape(
        definition=shape.definition + there,
        repetition=shape.repetition,
        places=np.where(there, shape.places, -1),
        max_definition=shape.max_definition + 1,
        max_repetition=shape.max_repetition,
    )


def valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Which slots of an array are not null."""
    if not array.null_count:
        return np.ones(len(array), bool)
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    return np.unpackbits(bits, count=array.offset + len(array), bitorder="little")[array.offset :].astype(bool)


def numbers(array: pa.Array) -> npt.NDArray[np.int64]:
    """The numbers of an array of 32 or 64 bits; at a null, anything.

    From the buffer itself: `to_numpy` imports pandas where it is installed, and 25 MB with it.
    """
    kind = np.dtype(f"i{array.type.bit_width // 8}")
    if not len(array):
        return np.zeros(0, np.int64)
    return np.frombuffer(array.buffers()[1], kind)[array.offset : array.offset + len(array)].astype(
        np.int64, copy=False
    )


def _into_list(shape: Shape, array: pa.Array) -> Shape:
    """Every list becomes its elements; an empty one stays as a single entry that ends here."""
    offsets = numbers(array.offsets)
    alive = shape.places >= 0
    starts, lengths = np.zeros(len(alive), np.int64), np.zeros(len(alive), np.int64)
    starts[alive] = offsets[shape.places[alive]]
    lengths[alive] = offsets[shape.places[alive] + 1] - starts[alive]
    counts = np.maximum(lengths, 1)
    firsts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(firsts, counts)
    filled = np.repeat(lengths > 0, counts)
    depth = shape.max_repetition + 1
    return Shape(
        definition=np.repeat(shape.definition, counts) + filled,
        repetition=np.where(within > 0, np.uint8(depth), np.repeat(shape.repetition, counts)),
        places=np.where(filled, np.repeat(starts, counts) + within, -1),
        max_definition=shape.max_definition + 1,
        max_repetition=depth,
    )


def encode(levels: _Levels, highest: int) -> bytes:
    """Levels as a data page of version 1 has them: four bytes of length, then runs. None where there is one level only.

    >>> encode(np.array([1, 1, 1], np.uint8), 1).hex()
    '020000000601'
    """
    if highest == 0:
        return b""
    data = _runs(levels, highest.bit_length())
    return len(data).to_bytes(4, "little") + data


def _runs(levels: _Levels, width: int) -> bytes:
    """All as repeats or all bit-packed, whichever is shorter. Beside the values of a media page either is nothing."""
    if not len(levels):
        return b""
    groups = -(-len(levels) // 8)
    changes = np.flatnonzero(levels[1:] != levels[:-1]) + 1
    starts = np.concatenate(([0], changes))
    lengths = np.diff(np.concatenate((starts, [len(levels)])))
    if 2 * len(starts) <= groups * width + 1:  # a repeat takes two bytes or more
        repeats = _repeats(lengths, levels[starts])
        if len(repeats) <= groups * width + 1:
            return repeats
    padded = np.zeros(groups * 8, np.uint8)
    padded[: len(levels)] = levels
    bits = np.unpackbits(padded[:, None], axis=1, count=width, bitorder="little")
    return _varint(groups << 1 | 1) + np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def _repeats(lengths: npt.NDArray[np.int64], values: _Levels) -> bytes:
    """Each run as twice its length, a variable-length number, and its value."""
    heads = lengths.astype(np.uint64) << np.uint64(1)
    shifts = np.arange(0, 35, 7, dtype=np.uint64)
    sevens = heads[:, None] >> shifts
    more = sevens >= 128
    table = np.empty((len(heads), len(shifts) + 1), np.uint8)
    table[:, :-1] = (sevens & np.uint64(127)) | np.where(more, np.uint64(128), np.uint64(0))
    table[:, -1] = values
    used = np.ones(table.shape, bool)
    used[:, 1:-1] = more[:, :-1]  # a byte is there if the one before it says so
    return table[used].tobytes()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)

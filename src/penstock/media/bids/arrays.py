"""Python values as Arrow arrays, level by level. `pa.array` would import pandas where that is installed: 40 MB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.media.found import strings


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An array of the types a tree's columns have: strings, numbers, lists, structs, `binary` with nothing in it."""
    there = np.fromiter((value is not None for value in values), dtype=np.bool_, count=len(values))
    if pa.types.is_string(kind):
        return strings(values)
    if pa.types.is_struct(kind):
        held = [{} if value is None else value for value in values]
        children = [array_of([value.get(one.name) for value in held], one.type) for one in kind]
        return pa.Array.from_buffers(kind, len(values), [_bits(there)], children=children)
    if pa.types.is_list(kind):
        ends = np.zeros(len(values) + 1, np.int32)
        np.cumsum([len(value or ()) for value in values], out=ends[1:])
        inside = array_of([item for value in values for item in value or ()], kind.value_type)
        return pa.Array.from_buffers(kind, len(values), [_bits(there), pa.py_buffer(ends)], children=[inside])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers = np.array(
            [value or 0 for value in values], dtype=np.int64 if pa.types.is_integer(kind) else np.float64
        )
        return pa.Array.from_buffers(kind, len(values), [_bits(there), pa.py_buffer(numbers)])
    assert not there.any(), kind
    return pa.nulls(len(values), kind)


def _bits(there: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))

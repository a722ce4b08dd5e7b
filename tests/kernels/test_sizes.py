"""Row sizes are a function of values; the cutter does what a loop over rows would."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.sizes import cut, row_bytes

law = settings(deadline=None)  # machines are shared
TEXT = st.none() | st.text("abé€", max_size=20)
NUMBER = st.none() | st.integers(-100, 100)
PAIRS = st.lists(st.tuples(st.text("ab", max_size=3), NUMBER), max_size=3)
PAIR = pa.struct([("s", pa.string()), ("n", pa.int16())])
STRUCT = st.none() | st.fixed_dictionaries({"s": TEXT, "n": NUMBER})
KINDS: list[tuple[pa.DataType, st.SearchStrategy[object]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.none() | st.booleans()),
    (pa.int8(), NUMBER),
    (pa.float64(), NUMBER),
    (pa.timestamp("us", "UTC"), NUMBER),
    (pa.decimal128(10, 2), st.none() | st.integers(0, 99).map(Decimal)),
    (pa.binary(3), st.none() | st.binary(min_size=3, max_size=3)),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), st.none() | st.binary(max_size=20)),
    (pa.binary_view(), st.none() | st.binary(max_size=20)),
    (pa.list_(pa.int32()), st.none() | st.lists(NUMBER, max_size=4)),
    (pa.list_(pa.string()), st.none() | st.lists(TEXT, max_size=4)),
    (pa.large_list(pa.list_(pa.string())), st.none() | st.lists(st.none() | st.lists(TEXT, max_size=3), max_size=3)),
    (pa.list_view(pa.string()), st.none() | st.lists(TEXT, max_size=4)),
    (pa.large_list_view(pa.int8()), st.none() | st.lists(NUMBER, max_size=4)),
    (pa.list_(pa.string(), 2), st.none() | st.lists(TEXT, min_size=2, max_size=2)),
    (pa.list_(pa.float32(), 3), st.none() | st.lists(NUMBER, min_size=3, max_size=3)),
    (PAIR, STRUCT),
    (pa.list_(PAIR), st.none() | st.lists(STRUCT, max_size=3)),
    (pa.map_(pa.string(), pa.int16()), st.none() | PAIRS),
    (pa.dictionary(pa.int8(), pa.string()), TEXT),
    (pa.uuid(), st.none() | st.binary(min_size=16, max_size=16)),
]


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    kind, values = draw(st.sampled_from(KINDS))
    return pa.array(draw(st.lists(values, max_size=12)), kind)


def sizes(array: pa.Array) -> list[int]:
    made: list[int] = row_bytes(pa.record_batch([array], names=["x"])).tolist()
    return made


@law
@given(columns(), st.integers(0, 12), st.integers(0, 12))
def test_a_slice_has_the_sizes_of_its_rows(array: pa.Array, start: int, length: int) -> None:
    assert sizes(array.slice(start, length)) == sizes(array)[start : start + length]


@law
@given(columns(), st.integers(0, 12))
def test_putting_slices_together_changes_nothing(array: pa.Array, at: int) -> None:
    assert sizes(pa.concat_arrays([array.slice(at), array.slice(0, at)])) == sizes(array)[at:] + sizes(array)[:at]


@law
@given(columns())
def test_sizes_are_those_of_the_same_values_made_anew(array: pa.Array) -> None:
    values = (array.storage if isinstance(array, pa.ExtensionArray) else array).to_pylist()
    assert sizes(pa.array(values, array.type)) == sizes(array)


@law
@given(columns())
def test_a_row_is_the_sum_of_its_columns(array: pa.Array) -> None:
    batch = pa.record_batch([array, array], names=["a", "b"])
    assert row_bytes(batch).tolist() == [2 * size for size in sizes(array)]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None], pa.int32()), [4, 4]),
        (pa.array([True, None]), [1, 1]),
        (pa.nulls(2), [0, 0]),
        (pa.array(["", "abc", None]), [4, 7, 4]),
        (pa.array(["é"], pa.large_string()), [10]),
        (pa.array(["x" * 12, "x" * 13, None], pa.string_view()), [16, 29, 16]),
        (pa.array([b"ab", None], pa.binary(2)), [2, 2]),
        (pa.array([[1, 2], [], None]), [20, 4, 4]),
        (pa.array([["a", None], None]), [13, 4]),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), [16, 16]),
        (pa.array([["ab", ""], None], pa.list_(pa.string(), 2)), [10, 8]),
        (pa.array([{"s": "ab", "n": 1}, None], PAIR), [8, 6]),
        (pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())), [17, 4]),
        (pa.array(["aa", "b", None, "aa"]).dictionary_encode(), [6, 5, 4, 6]),
        (pc.run_end_encode(pa.array(["aa", "aa", None, "b"])), [6, 6, 4, 5]),
        (pc.run_end_encode(pa.array(["aa", "aa", None, "b"])).slice(1, 2), [6, 4]),
        (pa.array([None, None], pa.dictionary(pa.int8(), pa.string())), [4, 4]),
    ],
)
def test_sizes_by_hand(array: pa.Array, expected: list[int]) -> None:
    assert sizes(array) == expected


def test_unions_count_the_value_they_hold() -> None:
    codes = pa.array([0, 1, 1], pa.int8())
    texts = pa.array(["a", "bb", "ccc"])
    dense = pa.UnionArray.from_dense(codes, pa.array([0, 0, 2], pa.int32()), [pa.array([7]), texts])
    sparse = pa.UnionArray.from_sparse(codes, [pa.array([7, 8, 9]), texts])
    assert sizes(dense) == [13, 10, 12]
    assert sizes(sparse) == [9, 7, 8]
    assert sizes(dense.slice(1)) == [10, 12]
    assert sizes(sparse.slice(1)) == [7, 8]


def test_what_lies_under_a_null_does_not_count() -> None:
    hole = pa.array([False, True])
    offsets = pa.array([0, 2, 3], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(["aaaa", "bbbb", "cccc"]), mask=hole)
    structs = pa.StructArray.from_arrays([pa.array(["aaaa", "bbbb"])], names=["s"], mask=hole)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(["aaaa", "bbbb"]), 1, mask=hole)
    validity = pa.py_buffer(b"\x01")
    text = pa.Array.from_buffers(pa.string(), 2, [validity, *pa.array(["aaaa", "bbbb"]).buffers()[1:]])
    view = pa.Array.from_buffers(
        pa.string_view(), 2, [validity, *pa.array(["a" * 20] * 2, pa.string_view()).buffers()[1:]]
    )
    assert sizes(lists) == [20, 4]
    assert sizes(structs) == sizes(fixed) == sizes(text) == [8, 4]
    assert sizes(view) == [36, 16]


def test_a_dictionary_counts_what_it_stands_for_whatever_else_it_holds() -> None:
    indices = pa.array([1, None], pa.int8())
    assert sizes(pa.DictionaryArray.from_arrays(indices, ["long unused", "b"])) == [5, 4]
    assert sizes(pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["b", None]))) == [5, 4]


def by_loop(rows: list[int], carry_rows: int, carry_bytes: int, max_rows: int, max_bytes: int) -> list[int]:
    cuts = []
    for index, size in enumerate(rows):
        if carry_rows and (carry_rows + 1 > max_rows or carry_bytes + size > max_bytes):
            cuts.append(index)
            carry_rows = carry_bytes = 0
        carry_rows, carry_bytes = carry_rows + 1, carry_bytes + size
    return cuts


@law
@given(
    rows=st.lists(st.integers(0, 12), max_size=40),
    carry=st.just((0, 0)) | st.tuples(st.integers(1, 9), st.integers(0, 30)),
    max_rows=st.integers(1, 9),
    max_bytes=st.integers(0, 30),
)
def test_cut_is_the_greedy_loop(rows: list[int], carry: tuple[int, int], max_rows: int, max_bytes: int) -> None:
    made = cut(
        np.array(rows, dtype=np.int64),
        carry_rows=carry[0],
        carry_bytes=carry[1],
        max_rows=max_rows,
        max_bytes=max_bytes,
    )
    assert made == by_loop(rows, *carry, max_rows, max_bytes)


@law
@given(rows=st.lists(st.integers(0, 12), max_size=40), at=st.integers(0, 40))
def test_cutting_in_two_goes_cuts_at_the_same_rows(rows: list[int], at: int) -> None:
    """The law that makes bins independent of how rows arrive in batches."""
    at = min(at, len(rows))
    array = np.array(rows, dtype=np.int64)
    first = cut(array[:at], carry_rows=0, carry_bytes=0, max_rows=5, max_bytes=20)
    last = first[-1] if first else 0
    carry = {"carry_rows": at - last, "carry_bytes": int(array[last:at].sum())}
    second = cut(array[at:], **carry, max_rows=5, max_bytes=20)
    whole = cut(array, carry_rows=0, carry_bytes=0, max_rows=5, max_bytes=20)
    assert first + [at + index for index in second] == whole


def test_cut_takes_limits_beyond_int64() -> None:
    assert cut(np.array([1, 2]), carry_rows=0, carry_bytes=0, max_rows=1 << 70, max_bytes=1 << 70) == []

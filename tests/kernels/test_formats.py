"""What goes out in a format comes back the same, and what cannot come back is an error that says where."""

from __future__ import annotations

import datetime as dt
import importlib
import re
from collections.abc import Callable
from decimal import Decimal
from types import ModuleType

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FunctionFailed, UsageError
from penstock.kernels.formats import FORMATS, call_filter, call_map, from_format, mask_of, to_format

FRAMES = ["numpy", "pandas", "polars"]
MOMENT = dt.datetime(2020, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
COLUMNS: dict[str, pa.Array] = {
    "bool": pa.array([True, None, False]),
    "int8": pa.array([1, None, -3], pa.int8()),
    "int64": pa.array([1, 2, 3]),
    "wide": pa.array([2**53 + 1, None, -(2**62) - 1]),
    "uint64": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "float": pa.array([1.5, None, float("nan")]),
    "nan": pa.array([1.5, 2.0, float("nan")]),
    "float32": pa.array([0.1, None, 2.0], pa.float32()),
    "text": pa.array(["a", None, "é"]),
    "large_text": pa.array(["a", None, "é"], pa.large_string()),
    "binary": pa.array([b"a", None, b"\xff"]),
    "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "date": pa.array([dt.date(2020, 1, 2), None, dt.date(1, 1, 1)]),
    "seconds": pa.array([MOMENT, None, MOMENT], pa.timestamp("s")),
    "zoned": pa.array([MOMENT, None, MOMENT], pa.timestamp("us", "Europe/Paris")),
    "time": pa.array([dt.time(1, 2), None, dt.time(3)], pa.time32("s")),
    "date64": pa.array([dt.date(2020, 1, 2), None, dt.date(2020, 1, 3)], pa.date64()),
    "duration": pa.array([dt.timedelta(1), None, dt.timedelta(2)], pa.duration("ms")),
    "decimal": pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal128(12, 2)),
    "nothing": pa.nulls(3, pa.string()),
    "no_numbers": pa.nulls(3, pa.int32()),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "list": pa.array([[1, 2], None, []], pa.list_(pa.int32())),
    "texts": pa.array([["a", None], None, []], pa.list_(pa.string())),
    "holes": pa.array([[1, None], None, [2**60 + 1]], pa.list_(pa.int64())),
    "small_holes": pa.array([[1, None], None, [2]], pa.list_(pa.int8())),
    "deep_holes": pa.array([{"l": [[1, None]], "n": 1}, {"l": None, "n": None}, {"l": [], "n": 2}]),
    "vector": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
    "struct": pa.array([{"a": 1, "s": "x"}, {"a": None, "s": None}, {"a": 3, "s": ""}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "map_holes": pa.array([[("k", None), ("j", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "structs": pa.array([[{"a": 1, "s": "x"}], None, [{"a": None, "s": None}]]),
    "uuid": pa.array([b"0" * 16, None, b"1" * 16], pa.binary(16)).cast(pa.uuid()),
}


def batch_of(**columns: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def same(made: pa.RecordBatch, wanted: pa.RecordBatch) -> bool:
    """Equal with NaN equal to NaN, which Arrow's own equality is not."""
    return made.schema.equals(wanted.schema) and str(made.to_pylist()) == str(wanted.to_pylist())


def failing(call: Callable[[], object]) -> str:
    with pytest.raises(FunctionFailed) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("form", FORMATS)
def test_an_untouched_column_comes_back_as_it_was(form: str, name: str) -> None:
    batch = batch_of(x=COLUMNS[name])
    assert same(call_map(lambda seen: seen, batch, form, None), batch)
    assert same(call_map(lambda seen: seen, batch, form, batch.schema), batch)
    assert same(call_map(lambda seen: seen, batch.slice(1), form, batch.schema), batch.slice(1))


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)), st.sampled_from(FORMATS))
def test_no_integer_is_ever_rounded(values: list[int | None], form: str) -> None:
    batch = batch_of(x=pa.array(values, pa.int64()))
    assert call_map(lambda seen: seen, batch, form, batch.schema).equals(batch)


def test_what_each_format_is() -> None:
    batch = batch_of(n=[1, None], s=["a", None])
    assert to_format(batch, "arrow") is batch
    assert to_format(batch, "python") == {"n": [1, None], "s": ["a", None]}
    assert to_format(batch, "rows") == [{"n": 1, "s": "a"}, {"n": None, "s": None}]
    arrays = to_format(batch, "numpy")
    assert isinstance(arrays, dict)
    assert arrays["n"].dtype == np.float64 and np.isnan(arrays["n"][1])
    assert arrays["s"].tolist() == ["a", None]
    assert isinstance(to_format(batch, "pandas"), pd.DataFrame)
    assert isinstance(to_format(batch, "polars"), pl.DataFrame)
    with pytest.raises(UsageError, match="no format 'jax'; use one of arrow, numpy, pandas, polars, python, rows"):
        to_format(batch, "jax")


@pytest.mark.parametrize(
    "result",
    [
        pa.record_batch({"a": [1, 2]}),
        pa.table({"a": pa.chunked_array([[1], [2]])}),
        {"a": [1, 2]},
        {"a": (1, 2)},
        {"a": np.array([1, 2])},
        {"a": pa.array([1, 2])},
        {"a": pa.chunked_array([[1], [2]])},
        {"a": pd.Series([1, 2], index=[7, 8])},
        {"a": pl.Series([1, 2])},
        [{"a": 1}, {"a": 2}],
        pd.DataFrame({"a": [1, 2]}, index=["x", "y"]),
        pd.DataFrame({"a": [1, 2]}, index=pd.Index([5, 6], name="b")),
        pl.DataFrame({"a": [1, 2]}),
    ],
    ids=lambda result: type(result).__name__,
)
def test_anything_with_columns_is_taken(result: object) -> None:
    assert from_format(result, None).equals(pa.record_batch({"a": [1, 2]}))


def test_matrices_become_fixed_size_lists() -> None:
    made = from_format({"v": np.arange(12, dtype=np.float32).reshape(2, 3, 2)}, None)
    assert made.schema.field("v").type == pa.list_(pa.list_(pa.float32(), 2), 3)
    assert made.column("v").to_pylist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]


def test_no_rows_take_the_shape_of_the_schema() -> None:
    schema = pa.schema([("a", pa.int64())])
    assert from_format([], schema).schema == schema
    assert from_format({"a": []}, schema).num_rows == 0
    assert from_format([], None).num_rows == 0


# Types without a schema.


NAIVE = pa.array([dt.datetime(2020, 1, 2)] * 2, pa.timestamp("us"))


@pytest.mark.parametrize(
    ("column", "form", "fn", "kind"),
    [
        (pa.array([1, 2], pa.int32()), "numpy", lambda x: x.astype("int64"), pa.int64()),
        (pa.array([1, 2]), "numpy", lambda x: x.astype("float64"), pa.float64()),
        (pa.array([1, 2]), "pandas", lambda x: x.astype("float64"), pa.float64()),
        (pa.array([1, None]), "polars", lambda x: x.cast(pl.Float64), pa.float64()),
        (pa.array([1, 2]), "python", lambda x: [float(n) for n in x], pa.float64()),
        (pa.array([1.0, 2.0]), "python", lambda x: [int(n) for n in x], pa.int64()),
        (pa.array([1, 2], pa.int32()), "python", lambda x: [2 * n for n in x], pa.int64()),
        (pa.array([1.0, 2.0], pa.float32()), "numpy", lambda x: x.astype("float64"), pa.float64()),
        (NAIVE.cast(pa.timestamp("us", "UTC")), "pandas", lambda x: x.dt.tz_localize(None), pa.timestamp("us")),
        (NAIVE, "python", lambda x: [moment.date() for moment in x], pa.date32()),
        (pa.array(["a", "b"]), "arrow", lambda x: x.cast(pa.large_string()), pa.large_string()),
    ],
)
def test_a_type_the_function_chose_stands(
    column: pa.Array, form: str, fn: Callable[[object], object], kind: pa.DataType
) -> None:
    made = call_map(lambda seen: {"x": fn(seen["x"])}, batch_of(x=column), form, None)
    assert made.column("x").type == kind


def test_integers_with_nulls_halved_in_pandas_are_floats() -> None:
    batch = batch_of(n=[2, None, 8])
    halved = call_map(lambda frame: frame / 2, batch, "pandas", None)
    assert halved.column("n").equals(pa.array([1.0, None, 4.0]))


@pytest.mark.parametrize("form", FRAMES)
def test_rows_dropped_or_moved_keep_their_types(form: str) -> None:
    batch = batch_of(n=pa.array([3, None, 1], pa.int32()), s=["c", None, "a"])
    turned = call_map(lambda b: b[::-1] if form != "numpy" else {k: v[::-1] for k, v in b.items()}, batch, form, None)
    assert turned.equals(batch.take(pa.array([2, 1, 0])))


def test_polars_text_keeps_its_layout_when_changed() -> None:
    batch = batch_of(s=["a", "b"], t=pa.array([["a"], ["b"]]))
    made = call_map(lambda b: b.with_columns(pl.col("s").str.to_uppercase()), batch, "polars", None)
    assert made.equals(batch_of(s=["A", "B"], t=[["a"], ["b"]]))


# Types with a schema.


def fit(values: object, kind: pa.DataType) -> pa.Array:
    return from_format({"x": values}, pa.schema([("x", kind)])).column("x")


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([None, None], pa.int64(), [None, None]),
        ([None], pa.list_(pa.struct([("a", pa.int8())])), [None]),
        ([1, 2], pa.float64(), [1.0, 2.0]),
        ([1.0, 2.0], pa.int64(), [1, 2]),
        (np.array([1.0, np.nan]), pa.int64(), [1, None]),
        (np.array([1.0, 2.0]), pa.float32(), [1.0, 2.0]),
        ([300], pa.int16(), [300]),
        ([1, None], pa.decimal128(6, 2), [Decimal("1.00"), None]),
        ([Decimal("1.5")], pa.decimal128(6, 2), [Decimal("1.50")]),
        (["a"], pa.large_string(), ["a"]),
        (["a"], pa.dictionary(pa.int32(), pa.string()), ["a"]),
        ([[]], pa.list_(pa.string()), [[]]),
        ([[1, 2]], pa.list_(pa.float32(), 2), [[1.0, 2.0]]),
        ([{"a": 1}], pa.struct([("b", pa.string()), ("a", pa.float64())]), [{"b": None, "a": 1.0}]),
        ([[("k", 1)]], pa.map_(pa.string(), pa.int8()), [[("k", 1)]]),
        ([dt.datetime(2020, 1, 2)], pa.date32(), [dt.date(2020, 1, 2)]),
        ([dt.datetime(2020, 1, 2)], pa.timestamp("s", "UTC"), [dt.datetime(2020, 1, 2, tzinfo=dt.UTC)]),
        (pl.Series(["a"]), pa.string(), ["a"]),
    ],
)
def test_what_fits_a_schema(values: object, kind: pa.DataType, wanted: list[object]) -> None:
    made = fit(values, kind)
    assert (made.type, made.to_pylist()) == (kind, wanted)


def test_python_floats_round_to_the_width_asked_for() -> None:
    assert fit([0.1], pa.float32()).equals(pa.array([0.1], pa.float32()))


@pytest.mark.parametrize(
    ("values", "kind", "row", "value"),
    [
        ([1.0, 1.5], pa.int64(), 1, "1.5"),
        ([1, 2, 300, 4], pa.int8(), 2, "300"),
        ([0, 2**53 + 1], pa.float64(), 1, "9007199254740993"),
        ([1.0, 1e300], pa.float32(), 1, "1e+300"),
        ([2048, 2049], pa.float16(), 1, "2049"),
        (np.array([1.0, 2.0, 0.1]), pa.float32(), 2, "0.1"),
        (np.array([[1.0], [0.1]]), pa.list_(pa.float32(), 1), 1, "[0.1]"),
        ([[1], [2, 2.5]], pa.list_(pa.int64()), 1, "[2.0, 2.5]"),
        ([[1, 2], [3]], pa.list_(pa.int64(), 2), 1, "[3]"),
        ([Decimal("1.5"), Decimal("1.555")], pa.decimal128(6, 2), 1, "Decimal('1.555')"),
        ([dt.datetime(2020, 1, 2, 3)], pa.date32(), 0, "datetime.datetime(2020, 1, 2, 3, 0)"),
        ([{"a": 1}, {"a": 0.5}], pa.struct([("a", pa.int64())]), 1, "{'a': 0.5}"),
    ],
)
def test_what_does_not_fit_names_column_row_and_value(values: object, kind: pa.DataType, row: int, value: str) -> None:
    text = failing(lambda: fit(values, kind))
    assert text.startswith(f"column 'x', row {row} of the batch: {value} does not fit {kind}; return the same types")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1"], pa.int64()),
        ([1], pa.string()),
        ([True], pa.int64()),
        ([b"a"], pa.string()),
        ([{"a": 1, "b": 2}], pa.struct([("a", pa.int64())])),
        ([MOMENT], pa.timestamp("us")),
        ([1.5], pa.decimal128(5, 1)),
    ],
)
def test_other_kinds_of_value_are_refused_as_a_whole(values: object, kind: pa.DataType) -> None:
    text = failing(lambda: fit(values, kind))
    assert re.match(rf"column 'x' came back as .* and has to be {re.escape(str(kind))}; return the same types", text)


def test_nulls_where_the_schema_allows_none() -> None:
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    text = failing(lambda: from_format({"x": [1, None]}, schema))
    assert text == "column 'x', row 1 of the batch: null, where the schema allows none"


def test_missing_and_extra_columns_are_named() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    do = "return the same columns for every batch, or give the step a schema="
    assert failing(lambda: from_format({"a": [1]}, schema)) == f"returned no column 'b'; {do}"
    extra = failing(lambda: from_format({"b": [1], "a": [1], "c": [1]}, schema))
    assert extra == f"returned column 'c', which is not in the schema; {do}"
    assert from_format({"b": [1], "a": [2]}, schema).to_pydict() == {"a": [2], "b": [1]}


# Results that are no batch.


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "returned None; return a dict of columns, Arrow data, a frame or a list of dicts"),
        (7, "returned a value of type int; return a dict of columns, Arrow data, a frame or a list of dicts"),
        ({}, "returned a value of type dict with no columns"),
        ({"a": [1, 2], "b": [1]}, "returned columns of different lengths: 'a' has 2, 'b' has 1"),
        ({"a": "xy"}, "column 'a' is a value of type str, not one value per row"),
        ({"a": np.float64(1)}, "column 'a' is a value of type float64, not one value per row"),
        ({1: [1]}, "returned a column named 1, a int; name columns by str"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "returned more than one column named 'a'"),
        (
            {"a": [1, 2, "x"]},
            "column 'a', row 2 of the batch: a value of type str among values of type int64; "
            "return the same types for every batch, or give the step a schema=",
        ),
        (
            {"a": [dt.date(2020, 1, 2), dt.datetime(2020, 1, 2, 3)]},
            "column 'a', row 1 of the batch: a value of type datetime among values of type date32[day]; "
            "return the same types for every batch, or give the step a schema=",
        ),
        (
            {"a": [dt.datetime(2020, 1, 2), MOMENT]},
            "column 'a', row 1 of the batch: a value of type datetime among values of type timestamp[us]; "
            "return the same types for every batch, or give the step a schema=",
        ),
        (
            {"a": [object()]},
            "column 'a', row 0 of the batch: a value of type object, which Arrow cannot hold; "
            "return the same types for every batch, or give the step a schema=",
        ),
        (
            [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
            "row 1 of the batch lacks 'b' and adds 'c', unlike the rows before; "
            "return the same keys for every row, with None where there is no value",
        ),
        ([{}], "returned a dict with no columns"),
    ],
)
def test_results_that_are_refused(result: object, text: str) -> None:
    assert failing(lambda: from_format(result, None)) == text


def test_a_batch_with_one_name_twice_is_refused_where_a_column_would_be_lost() -> None:
    batch = pa.record_batch([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert failing(lambda: to_format(batch, "python")) == "the batch has more than one column named 'a'"
    assert call_map(lambda b: b, batch, "arrow", None) is batch


def test_what_the_function_raises_is_told() -> None:
    batch = batch_of(n=[1, 0])
    assert failing(lambda: call_map(lambda b: b["m"], batch, "python", None)) == "raised KeyError: 'm'"
    assert (
        failing(lambda: call_map(lambda row: {"n": 1 // row["n"]}, batch, "rows", None))
        == "raised ZeroDivisionError at row 1 of the batch: integer division or modulo by zero"
    )
    assert failing(lambda: call_map(lambda _: None, batch, "rows", None)) == (
        "returned None for row 0 of the batch; return a dict"
    )


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_library_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> ModuleType:
        raise ImportError

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError) as caught:
        to_format(batch_of(n=[1]), name)
    assert str(caught.value) == f"format {name!r} needs {name}; pip install 'penstock[{name}]'"


def test_what_polars_cannot_hold_is_said() -> None:
    with pytest.raises(UsageError, match=r"^polars cannot hold this batch: .*; use another format$"):
        to_format(batch_of(x=pa.array([[1]], pa.list_view(pa.int64()))), "polars")


def test_values_outside_a_slice_or_under_a_null_do_not_fail_a_cast() -> None:
    schema = pa.schema([("x", pa.list_(pa.int64()))])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), pa.array([1.5, 2.0, 3.5]))
    assert from_format({"x": lists.slice(1, 1)}, schema).column("x").to_pylist() == [[2]]
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.array([1.5, 2.0]), mask=pa.array([True, False])
    )
    assert from_format({"x": hidden}, schema).column("x").to_pylist() == [None, [2]]


# Filters.


@pytest.mark.parametrize(
    "result",
    [
        pa.array([True, None, False]),
        pa.chunked_array([[True, None], [False]]),
        np.array([True, False, False]),
        [True, None, False],
        [np.True_, False, False],
        pd.Series([True, False, False], index=[5, 6, 7]),
        pd.Series([True, None, False], dtype="boolean"),
        pl.Series([True, None, False]),
    ],
    ids=lambda result: type(result).__name__,
)
def test_masks(result: object) -> None:
    assert mask_of(result, 3).equals(pa.array([True, False, False]))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (True, "returned one bool for a batch of 128 rows; return one per row"),
        (np.False_, "returned one bool for a batch of 128 rows; return one per row"),
        (None, "returned None for a batch of 128 rows; return one bool per row"),
        ({"a": [True]}, "returned a value of type dict for a batch of 128 rows; return one bool per row"),
        ([True, False], "returned 2 bools for a batch of 128 rows; return one per row"),
        ([1] * 128, "returned a value of type list of int64; return one bool per row"),
        (np.ones(128), "returned a value of type ndarray of double; return one bool per row"),
        ([True, "a"] * 64, "returned a value of type list, not all bools; return one bool per row"),
        (
            np.ones((128, 2), bool),
            "returned a value of type ndarray of more than one dimension; return one bool per row",
        ),
    ],
    ids=str,
)
def test_masks_that_are_refused(result: object, text: str) -> None:
    assert failing(lambda: mask_of(result, 128)) == text


@pytest.mark.parametrize("form", FORMATS)
def test_filters_keep_the_same_rows_in_every_format(form: str) -> None:
    batch = batch_of(n=[1, 5, 3], s=["a", "b", None])
    keep: dict[str, Callable[..., object]] = {
        "arrow": lambda b: [n > 2 for n in b.column("n").to_pylist()],
        "python": lambda b: [n > 2 for n in b["n"]],
        "rows": lambda row: np.bool_(row["n"] > 2),
    }
    mask = call_filter(keep.get(form, lambda b: b["n"] > 2), batch, form)
    assert mask.equals(pa.array([False, True, True]))


def test_a_row_filter_returns_a_bool() -> None:
    text = failing(lambda: call_filter(lambda row: row["n"], batch_of(n=[1]), "rows"))
    assert text == "returned a value of type int for row 0 of the batch; return a bool"

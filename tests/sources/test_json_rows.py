"""One line is one row, values come out as the text has them, and what cannot be read is named."""

from __future__ import annotations

import json
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadRow, SchemaClash, UsageError
from penstock.sources.json_rows import Inferred, Parsed, check_wide, infer, parse, unify
from penstock.sources.lines import Block

ONE = pa.schema({"a": pa.int64()})
Row = dict[str, Any]


def block(data: bytes) -> Block:
    return Block(offset=0, data=data, lines=data.count(b"\n") + (not data.endswith(b"\n")))


def parsed(data: bytes, schema: pa.Schema = ONE, on_error: str = "raise", first_line: int = 0) -> Parsed:
    return parse(block(data), schema, where="f.jsonl", first_line=first_line, on_error=on_error)


def inferred(data: bytes, on_error: str = "raise", first_line: int = 0) -> Inferred:
    return infer(block(data), where="f.jsonl", first_line=first_line, on_error=on_error)


def names(kind: pa.DataType) -> object:
    """A type in which the order of fields does not count."""
    if pa.types.is_struct(kind):
        return {inner.name: names(inner.type) for inner in kind}
    return [names(kind.value_type)] if pa.types.is_list(kind) else str(kind)


def filled(value: object, kind: pa.DataType) -> object:
    """The value as a column of this type shows it: with every key, and whole numbers as floats in a float column."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        assert isinstance(value, dict)
        return {inner.name: filled(value.get(inner.name), inner.type) for inner in kind}
    if pa.types.is_list(kind):
        assert isinstance(value, list)
        return [filled(item, kind.value_type) for item in value]
    return value


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["2020-01-01", "", "\u2028", "1"]
)
scalars: dict[str, st.SearchStrategy[Any]] = {
    "whole": st.integers(-(2**63), 2**63 - 1),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
    "text": texts,
    "yes": st.booleans(),
    "none": st.none(),
}


def objects(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Row]:
    """Ragged: any field may be missing or null."""
    return st.fixed_dictionaries({}, optional={name: st.none() | value for name, value in fields.items()})


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | items, max_size=3)


things = objects(scalars | {"nothings": lists(st.none())})
rows = objects(
    scalars
    | {"wholes": lists(scalars["whole"]), "numbers": lists(scalars["number"]), "texts": lists(lists(texts))}
    | {"nothings": lists(st.none()), "deep": lists(lists(st.none())), "things": lists(things), "empty": st.just({})}
    | {"inner": objects(scalars | {"things": lists(things), "nothings": lists(st.none())}), "é.x": texts, "": texts}
)


def dumped(some: list[Row], *, ascii_only: bool = True) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=ascii_only).encode() + b"\n" for row in some)


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=12), st.booleans())
def test_rows_are_what_json_says(some: list[Row], ascii_only: bool) -> None:
    data = dumped(some, ascii_only=ascii_only)
    schema = inferred(data).schema
    got = parsed(data, schema)
    assert got.lines is None
    assert got.batch.num_rows == len(some)
    assert got.batch.schema == schema
    got.batch.validate(full=True)
    assert got.batch.to_pylist() == [filled(row, pa.struct(schema)) for row in some]


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=12), st.data())
def test_any_cut_infers_the_same_and_parses_the_same(some: list[Row], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(some)))
    whole = inferred(dumped(some))
    schema = pa.schema([])
    for part in (some[:cut], some[cut:]):
        if part:
            schema = unify(schema, inferred(dumped(part)).schema, a_where="a", b_where="b")
    assert names(pa.struct(schema)) == names(pa.struct(whole.schema))
    assert whole.rows == len(some)
    assert whole.longest == max(len(line) for line in dumped(some).splitlines(keepends=True))
    batches = [parsed(dumped(part), schema).batch for part in (some[:cut], some[cut:]) if part]
    assert pa.concat_batches(batches).to_pylist() == parsed(dumped(some), schema).batch.to_pylist()


BAD = [
    (b"42", "is not a JSON object"),
    (b"[1]", "is not a JSON object"),
    (b'"x"', "is not a JSON object"),
    (b"null", "is not a JSON object"),
    (b'{"a": 1}{"a": 2}', "is more than one JSON object"),
    (b'{"a": 1} null {"a": 2}', "is more than one JSON object"),
    (b'{"a": 1},', "is not a JSON object"),
    (b'{"a":', "is not a JSON object"),
    (b'{"a": }', r"is malformed \(Invalid value\)"),
    (b"{'a': 1}", r"is malformed \(Missing a name for object member\)"),
    (b'{"a": 1, "a": 2}', r"is malformed \(Column\(/a\) was specified twice\)"),
    (b'{"a": null, "b\xff": 2}', "is not UTF-8"),
    (b"\x00", "is not a JSON object"),
]


@pytest.mark.parametrize(("line", "why"), BAD)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_malformed_line_is_named(line: bytes, why: str, end: bytes) -> None:
    data = end.join([b'{"a": 1}', b"", line, b'{"a": 3}', b""])
    message = rf"^f\.jsonl line 103: {why}; fix the line, or pass on_error='skip' \(--on-error skip\)$"
    with pytest.raises(BadRow, match=message):
        parsed(data, first_line=100)
    with pytest.raises(BadRow, match=message):
        inferred(data, first_line=100)
    got = parsed(data, on_error="skip", first_line=100)
    assert got.batch.to_pylist() == [{"a": 1}, {"a": 3}]
    assert got.lines is not None
    assert got.lines.tolist() == [0, 3]
    assert got.skipped == 1
    assert got.first_error is not None
    assert got.first_error.startswith("f.jsonl line 103: is ")
    assert inferred(data, on_error="skip").schema == ONE
    assert inferred(data, on_error="skip").skipped == 1


def test_one_object_over_two_lines_beside_two_on_one_is_not_taken_for_three_rows() -> None:
    data = b'{"a": 1}{"a": 2}\n{"a":\n3}\n'
    with pytest.raises(BadRow, match="line 2: is not a JSON object"):
        parsed(data)
    assert parsed(data, on_error="skip").skipped == 3


@pytest.mark.parametrize(
    ("schema", "line", "message"),
    [
        ({"a": pa.int64()}, {"a": "x"}, "column 'a' is int64 but the value is string"),
        ({"a": pa.int64()}, {"a": 1.5}, "column 'a' is int64 but the value is double"),
        ({"a": pa.int32()}, {"a": 2**31}, "column 'a' is int32 but the value is int64"),
        ({"a": pa.string()}, {"a": 5}, "column 'a' is string but the value is int64"),
        ({"a": pa.null()}, {"a": 5}, "column 'a' is null but the value is int64"),
        ({"a": pa.bool_()}, {"a": "2020-01-01"}, "column 'a' is bool but the value is string"),
        ({"a": pa.list_(pa.int64())}, {"a": [1, 2.5]}, r"column 'a\[\]' is int64 but the value is double"),
        ({"a": pa.list_(pa.null())}, {"a": [None, True]}, r"column 'a\[\]' is null but the value is bool"),
        ({"a": pa.struct({"b": pa.string()})}, {"a": {"b": 1}}, r"column 'a\.b' is string but the value is int64"),
    ],
)
def test_a_value_of_another_type_is_named(schema: dict[str, pa.DataType], line: Row, message: str) -> None:
    data = b'{"a": null}\n' + json.dumps(line).encode() + b"\n"
    with pytest.raises(BadRow, match=rf"^f\.jsonl line 2: {message} .*; fix the line"):
        parsed(data, pa.schema(schema))
    got = parsed(data, pa.schema(schema), on_error="skip")
    assert (got.batch.to_pylist(), got.skipped) == ([{"a": None}], 1)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_column_the_schema_lacks_is_never_skipped(on_error: str) -> None:
    with pytest.raises(BadRow, match=r"line 2: has a column the schema lacks, 'b'; pass a schema that has it"):
        parsed(b'{"a": 1}\n{"a": 1, "b": 2}\n', on_error=on_error)
    nested = pa.schema({"a": pa.struct({"x": pa.int64()})})
    with pytest.raises(BadRow, match=r"line 1: has a column the schema lacks, 'a\.y'"):
        parsed(b'{"a": {"x": 1, "y": 2}}\n', nested, on_error=on_error)


def test_a_type_json_cannot_give_is_refused() -> None:
    with pytest.raises(UsageError, match=r"JSON cannot be read into this schema: .*map<string, int64>"):
        parsed(b'{"a": 1}\n', pa.schema({"a": pa.map_(pa.string(), pa.int64())}))


def test_blank_lines_are_no_rows() -> None:
    got = parsed(b'\n \t\r\n{"a": 1}\n\n  {"a": 2}  \r\n\n')
    assert got.batch.to_pylist() == [{"a": 1}, {"a": 2}]
    assert got.lines is not None
    assert got.lines.tolist() == [2, 4]
    assert (got.skipped, got.first_error) == (0, None)
    assert parsed(b"\n\n").batch.num_rows == 0
    assert parsed(b"\n\n").batch.schema == ONE
    assert inferred(b"\n\n").rows == 0


def test_objects_without_a_key_are_rows() -> None:
    assert inferred(b"{}\n{}\n").rows == 2
    assert parsed(b"{}\n{}\n", pa.schema([])).batch.num_rows == 2
    assert parsed(b"{}\n\n{}\n", pa.schema([])).batch.num_rows == 2


def test_many_bad_lines_cost_little() -> None:
    good, bad, clash = b'{"a": 1}\n', b'{"a": }\n', b'{"a": "x"}\n'
    begun = time.monotonic()
    got = parsed((bad * 9 + good) * 5000, on_error="skip")
    assert (got.batch.num_rows, got.skipped) == (5000, 45000)
    assert parsed((good + clash) * 10000, on_error="skip").skipped == 10000
    with pytest.raises(BadRow, match="line 10001: column 'a' is int64"):
        parsed(good * 10000 + clash * 10000)
    with pytest.raises(BadRow, match="line 2: has a column the schema lacks"):
        parsed(good + b'{"b": 1}\n' * 10000, on_error="skip")
    assert time.monotonic() - begun < 10


def test_strings_stay_strings() -> None:
    data = b'{"a": "2020-01-01", "b": [{"c": "2020-01-01 10:00:00"}], "d": ""}\n' * 3
    schema = inferred(data).schema
    assert schema.field("a").type == pa.string()
    assert schema.field("b").type == pa.list_(pa.struct({"c": pa.string()}))
    assert parsed(data, schema).batch.to_pylist()[0] == json.loads(data.splitlines()[0])
    assert inferred(b'{"a": "2020-01-01"}\n{"a": "later"}\n').schema.field("a").type == pa.string()


def test_a_column_of_two_types_is_a_clash_with_both_lines() -> None:
    data = b'{"x": 1}\n{"a": null}\n{"a": 1}\n' + b'{"a": 2}\n' * 50 + b'{"a": null}\n{"a": "x"}\n' + b'{"a": 1}\n' * 9
    with pytest.raises(SchemaClash, match=r"^column 'a' is int64 in f\.jsonl line 13 and string in f\.jsonl line 65;"):
        inferred(data, first_line=10)
    with pytest.raises(
        SchemaClash, match=r"^column 'a\[\]\.b' is bool in f\.jsonl line 1 and .* in f\.jsonl line 2; make"
    ):
        inferred(b'{"a": [{"b": true}]}\n{"a": [{"b": []}]}\n', on_error="skip")


@pytest.mark.parametrize("number", [2**63 + 1, -(2**63) - 1, 2**64 - 1, 10**25 + 1])
def test_whole_numbers_beyond_int64_are_refused(number: int) -> None:
    for value in (number, [0, number]):
        with pytest.raises(
            BadRow, match=rf"line 2: column 'a.*' is float64, which cannot hold {number}; pass a schema"
        ):
            inferred(dumped([{"a": None}, {"a": value}, {"a": None}]))
    assert parsed(b'{"a": 18446744073709551615}\n', pa.schema({"a": pa.uint64()})).batch.to_pylist() == [
        {"a": 2**64 - 1}
    ]


def test_whole_and_broken_numbers_meet_only_where_nothing_is_lost() -> None:
    assert (
        inferred(dumped([{"a": 2**53}, {"a": 1.5}, {"a": 1e300}, {"a": float("inf")}])).schema.field("a").type
        == pa.float64()
    )
    with pytest.raises(BadRow, match=f"line 1: column 'a' is float64, which cannot hold {2**53 + 1}"):
        inferred(dumped([{"a": 2**53 + 1}, {"a": 1.5}]))
    with pytest.raises(BadRow, match="line 1: column 'a' is float64"):
        parsed(dumped([{"a": 2**53 + 1}]), pa.schema({"a": pa.float64()}))
    near = dumped([{"whole": 2**60 + 1, "broken": float(2**60)}])
    assert parsed(near, inferred(near).schema).batch.to_pylist() == [{"whole": 2**60 + 1, "broken": 2.0**60}]


def test_wide_whole_numbers_are_remembered_for_the_fold() -> None:
    whole, broken = inferred(dumped([{"a": {"b": [2**60 + 1]}}])), inferred(dumped([{"a": {"b": [1.5]}}]))
    assert whole.wide == {"a.b[]": "f.jsonl line 1"}
    check_wide(whole.schema, whole.wide)
    with pytest.raises(
        SchemaClash, match=r"^f\.jsonl line 1: column 'a\.b\[\]' holds numbers with a fraction, and a whole"
    ):
        check_wide(unify(whole.schema, broken.schema, a_where="a", b_where="b"), {**whole.wide, **broken.wide})


def test_schemas_unify() -> None:
    a = pa.schema({"x": pa.int64(), "n": pa.null(), "s": pa.struct({"p": pa.int64()}), "l": pa.list_(pa.null())})
    b = pa.schema(
        {
            "l": pa.list_(pa.string()),
            "s": pa.struct({"q": pa.bool_(), "p": pa.float64()}),
            "n": pa.string(),
            "y": pa.null(),
        }
    )
    both = unify(a, b, a_where="a", b_where="b")
    assert both == pa.schema(
        {
            "x": pa.int64(),
            "n": pa.string(),
            "s": pa.struct({"p": pa.float64(), "q": pa.bool_()}),
            "l": pa.list_(pa.string()),
            "y": pa.null(),
        }
    )


def test_schemas_that_do_not_unify_name_both_places() -> None:
    a, b = pa.schema({"s": pa.struct({"p": pa.int64()})}), pa.schema({"s": pa.struct({"p": pa.string()})})
    with pytest.raises(
        SchemaClash, match=r"^column 's\.p' is int64 in a\.jsonl and string in b\.jsonl; make the column one type"
    ):
        unify(a, b, a_where="a.jsonl", b_where="b.jsonl")


@pytest.mark.parametrize("levels", [31, 1900, 50_000])
def test_nesting_too_deep_for_arrow_is_named(levels: int) -> None:
    deep = b'{"a": ' + b'{"\\\\": [' * levels + b"]}" * levels + b"}\n"
    with pytest.raises(BadRow, match=r"line 2: is nested more than 60 levels deep; fix the line"):
        inferred(b'{"a": null}\n' + deep)
    assert inferred(b'{"b": 1}\n' + deep, on_error="skip").skipped == 1
    assert parsed(deep, on_error="skip").skipped == 1
    text = dumped([{"a": '\\"[{' * 5000 + "\\"}] * 3)
    assert inferred(text).schema == pa.schema({"a": pa.string()})
    assert inferred(b'{"a": ' + b"[" * 59 + b"]" * 59 + b"}\n").rows == 1


def test_nulls_at_the_head_of_lists_are_kept() -> None:
    some: list[Row] = [{"a": [None, 1]}, {"a": [2]}, {"a": [None, None, 2**60 + 1]}]
    found = inferred(dumped(some))
    assert found.wide == {"a[]": "f.jsonl line 3"}
    assert parsed(dumped(some), found.schema).batch.to_pylist() == some
    nothing: list[Row] = [{"a": [None, None]}, {"a": []}, {"a": None}, {"a": [None]}]
    batch = parsed(dumped(nothing), inferred(dumped(nothing)).schema).batch
    batch.validate(full=True)
    assert batch.schema == pa.schema({"a": pa.list_(pa.null())})
    assert batch.to_pylist() == nothing

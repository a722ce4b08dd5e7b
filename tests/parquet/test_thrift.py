"""Taking apart and putting together loses nothing, and no input does harm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.parquet import thrift
from penstock.parquet.footer import read_footer
from penstock.parquet.thrift import BINARY, BYTE, DOUBLE, FALSE, I16, I32, I64, LIST, MAP, SET, STRUCT, TRUE, UUID


def through(kind: int, payload: bytes) -> bytes:
    """Decode a value to its last leaf and encode it again."""
    if kind in (I16, I32, I64):
        return thrift.zigzag(thrift.read_integer(kind, payload))
    if kind == BINARY:
        return thrift.binary(thrift.string(payload))
    if kind in (LIST, SET):
        of, items = thrift.read_list(payload)
        return thrift.write_list(of, [through(of, item) for item in items])
    if kind == STRUCT:
        struct, end = thrift.read_struct(payload)
        assert end == len(payload)
        return thrift.write_struct({number: (k, through(k, v)) for number, (k, v) in struct.items()})
    return payload


def test_real_footers_go_through_byte_for_byte(any_file: str) -> None:
    raw = read_footer(any_file).raw
    assert through(STRUCT, raw) == raw


def fixed(kind: int, length: int) -> st.SearchStrategy[tuple[int, bytes]]:
    return st.binary(min_size=length, max_size=length).map(lambda data: (kind, data))


numbers = st.tuples(st.sampled_from([I16, I32, I64]), st.integers(-(2**63), 2**63 - 1).map(thrift.zigzag))
strings = st.binary(max_size=200).map(lambda value: (BINARY, thrift.binary(value)))
scalars = st.one_of(numbers, strings, fixed(BYTE, 1), fixed(DOUBLE, 8), fixed(UUID, 16))


def grown(inner: st.SearchStrategy[tuple[int, bytes]]) -> st.SearchStrategy[tuple[int, bytes]]:
    lists = st.tuples(st.sampled_from([LIST, SET]), inner, st.integers(0, 40)).map(
        lambda made: (made[0], thrift.write_list(made[1][0], [made[1][1]] * made[2]))
    )
    maps = st.tuples(scalars, inner, st.integers(0, 5)).map(
        lambda made: (
            MAP,
            bytes([made[2], made[0][0] << 4 | made[1][0]]) + (made[0][1] + made[1][1]) * made[2] if made[2] else b"\0",
        )
    )
    fields = st.one_of(inner, st.sampled_from([(TRUE, b""), (FALSE, b"")]))
    structs = st.dictionaries(st.integers(-(2**15), 2**15 - 1), fields, max_size=8)
    return st.one_of(lists, maps, structs.map(lambda made: (STRUCT, thrift.write_struct(made))))


values = st.recursive(scalars, grown, max_leaves=20)


@given(values, st.binary(max_size=4))
def test_any_value_is_passed_over_exactly_and_put_together_again(value: tuple[int, bytes], after: bytes) -> None:
    kind, payload = value
    assert thrift.skip(payload + after, 0, kind) == len(payload)
    assert through(kind, payload) == payload


@given(values.filter(lambda value: value[0] == STRUCT), st.data())
def test_a_value_cut_anywhere_is_an_error(value: tuple[int, bytes], data: st.DataObject) -> None:
    kind, payload = value
    with pytest.raises(thrift.ThriftError):
        thrift.skip(payload[: data.draw(st.integers(0, len(payload) - 1))], 0, kind)


@given(st.binary(max_size=300), st.integers(0, 15))
def test_garbage_is_a_value_or_an_error(garbage: bytes, kind: int) -> None:
    try:
        end = thrift.skip(garbage, 0, kind)
    except thrift.ThriftError:
        return
    assert end <= len(garbage)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x1c" * 5000, "deep"),
        (b"\x19" * 5000, "deep"),
        (b"\x19\xfc\xff\xff\xff\xff\x07", "does not fit"),
        (b"\x18\xff\xff\xff\xff\x07abc", "missing"),
        (b"\x1b\xff\xff\xff\xff\x07\x88", "does not fit"),
        (b"\x16" + b"\xff" * 40, "no end"),
        (b"\x15\x02\x05\x02\x02\x00", "twice"),
        (b"\x10\x00", "no kind 0"),
        (b"\x1e\x00", "no kind 14"),
        (b"\x05\xff\xff\x7f\x00\x00", "no field"),
    ],
)
def test_hostile_bytes_raise(data: bytes, message: str) -> None:
    with pytest.raises(thrift.ThriftError, match=message):
        thrift.read_struct(data + b"\x00" * 8 if message == "deep" else data)


def test_wrong_kinds_and_missing_fields_are_errors() -> None:
    struct, _ = thrift.read_struct(bytes.fromhex("15043802696400"))
    assert thrift.integer(struct, 1) == 2
    assert thrift.string(thrift.raw(struct, 4, BINARY)) == b"id"
    with pytest.raises(thrift.ThriftError, match="field 2 is missing"):
        thrift.integer(struct, 2)
    with pytest.raises(thrift.ThriftError, match="number should be"):
        thrift.integer(struct, 4)
    with pytest.raises(thrift.ThriftError, match="field 9 is missing"):
        thrift.raw(struct, 9, BINARY)
    with pytest.raises(thrift.ThriftError, match="of kind 5, not 8"):
        thrift.raw(struct, 1, BINARY)

"""Levels are those pyarrow's own writer gives the same values, for every shape; and runs decode to what was encoded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.parquet.footer import open_parquet
from penstock.parquet.levels import encode, shape_of, valid, with_presence
from penstock.parquet.pages import walk

LEAF = pa.int32()
INNER = pa.struct([("a", LEAF), ("b", pa.list_(LEAF))])
# Type, whether the column is nullable, and the steps to the leaf.
SHAPES: dict[str, tuple[pa.DataType, bool, list[str]]] = {
    "flat": (LEAF, True, []),
    "required": (LEAF, False, []),
    "list": (pa.list_(LEAF), True, ["[]"]),
    "large list": (pa.large_list(LEAF), True, ["[]"]),
    "required list": (pa.list_(LEAF), False, ["[]"]),
    "list of required": (pa.list_(pa.field("element", LEAF, nullable=False)), True, ["[]"]),
    "list of lists": (pa.list_(pa.large_list(LEAF)), True, ["[]", "[]"]),
    "struct": (pa.struct([("a", LEAF), ("b", pa.string())]), True, ["a"]),
    "required member": (pa.struct([pa.field("a", LEAF, nullable=False)]), True, ["a"]),
    "struct of structs": (pa.struct([("x", INNER)]), True, ["x", "a"]),
    "list in structs": (pa.struct([("x", INNER)]), True, ["x", "b", "[]"]),
    "list of structs": (pa.list_(INNER), True, ["[]", "a"]),
    "list in a list of structs": (pa.list_(INNER), True, ["[]", "b", "[]"]),
    "three deep": (pa.list_(pa.list_(pa.list_(LEAF))), True, ["[]", "[]", "[]"]),
}


def decode(data: bytes, count: int, width: int) -> list[int]:
    """The hybrid encoding, by the letter of the format's description."""
    out: list[int] = []
    pos = 0
    while len(out) < count:
        head = shift = 0
        while True:
            byte = data[pos]
            pos += 1
            head |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if head & 1:
            bits = int.from_bytes(data[pos : pos + (head >> 1) * width], "little")
            pos += (head >> 1) * width
            out += [bits >> i * width & ((1 << width) - 1) for i in range((head >> 1) * 8)]
        else:
            out += [data[pos]] * (head >> 1)
            pos += 1
    assert pos == len(data)
    return out[:count]


def levels_in_file(path: Path, leaf: str, definition: int, repetition: int) -> tuple[list[int], list[int]]:
    """Definition and repetition levels of a leaf, as pyarrow has written them."""
    definitions: list[int] = []
    repetitions: list[int] = []
    with open_parquet(str(path)) as (fd, footer):
        data = path.read_bytes()
        for chunk in footer.chunks(0):
            if ".".join(chunk.path) != leaf:
                continue
            for page in walk(fd, chunk, path=str(path)):
                assert page.kind == "DATA"
                at = page.offset
                for highest, into in ((repetition, repetitions), (definition, definitions)):
                    if highest:
                        length = int.from_bytes(data[at : at + 4], "little")
                        into += decode(data[at + 4 : at + 4 + length], page.num_values, highest.bit_length())
                        at += 4 + length
                    else:
                        into += [0] * page.num_values
    return definitions, repetitions


def of_type(kind: pa.DataType, nullable: bool = True) -> st.SearchStrategy[object]:
    if pa.types.is_struct(kind):
        made: st.SearchStrategy[object] = st.fixed_dictionaries(
            {one.name: of_type(one.type, one.nullable) for one in kind}
        )
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        made = st.lists(of_type(kind.value_type, kind.value_field.nullable), max_size=4)
    else:
        made = st.just("t") if pa.types.is_string(kind) else st.integers(0, 5)
    return st.one_of(st.none(), made) if nullable else made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("levels")


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_levels_are_those_of_arrows_writer(folder: Path, name: str, data: st.DataObject) -> None:
    kind, nullable, steps = SHAPES[name]
    values: Sequence[object] = data.draw(st.lists(of_type(kind, nullable), min_size=1, max_size=12))
    skip = data.draw(st.integers(0, len(values) - 1))
    column = pa.array(values, kind)[skip:]
    field = pa.field("c", kind, nullable=nullable)
    shape, array, last = shape_of(column, field, steps)
    if last.nullable:
        shape = with_presence(shape, valid(array))
    path = folder / "arrow.parquet"
    pq.write_table(
        pa.table([column], schema=pa.schema([field])),
        path,
        compression="none",
        use_dictionary=False,
        store_schema=False,
    )
    leaf = pq.ParquetFile(path).schema
    parquet = next(
        leaf.column(i)
        for i in range(len(leaf.names))
        if leaf.column(i).path.split(".") == ["c", *(part for one in steps for part in _names(one))]
    )
    assert (shape.max_definition, shape.max_repetition) == (
        parquet.max_definition_level,
        parquet.max_repetition_level,
    )
    theirs = levels_in_file(path, parquet.path, shape.max_definition, shape.max_repetition)
    assert (shape.definition.tolist(), shape.repetition.tolist()) == theirs
    there = shape.places[shape.places >= 0]
    assert array.take(pa.array(there)).to_pylist() == [
        one for one in pq.read_table(path).column("c").combine_chunks().to_pylist() for one in _flat(one, steps)
    ]


def _names(step: str) -> list[str]:
    return ["list", "element"] if step == "[]" else [step]


def _flat(value: object, steps: Sequence[str]) -> list[object]:
    """The leaf's values that are there, in order."""
    if value is None or not steps:
        return [] if value is None else [value]
    if steps[0] == "[]":
        assert isinstance(value, list)
        return [one for item in value for one in _flat(item, steps[1:])]
    assert isinstance(value, dict)
    return _flat(value[steps[0]], steps[1:])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=30))
def test_runs_decode_to_what_was_encoded(highest: int, runs: list[tuple[int, int]]) -> None:
    levels = [value % (highest + 1) for value, count in runs for _ in range(count)]
    encoded = encode(np.array(levels, np.uint8), highest)
    assert int.from_bytes(encoded[:4], "little") == len(encoded) - 4
    assert decode(encoded[4:], len(levels), highest.bit_length()) == levels
    assert len(encoded) <= 4 + 5 + -(-len(levels) // 8) * highest.bit_length()


def test_long_runs_and_noise() -> None:
    rng = random.Random(1)
    for levels in ([1] * 3_000_000, [0] * 127 + [1] * 128 + [0] * 16_384, rng.choices([0, 1], k=100_000)):
        encoded = encode(np.array(levels, np.uint8), 1)
        assert decode(encoded[4:], len(levels), 1) == levels
    assert encode(np.array([1] * 3_000_000, np.uint8), 1) == bytes.fromhex("05000000809bee0201")
    assert encode(np.zeros(5, np.uint8), 0) == b""

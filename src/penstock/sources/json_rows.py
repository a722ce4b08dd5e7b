"""JSON lines to Arrow, natively, a block at a time; lines are looked at one by one only in a block that fails.

The law: one line is one object is one row, and a value comes out as the text has it or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from penstock.errors import BadRow, SchemaClash, UsageError
from penstock.sources.lines import Block, longest_line

EXACT = 1 << 53  # float64 holds every whole number below this one, and not every one above
FIX_LINE = "fix the line, or pass on_error='skip' (--on-error skip)"
FIX_SCHEMA = "pass a schema that has it, or infer from all rows"
FIX_COLUMN = "make the column one type, or pass a schema"

_JUDGED = 1 << 20  # longer lines are never made Python objects, which take many times their text
_LOOK = 1 << 20
_LARGEST = (1 << 31) - (1 << 16)  # Arrow's block size is an int32
_UNEXPECTED = "unexpected field"
_BLANK = b" \t\r"
_DEEPEST = 60  # levels; Arrow hands types of at most 64 from one library to another
_DEEP = f"is nested more than {_DEEPEST} levels deep"
# Levels at which a block is not even given to inference: between 10,000 and 20,000 it ends the process with a stack
# overflow. Reading with a schema does not.
_DEADLY = 4000
_PLAIN = bytes(set(range(256)) - set(b'[]{}"'))

Others = Literal["error", "ignore"]
Path = tuple[str | None, ...]  # None steps into a list
Ordinals = np.ndarray[tuple[int], np.dtype[np.int64]]
Leaf = tuple[Path, pa.Array, tuple[pa.Array, ...]]  # with the list arrays it lies in, outermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The rows of a block. `lines` are their lines, from 0 in the block; None when row i is line i."""

    batch: pa.RecordBatch
    lines: Ordinals | None = None
    skipped: int = 0
    first_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """What a block holds. `wide`: int64 columns with a number no float64 holds, and where; see `check_wide`."""

    schema: pa.Schema
    rows: int
    longest: int
    skipped: int = 0
    wide: Mapping[str, str] = field(default_factory=dict)


def parse(
    block: Block,
    schema: pa.Schema,
    *,
    where: str,
    first_line: int,
    on_error: str = "raise",
    others: Others = "error",
) -> Parsed:
    """The block's rows as one batch of `schema`; `first_line` lines of the file come before it.

    A line that does not fit is a BadRow, or with on_error="skip" is left out and counted. A column the schema lacks is
    a BadRow always: then it is the schema that is wrong, and skipping would drop good rows. Unless it is to leave some
    columns unread: others="ignore".
    """
    lines = _Lines(block, where, first_line)
    whole = _whole(block, schema, others)
    if whole is not None:
        _check_floats(whole, lines, range(whole.num_rows))
        return Parsed(batch=whole)
    batches, kept, wrong = list[pa.RecordBatch](), list[int](), list[int]()
    for rows, result in _sift(lines.text, schema, others):
        if isinstance(result, pa.RecordBatch):
            _check_floats(result, lines, rows)
            batches.append(result)
            kept += rows
        elif _UNEXPECTED in result:
            raise lines.bad(rows[0], _why(lines.text[rows[0]], schema), do=FIX_SCHEMA)
        elif on_error == "raise":
            raise lines.bad(rows[0], _why(lines.text[rows[0]], schema))
        else:
            wrong += rows
    first = lines.bad(min(wrong), _why(lines.text[min(wrong)], schema), do="") if wrong else None
    return Parsed(
        batch=batches[0] if len(batches) == 1 else pa.concat_batches([_read(b"", schema, rows=0), *batches]),
        lines=lines.at[kept],
        skipped=len(wrong),
        first_error=None if first is None else str(first),
    )


def infer(block: Block, *, where: str, first_line: int, on_error: str = "raise") -> Inferred:
    """The types of all values in the block. Strings stay strings, whatever they look like.

    A line that is no JSON object is a BadRow, or skipped; a column of two types is a SchemaClash in any case.
    """
    lines = _Lines(block, where, first_line)
    whole = _whole(block, None)
    schema, wide, seen, skipped = pa.schema([]), dict[str, str](), list[Sequence[int]](), 0
    runs = _sift(lines.text, None) if whole is None else [(range(whole.num_rows), whole)]
    for run, result in runs:
        if isinstance(result, str):
            if on_error == "raise":
                raise lines.bad(run[0], _why(lines.text[run[0]], None))
            skipped += 1
            continue
        _check_floats(result, lines, run)
        found = _strings(result.schema)
        try:
            schema = _merged(schema, found)
        except _DifferError as differ:
            before = [row for rows in seen for row in rows]
            places = [lines.place(_first_with(lines.text, rows, differ.path)) for rows in (before, run)]
            raise _clash(differ, *places) from None
        wide = _wide(result, lines, run) | wide
        seen.append(run)
    check_wide(schema, wide)
    rows, longest = sum(map(len, seen)), longest_line(block.data)
    return Inferred(schema=schema, rows=rows, longest=longest, skipped=skipped, wide=wide)


def unify(a: pa.Schema, b: pa.Schema, *, a_where: str, b_where: str) -> pa.Schema:
    """All columns of both, in order of first appearance. Null gives way to any type, int64 to float64.

    >>> a, b = pa.schema({"x": pa.int64()}), pa.schema({"y": pa.string(), "x": pa.null()})
    >>> unify(a, b, a_where="a", b_where="b").names
    ['x', 'y']
    """
    try:
        return _merged(a, b)
    except _DifferError as differ:
        raise _clash(differ, a_where, b_where) from None


def check_wide(schema: pa.Schema, wide: Mapping[str, str]) -> None:
    """Refuse a schema folded by `unify` in which a column of `wide` became float64: its numbers would change."""
    for path, kind in _leaf_types(pa.struct(schema)):
        if (name := _dotted(path)) in wide and pa.types.is_float64(kind):
            what = f"column {name!r} holds numbers with a fraction, and a whole number that float64 cannot hold"
            raise SchemaClash(what, where=wide[name], do=FIX_COLUMN)


class _DifferError(Exception):
    """Two types have no common one."""

    def __init__(self, path: Path, a: pa.DataType, b: pa.DataType) -> None:
        super().__init__(path, a, b)
        self.path, self.a, self.b = path, a, b


class _Lines:
    """The lines of a block that are not blank. Split only when asked for, which few blocks do."""

    def __init__(self, block: Block, where: str, first_line: int) -> None:
        self._block, self._where, self._first_line = block, where, first_line

    @cached_property
    def _all(self) -> list[bytes]:
        return [line.strip(_BLANK) for line in self._block.data.split(b"\n")]

    @cached_property
    def at(self) -> Ordinals:
        return np.flatnonzero(np.fromiter(map(len, self._all), dtype=np.int64))

    @cached_property
    def text(self) -> list[bytes]:
        return [line for line in self._all if line]

    def place(self, row: int) -> str:
        return f"{self._where} line {self._first_line + self.at[row] + 1}"

    def bad(self, row: int, why: str, *, do: str = FIX_LINE) -> BadRow:
        return BadRow(why, where=self.place(row), do=do)


def _whole(block: Block, schema: pa.Schema | None, others: Others = "error") -> pa.RecordBatch | None:
    """All of the block in one native read; None when a line is blank or wrong."""
    data = block.data
    # Arrow takes rows from anywhere: two on a line, one over two lines, `null` for an empty one. But "}" is followed
    # by "{" only between rows, so if every line begins and ends so, and rows are as many as lines, each is one row.
    joints = data.count(b"}\n{") + data.count(b"}\r\n{")
    if joints != block.lines - 1 or not data.startswith(b"{") or not data[-3:].rstrip(b"\r\n").endswith(b"}"):
        return None
    try:
        return _read(data, schema, rows=block.lines, others=others)
    except pa.ArrowInvalid:
        return None


def _read(text: bytes, schema: pa.Schema | None, *, rows: int, others: Others = "error") -> pa.RecordBatch:
    """`rows` framed lines, natively. ArrowInvalid if they are not that."""
    if not text:
        return pa.RecordBatch.from_pylist([], schema=schema)
    if len(text) > _LARGEST:
        raise pa.ArrowInvalid(f"is {len(text)} bytes long, more than the {_LARGEST} that can be read")
    if schema is None and _too_deep(text, rows):
        raise pa.ArrowInvalid(_DEEP)
    asked = schema if schema is None else pa.schema(_without_null(pa.struct(schema)))
    buffer = pa.py_buffer(text)
    # Arrow does not look at the encoding. A view of the text as one string does, without a copy.
    offsets = pa.py_buffer(np.array([0, len(text)], dtype=np.int64))
    pa.LargeStringArray.from_buffers(1, offsets, buffer).validate(full=True)
    try:
        table = pj.read_json(
            pa.BufferReader(buffer),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=asked, unexpected_field_behavior="infer" if schema is None else others
            ),
        )
    except pa.ArrowNotImplementedError as error:
        raise UsageError(f"JSON cannot be read into this schema: {error}") from error
    if table.num_rows != rows:
        raise pa.ArrowInvalid("is more than one JSON object")
    if schema is None and _levels(table.schema) > _DEEPEST:
        raise pa.ArrowInvalid(_DEEP)
    batch = table.combine_chunks().to_batches()[0]
    if schema is None:
        return _read(text, _strings(batch.schema), rows=rows) if any(map(_torn, batch.columns)) else batch
    if asked == schema:
        return batch
    return pa.RecordBatch.from_arrays(list(map(_with_null, batch, schema.types)), schema=schema)


def _too_deep(text: bytes, rows: int) -> bool:
    """Whether inference might overflow the stack. Looks closely only at blocks with a line that has room for it."""
    if text.count(b"[") + text.count(b"{") - rows < _DEADLY or longest_line(text) < 2 * _DEADLY:
        return False
    at = depth = quoted = 0
    while at < len(text):
        end = at + _LOOK
        while text[end - 1 : end] == b"\\":
            end += 1
        # Without escapes, and with brackets and quotes alone, a bracket after an odd number of quotes is in a string.
        bare = text[at:end].replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _PLAIN)
        at, marks = end, np.frombuffer(b'"' * quoted + bare, dtype=np.uint8)
        odd, opens = np.cumsum(marks == ord('"')) % 2 == 1, (marks == ord("[")) | (marks == ord("{"))
        steps = np.where(odd | (marks == ord('"')), 0, np.where(opens, 1, -1))
        depths = depth + np.cumsum(steps)
        if len(marks):
            depth, quoted = int(depths[-1]), int(odd[-1])
        if depths.max(initial=0) > _DEADLY:
            return True
    return False


def _levels(schema: pa.Schema) -> int:
    levels, kinds = 0, schema.types
    while kinds:
        levels, kinds = levels + 1, [kind.field(at).type for kind in kinds for at in range(kind.num_fields)]
    return levels


def _torn(array: pa.Array) -> bool:
    """Whether a list has lost values: inference drops nulls at the head of lists (apache/arrow#51305)."""
    if pa.types.is_struct(array.type):
        return any(_torn(array.field(at)) for at in range(array.type.num_fields))
    if pa.types.is_list(array.type):
        return array.offsets[-1].as_py() != len(array.values) or _torn(array.values)
    return False


def _without_null(kind: pa.DataType, *, listed: bool = False) -> pa.DataType:
    """The type with nulls in lists read as bool: given a type Arrow keeps them all, except for null itself."""
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(_without_null(inner.type, listed=listed)) for inner in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_null(kind.value_type, listed=True)))
    return pa.bool_() if listed and pa.types.is_null(kind) else kind


def _with_null(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """What `_without_null` had read, as the type that was meant."""
    if array.type == kind:
        return array
    if pa.types.is_struct(kind):
        children = [_with_null(array.field(at), inner.type) for at, inner in enumerate(kind)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        values = _with_null(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=array.is_null())
    if array.null_count < len(array):
        raise pa.ArrowInvalid("bool in a column of nulls")
    return pa.nulls(len(array))


def _sift(
    text: Sequence[bytes], schema: pa.Schema | None, others: Others = "error"
) -> Iterator[tuple[list[int], pa.RecordBatch | str]]:
    """Runs of rows that read well together, in order, and single rows that do not, with the reason.

    Halves what fails: n lines with k wrong cost at worst n log n bytes, and some k log n reads.
    """
    todo: list[list[int]] = [[]]
    for row, line in enumerate(text):
        if _framed(line):
            todo[0].append(row)
        else:
            yield [row], "is not a JSON object"
    judged = False
    while todo and (rows := todo.pop()):
        half = len(rows) // 2
        try:
            batch = _read(b"\n".join([text[row] for row in rows]), schema, rows=len(rows), others=others)
        except pa.ArrowInvalid as error:
            if not half:
                yield rows, str(error)
            elif judged:
                todo += [rows[half:], rows[:half]]
            else:
                judged = True
                todo.append([])
                for row in rows:
                    if _wrong(text[row], schema):
                        yield [row], "is wrong"
                    else:
                        todo[0].append(row)
        else:
            yield rows, batch


def _framed(line: bytes) -> bool:
    return line.startswith(b"{") and line.endswith(b"}")


def _wrong(line: bytes, schema: pa.Schema | None) -> bool:
    """Whether a line is wrong for certain. Where many are, Python says so in a few µs, Arrow takes some hundred."""
    if len(line) > _JUDGED or b"Inf" in line:  # which Arrow reads, and Python does not
        return False
    try:
        row = json.loads(line.decode())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return True
    except (RecursionError, ValueError):  # too deep, or a number too long, for Python: Arrow decides
        return False
    return schema is not None and _misfit(row, pa.struct(schema))


def _misfit(value: object, kind: pa.DataType) -> bool:
    """Whether no value of this type can be read from what Python made of it; False when in doubt."""
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return any(_misfit(value.get(inner.name), inner.type) for inner in kind)
    if isinstance(value, list) and pa.types.is_list(kind):
        return any(_misfit(item, kind.value_type) for item in value)
    if value is None:
        return False
    if pa.types.is_nested(kind) or isinstance(value, dict | list):
        return True
    if pa.types.is_integer(kind):
        return not isinstance(value, int) or isinstance(value, bool)
    return pa.types.is_boolean(kind) and not isinstance(value, bool)


def _why(line: bytes, schema: pa.Schema | None) -> str:
    """What is wrong with one line, in the reader's words."""
    if not _framed(line):
        return "is not a JSON object"
    try:
        found = _strings(_read(line, None, rows=1).schema)
    except pa.ArrowInvalid as error:
        reason = re.sub(r"^JSON parse error: |\.? in row \d+$|\.$", "", str(error))
        if reason.startswith("Invalid UTF8"):
            return "is not UTF-8"
        return reason if reason.startswith("is ") else f"is malformed ({reason})"
    for column in schema or []:
        try:
            _read(line, pa.schema([column]), rows=1, others="ignore")
        except pa.ArrowInvalid as error:
            have = found.field(column.name).type if column.name in found.names else pa.null()
            path, want, have = _difference((column.name,), column.type, have)
            return f"column {_dotted(path)!r} is {want} but the value is {have} ({error})"
    known = {path for path, _ in _leaf_types(pa.struct(schema or []), inner=True)}
    new = next((path for path, _ in _leaf_types(pa.struct(found), inner=True) if path not in known), ())
    return f"has a column the schema lacks, {_dotted(new)!r}"


def _difference(path: Path, want: pa.DataType, have: pa.DataType) -> tuple[Path, pa.DataType, pa.DataType]:
    """The innermost place where two types differ."""
    if pa.types.is_struct(want) and pa.types.is_struct(have):
        for inner in want:
            at = have.get_field_index(inner.name)
            if at >= 0 and have.field(at).type != inner.type and not pa.types.is_null(have.field(at).type):
                return _difference((*path, inner.name), inner.type, have.field(at).type)
    if pa.types.is_list(want) and pa.types.is_list(have):
        return _difference((*path, None), want.value_type, have.value_type)
    return path, want, have


def _strings(schema: pa.Schema) -> pa.Schema:
    """Arrow infers a timestamp only where every value is a string that looks like one; the value is the string."""

    def kept(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_timestamp(kind):
            return pa.string()
        if pa.types.is_struct(kind):
            return pa.struct([inner.with_type(kept(inner.type)) for inner in kind])
        if pa.types.is_list(kind):
            return pa.list_(kept(kind.value_type))
        return kind

    return pa.schema(kept(pa.struct(schema)))


def _merged(a: pa.Schema, b: pa.Schema) -> pa.Schema:
    return pa.schema(_common((), pa.struct(a), pa.struct(b)))


def _common(path: Path, a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if {a, b} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(a) and pa.types.is_list(b):
        return pa.list_(_common((*path, None), a.value_type, b.value_type))
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        kinds = {inner.name: inner.type for inner in a}
        for inner in b:
            here = kinds.get(inner.name, pa.null())
            kinds[inner.name] = _common((*path, inner.name), here, inner.type)
        return pa.struct(kinds)
    raise _DifferError(path, a, b)


def _clash(differ: _DifferError, a_where: str, b_where: str) -> SchemaClash:
    what = f"column {_dotted(differ.path)!r} is {differ.a} in {a_where} and {differ.b} in {b_where}"
    return SchemaClash(what, do=FIX_COLUMN)


def _first_with(text: Sequence[bytes], rows: Sequence[int], path: Path) -> int:
    """The first of these rows with a value at `path`; all of them read well together."""
    low, high = 0, len(rows) - 1
    while low < high:
        middle = (low + high) // 2
        part = rows[low : middle + 1]
        schema = _read(b"\n".join([text[row] for row in part]), None, rows=len(part)).schema
        kinds = dict(_leaf_types(pa.struct(schema), inner=True))
        if pa.types.is_null(kinds.get(path, pa.null())):
            low = middle + 1
        else:
            high = middle
    return rows[low]


def _dotted(path: Path) -> str:
    return "".join("[]" if name is None else f".{name}" for name in path)[1:]


def _leaf_types(kind: pa.DataType, path: Path = (), *, inner: bool = False) -> Iterator[tuple[Path, pa.DataType]]:
    """Paths and types of the leaves of a type; with `inner` of the types in between too."""
    if inner or not (pa.types.is_struct(kind) or pa.types.is_list(kind)):
        yield path, kind
    if pa.types.is_struct(kind):
        for child in kind:
            yield from _leaf_types(child.type, (*path, child.name), inner=inner)
    elif pa.types.is_list(kind):
        yield from _leaf_types(kind.value_type, (*path, None), inner=inner)


def _leaves(array: pa.Array, path: Path = (), lists: tuple[pa.Array, ...] = ()) -> Iterator[Leaf]:
    if pa.types.is_struct(array.type):
        for at, child in enumerate(array.type):
            yield from _leaves(array.field(at), (*path, child.name), lists)
    elif pa.types.is_list(array.type):
        yield from _leaves(array.flatten(), (*path, None), (*lists, array))
    else:
        yield path, array, lists


def _far(batch: pa.RecordBatch, kind: pa.DataType) -> Iterator[Leaf]:
    """Leaves of a type with a value at which float64 may not be exact."""
    for column, name in zip(batch.columns, batch.schema.names, strict=True):
        for path, leaf, lists in _leaves(column, (name,)):
            if leaf.type == kind and len(leaf):
                ends = pc.min_max(leaf).as_py()
                if (ends["max"] or 0) >= EXACT or (ends["min"] or 0) <= -EXACT:
                    yield path, leaf, lists


def _rows_of(lists: tuple[pa.Array, ...], at: Ordinals) -> Ordinals:
    for array in reversed(lists):
        at = pc.list_parent_indices(array).to_numpy()[at]
    return at


def _wide(batch: pa.RecordBatch, lines: _Lines, rows: Sequence[int]) -> dict[str, str]:
    wide = {}
    for path, leaf, lists in _far(batch, pa.int64()):
        values = leaf.fill_null(0).to_numpy()
        with np.errstate(invalid="ignore"):  # 2**63 - 1 rounds up to 2**63, which wraps: not equal, as it should be
            changed = np.flatnonzero(values.astype(np.float64).astype(np.int64) != values)
        if len(changed):
            wide[_dotted(path)] = lines.place(rows[_rows_of(lists, changed[:1])[0]])
    return wide


def _check_floats(batch: pa.RecordBatch, lines: _Lines, rows: Sequence[int]) -> None:
    """Refuse whole numbers that became other numbers as float64. Only rows with a number so large are looked at."""
    for path, leaf, lists in _far(batch, pa.float64()):
        values = leaf.to_numpy(zero_copy_only=False)
        for row in np.unique(_rows_of(lists, np.flatnonzero(np.isfinite(values) & (np.abs(values) >= EXACT)))):
            for number in _whole_numbers(json.loads(lines.text[rows[row]], parse_float=_none), path):
                if number != float(number):
                    what = f"column {_dotted(path)!r} is float64, which cannot hold {number}"
                    raise lines.bad(rows[row], what, do="pass a schema with int64, uint64 or decimal128 for it")


def _none(_: str) -> None:
    """Floats are left out, so that a line of floats stays small."""


def _whole_numbers(value: object, path: Path) -> Iterator[int]:
    if not path:
        if isinstance(value, int):
            yield value
    elif isinstance(value, dict):
        yield from _whole_numbers(value.get(path[0]), path[1:])
    elif isinstance(value, list):
        for item in value:
            yield from _whole_numbers(item, path[1:])

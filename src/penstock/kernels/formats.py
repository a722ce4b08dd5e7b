"""What a user's function sees of a batch, and how its answer becomes a batch again.

Nothing is lost on the way: a cast is exact or it is an error that names the column and the row.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.errors import FunctionFailed, UsageError

Function: TypeAlias = Callable[..., object]
FORMATS = ("arrow", "numpy", "pandas", "polars", "python", "rows")

# Who says what type a column has: Arrow itself, an array that knows fewer types, or a guess from Python objects.
_Origin: TypeAlias = Literal["arrow", "numpy", "pandas", "polars", "python"]
_Test: TypeAlias = Callable[[pa.DataType], bool]
_Pairs: TypeAlias = tuple[tuple[_Test, _Test], ...]

_EXACT_IN_DOUBLE = 1 << 53
_SAME_COLUMNS = "return the same columns for every batch, or give the step a schema="
_SAME_TYPES = "return the same types for every batch, or give the step a schema="
_CONVERSION = (pa.ArrowException, TypeError, ValueError, OverflowError)


def to_format(batch: pa.RecordBatch, form: str) -> object:
    """A batch as the function sees it. Extension columns are seen as their storage.

    - ``arrow``: the batch. ``python``: a dict of lists. ``rows``: a list of dicts; the function gets one at a time.
    - ``numpy``: a dict of arrays. Text and nested values are object arrays. Nulls are None there, NaT in times, and NaN
      in numbers, which makes integers floats; where a float would round an integer, or nested integers have nulls among
      them, the column is of Python objects.
    - ``pandas``: a frame, with nulls as in ``numpy``. ``polars``: a frame.
    """
    if form == "arrow":
        return batch
    _once(batch.schema.names, "the batch has")
    columns = {name: _plain(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    if form == "python":
        return {name: column.to_pylist() for name, column in columns.items()}
    if form == "rows":
        return pa.RecordBatch.from_pydict(columns).to_pylist()
    if form == "numpy":
        return {name: _to_numpy(column) for name, column in columns.items()}
    if form == "pandas":
        pandas = _library("pandas")
        series = {name: _to_objects(c) if _rounds(c) else c.to_pandas() for name, c in columns.items()}
        return pandas.DataFrame(series, index=range(batch.num_rows), copy=False)
    if form == "polars":
        polars = _library("polars")
        try:
            return polars.from_arrow(pa.Table.from_pydict(columns))
        except polars.exceptions.PolarsError as error:
            raise UsageError(f"polars cannot hold this batch: {error}", do="use another format") from error
    raise UsageError(f"no format {form!r}", do="use one of " + ", ".join(FORMATS))


def from_format(result: object, schema: pa.Schema | None, *, given: pa.RecordBatch | None = None) -> pa.RecordBatch:
    """The batch in what a function returned: Arrow, a dict of columns, a frame (without its index) or a list of dicts.

    With a `schema`, columns are put in its order and cast without loss. Nulls fit every type, integers fit floats that
    hold them exactly, floats fit integers when whole, times without a zone are UTC. Python floats may be rounded to the
    width the schema asks for, since Python has no other; arrays of doubles may not.

    Without one, columns keep the types they came in, except for what the way through the format did to the columns of
    `given`: text and binary get back their layout, nulls their type; and a column that holds only values of the input
    gets back its type where the format has no such type (integers with nulls that became floats, times, decimals).
    What Arrow arrays say is never changed.
    """
    if isinstance(result, pa.RecordBatch) and (schema is None or result.schema.equals(schema)):
        return result
    columns = _columns(result)
    if schema is not None:
        if not columns and isinstance(result, Sequence):
            return pa.RecordBatch.from_pylist([], schema=schema)
        _same_names(list(columns), schema.names)
        columns = {name: columns[name] for name in schema.names}
    lengths = {name: _length(name, value) for name, value in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise FunctionFailed(f"returned columns of different lengths: {shown}")
    arrays = []
    for name, value in columns.items():
        before = given.column(name) if given is not None and name in given.schema.names else None
        arrays.append(_column(name, value, before, None if schema is None else schema.field(name)))
    if schema is not None:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def mask_of(result: object, rows: int) -> pa.BooleanArray:
    """Which rows a filter keeps: a bool for each, from Arrow, numpy, pandas, polars or a list. Null is False."""
    if isinstance(result, bool | np.bool_):
        raise FunctionFailed(f"returned one bool for a batch of {rows} rows", do="return one per row")
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
        raise FunctionFailed(f"returned {_shown(result)} for a batch of {rows} rows", do="return one bool per row")
    if getattr(result, "ndim", 1) != 1:
        raise FunctionFailed(f"returned {_shown(result)} of more than one dimension", do="return one bool per row")
    try:
        mask, _ = _read("the mask", result, None)
    except FunctionFailed as error:
        raise FunctionFailed(f"returned {_shown(result)}, not all bools", do="return one bool per row") from error
    if len(mask) != rows:
        raise FunctionFailed(f"returned {len(mask)} bools for a batch of {rows} rows", do="return one per row")
    if pt.is_null(mask.type):
        mask = mask.cast(pa.bool_())
    if not pt.is_boolean(mask.type):
        raise FunctionFailed(f"returned {_shown(result)} of {mask.type}", do="return one bool per row")
    return mask.fill_null(False)


def call_map(fn: Function, batch: pa.RecordBatch, form: str, schema: pa.Schema | None) -> pa.RecordBatch:
    """The batch `fn` makes of a batch; for ``rows`` it is called with each row and must return a dict."""
    seen = to_format(batch, form)
    if form != "rows":
        with _blaming(""):
            result = fn(seen)
        return from_format(result, schema, given=batch)
    made: list[object] = []
    for number, row in _rows(seen):
        with _blaming(f" at row {number} of the batch"):
            result = fn(row)
        if not isinstance(result, dict):
            raise FunctionFailed(f"returned {_shown(result)} for row {number} of the batch", do="return a dict")
        made.append(result)
    return from_format(made, schema, given=batch)


def call_filter(fn: Function, batch: pa.RecordBatch, form: str) -> pa.BooleanArray:
    """The mask of the rows `fn` keeps; for ``rows`` it is called with each row and must return a bool."""
    seen = to_format(batch, form)
    if form != "rows":
        with _blaming(""):
            result = fn(seen)
        return mask_of(result, batch.num_rows)
    kept = np.zeros(batch.num_rows, dtype=bool)
    for number, row in _rows(seen):
        with _blaming(f" at row {number} of the batch"):
            result = fn(row)
        if not isinstance(result, bool | np.bool_):
            raise FunctionFailed(f"returned {_shown(result)} for row {number} of the batch", do="return a bool")
        kept[number] = result
    return pa.array(kept)


# Out: Arrow to what the function sees.


def _plain(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _to_numpy(column: pa.Array) -> npt.NDArray[np.generic]:
    if _rounds(column):
        return _to_objects(column)
    array: npt.NDArray[np.generic] = column.to_numpy(zero_copy_only=False)
    return array


def _to_objects(column: pa.Array) -> npt.NDArray[np.object_]:
    array = np.empty(len(column), dtype=object)
    array[:] = column.to_pylist()
    return array


def _rounds(column: pa.Array, *, nested: bool = False) -> bool:
    """Whether NaN for null would make floats of integers that cannot be told back: too large for one, or nested."""
    kind = column.type
    if pt.is_integer(kind):
        if column.null_count == 0 or nested:
            return bool(column.null_count)
        low, high = pc.min_max(column).as_py().values()
        return low is not None and bool(low < -_EXACT_IN_DOUBLE or high > _EXACT_IN_DOUBLE)
    if _is_list(kind) or pt.is_map(kind):
        return _rounds(column.items if pt.is_map(kind) else column.flatten(), nested=True)
    if pt.is_struct(kind):
        return any(_rounds(field, nested=True) for field in column.flatten())
    return False


def _rows(seen: object) -> Iterator[tuple[int, object]]:
    assert isinstance(seen, list)
    return enumerate(seen)


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"format {name!r} needs {name}", do=f"pip install 'penstock[{name}]'") from error


# Back: what the function returned to named columns, to Arrow, to the types wanted.


def _columns(result: object) -> dict[str, object]:
    if isinstance(result, pa.RecordBatch | pa.Table):
        _once(result.schema.names, "returned")
        return dict(zip(result.schema.names, result.columns, strict=True))
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    if isinstance(result, Mapping):
        names, values = list(result.keys()), list(result.values())
    elif isinstance(result, list | tuple) and all(isinstance(row, Mapping) for row in result):
        return _from_rows(result)
    elif pandas and isinstance(result, pandas.DataFrame):
        names = list(result.columns)
        values = [result.iloc[:, place] for place in range(len(names))]
    elif polars and isinstance(result, polars.DataFrame):
        names, values = result.columns, result.get_columns()
    else:
        raise FunctionFailed(
            f"returned {_shown(result)}", do="return a dict of columns, Arrow data, a frame or a list of dicts"
        )
    for name in names:
        if not isinstance(name, str):
            raise FunctionFailed(f"returned a column named {name!r}, a {type(name).__name__}", do="name columns by str")
    if not names:
        raise FunctionFailed(f"returned {_shown(result)} with no columns")
    _once(names, "returned")
    return dict(zip(names, values, strict=True))


def _from_rows(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Columns of a list of dicts. All have the keys of the first: a key some rows lack would depend on the batch."""
    if not rows:
        return {}
    names = rows[0].keys()
    if not names:
        raise FunctionFailed("returned a dict with no columns")
    for number, row in enumerate(rows):
        if row.keys() != names:
            lacks, adds = _quoted(names - row.keys()), _quoted(row.keys() - names)
            what = " and ".join(f"{verb} {keys}" for verb, keys in (("lacks", lacks), ("adds", adds)) if keys)
            raise FunctionFailed(
                f"row {number} of the batch {what}, unlike the rows before",
                do="return the same keys for every row, with None where there is no value",
            )
    return {name: [row[name] for row in rows] for name in names}


def _same_names(names: list[str], wanted: list[str]) -> None:
    missing = [name for name in wanted if name not in names]
    extra = [name for name in names if name not in wanted]
    if missing:
        raise FunctionFailed(f"returned no column {_quoted(missing)}", do=_SAME_COLUMNS)
    if extra:
        raise FunctionFailed(f"returned column {_quoted(extra)}, which is not in the schema", do=_SAME_COLUMNS)


def _once(names: list[str], who: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FunctionFailed(f"{who} more than one column named {_quoted(twice)}")


def _length(name: str, value: object) -> int:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        raise FunctionFailed(f"column {name!r} is {_shown(value)}, not one value per row")
    return len(value)


def _column(name: str, value: object, given: pa.Array | None, field: pa.Field | None) -> pa.Array:
    if given is not None and _untouched(value, given):
        value = given
    target = field.type if field is not None else None if given is None else given.type
    found, origin = _read(name, value, target)
    if field is None:
        return found if given is None or origin == "arrow" else _restored(found, given, origin)
    made = _fitted(name, found, field.type, origin)
    if not field.nullable and made.null_count:
        row = pc.index(made.is_null(), True).as_py()
        raise FunctionFailed(f"column {name!r}, row {row} of the batch: null, where the schema allows none")
    return made


def _untouched(value: object, given: pa.Array) -> bool:
    """Whether floats are, row by row, the ones handed out, so that which NaN was a null is known from `given`."""
    floats = np.asarray(value) if _home(value) in ("numpy", "pandas") and _is_float(value) else None
    if floats is None or floats.ndim != 1 or len(floats) != len(given):
        return False
    if not (pt.is_integer(given.type) or pt.is_floating(given.type)) or _rounds(given):
        return False
    before = given.to_numpy(zero_copy_only=False)
    bits = f"u{floats.itemsize}"
    return floats.dtype == before.dtype and np.array_equal(floats.view(bits), before.view(bits))


def _is_float(value: object) -> bool:
    return isinstance(dtype := getattr(value, "dtype", None), np.dtype) and dtype.kind == "f"


def _read(name: str, value: object, target: pa.DataType | None) -> tuple[pa.Array, _Origin]:
    """A column as Arrow, in its own type; `target` is for values that Arrow cannot type alone, such as maps."""
    if isinstance(value, pa.Array):
        return value, "arrow"
    if isinstance(value, pa.ChunkedArray):
        return _one(value), "arrow"
    polars = sys.modules.get("polars")
    if polars and isinstance(value, polars.Series):
        return _one(pa.chunked_array([value.to_arrow()])), "polars"
    dtype = getattr(value, "dtype", None)
    typed = dtype is not None and dtype != np.dtype(object)  # numpy holds float64 equal to None
    if typed and getattr(value, "ndim", 1) > 1:
        return _tensor(np.asarray(value)), "numpy"
    pandas = _home(value) == "pandas"
    origin: _Origin = "python" if not typed else "pandas" if pandas else "numpy"
    if target is not None and pt.is_map(target) and (array := _exactly(list(_iterable(value)), target)) is not None:
        return array, "arrow"
    try:
        made = _one(pa.chunked_array([pa.array(value, from_pandas=pandas)]))
    except _CONVERSION as error:
        values = list(_iterable(value))
        if target is not None and (array := _exactly(values, target)) is not None:
            return array, "arrow"
        row = _first(len(values), lambda count: _guess(values[:count]) is None)
        raise _misplaced(name, row, values[row], _guess(values[:row]) if row else None) from error
    if origin == "python" and _is_moment(made.type):
        for row, item in enumerate(_iterable(value)):
            if _is_stray(item, made.type):
                raise _misplaced(name, row, item, made)
    return made, origin


def _misplaced(name: str, row: int, value: object, others: pa.Array | None) -> FunctionFailed:
    among = ", which Arrow cannot hold" if others is None else f" among values of type {others.type}"
    return FunctionFailed(f"column {name!r}, row {row} of the batch: {_shown(value)}{among}", do=_SAME_TYPES)


def _is_stray(value: object, kind: pa.DataType) -> bool:
    """Whether Arrow, going by the first value, cut this time to a date or read it in a zone it does not have."""
    if not isinstance(value, datetime) or value != value:  # NaT
        return False
    return bool(pt.is_date(kind)) or (value.tzinfo is None) != (kind.tz is None)


def _iterable(value: object) -> Iterable[object]:
    return value if isinstance(value, Iterable) else ()


def _one(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks() if column.num_chunks else pa.array([], column.type)


def _tensor(array: npt.NDArray[np.generic]) -> pa.Array:
    made = pa.array(array.reshape(-1))
    for width in reversed(array.shape[1:]):
        made = pa.FixedSizeListArray.from_arrays(made, width)
    return made


def _guess(values: list[object]) -> pa.Array | None:
    try:
        return pa.array(values)
    except _CONVERSION:
        return None


def _exactly(values: list[object], target: pa.DataType) -> pa.Array | None:
    # pa.array([1.5], pa.int64()) gives 1 without a word, so what went in is compared with what is there.
    try:
        made = pa.array(values, target)
        return made if made.to_pylist() == values else None
    except _CONVERSION:
        return None


def _restored(found: pa.Array, given: pa.Array, origin: _Origin) -> pa.Array:
    """`found` in the type of `given` if only the way through a format changed it."""
    if found.type == given.type:
        return found
    layout = _akin(found.type, given.type, _LAYOUT)
    nulled = origin in ("numpy", "pandas") and given.null_count and pt.is_floating(found.type)
    if not (layout or (nulled and pt.is_integer(given.type)) or _akin(found.type, given.type, _LAYOUT + _LOST[origin])):
        return found
    try:
        made = _cast(_nan_to_null(found, given.type), given.type)
    except _CONVERSION:
        return found
    return made if layout or _came_from(made, given) else found


def _came_from(made: pa.Array, given: pa.Array) -> bool:
    try:
        return bool(pc.all(pc.is_in(made, value_set=given)).as_py())
    except pa.ArrowException:  # nested and dictionary types have no such kernel
        return bool(made.equals(given))


def _fitted(name: str, found: pa.Array, want: pa.DataType, origin: _Origin) -> pa.Array:
    if found.type == want:
        return found
    if not _akin(found.type, want, _LOSSLESS):
        raise FunctionFailed(f"column {name!r} came back as {found.type} and has to be {want}", do=_SAME_TYPES)
    if origin in ("numpy", "pandas"):
        found = _nan_to_null(found, want)
    made = _cast_exactly(found, want, origin)
    if made is None:
        row = _first(len(found), lambda count: _cast_exactly(found.slice(0, count), want, origin) is None)
        value = found[row].as_py()
        raise FunctionFailed(f"column {name!r}, row {row} of the batch: {value!r} does not fit {want}", do=_SAME_TYPES)
    return made


def _cast_exactly(found: pa.Array, want: pa.DataType, origin: _Origin) -> pa.Array | None:
    try:
        made = _cast(found, want)
        return None if _loses(_plain(found), _plain(made), rounding=origin == "python") else made
    except _CONVERSION:
        return None


def _cast(array: pa.Array, want: pa.DataType) -> pa.Array:
    if pt.is_integer(array.type) and pt.is_decimal(want):
        array = array.cast(pa.decimal128(20, 0))  # Arrow refuses integers for a decimal that not all of them fit
    try:
        return array.cast(want)
    except pa.ArrowInvalid:
        if not pt.is_nested(array.type):
            raise
        # Arrow casts children whole, with those outside the slice and under nulls, which no row holds.
        return array.take(pa.array(np.arange(len(array)))).cast(want)


def _nan_to_null(array: pa.Array, want: pa.DataType) -> pa.Array:
    if pt.is_floating(array.type) and pt.is_integer(want):
        return pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    return array


def _loses(found: pa.Array, made: pa.Array, *, rounding: bool) -> bool:
    """Whether a cast Arrow calls safe lost something: it rounds to narrow floats, and times to dates."""
    if _is_list(found.type) and _is_list(made.type):
        return _loses(found.flatten(), made.flatten(), rounding=rounding)
    if pt.is_struct(found.type) and pt.is_struct(made.type):
        names = [field.name for field in found.type]
        return any(_loses(found.field(name), made.field(name), rounding=rounding) for name in names)
    if pt.is_integer(found.type) and pt.is_floating(made.type):
        return not made.cast(found.type).equals(found)
    if pt.is_floating(found.type) and pt.is_floating(made.type):
        back = made.cast(found.type)
        if rounding:
            return bool(pc.any(pc.and_(pc.is_inf(back), pc.is_finite(found))).as_py())
        return bool(pc.any(pc.and_(pc.not_equal(back, found), pc.invert(pc.is_nan(found)))).as_py())
    if pt.is_timestamp(found.type) and pt.is_date(made.type):
        return not made.cast(found.type).equals(found)
    return False


def _first(count: int, fails: Callable[[int], bool]) -> int:
    """The row that makes a prefix fail: bisected, for prefixes that hold it all fail."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return low


# Which types may become which.


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    plain = pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind)
    return bool(plain or pt.is_fixed_size_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    listed = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return bool(listed or pt.is_list_view(kind) or pt.is_large_list_view(kind))


def _is_moment(kind: pa.DataType) -> bool:
    return bool(pt.is_timestamp(kind) or pt.is_date(kind))


def _is_zoned(kind: pa.DataType) -> bool:
    return bool(pt.is_timestamp(kind) and kind.tz is not None)


def _is_naive(kind: pa.DataType) -> bool:
    return bool(pt.is_timestamp(kind) and kind.tz is None)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind))


def _is_exact(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_decimal(kind))


def _alike(*tests: _Test) -> _Pairs:
    return tuple((test, test) for test in tests)


_LAYOUT = _alike(_is_text, _is_bytes)
_LOSSLESS = (*_LAYOUT, *_alike(_is_number, _is_exact, _is_moment, pt.is_time, pt.is_duration))
# What each origin cannot say. A type it could have kept, and did not, is one the function chose.
_LOST: dict[_Origin, _Pairs] = {
    "arrow": (),
    "numpy": ((_is_naive, _is_zoned), (_is_naive, pt.is_date64)),
    "pandas": (),
    "polars": (*_alike(_is_naive, _is_zoned, pt.is_time, pt.is_duration), (_is_naive, pt.is_date64)),
    "python": (
        *_alike(pt.is_integer, pt.is_floating, pt.is_decimal),
        *_alike(_is_naive, _is_zoned, pt.is_date, pt.is_time, pt.is_duration),
    ),
}


def _akin(found: pa.DataType, want: pa.DataType, pairs: _Pairs) -> bool:
    """Whether every leaf of `found` and its place in `want` are such a pair, or the same."""
    if found == want or pt.is_null(found):
        return True
    if isinstance(want, pa.BaseExtensionType):
        return _akin(found, want.storage_type, pairs)
    if pt.is_dictionary(found):
        return _akin(found.value_type, want, pairs)
    if pt.is_dictionary(want):
        return _akin(found, want.value_type, pairs)
    if _is_list(found) and _is_list(want):
        return _akin(found.value_type, want.value_type, pairs)
    if pt.is_map(found) and pt.is_map(want):
        return _akin(found.key_type, want.key_type, pairs) and _akin(found.item_type, want.item_type, pairs)
    if pt.is_struct(found) and pt.is_struct(want):
        wanted = {field.name: field.type for field in want}
        return all(field.name in wanted and _akin(field.type, wanted[field.name], pairs) for field in found)
    if _is_zoned(found) and _is_naive(want):
        return False  # the zone would be lost
    return any(of_found(found) and of_want(want) for of_found, of_want in pairs)


# What messages say.


@contextmanager
def _blaming(place: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = f": {error}" if str(error) else ""
        raise FunctionFailed(f"raised {type(error).__name__}{place}{text}") from error


def _home(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _shown(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))

"""Schemas of several files made one: columns by name, types without loss, a clash named with both places."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import SchemaClash


def unify(a: pa.Schema, b: pa.Schema, *, a_where: str, b_where: str) -> pa.Schema:
    """Columns of both in order of first appearance, each of a type that holds both without loss."""
    fields: dict[str, pa.Field] = {field.name: field for field in a}
    for field in b:
        known = fields.get(field.name)
        if known is None:
            fields[field.name] = field
        elif known.type != field.type:
            fields[field.name] = known.with_type(_common(known.type, field.type, field.name, a_where, b_where))
    return pa.schema(list(fields.values()), metadata=a.metadata)


def only(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Some columns, in the order asked for; a name that is not there is an error."""
    from penstock.steps.columns import check_known

    check_known(columns, schema.names, step="read")
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with exactly the columns and types of a schema; a column it does not have is null."""
    if batch.schema.equals(schema, check_metadata=False):
        return pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(index)
            arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _common(a: pa.DataType, b: pa.DataType, column: str, a_where: str, b_where: str) -> pa.DataType:
    """The narrowest type that holds every value of both as it is."""
    if a == b or pt.is_null(b):
        return a
    if pt.is_null(a):
        return b
    for family in _FAMILIES:
        if a in family and b in family:
            return family[max(family.index(a), family.index(b))]
    if (pt.is_integer(a) and pt.is_float64(b)) or (pt.is_integer(b) and pt.is_float64(a)):
        return pa.float64()
    if pt.is_struct(a) and pt.is_struct(b):
        one = unify(pa.schema(list(a)), pa.schema(list(b)), a_where=f"{a_where} ({column})", b_where=b_where)
        return pa.struct(list(one))
    for is_kind, make in ((pt.is_list, pa.list_), (pt.is_large_list, pa.large_list)):
        if is_kind(a) and is_kind(b):
            return make(a.value_field.with_type(_common(a.value_type, b.value_type, column, a_where, b_where)))
    raise SchemaClash(
        f"column {column!r} is {a} in {a_where} and {b} in {b_where}",
        do="pass schema= to say what it is, or read the files apart and map one of them",
    )


_FAMILIES = (
    [pa.int8(), pa.int16(), pa.int32(), pa.int64()],
    [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()],
    [pa.float32(), pa.float64()],
    [pa.string_view(), pa.string(), pa.large_string()],
    [pa.binary_view(), pa.binary(), pa.large_binary()],
)

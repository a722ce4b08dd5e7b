"""Media columns: which columns hold files, of what kind, and the two shapes a value takes.

In flight, through steps and in scratch, a value is a *reference*: where its file lies, how long it was and when it was
last changed. In a finished shard it is what Hugging Face `datasets` stores: its bytes and its name. So no step, no
worker and no scratch file ever holds a scan, and what a shard will weigh is known from file stat alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import UsageError
from penstock.media.weights import KEY

# Kind, and the feature `datasets` has for it; plain bytes are a `binary` column there.
KINDS: dict[str, str | None] = {
    "image": "Image",
    "audio": "Audio",
    "video": "Video",
    "pdf": "Pdf",
    "nifti": "Nifti",
    "mesh": "Mesh",
    "bytes": None,
}
MARK = KEY.encode()
# A page's size is a signed 32-bit number, and holds levels and a length beside the value.
LARGEST_VALUE = (1 << 31) - (1 << 16)

# `bytes` is set where a value came without a file; `path` is the name that is stored, `file` the place it is read from.
REFERENCE = pa.struct(
    [
        pa.field("bytes", pa.binary()),
        pa.field("path", pa.string()),
        pa.field("file", pa.string()),
        pa.field("size", pa.int64()),
        pa.field("modified", pa.int64()),  # ns
    ]
)
STORED = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


@dataclass(frozen=True)
class Leaf:
    """One place in a column where media values are: `within` is "" for the column itself, "[]" for the elements of a
    list, ".name" for a member of a struct, and these one after the other ("[].nifti")."""

    column: str
    within: str
    kind: str

    @property
    def path(self) -> str:
        """How it is named to people: `bold[].nifti`."""
        return self.column + self.within


def mark(field: pa.Field, kinds: Mapping[str, str]) -> pa.Field:
    """A column marked as holding media: from places within it ("" for itself, see `Leaf`) to kinds.

    >>> leaves_of(pa.schema([mark(pa.field("scans", pa.list_(REFERENCE)), {"[]": "nifti"})]))
    [Leaf(column='scans', within='[]', kind='nifti')]
    """
    for kind in kinds.values():
        check_kind(kind)
    return field.with_metadata({**(field.metadata or {}), MARK: json.dumps(dict(kinds), sort_keys=True).encode()})


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"media kind {kind!r} is not known; one of {', '.join(KINDS)}")


def kinds_of(field: pa.Field) -> dict[str, str]:
    """The marks of one column; none for a column of plain values."""
    stored = (field.metadata or {}).get(MARK)
    return {} if stored is None else {str(place): str(kind) for place, kind in json.loads(stored).items()}


def leaves_of(schema: pa.Schema) -> list[Leaf]:
    """Every place of a schema where media values are, in its order."""
    return [Leaf(field.name, place, kind) for field in schema for place, kind in kinds_of(field).items()]


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of finished shards: references become what is stored, marks go."""
    return pa.schema([_stored_field(field) for field in schema], metadata=schema.metadata)


def _stored_field(field: pa.Field) -> pa.Field:
    kinds = kinds_of(field)
    if not kinds:
        return field
    left = {key: value for key, value in (field.metadata or {}).items() if key != MARK}
    return pa.field(field.name, stored_type(field.type, kinds), field.nullable, metadata=left or None)


def stored_type(kind: pa.DataType, kinds: Mapping[str, str], place: str = "") -> pa.DataType:
    """A column's type in finished shards, given the places of its media."""
    if place in kinds:
        return pa.binary() if KINDS[kinds[place]] is None else STORED
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(stored_type(one.type, kinds, f"{place}.{one.name}")) for one in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(stored_type(kind.value_type, kinds, place + "[]")))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(stored_type(kind.value_type, kinds, place + "[]")))
    return kind


def references_in(column: pa.Array, leaf: Leaf) -> pa.StructArray:
    """The reference values of one leaf of a column, lists flattened."""
    array = column
    for step in steps_of(leaf.within):
        array = array.flatten() if step == "[]" else pc.struct_field(array, [step])
    return array


def steps_of(within: str) -> Iterator[str]:
    """The steps into a column: "[].nifti" is "[]", "nifti"."""
    for part in within.replace("[]", ".[]").split("."):
        if part:
            yield part

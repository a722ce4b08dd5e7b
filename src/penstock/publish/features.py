"""Features: the column types as Hugging Face `datasets` states them, without importing it.

One dictionary per column, in the JSON form of `Features.to_dict()` of datasets 5.2; from it the Parquet metadata and
the README's YAML are derived. The law: `Features.from_dict` of ours equals what `datasets` makes of the stored schema.
What a source declares of itself is checked against the column's real type before it is repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import types as pt

from penstock.errors import UsageError
from penstock.media.kinds import KINDS, STORED, kinds_of

Feature = dict[str, Any]

METADATA_KEY = b"huggingface"
# A declaration nests as deep as its column; JSON from a file may nest deeper than Python recurses.
DEEPEST = 64

_ARRAYS = {"Array2D": 2, "Array3D": 3, "Array4D": 4, "Array5D": 5}
_EXTENSION_NAME, _EXTENSION_DATA = b"ARROW:extension:name", b"ARROW:extension:metadata"
_ARRAY_EXTENSION = re.compile(r"datasets\.features\.features\.(Array[2-5]D)ExtensionType")
# As `datasets` reads a time zone back; it refuses to load a column with any other.
_ZONE = re.compile(r"[a-zA-Z0-9/_+\-:]*")


def features_of(schema: pa.Schema, *, known: Mapping[str, Any] | None = None) -> dict[str, Feature]:
    """The features of a schema, in flight or finished. `known` are features that were declared before; they stay for
    columns whose type they fit, and deeper down for those members and elements that they fit.

    >>> features_of(pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string()))]))["tags"]
    {'feature': {'dtype': 'string', '_type': 'Value'}, '_type': 'List'}
    """
    declared = {name: understood(feature) for name, feature in (known or {}).items()}
    made = {}
    for field in schema:
        try:
            made[field.name] = _feature(field, kinds_of(field), "", declared.get(field.name))
        except _NoFeature as error:
            raise UsageError(
                f"column {field.name!r} holds {error}, for which Hugging Face datasets has no feature: nobody could"
                " load the dataset",
                do=error.do,
            ) from None
    return made


def huggingface_metadata(features: Mapping[str, Feature]) -> bytes:
    """What goes under the key `huggingface` of a Parquet file, to the byte as `datasets` writes it."""
    return json.dumps({"info": {"features": features}}).encode()


def declared_features(metadata: bytes | str | None) -> dict[str, Feature]:
    """The features a file states under its key `huggingface`; of damaged or unknown ones, none.

    >>> declared_features(b'{"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}')
    {'label': {'names': ['no', 'yes'], '_type': 'ClassLabel'}}
    """
    try:
        stated = json.loads(metadata or b"{}")["info"]["features"]
        columns = {str(name): understood(feature) for name, feature in stated.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: feature for name, feature in columns.items() if feature is not None}


def yaml_features(features: Mapping[str, Feature]) -> list[dict[str, Any]]:
    """The README's form of features, as `Features._to_yaml_list()` gives it.

    >>> yaml_features({"scans": {"feature": {"_type": "Nifti"}, "_type": "List"}})
    [{'name': 'scans', 'list': 'nifti'}]
    """
    return [{"name": name, **_to_yaml(feature)} for name, feature in features.items()]


def features_from_yaml(stated: object) -> dict[str, Feature] | None:
    """The features a README states, older forms included; None where they cannot be understood."""
    try:
        made = _struct_from_yaml(stated, 0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return _all_understood(made, 0)


# From Arrow ----------------------------------------------------------------------------------------------------------


class _NoFeature(Exception):
    def __init__(self, kind: pa.DataType, do: str = "drop the column, or cast it to another type") -> None:
        super().__init__(str(kind))
        self.do = do


def _feature(field: pa.Field, kinds: Mapping[str, str], place: str, known: Feature | None) -> Feature:
    """The feature of one place in a column: its mark, what was declared if that fits, or what its type tells."""
    kind = field.type
    if place in kinds:
        name = KINDS[kinds[place]]
        if name is None:
            return {"dtype": "binary", "_type": "Value"}
        return known if known is not None and known.get("_type") == name else {"_type": name}
    marked = any(other.startswith(place) for other in kinds)
    if not marked and known is not None and _fits(known, kind):
        return known
    if (array := _array_extension(field)) is not None:
        return array
    if isinstance(kind, pa.JsonType):
        return {"_type": "Json"}
    if isinstance(kind, pa.BaseExtensionType):
        return _feature(field.with_type(kind.storage_type), kinds, place, known)
    if pt.is_struct(kind):
        below = known if known is not None and not isinstance(known.get("_type"), str) else {}
        return {one.name: _feature(one, kinds, f"{place}.{one.name}", below.get(one.name)) for one in kind}
    if _is_list(kind):
        element = known["feature"] if known is not None and known.get("_type") in ("List", "LargeList") else None
        inner = _feature(kind.value_field, kinds, place + "[]", element)
        if pt.is_large_list(kind):
            return {"feature": inner, "_type": "LargeList"}
        length = {"length": kind.list_size} if pt.is_fixed_size_list(kind) else {}
        return {"feature": inner, **length, "_type": "List"}
    return {"dtype": dtype_of(kind), "_type": "Value"}


def dtype_of(kind: pa.DataType) -> str:
    """What `datasets` calls a type that has no parts."""
    if pt.is_dictionary(kind):
        return dtype_of(kind.value_type)
    if (plain := _DTYPES.get(kind)) is not None:
        return plain
    if pt.is_time(kind) or pt.is_duration(kind) or pt.is_fixed_size_binary(kind):
        return str(kind)
    if pt.is_timestamp(kind):
        if not _ZONE.fullmatch(kind.tz or ""):
            raise _NoFeature(kind, "cast it to a time zone such as UTC")
        return f"timestamp[{kind.unit}, tz={kind.tz}]" if kind.tz else f"timestamp[{kind.unit}]"
    if pt.is_decimal256(kind):
        return f"decimal256({kind.precision}, {kind.scale})"
    if pt.is_decimal(kind):
        # datasets 5.2 has no decimal32 and decimal64; with this in the README it casts them on loading.
        return f"decimal128({kind.precision}, {kind.scale})"
    if pt.is_map(kind):
        raise _NoFeature(kind, "make it a list of structs with `key` and `value`")
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        raise _NoFeature(kind, "cast it to a plain list")
    raise _NoFeature(kind)


_DTYPES: dict[pa.DataType, str] = {
    **{kind: str(kind) for kind in (pa.null(), pa.bool_(), pa.string(), pa.large_string(), pa.string_view())},
    **{kind: str(kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    **{kind: str(kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{kind: str(kind) for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    pa.float16(): "float16",
    pa.float32(): "float32",
    pa.float64(): "float64",
    pa.date32(): "date32",
    pa.date64(): "date64",
}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _array_extension(field: pa.Field) -> Feature | None:
    """Array2D and its like are extension types that only `datasets` registers; else the field's metadata tells."""
    if isinstance(field.type, pa.ExtensionType):
        name, data = field.type.extension_name, field.type.__arrow_ext_serialize__()
    else:
        about = field.metadata or {}
        name, data = about.get(_EXTENSION_NAME, b"").decode("utf-8", "replace"), about.get(_EXTENSION_DATA, b"")
    if (found := _ARRAY_EXTENSION.fullmatch(name)) is None:
        return None
    try:
        shape, dtype = json.loads(data)
    except (ValueError, TypeError):
        return None
    array = understood({"shape": shape, "dtype": dtype, "_type": found[1]})
    return array if array is not None and _fits(array, field.type) else None


# What was declared ---------------------------------------------------------------------------------------------------


def understood(stated: object, depth: int = 0) -> Feature | None:
    """A declared feature as `datasets` 5.2 would write it, defaults left out; None for one that it would not load.

    Older forms are brought to today's: `Sequence`, a list of one feature, and defaults spelled out.
    """
    if depth > DEEPEST:
        return None
    if isinstance(stated, list | tuple):
        return understood({"feature": stated[0], "_type": "Sequence"}, depth) if len(stated) == 1 else None
    if not isinstance(stated, Mapping):
        return None
    name = stated.get("_type")
    if not isinstance(name, str):  # a struct; one of its members may be called `_type`
        return _all_understood(stated, depth + 1)
    if name in ("List", "LargeList", "Sequence"):
        return _understood_list(name, stated, depth)
    fields = _FIELDS.get(name)
    if fields is None:
        return None
    made: Feature = {}
    for key, (default, allowed) in fields.items():
        value = stated.get(key, default)
        if value == default and default is not _NEEDED:
            continue
        if not allowed(value):
            return None
        made[key] = _PUT_RIGHT.get((name, key), lambda same: same)(value)
    return {**made, "_type": name}


def _all_understood(members: Mapping[str, object], depth: int) -> Feature | None:
    made: Feature = {}
    for name, stated in members.items():
        if (feature := understood(stated, depth)) is None:
            return None
        made[str(name)] = feature
    return made


def _understood_list(name: str, stated: Mapping[str, Any], depth: int) -> Feature | None:
    inner = understood(stated.get("feature"), depth + 1)
    length = stated.get("length", -1)
    if inner is None or not _is_int(length):
        return None
    more: Feature = {} if length == -1 or name == "LargeList" else {"length": length}
    if isinstance(stated.get("id"), str):
        more["id"] = stated["id"]
    if name == "Sequence" and _is_struct(inner) and any(one.get("_type") != "List" for one in inner.values()):
        return {key: {"feature": one, **more, "_type": "List"} for key, one in inner.items()}
    return {"feature": inner, **more, "_type": "LargeList" if name == "LargeList" else "List"}


def _fits(feature: Feature, kind: pa.DataType) -> bool:
    """Whether a column of this type can be what was declared. Names of list elements and nullability do not matter:
    `datasets` casts both away."""
    name = feature.get("_type")
    if not isinstance(name, str):
        return bool(
            pt.is_struct(kind)
            and [one.name for one in kind] == list(feature)
            and all(_fits(feature[one.name], one.type) for one in kind)
        )
    if name == "List":
        length = feature.get("length", -1)
        shaped = pt.is_list(kind) if length == -1 else pt.is_fixed_size_list(kind) and kind.list_size == length
        return bool(shaped and _fits(feature["feature"], kind.value_type))
    if name == "LargeList":
        return bool(pt.is_large_list(kind) and _fits(feature["feature"], kind.value_type))
    if name == "Value":
        try:
            return bool(dtype_of(kind) == feature["dtype"])
        except _NoFeature:
            return False
    if name == "ClassLabel":
        return bool(pt.is_int64(kind))
    if name == "Json":  # stored as text, marked as JSON or not
        return isinstance(kind, pa.JsonType) or bool(pt.is_string(kind))
    if name == "Translation":
        return _same(kind, pa.struct([(language, pa.string()) for language in sorted(feature["languages"])]))
    if name == "TranslationVariableLanguages":
        texts = pa.list_(pa.string())
        return _same(kind, pa.struct([("language", texts), ("translation", texts)]))
    if name in _ARRAYS:
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        for _ in range(_ARRAYS[name]):
            if not pt.is_list(storage):
                return False
            storage = storage.value_type
        return bool(_DTYPES.get(storage) == feature["dtype"])
    return _same(kind, STORED)


def _same(kind: pa.DataType, other: pa.DataType) -> bool:
    """Equal types, whatever may be null in them."""
    if pt.is_struct(kind) and pt.is_struct(other):
        names = [one.name for one in kind] == [one.name for one in other]
        return names and all(_same(a.type, b.type) for a, b in zip(kind, other, strict=True))
    if pt.is_list(kind) and pt.is_list(other):
        return _same(kind.value_type, other.value_type)
    return bool(kind == other)


def _is_struct(feature: Feature) -> bool:
    return not isinstance(feature.get("_type"), str)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _are_labels(value: object) -> bool:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str | int) for one in value):
        return False
    return len({str(one) for one in value}) == len(value)


def _is_shape(sizes: int) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if not isinstance(value, list | tuple) or len(value) != sizes:
            return False
        return all(_is_int(one) or (at == 0 and one is None) for at, one in enumerate(value))

    return check


_NEEDED = object()
_Fields = dict[str, tuple[object, Callable[[object], bool]]]
_ID: _Fields = {"id": (None, _is_text)}
_DECODE: _Fields = {"decode": (True, _is_flag), **_ID}
_ALIASES = {"double": "float64", "float": "float32"}

# Every feature of datasets 5.2 that has no parts: its fields in order, each with its default and what it may be.
_FIELDS: dict[str, _Fields] = {
    "Value": {"dtype": (_NEEDED, _is_text), **_ID},
    "ClassLabel": {"names": (_NEEDED, _are_labels), **_ID},
    "Translation": {"languages": (_NEEDED, _are_texts), **_ID},
    "TranslationVariableLanguages": {"languages": (None, _are_texts), "num_languages": (None, _is_int), **_ID},
    **{
        name: {"shape": (_NEEDED, _is_shape(sizes)), "dtype": (_NEEDED, _is_text), **_ID}
        for name, sizes in _ARRAYS.items()
    },
    "Json": _DECODE,
    "Image": {"mode": (None, _is_text), **_DECODE},
    "Audio": {
        "sampling_rate": (None, _is_int),
        "decode": (True, _is_flag),
        "num_channels": (None, _is_int),
        "stream_index": (None, _is_int),
        **_ID,
    },
    "Video": {
        "decode": (True, _is_flag),
        "stream_index": (None, _is_int),
        "dimension_order": ("NCHW", _is_text),
        "num_ffmpeg_threads": (1, _is_int),
        "device": ("cpu", _is_text),
        "seek_mode": ("exact", _is_text),
        **_ID,
    },
    "Pdf": _DECODE,
    "Nifti": _DECODE,
    "Mesh": _DECODE,
    "BioSequence": {"format": ("fasta", _is_text), **_DECODE},
    "BioStructure": {"format": ("pdb", _is_text), **_DECODE},
}

_PUT_RIGHT: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("Value", "dtype"): lambda dtype: _ALIASES.get(dtype, dtype),
    ("ClassLabel", "names"): list,
    ("Translation", "languages"): list,
    ("TranslationVariableLanguages", "languages"): list,
    **{(name, "shape"): list for name in _ARRAYS},
}


# YAML ----------------------------------------------------------------------------------------------------------------


def _to_yaml(feature: Feature) -> dict[str, Any]:
    name = feature.get("_type")
    if not isinstance(name, str):
        return {"struct": yaml_features(feature)}
    more: dict[str, Any] = {key: value for key, value in feature.items() if key != "_type"}
    if "shape" in more:
        more["shape"] = list(more["shape"])  # a tuple in `Features.to_dict()`, which YAML would tag as one
    if name in ("List", "LargeList"):
        inner = _to_yaml(more.pop("feature"))
        word = "list" if name == "List" else "large_list"
        return {word: next(iter(inner.values())) if list(inner) in (["dtype"], ["struct"]) else inner, **more}
    if name == "Value":
        return more
    if name == "ClassLabel":  # the Hub wants keys that are text
        more["names"] = {str(at): label for at, label in enumerate(more["names"])}
    return {"dtype": {_snake(name): more} if more else _snake(name)}


def _struct_from_yaml(stated: object, depth: int) -> dict[str, Any]:
    if not isinstance(stated, list):
        raise TypeError("a struct is a list of members")
    members = [dict(one) for one in stated]
    return {str(one.pop("name")): _from_yaml(one, depth + 1) for one in members}


def _from_yaml(stated: object, depth: int) -> Any:
    """One feature in JSON form; what is wrong in it is left to `understood` or raises."""
    if depth > DEEPEST:
        raise ValueError("nested too deep")
    if isinstance(stated, list):
        return _struct_from_yaml(stated, depth)
    if isinstance(stated, str):
        return _named_dtype(stated, {})
    if not isinstance(stated, dict):
        raise TypeError("a feature is a mapping")
    if not stated:
        return {}
    word, value = next(iter(stated.items()))
    more = {key: one for key, one in stated.items() if key != word}
    if word in ("list", "large_list", "sequence"):
        inner = _from_yaml(value, depth + 1)
        if word == "sequence" and isinstance(value, list):
            return {key: {"feature": one, **more, "_type": "List"} for key, one in inner.items()}
        return {"feature": inner, **more, "_type": "LargeList" if word == "large_list" else "List"}
    if word == "struct":
        return _struct_from_yaml(value, depth)
    if word == "dtype":
        return _named_dtype(value, more) if isinstance(value, str) else _from_yaml(value, depth + 1)
    name = _CAMEL[word]
    fields = dict(value)
    if name == "ClassLabel" and isinstance(fields.get("names"), dict):
        fields["names"] = [label for _, label in sorted(fields["names"].items(), key=lambda one: int(one[0]))]
    return {**fields, "_type": name}


def _named_dtype(name: str, more: Mapping[str, Any]) -> Feature:
    return {"_type": _CAMEL[name]} if name in _CAMEL else {"dtype": name, **more, "_type": "Value"}


def _snake(name: str) -> str:
    """As `datasets` turns class names to words: Array2D is `array2_d`."""
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()


_CAMEL = {_snake(name): name for name in _FIELDS if name != "Value"}

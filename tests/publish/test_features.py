"""Features, judged by `datasets` itself: what it reads of ours is what it would have written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import (
    Array2D,
    Array5D,
    Audio,
    BioSequence,
    BioStructure,
    ClassLabel,
    Features,
    Image,
    Json,
    LargeList,
    List,
    Mesh,
    Nifti,
    Pdf,
    Translation,
    TranslationVariableLanguages,
    Value,
    Video,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.media.kinds import KINDS, REFERENCE, mark, stored_schema
from penstock.publish.features import (
    declared_features,
    features_from_yaml,
    features_of,
    huggingface_metadata,
    yaml_features,
)

PLAIN = [
    *(pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.binary(1), pa.binary(16), pa.date32(), pa.date64(), pa.json_()),
    *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.timestamp("us", zone) for zone in ("UTC", "Europe/Zurich", "+05:30", "Etc/GMT-3")),
    *(pa.decimal128(38, 10), pa.decimal128(4, -2), pa.decimal256(60, 0)),
]
DICTIONARIES = [pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.int64(), ordered=True)]


def nested(kind: pa.DataType) -> list[pa.DataType]:
    return [
        pa.list_(kind),
        pa.large_list(kind),
        pa.list_(kind, 3),
        pa.struct([("one", kind), ("other", pa.list_(pa.struct([("deep", kind)])))]),
        pa.list_(pa.list_(pa.field("element", kind), 2)),
    ]


# pyarrow cuts the name of a struct's member at a NUL; the two others are words that `datasets` itself trips over.
names = st.text(min_size=1, max_size=6).filter(lambda name: "\0" not in name and name not in ("_type", "self"))
types = st.recursive(
    st.sampled_from(PLAIN),
    lambda below: st.one_of(
        st.builds(pa.list_, below),
        st.builds(pa.large_list, below),
        st.builds(lambda kind, size: pa.list_(kind, size), below, st.integers(1, 5)),
        st.dictionaries(names, below, max_size=3).map(lambda members: pa.struct(list(members.items()))),
    ),
    max_leaves=6,
)


def check(schema: pa.Schema, ours: dict[str, Any], theirs: Features) -> None:
    """All that holds of features whatever they came from."""
    through_json = json.loads(json.dumps(ours))
    assert Features.from_dict(through_json) == theirs
    assert json.loads(json.dumps(theirs.to_dict())) == through_json
    assert yaml_features(ours) == theirs._to_yaml_list()
    assert Features._from_yaml_list(yaml_features(ours)) == theirs
    assert features_from_yaml(yaml_features(ours)) == through_json
    assert huggingface_metadata(ours) == theirs.arrow_schema.metadata[b"huggingface"]
    assert declared_features(huggingface_metadata(ours)) == through_json
    assert features_of(schema, known=ours) == ours
    assert theirs.arrow_schema.names == schema.names


@pytest.mark.parametrize("kind", [*PLAIN, *DICTIONARIES, *(deep for kind in PLAIN for deep in nested(kind))], ids=str)
def test_every_type(kind: pa.DataType) -> None:
    schema = pa.schema([("column", kind), ("beside", pa.int64())])
    theirs = Features.from_arrow_schema(schema)
    check(schema, features_of(schema), theirs)
    if not pa.types.is_dictionary(kind):  # datasets unpacks those
        assert theirs.arrow_schema.remove_metadata() == schema


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(names, types))
def test_any_schema(columns: dict[str, pa.DataType]) -> None:
    schema = pa.schema(list(columns.items()))
    check(schema, features_of(schema), Features.from_arrow_schema(schema))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes"])
def test_media_of_every_kind(kind: str) -> None:
    """Marked columns in flight, at every place a mark may be."""
    feature = getattr(datasets, str(KINDS[kind]))()
    struct = pa.struct([("scan", REFERENCE), ("run", pa.int32()), ("more", pa.list_(REFERENCE))])
    schema = pa.schema(
        [
            ("id", pa.string()),
            mark(pa.field("one", REFERENCE), {"": kind}),
            mark(pa.field("many", pa.list_(REFERENCE)), {"[]": kind}),
            mark(pa.field("large", pa.large_list(REFERENCE)), {"[]": kind}),
            mark(pa.field("runs", pa.list_(struct)), {"[].scan": kind, "[].more[]": kind}),
            mark(pa.field("raw", pa.list_(REFERENCE)), {"[]": "bytes"}),
        ]
    )
    theirs = Features(
        id=Value("string"),
        one=feature,
        many=List(feature),
        large=LargeList(feature),
        runs=List({"scan": feature, "run": Value("int32"), "more": List(feature)}),
        raw=List(Value("binary")),
    )
    ours = features_of(schema)
    check(schema, ours, theirs)
    assert theirs.arrow_schema.remove_metadata() == stored_schema(schema).remove_metadata()
    finished = stored_schema(schema).with_metadata({b"huggingface": huggingface_metadata(ours)})
    assert Features.from_arrow_schema(finished) == theirs
    assert features_of(finished, known=declared_features(finished.metadata[b"huggingface"])) == ours


DECLARED = Features(
    label=ClassLabel(names=["no", "yes", "1", "null"]),
    labels=List(ClassLabel(names=["a"])),
    large=LargeList(ClassLabel(names=["a", "b"])),
    image=Image(mode="RGB", decode=False),
    images=List(Image(decode=False)),
    audio=Audio(sampling_rate=16_000, num_channels=1, stream_index=0),
    video=Video(dimension_order="NHWC", device="cuda"),
    pdf=Pdf(decode=False),
    nifti=Nifti(),
    mesh=Mesh(decode=False),
    sequence=BioSequence(format="genbank"),
    structure=BioStructure(),
    json=Json(),
    jsons=List(Json(decode=False)),
    two=Translation(languages=["fr", "en"]),
    some=TranslationVariableLanguages(languages=["de", "cs", "fr"]),
    square=Array2D(shape=(None, 3), dtype="float32"),
    deep=Array5D(shape=(1, 2, 3, 4, 5), dtype="uint8"),
    nested={"a": ClassLabel(names=["x"]), "b": List({"image": Image(), "id": Value("int8")}, length=2)},
    named=Value("string", id="kept"),
    plain=Value("float64"),
)


def test_what_was_declared_stays() -> None:
    schema = DECLARED.arrow_schema
    ours = features_of(schema, known=DECLARED.to_dict())
    check(schema, ours, DECLARED)
    assert features_of(schema, known=declared_features(schema.metadata[b"huggingface"])) == ours


def test_declared_through_a_parquet_file_of_datasets(tmp_path: Path) -> None:
    """Written by `datasets`, read where it is not imported: its extension types come back as plain lists there."""
    columns = {name: DECLARED[name] for name in ("label", "image", "json", "two", "square", "nested", "named")}
    empty = Features(columns)
    rows = datasets.Dataset.from_dict({name: [] for name in empty}, features=empty)
    rows.to_parquet(tmp_path / "a.parquet")
    code = (
        "import sys, json, pyarrow.parquet as pq\n"
        "from penstock.publish.features import *\n"
        f"schema = pq.read_schema({str(tmp_path / 'a.parquet')!r})\n"
        "known = declared_features(schema.metadata[b'huggingface'])\n"
        "print(json.dumps([features_of(schema, known=known), features_of(schema)['square']]))\n"
        "assert 'datasets' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours, square = json.loads(ran.stdout)
    assert Features.from_dict(ours) == empty
    assert Features.from_dict({"square": square})["square"] == DECLARED["square"]
    stored = pq.read_schema(tmp_path / "a.parquet").metadata[b"huggingface"]
    assert huggingface_metadata(ours) == stored


@pytest.mark.parametrize(
    ("feature", "kind"),
    [
        (ClassLabel(names=["a"]), pa.string()),
        (ClassLabel(names=["a"]), pa.int32()),
        (Image(), pa.binary()),
        (Image(), pa.struct([("path", pa.string()), ("bytes", pa.binary())])),
        (Value("int64"), pa.int32()),
        (Value("string"), pa.large_string()),
        (List(Value("int8")), pa.large_list(pa.int8())),
        (List(Value("int8"), length=2), pa.list_(pa.int8())),
        (List(Value("int8"), length=2), pa.list_(pa.int8(), 3)),
        (Json(), pa.int8()),
        (Translation(languages=["en"]), pa.struct([("en", pa.string()), ("fr", pa.string())])),
        (TranslationVariableLanguages(), pa.struct([("language", pa.list_(pa.string()))])),
        (Array2D(shape=(1, 2), dtype="int8"), pa.list_(pa.int8())),
        (Array2D(shape=(1, 2), dtype="int8"), pa.list_(pa.list_(pa.int16()))),
        ({"a": Value("int8")}, pa.struct([("b", pa.int8())])),
    ],
    ids=str,
)
def test_what_no_longer_fits_is_not_repeated(feature: Any, kind: pa.DataType) -> None:
    schema = pa.schema([("column", kind)])
    known = {**Features(column=feature).to_dict(), "gone": {"dtype": "int8", "_type": "Value"}}
    assert features_of(schema, known=known) == features_of(schema)
    assert Features.from_dict(features_of(schema)) == Features.from_arrow_schema(schema)


def test_of_a_changed_struct_what_fits_stays() -> None:
    schema = pa.schema([("a", pa.list_(pa.struct([("new", pa.int8()), ("label", pa.int64())])))])
    known = Features(a=List({"label": ClassLabel(names=["x"]), "new": Value("string")})).to_dict()
    assert Features.from_dict(features_of(schema, known=known)) == Features(
        a=List({"new": Value("int8"), "label": ClassLabel(names=["x"])})
    )


def test_marks_outweigh_what_was_declared() -> None:
    schema = pa.schema([mark(pa.field("a", REFERENCE), {"": "nifti"}), mark(pa.field("b", REFERENCE), {"": "bytes"})])
    ours = features_of(schema, known=Features(a=Image(), b=Image()).to_dict())
    assert Features.from_dict(ours) == Features(a=Nifti(), b=Value("binary"))
    kept = features_of(schema, known=Features(a=Nifti(decode=False), b=Image()).to_dict())
    assert Features.from_dict(kept)["a"] == Nifti(decode=False)


def test_nullability_and_names_of_elements_do_not_matter() -> None:
    kind = pa.struct([pa.field("bytes", pa.binary(), nullable=False), pa.field("path", pa.string())])
    schema = pa.schema([pa.field("a", pa.list_(pa.field("element", kind, nullable=False)), nullable=False)])
    known = Features(a=List(Image())).to_dict()
    assert features_of(schema, known=known) == known


def test_older_forms_are_brought_to_todays() -> None:
    number = {"dtype": "double", "id": None, "_type": "Value"}
    text = {"dtype": "string", "id": None, "_type": "Value"}
    old = {
        "tokens": {"feature": number, "length": -1, "id": None, "_type": "Sequence"},
        "answers": {"feature": {"text": text}, "length": -1, "_type": "Sequence"},
        "bare": [{"dtype": "float", "_type": "Value"}],
        "label": {"num_classes": 2, "names": ["a", "b"], "names_file": None, "id": None, "_type": "ClassLabel"},
        "audio": {"sampling_rate": 8000, "mono": True, "decode": True, "id": None, "_type": "Audio"},
    }
    theirs = Features.from_dict(old)
    ours = declared_features(json.dumps({"info": {"features": old}}))
    assert Features.from_dict(ours) == theirs
    check(theirs.arrow_schema, ours, theirs)
    stated = [
        {"name": "tokens", "sequence": "float64"},
        {"name": "answers", "sequence": [{"name": "text", "dtype": "string"}]},
        {"name": "bare", "list": [{"name": "x", "dtype": "float32"}]},
    ]
    found = features_from_yaml(stated)
    assert found is not None
    assert Features.from_dict(found) == Features._from_yaml_list(stated)


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        b"",
        b"{",
        b"\xff\x00",
        b"[]",
        b"3",
        b'{"info": null}',
        b'{"info": {"features": null}}',
        b'{"info": {"features": [1]}}',
        b'{"info": {"features": {"a": 1}}}',
        b'{"info": {"features": {"a": {"_type": "Unheard"}}}}',
        b'{"info": {"features": {"a": {"_type": "Value"}}}}',
        b'{"info": {"features": {"a": {"_type": "Value", "dtype": 3}}}}',
        b'{"info": {"features": {"a": {"_type": "ClassLabel", "names": ["x", "x"]}}}}',
        b'{"info": {"features": {"a": {"_type": "ClassLabel", "names": {"0": "x"}}}}}',
        b'{"info": {"features": {"a": {"_type": "Image", "decode": "no"}}}}',
        b'{"info": {"features": {"a": {"_type": "Array2D", "shape": [1, null], "dtype": "int8"}}}}',
        b'{"info": {"features": {"a": {"_type": "List"}}}}',
        b'{"info": {"features": {"a": {"_type": "List", "feature": {"_type": "Image"}, "length": "2"}}}}',
        b'{"info": {"features": {"a": [{"_type": "Image"}, {"_type": "Image"}]}}}',
        b'{"info": {"features": {"a": ' + b'{"x": ' * 200 + b"1" + b"}" * 203,
        b'{"info": {"features": {"a": ' + b"[" * 100_000,
    ],
)
def test_what_is_damaged_counts_for_nothing(damaged: bytes | None) -> None:
    assert declared_features(damaged) == {}


def test_one_damaged_column_leaves_the_others() -> None:
    stated = {"a": {"_type": "Image"}, "b": {"_type": "Unheard"}, "c": {"names": ["x"], "_type": "ClassLabel"}}
    assert set(declared_features(json.dumps({"info": {"features": stated}}))) == {"a", "c"}


@pytest.mark.parametrize(
    "stated",
    [None, 3, "x", [3], [{"dtype": "int8"}], [{"name": "a", "what": "int8"}], [{"name": "a", "list": 3}],
     [{"name": "a", "dtype": {"class_label": {"names": {"x": "y"}}}}], [{"name": "a", "dtype": {"image": 3}}]],
)  # fmt: skip
def test_yaml_that_is_no_features(stated: object) -> None:
    assert features_from_yaml(stated) is None


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pa.map_(pa.string(), pa.int8()), "list of structs"),
        (pa.list_view(pa.int8()), "plain list"),
        (pa.month_day_nano_interval(), "drop the column"),
        (pa.run_end_encoded(pa.int32(), pa.string()), "drop the column"),
        (pa.dense_union([pa.field("x", pa.int8())]), "drop the column"),
        (pa.timestamp("us", "Mars Base (1)"), "time zone"),
    ],
    ids=str,
)
def test_what_datasets_cannot_load_is_refused(kind: pa.DataType, says: str) -> None:
    for schema in (pa.schema([("odd", kind)]), pa.schema([("odd", pa.list_(pa.struct([("x", kind)])))])):
        with pytest.raises(ValueError):
            Features.from_arrow_schema(schema)
        with pytest.raises(UsageError, match=rf"'odd' holds {re.escape(str(kind))}.*{says}"):
            features_of(schema)


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        (pa.decimal32(5, 2), Value("decimal128(5, 2)")),
        (pa.decimal64(12, 2), Value("decimal128(12, 2)")),
        (pa.uuid(), Value("fixed_size_binary[16]")),
        (pa.bool8(), Value("int8")),
        (pa.fixed_shape_tensor(pa.int32(), [2, 2]), List(Value("int32"), length=4)),
    ],
    ids=str,
)
def test_what_datasets_loads_only_by_the_readme(kind: pa.DataType, feature: Any) -> None:
    """It refuses these types by themselves, and casts them when the README says to what."""
    with pytest.raises(ValueError):
        Features.from_arrow_schema(pa.schema([("a", kind)]))
    assert Features.from_dict(features_of(pa.schema([("a", kind)]))) == Features(a=feature)


def test_a_column_named_type() -> None:
    schema = pa.schema([("_type", pa.string()), ("a", pa.struct([("_type", pa.int8()), ("b", pa.int8())]))])
    ours = features_of(schema)
    assert Features.from_dict(ours) == Features.from_arrow_schema(schema)
    assert Features._from_yaml_list(yaml_features(ours)) == Features.from_arrow_schema(schema)
    assert features_from_yaml(yaml_features(ours)) == ours

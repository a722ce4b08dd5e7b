"""Tables in memory: every kind of them gives the same rows, and a slice looks at its own files alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from penstock.errors import BadRow, NotFound, SchemaClash, UsageError
from penstock.media import found as looking
from penstock.media.files import files_table
from penstock.media.found import Found
from penstock.media.frames import frame_batches, frame_splits
from penstock.media.kinds import REFERENCE, leaves_of, mark

ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": None}, {"id": None, "name": "ç"}]
COLUMNS: dict[str, list[Any]] = {"id": [1, 2, None], "name": ["a", None, "ç"]}


def rows_of(found: Found) -> list[dict[str, Any]]:
    return [row for batch in found.batches() for row in batch.to_pylist()]


def read(frame: object) -> Found:
    found = frame_batches(frame)
    assert found is not None
    for batch in found.batches():
        batch.validate(full=True)
        assert batch.schema.equals(found.schema, check_metadata=True)
    return found


@pytest.fixture
def scans(tmp_path: Path) -> list[str]:
    """Six files of 10 to 15 bytes."""
    for number in range(6):
        (tmp_path / f"s{number}.nii").write_bytes(b"x" * (10 + number))
    return [str(tmp_path / f"s{number}.nii") for number in range(6)]


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are looked at."""
    seen: list[str] = []
    real = looking._look_at

    def noted(text: str, places: looking.Places) -> Any:
        seen.append(text)
        return real(text, places)

    monkeypatch.setattr(looking, "_look_at", noted)
    return seen


@pytest.mark.parametrize(
    "frame",
    [
        pa.table(COLUMNS),
        pa.RecordBatch.from_pydict(COLUMNS),
        pl.DataFrame(COLUMNS),
        pd.DataFrame(COLUMNS).astype({"id": "Int64"}),
        COLUMNS,
        ROWS,
        {"id": pa.array(COLUMNS["id"]), "name": pd.Series(COLUMNS["name"])},
        {"id": pl.Series(COLUMNS["id"]), "name": tuple(COLUMNS["name"])},
        datasets.Dataset.from_dict(COLUMNS),
        datasets.IterableDataset.from_generator(lambda: iter(ROWS)),
    ],
    ids=["arrow", "batch", "polars", "pandas", "columns", "rows", "mixed", "series", "dataset", "stream"],
)
def test_every_frame_gives_its_rows_twice(frame: object) -> None:
    found = read(frame)
    assert rows_of(found) == ROWS
    assert rows_of(found) == ROWS


@pytest.mark.parametrize("frame", ["a.parquet", Path("a"), ["a", "b"], [], {}, 3, None, {"train": "a.parquet"}])
def test_what_is_no_frame(frame: object) -> None:
    assert frame_batches(frame) is None


def test_a_reader_is_read_once() -> None:
    found = frame_batches(pa.table(COLUMNS).to_reader())
    assert found is not None
    assert rows_of(found) == ROWS
    with pytest.raises(UsageError, match="can be read once, and was; make a new one"):
        rows_of(found)


def test_a_lazy_frame_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"call \.collect\(\)"):
        frame_batches(pl.DataFrame(COLUMNS).lazy())


def test_columns_of_all_rows_and_types_of_all_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.media import frames

    monkeypatch.setattr(frames, "BATCH_ROWS", 2)
    rows: list[dict[str, Any]] = [{"a": None}, {"a": None}, {"a": 1}, {"a": 2, "b": "late"}, {"a": 2.5}]
    found = read(rows)
    assert found.schema == pa.schema([("a", pa.float64()), ("b", pa.string())])
    assert [row["b"] for row in rows_of(found)] == [None, None, None, "late", None]
    with pytest.raises(SchemaClash, match=r"column 'a' is int64 .* string"):
        frame_batches({"a": [1, 2, "x"]})


def test_frames_that_do_not_hold_together() -> None:
    with pytest.raises(UsageError, match="column 'a' has 2 values, column 'b' has 1"):
        frame_batches({"a": [1, 2], "b": [1]})
    with pytest.raises(UsageError, match="two columns named 'a'"):
        frame_batches(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))
    with pytest.raises(UsageError, match="column 'a' cannot be made an Arrow column"):
        frame_batches({"a": [object()]})


def test_a_named_index_is_a_column_and_the_leavings_of_a_filter_are_not() -> None:
    frame = pd.DataFrame({"x": [1, 2, 3]})
    assert read(frame[frame.x > 1]).schema.names == ["x"]
    assert read(frame.set_index("x").assign(y=1)).schema.names == ["x", "y"]


def test_many_rows_come_in_bounded_batches() -> None:
    found = read(pa.table({"n": range(40_000), "text": ["x" * 1000] * 40_000}))
    sizes = [(batch.num_rows, batch.nbytes) for batch in found.batches()]
    assert sum(rows for rows, _ in sizes) == 40_000
    assert max(rows for rows, _ in sizes) <= looking.BATCH_ROWS
    assert max(size for _, size in sizes) <= looking.BATCH_BYTES


def features() -> datasets.Features:
    return datasets.Features(
        {
            "id": datasets.Value("int32"),
            "kind": datasets.ClassLabel(names=["t1", "t2"]),
            "scan": datasets.Nifti(),
            "more": datasets.List(datasets.Nifti(decode=False)),
            "large": datasets.LargeList(datasets.Image()),
            "two": datasets.List(datasets.Pdf(), length=2),
            "runs": datasets.List({"nifti": datasets.Nifti(), "echo": datasets.Value("int8")}),
            "deep": {"inner": {"mesh": datasets.Video()}},
            "grid": datasets.Array2D(shape=(2, 2), dtype="int32"),
        }
    )


def dataset(scans: list[str]) -> datasets.Dataset:
    """Each row has files of its own, but for the nulls."""
    rows: list[dict[str, Any]] = []
    for number, scan in enumerate(scans):
        rows.append(
            {
                "id": number,
                "kind": number % 2,
                "scan": scan if number != 1 else None,
                "more": [scan, None, scan] if number != 2 else [],
                "large": None if number == 3 else [{"bytes": b"inline", "path": "some/name.png"}],
                "two": [scan, scan],
                "runs": [{"nifti": scan, "echo": 1}, {"nifti": None, "echo": 2}],
                "deep": {"inner": {"mesh": scan}},
                "grid": [[number, 1], [2, 3]],
            }
        )
    # A cast needs neither Pillow nor pdfplumber, and publishing does not either.
    return datasets.Dataset.from_list(rows).cast(features())


def check_row(row: dict[str, Any], scans: list[str]) -> None:
    number = row["id"]
    scan = scans[number]
    size = 10 + number
    value = {
        "bytes": None,
        "path": f"s{number}.nii",
        "file": scan,
        "size": size,
        "modified": os.stat(scan).st_mtime_ns,
    }
    inline = {"bytes": b"inline", "path": "some/name.png", "file": None, "size": 6, "modified": None}
    assert row["scan"] == (None if number == 1 else value)
    assert row["more"] == ([] if number == 2 else [value, None, value])
    assert row["large"] == (None if number == 3 else [inline])
    assert row["two"] == [value, value]
    assert row["runs"] == [{"nifti": value, "echo": 1}, {"nifti": None, "echo": 2}]
    assert row["deep"] == {"inner": {"mesh": value}}
    assert row["grid"] == [[number, 1], [2, 3]]


def test_a_dataset_with_media_wherever_features_have_them(scans: list[str]) -> None:
    found = read(dataset(scans))
    assert [(leaf.path, leaf.kind) for leaf in leaves_of(found.schema)] == [
        ("scan", "nifti"),
        ("more[]", "nifti"),
        ("large[]", "image"),
        ("two[]", "pdf"),
        ("runs[].nifti", "nifti"),
        ("deep.inner.mesh", "video"),
    ]
    assert datasets.Features.from_dict(found.features) == features()
    rows = rows_of(found)
    assert [row["id"] for row in rows] == list(range(6))
    for row in rows:
        check_row(row, scans)


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        (lambda ds: ds.select([4, 0, 4, 2]), [4, 0, 4, 2]),
        (lambda ds: ds.select(range(2, 4)), [2, 3]),
        (lambda ds: ds.shard(6, 5, contiguous=True), [5]),
        (lambda ds: ds.shard(3, 1, contiguous=False), [1, 4]),
        (lambda ds: ds.filter(lambda ids: [one in (1, 5) for one in ids], input_columns="id", batched=True), [1, 5]),
        (lambda ds: ds.select([5, 3, 1]).select([2, 0]), [1, 5]),
        (lambda ds: datasets.concatenate_datasets([ds.select([3]), ds, ds.select(range(4, 6))]), [3, *range(6), 4, 5]),
        (lambda ds: ds.with_format("numpy", columns=["id"]), list(range(6))),
        (lambda ds: ds.select([]), []),
    ],
    ids=["select", "range", "shard", "strided", "filter", "twice", "concat", "format", "none"],
)
def test_selections_give_their_rows_and_look_at_their_files_alone(
    scans: list[str], stats: list[str], chosen: Any, ids: list[int]
) -> None:
    found = frame_batches(chosen(dataset(scans)))
    assert found is not None
    rows = rows_of(found)
    assert [row["id"] for row in rows] == ids
    for row in rows:
        check_row(row, scans)
    assert set(stats) == {scans[number] for number in ids}


def test_one_row_of_a_shared_chunk_is_cut_out_of_sliced_lists(scans: list[str], stats: list[str]) -> None:
    lists = pa.array([[scans[0]], None, [], [scans[1], None], [scans[2]]])
    sliced = pa.table({"s": lists}).slice(1, 3)
    found = files_table(sliced, media={"s": "nifti"})
    values = [row["s"] if not row["s"] else [one and one["file"] for one in row["s"]] for row in rows_of(found)]
    assert values == [None, [], [scans[1], None]]
    assert set(stats) == {scans[1]}


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_view(pa.string()), pa.list_(pa.string_view())],
    ids=str,
)
def test_lists_of_every_sort_keep_null_and_empty_apart(scans: list[str], kind: pa.DataType) -> None:
    array = pa.array([[scans[5]], [scans[0], None], None, [], [None], [scans[1]]], kind)[1:]
    found = files_table(pa.table({"s": array}), media={"s": "nifti"})
    values = [row["s"] and [one and one["size"] for one in row["s"]] for row in rows_of(found)]
    assert values == [[10, None], None, [], [None], [11]]


@pytest.mark.parametrize("rows", [[[]], [None], [[[]]], [[None, []]], [[[None]]], []], ids=str)
def test_lists_of_lists_with_nothing_in_them(rows: list[Any]) -> None:
    inner = {"path": pa.string(), "bytes": pa.binary()}
    table = pa.table({"s": pa.array(rows, pa.list_(pa.list_(pa.struct(inner))))}).replace_schema_metadata(
        {"huggingface": '{"info": {"features": {"s": [[{"_type": "Image"}]]}}}'}
    )
    found = read(table)
    assert [leaf.path for leaf in leaves_of(found.schema)] == ["s[][]"]
    assert [row["s"] for row in rows_of(found)] == rows


def test_fixed_lists_become_lists(scans: list[str]) -> None:
    array = pa.array([[scans[0], None], None, [scans[1], scans[2]]], pa.list_(pa.string(), 2))[1:]
    found = files_table(pa.table({"s": array}), media={"s": "nifti"})
    assert found.schema.field("s").type == pa.list_(REFERENCE)
    values = [row["s"] and [one and one["size"] for one in row["s"]] for row in rows_of(found)]
    assert values == [None, [11, 12]]


def test_what_lies_below_a_null_struct_is_nobodys_path(scans: list[str]) -> None:
    inner = pa.array([scans[0], "/nowhere/at/all"])
    bare = pa.StructArray.from_arrays([pa.nulls(2, pa.binary()), inner], fields=list(pa.struct(
        [("bytes", pa.binary()), ("path", pa.string())])), mask=pa.array([False, True]))  # fmt: skip
    rows = rows_of(files_table(pa.table({"s": bare}), media={"s": "nifti"}))
    assert [row["s"] and row["s"]["file"] for row in rows] == [scans[0], None]


def test_a_dataset_whose_file_is_gone_names_it(scans: list[str]) -> None:
    whole = dataset(scans)
    os.unlink(scans[3])
    found = frame_batches(whole)
    assert found is not None
    with pytest.raises(
        NotFound, match=r"1 file does not exist: '.*/s3\.nii' \(column scan, row 3\); correct the paths"
    ):
        rows_of(found)


def test_datasets_names_for_compressed_scans_are_understood(tmp_path: Path) -> None:
    """As its niftifolder gives them: the compressed file is published, not what unpacks from it."""
    (tmp_path / "T1.nii.gz").write_bytes(b"\x1f\x8bzip")
    whole = datasets.Dataset.from_dict({"s": [f"gzip://T1.nii::{tmp_path}/T1.nii.gz"]})
    (row,) = rows_of(read(whole.cast_column("s", datasets.Nifti())))
    assert row["s"]["file"] == f"{tmp_path}/T1.nii.gz"
    assert (row["s"]["path"], row["s"]["size"]) == ("T1.nii.gz", 5)


def test_inline_bytes_keep_a_relative_name_and_lose_a_machines_folders() -> None:
    values = [
        {"bytes": b"1", "path": "/home/me/a.png"},
        {"bytes": b"22", "path": "sub/b.png"},
        {"bytes": b"", "path": None},
    ]
    whole = datasets.Dataset.from_dict({"i": values}).cast_column("i", datasets.Image())
    rows = [row["i"] for row in rows_of(read(whole))]
    assert [(row["bytes"], row["path"], row["size"]) for row in rows] == [
        (b"1", "a.png", 1),
        (b"22", "sub/b.png", 2),
        (b"", None, 0),
    ]


def test_features_in_an_arrow_table_count(scans: list[str]) -> None:
    whole = dataset(scans).data.table
    found = read(whole)
    assert "runs[].nifti" in [leaf.path for leaf in leaves_of(found.schema)]
    check_row(rows_of(found)[4], scans)


def test_references_stay_as_they_are(scans: list[str]) -> None:
    value = {"bytes": None, "path": "sub-01/a.nii", "file": "/not/looked/at", "size": 3, "modified": 4}
    schema = pa.schema([mark(pa.field("s", REFERENCE), {"": "nifti"})])
    found = read(pa.table([pa.array([value], REFERENCE)], schema=schema))
    assert found.schema.equals(schema, check_metadata=True)
    assert rows_of(found) == [{"s": value}]


def test_a_stream_of_examples_with_media(scans: list[str]) -> None:
    whole = dataset(scans)
    stream = datasets.IterableDataset.from_generator(
        lambda: iter(whole.with_format("arrow").data.table.to_pylist()), features=features()
    )
    for source in (stream, whole.to_iterable_dataset()):
        found = read(source)
        rows = rows_of(found)
        assert [row["id"] for row in rows] == list(range(6))
        for row in rows:
            check_row(row, scans)


def test_a_stream_whose_type_changes_names_the_row() -> None:
    stream = datasets.IterableDataset.from_generator(lambda: ({"a": 1 if i < 2000 else "x"} for i in range(2001)))
    found = frame_batches(stream)
    assert found is not None
    with pytest.raises(BadRow, match=r"row 2,000: a value is of another type .* give the stream features"):
        rows_of(found)


def test_splits() -> None:
    one = datasets.Dataset.from_dict({"a": [1]})
    assert frame_splits(datasets.DatasetDict({"train": one, "test": one})) == {"train": one, "test": one}
    assert frame_splits({"train": pa.table({"a": [1]})}) is not None
    for other in (one, COLUMNS, {}, "train", {"train": "a.parquet"}):
        assert frame_splits(other) is None


def test_files_that_are_no_kind_here_are_refused() -> None:
    whole = pa.table({"a": [1]}).replace_schema_metadata(
        {"huggingface": '{"info": {"features": {"a": {"_type": "BioStructure"}}}}'}
    )
    with pytest.raises(UsageError, match="the feature BioStructure holds files"):
        frame_batches(whole)


def test_frames_bring_their_own_libraries() -> None:
    """Neither pandas nor datasets is imported for an Arrow table with media."""
    code = (
        "import sys, pyarrow as pa\n"
        "from penstock.media.files import files_table\n"
        "from penstock.media.found import strings\n"
        "import pyarrow.compute, numpy\n"
        f"table = pa.table([strings([{sys.executable!r}, None])], names=['a'])\n"
        "print(sum(b.num_rows for b in files_table(table, media={'a': 'bytes'}).batches()))\n"
        "print([one for one in ('pandas', 'datasets', 'polars') if one in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["2", "[]"]

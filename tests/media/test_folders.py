"""Folders of media give what the folder builders of `datasets` give: the same rows, labels and metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import NotFetched, NotFound, UsageError
from penstock.media import folders, found
from penstock.media.folders import folder_splits, is_media_folder, media_folder, media_splits, split_of
from penstock.media.found import Found
from penstock.media.kinds import REFERENCE, leaves_of


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def rows_of(found: Found) -> list[dict[str, Any]]:
    rows = []
    for batch in found.batches():
        batch.validate(full=True)
        assert batch.schema.equals(found.schema, check_metadata=True)
        rows += batch.to_pylist()
    return rows


def files_in(found: Found, column: str, folder: Path) -> list[str]:
    return [os.path.relpath(row[column]["file"], folder) for row in rows_of(found)]


def theirs(
    folder: Path, kind: str, split: str = "train", **options: Any
) -> tuple[datasets.Features, list[dict[str, Any]]]:
    """What the folder builder of `datasets` makes of it, before it encodes: that would need Pillow and torchcodec."""
    cache = str(folder.parent / "cache")
    builder = datasets.load_dataset_builder(f"{kind}folder", data_dir=str(folder), cache_dir=cache, **options)
    splits = {one.name: one for one in builder._split_generators(datasets.DownloadManager())}
    rows = [row for _, row in builder._generate_examples(**splits[split].gen_kwargs)]
    return builder.info.features, rows


def check_as_theirs(ours: Found, other: tuple[datasets.Features, list[dict[str, Any]]]) -> None:
    features, rows = other
    assert ours.schema.names == list(features)
    names = ours.features.get("label", {}).get("names")
    assert names == (features["label"].names if "label" in features else None)
    made = []
    for row in rows_of(ours):
        plain = {name: one["file"] if isinstance(one, dict) else one for name, one in row.items()}
        made.append({**plain, "label": names[row["label"]]} if names else plain)
    column = ours.schema.names[0]
    for row in rows:
        row[column] = row[column].rpartition("::")[2]  # gzip://a.nii::/data/a.nii.gz
    assert made == rows


CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "classes": ("image", ["cats/b.jpg", "cats/a.PNG", "dogs/c.jpeg", "dogs/notes.txt", "dogs/.hidden.png"], {}),
    "flat": ("image", ["b.jpg", "a.jpg", "B.jpg", "é.jpg", "a b.jpg"], {}),
    "one class": ("image", ["cats/a.jpg", "cats/b.jpg"], {}),
    "uneven": ("image", ["cats/a.jpg", "dogs/big/b.jpg"], {}),
    "uneven, labelled": ("image", ["cats/a.jpg", "dogs/big/b.jpg"], {"drop_labels": False}),
    "dropped": ("image", ["cats/a.jpg", "dogs/b.jpg"], {"drop_labels": True}),
    "flat, labelled": ("image", ["a.jpg"], {"drop_labels": False}),
    "order": ("image", ["a/x.jpg", "a-b/x.jpg", "a.b/x.jpg", "a0/x.jpg", "A/x.jpg", "a/x/y.jpg", "a/x-y.jpg"], {}),
    "bookkeeping": ("image", ["x/a.jpg", "y/b.jpg", ".git/c.jpg", "__pycache__/d.jpg", "_z/e.jpg"], {}),
    "deep": ("image", ["one/cats/a.jpg", "one/dogs/b.jpg", "two/cats/c.jpg"], {}),
    "audio": ("audio", ["yes/a.wav", "no/b.flac", "no/c.mp3"], {}),
    "video": ("video", ["a.mp4", "b.mkv"], {}),
    "pdf": ("pdf", ["x/a.pdf", "y/b.PDF"], {}),
    "mesh": ("mesh", ["x/a.glb", "y/b.stl"], {}),
    "nifti": ("nifti", ["x/a.nii", "y/b.nii"], {}),
    "zipped scans": ("nifti", ["a.nii.gz", "b.nii"], {}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_folders_are_read_as_datasets_reads_them(tmp_path: Path, case: str) -> None:
    kind, names, options = CASES[case]
    folder = make(tmp_path / "data-set", *names)
    assert is_media_folder(folder) == kind
    ours = media_folder(folder, **options)
    assert [(leaf.path, leaf.kind) for leaf in leaves_of(ours.schema)] == [(kind, kind)]
    assert ours.folders == (str(folder),)
    check_as_theirs(ours, theirs(folder, kind, **options))


def test_zipped_scans_have_classes_too(tmp_path: Path) -> None:
    """datasets 5.2.0 forgets them: it looks for `.gz` among the endings of scans."""
    folder = make(tmp_path / "d", "x/a.nii.gz", "y/b.nii.gz")
    assert "label" not in theirs(folder, "nifti")[0]
    ours = media_folder(folder)
    assert [row["label"] for row in rows_of(ours)] == [0, 1]
    assert ours.features == {"label": {"names": ["x", "y"], "_type": "ClassLabel"}}


def write_metadata(folder: Path, rows: list[dict[str, Any]], ending: str, within: str = "") -> None:
    path = folder / within / f"metadata.{ending}"
    table = pa.Table.from_pylist(rows)
    if ending == "parquet":
        pq.write_table(table, path)
    elif ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table.to_pandas().to_csv(path, index=False)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_metadata_beside_is_joined(tmp_path: Path, ending: str) -> None:
    folder = make(tmp_path / "d", "cats/a.jpg", "dogs/b.jpg", "c.jpg", "unlisted.jpg")
    rows: list[dict[str, Any]] = [
        {"text": "two", "file_name": "dogs/b.jpg", "depth_file_name": "c.jpg", "age": 3},
        {"text": "one", "file_name": "./cats/a.jpg", "depth_file_name": None, "age": 4},
    ]
    write_metadata(folder, rows, ending)
    ours = media_folder(folder)
    assert ours.schema.names == ["text", "image", "depth", "age"]
    assert [leaf.path for leaf in leaves_of(ours.schema)] == ["image", "depth"]
    made = rows_of(ours)
    assert [(row["text"], row["age"]) for row in made] == [("two", 3), ("one", 4)]
    assert [row["depth"] and row["depth"]["path"] for row in made] == ["c.jpg", None]
    features, other = theirs(folder, "image")
    assert list(features) == ours.schema.names
    for mine, his in zip(made, other, strict=True):
        assert mine["image"]["file"] == his["image"]
        assert (mine["text"], mine["age"]) == (his["text"], his["age"])


def test_lists_and_members_that_name_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", *(f"{n}.jpg" for n in range(4)))
    rows: list[dict[str, Any]] = [
        {"file_names": ["0.jpg", "1.jpg"], "left_file_names": [], "pair": {"a_file_name": "2.jpg", "n": 1},
         "runs": [{"file_name": "3.jpg", "echo": 1}]},
        {"file_names": ["2.jpg"], "left_file_names": ["3.jpg"], "pair": {"a_file_name": "0.jpg", "n": 2},
         "runs": [{"file_name": "1.jpg", "echo": 2}, {"file_name": "2.jpg", "echo": 3}]},
    ]  # fmt: skip
    write_metadata(folder, rows, "jsonl")
    ours = media_folder(folder)
    assert [leaf.path for leaf in leaves_of(ours.schema)] == ["images[]", "left[]", "pair.a", "runs[].image"]
    assert ours.schema.field("images").type == pa.list_(REFERENCE)
    first, second = rows_of(ours)
    assert [one["path"] for one in first["images"]] == ["0.jpg", "1.jpg"]
    assert (first["left"], [one["path"] for one in second["left"]]) == ([], ["3.jpg"])
    assert (first["pair"]["a"]["path"], first["pair"]["n"]) == ("2.jpg", 1)
    assert [(one["image"]["path"], one["echo"]) for one in second["runs"]] == [("1.jpg", 2), ("2.jpg", 3)]


def test_metadata_in_several_folders_comes_in_order(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "b/x.jpg", "a/x.jpg")
    write_metadata(folder, [{"file_name": "x.jpg", "n": 1}], "jsonl", "b")
    write_metadata(folder, [{"file_name": "x.jpg", "n": 2.5, "more": "y"}], "jsonl", "a")
    made = media_folder(folder)
    assert [(row["n"], row["more"], row["image"]["size"]) for row in rows_of(made)] == [(2.5, "y", 7), (1.0, None, 7)]
    write_metadata(folder, [{"file_name": "x.jpg", "n": 1}], "csv", "b")
    with pytest.raises(UsageError, match=r"has metadata in \.csv and \.jsonl; use one of them"):
        media_folder(folder)


def test_metadata_can_be_left_out(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "x/a.jpg", "y/b.jpg")
    write_metadata(folder, [{"file_name": "x/a.jpg"}], "csv")
    check_as_theirs(media_folder(folder, drop_metadata=True), theirs(folder, "image", drop_metadata=True))
    check_as_theirs(media_folder(folder), theirs(folder, "image"))


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "x/../../secret.jpg", "file:///etc/passwd"])
def test_metadata_may_not_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    make(tmp_path, "secret.jpg")
    folder = make(tmp_path / "d", "a.jpg", "x/b.jpg")
    write_metadata(folder, [{"file_name": "a.jpg"}, {"file_name": name}], "csv")
    with pytest.raises(UsageError, match=r"1 path (leads out|is not on this machine).*column file_name, row 1"):
        rows_of(media_folder(folder))


def test_metadata_that_does_not_do(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "a.jpg")
    write_metadata(folder, [{"name": "a.jpg"}], "jsonl")
    with pytest.raises(UsageError, match="names no files; add a column file_name"):
        media_folder(folder)
    write_metadata(folder, [{"file_name": "a.jpg", "image": 1}], "jsonl")
    with pytest.raises(UsageError, match="two columns would be named 'image'"):
        media_folder(folder)
    write_metadata(folder, [{"file_name": "gone.jpg"}], "jsonl")
    with pytest.raises(
        NotFound, match=r"metadata\.jsonl: 1 file does not exist: 'gone\.jpg' \(column file_name, row 0\)"
    ):
        rows_of(media_folder(folder))


def test_splits_have_the_same_classes(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "train/x/a.jpg", "train/z/b.jpg", "test/y/c.jpg", "README.md")
    assert folder_splits(folder) == {"train": f"{folder}/train", "test": f"{folder}/test"}
    ours = media_splits(folder)
    assert list(ours) == ["train", "test"]
    for split in ours:
        check_as_theirs(ours[split], theirs(folder, "image", split))
    assert ours["test"].features["label"]["names"] == ["x", "y", "z"]
    moved = make(tmp_path / "e", "data/val/a.jpg", "data/training/b.jpg")
    assert folder_splits(moved) == {"train": f"{moved}/data/training", "validation": f"{moved}/data/val"}
    whole = make(tmp_path / "f", "a.jpg", "b.jpg")
    assert folder_splits(whole) == {}
    assert files_in(media_splits(whole)["train"], "image", whole) == ["a.jpg", "b.jpg"]


def test_what_may_and_may_not_be_a_split(tmp_path: Path) -> None:
    assert [split_of(name) for name in ("train", "Train", "my-val.2", "test_1", "contest", "retrain")] == [
        "train", "train", "validation", "test", None, None,
    ]  # fmt: skip
    assert folder_splits(make(tmp_path / "a", "train/a.jpg", "bus/b.jpg")) == {}
    with pytest.raises(UsageError, match="test and train are splits, but extra holds media too"):
        folder_splits(make(tmp_path / "b", "train/a.jpg", "test/b.jpg", "extra/c.jpg"))
    assert set(folder_splits(make(tmp_path / "c", "train/a.jpg", "test/b.jpg", "docs/c.txt"))) == {"train", "test"}
    with pytest.raises(UsageError, match="dev and val both mean the split 'validation'"):
        folder_splits(make(tmp_path / "d", "dev/a.jpg", "val/b.jpg"))
    listed = make(tmp_path / "e", "train/a.jpg", "test/b.jpg")
    write_metadata(listed, [{"file_name": "a.jpg"}], "csv", "train")
    with pytest.raises(UsageError, match="test: has no metadata file, and another split has one"):
        media_splits(listed)


def test_folders_that_are_none_of_media(tmp_path: Path) -> None:
    mixed = make(tmp_path / "a", "a.jpg", "b.jpg", "c.wav")
    with pytest.raises(UsageError, match=r"more than one kind \(2 image, 1 audio\); pass kind="):
        media_folder(mixed)
    assert files_in(media_folder(mixed, kind="audio"), "audio", mixed) == ["c.wav"]
    with pytest.raises(NotFound, match=r"holds no pdf files; its endings: 2 \.jpg, 1 \.wav"):
        media_folder(mixed, kind="pdf")
    with pytest.raises(NotFound, match="holds no media files"):
        media_folder(make(tmp_path / "b", "a.txt"))
    with pytest.raises(NotFound, match="there is no such folder"):
        media_folder(tmp_path / "none")
    with pytest.raises(UsageError, match=r"holds an archive \(x/b\.zip\)"):
        media_folder(make(tmp_path / "c", "a.jpg", "x/b.zip"))
    with pytest.raises(UsageError, match="kind 'scan' is not known"):
        media_folder(mixed, kind="scan")
    with pytest.raises(UsageError, match="no endings to tell"):
        media_folder(mixed, kind="bytes")
    assert is_media_folder(make(tmp_path / "d", "a.jpg", "x/part.parquet")) is None
    assert is_media_folder(tmp_path / "b") is None
    assert is_media_folder(tmp_path / "b" / "a.txt") is None
    assert media_folder(make(tmp_path / "e", "a.mp4"), kind="audio").schema.names == ["audio"]


def test_links_to_files_are_files_and_what_is_not_fetched_is_told(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "a.jpg")
    make(tmp_path / "elsewhere", "b.jpg")
    (folder / "link.jpg").symlink_to(tmp_path / "elsewhere" / "b.jpg")
    (folder / "whole").symlink_to(tmp_path / "elsewhere")
    ours = media_folder(folder)
    assert files_in(ours, "image", folder) == ["a.jpg", "link.jpg"]
    check_as_theirs(ours, theirs(folder, "image"))
    (folder / "b.jpg").symlink_to("../.git/annex/objects/x/y/MD5E-s3--900150983cd24fb0d6963f7d28e17f72.jpg")
    with pytest.raises(NotFetched, match=r"1 file is not fetched: 'b\.jpg' \(column image, row 1\).*annex get"):
        rows_of(media_folder(folder))


def test_names_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "a.jpg")
    with open(os.fsencode(folder) + b"/odd\xff.jpg", "wb"):
        pass
    with pytest.raises(UsageError, match=r"the file name 'odd.*xff\.jpg' is not UTF-8; rename the file"):
        rows_of(media_folder(folder))


def test_many_folders_share_batches_and_one_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BATCH_ROWS", 7)
    monkeypatch.setattr(found, "BATCH_ROWS", 7)
    folder = make(tmp_path / "d", *(f"c{n % 3}/{n:03}.jpg" for n in range(50)))
    ours = media_folder(folder)
    assert [batch.num_rows for batch in ours.batches()] == [7] * 7 + [1]
    want = sorted(f"c{n % 3}/{n:03}.jpg" for n in range(50))
    assert files_in(ours, "image", folder) == want
    assert [row["label"] for row in rows_of(ours)] == [int(name[1]) for name in want]

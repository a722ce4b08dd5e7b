"""Export gives back what was put in, file by file, and trusts no name on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import called, ok, penstock, refused
from media.bids_tree import files_of, make_bids
from penstock.errors import BadFile, BadRow, DestinationConflict, DoesNotFit, NotFound, UsageError
from penstock.files import Writing
from penstock.media import target
from penstock.media.bids import scan_bids
from penstock.media.export import export
from penstock.media.kinds import STORED, leaves_of
from penstock.media.references import write_references
from penstock.media.stored import Range, open_shard
from penstock.parquet.embed import virtual_shard
from penstock.parquet.footer import read_footer
from penstock.parquet.splice import Span
from penstock.parquet.stream import lay_out

SCAN = pa.struct([pa.field("nifti", STORED), pa.field("run", pa.int64()), pa.field("sidecar", pa.string())])


def publish(root: Path, folder: Path, *, shards: int = 1, **options: Any) -> None:
    """A BIDS tree as the folder of shards that a push or a write makes of it."""
    tree = scan_bids(root, **options)
    folder.mkdir()
    notes = folder.with_suffix(".references")
    notes.mkdir()
    size = 1 if shards > 1 else 64 << 20
    spans = [
        Span(str(written.path), group, group + 1)
        for written in write_references(notes, tree.schema, tree.batches(), row_group_bytes=size)
        for group in range(read_footer(str(written.path)).row_groups)
    ]
    each = -(-len(spans) // shards)
    for at, first in enumerate(range(0, len(spans), each)):
        shard = virtual_shard(spans[first : first + each], leaves=leaves_of(tree.schema))
        with Writing(folder / f"part-{at:05d}.parquet") as out:
            lay_out(shard, out)
            out.commit()
    for beside in tree.beside:
        place = folder / "bids" / beside.path_in_tree
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(beside.file, place)


def shard_of(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema, **options: Any) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, **options)


def media(name: str | None, data: bytes | None) -> dict[str, Any]:
    return {"bytes": data, "path": name}


@pytest.mark.parametrize("row", ["session", "subject", "file"])
@pytest.mark.parametrize("sidecars", [True, False])
def test_a_bids_tree_comes_back_file_by_file(tmp_path: Path, row: str, sidecars: bool) -> None:
    root = make_bids(tmp_path / "ds", subjects=3, sessions=2)
    for path in (root / "extra", root / "derivatives" / "fmriprep"):
        shutil.rmtree(path)
    (root / "sub-0001" / "sub-0001_scratch.txt").unlink()
    publish(root, tmp_path / "shards", row=row, sidecars=sidecars, derivatives=True)
    made = export(tmp_path / "shards", tmp_path / "back", bids=True)
    assert files_of(tmp_path / "back") == files_of(root)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == sorted(path.name for path in root.iterdir())
    assert (made.files, made.bytes) == (len(files_of(root)), sum(map(len, files_of(root).values())))
    assert (made.written, made.numbered) == (made.files, 0)


def test_the_command_over_several_shards_and_again(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=2, sessions=2, runs=1)
    publish(root, tmp_path / "shards", shards=3)
    words = ("export", tmp_path / "shards", tmp_path / "back", "--bids")
    said = ok(penstock(*words)).stdout
    assert said.startswith("exported to ")
    back = files_of(tmp_path / "back")
    assert {path for path in files_of(root) if path not in back} == {
        "extra/notes.txt",
        "sub-0001/sub-0001_scratch.txt",
        *(path for path in files_of(root) if path.startswith("derivatives/")),
    }
    victim = tmp_path / "back" / "sub-0001" / "ses-1" / "anat" / "sub-0001_ses-1_run-1_T1w.nii.gz"
    victim.unlink()
    made = ok(penstock(*words, "--json", "--verify")).json()
    assert (made["files"], made["written"]) == (len(back), 1)
    assert files_of(tmp_path / "back") == back


def test_columns_go_to_folders_of_their_names(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("image", STORED), ("scans", pa.list_(SCAN)), ("raw", pa.binary())])
    rows: list[dict[str, Any]] = [
        {"id": 1, "image": media("a.png", b"one"), "scans": [], "raw": b"r0"},
        {"id": 2, "image": None, "scans": None, "raw": None},
        {"id": 3, "image": media("b/c.png", b""), "scans": [{"nifti": media("x.nii.gz", b"x"), "run": 1,
         "sidecar": "{}"}, {"nifti": None, "run": 2, "sidecar": None}, None], "raw": b"r2"},
    ]  # fmt: skip
    for name, options in (("plain", {"compression": "none", "use_dictionary": False}), ("coded", {})):
        shard_of(tmp_path / f"{name}.parquet", rows, schema, **options)
        made = export(tmp_path / f"{name}.parquet", tmp_path / name)
        assert files_of(tmp_path / name) == {
            "image/a.png": b"one", "image/b/c.png": b"", "scans/x.nii.gz": b"x", "scans/x.json": b"{}",
        }  # fmt: skip
        assert made.files == 4
        export(tmp_path / f"{name}.parquet", tmp_path / f"{name}-raw", columns="raw")
        assert files_of(tmp_path / f"{name}-raw") == {"raw/00000000.bin": b"r0", "raw/00000002.bin": b"r2"}
        export(tmp_path / f"{name}.parquet", tmp_path / f"{name}-one", columns=["scans"])
        assert set(files_of(tmp_path / f"{name}-one")) == {"scans/x.nii.gz", "scans/x.json"}


@pytest.mark.parametrize("seed", range(4))
def test_values_at_any_depth_are_those_arrow_reads(tmp_path: Path, seed: int) -> None:
    """Nulls, empty lists and empty values at every level, over pages and row groups of every size."""
    rng = np.random.default_rng(seed)
    kind = pa.list_(pa.struct([("deep", pa.list_(STORED)), ("one", STORED), ("n", pa.int64())]))
    count = 0

    def value() -> dict[str, Any] | None:
        nonlocal count
        count += 1
        if rng.random() < 0.2:
            return None
        return media(f"{count}.bin", rng.bytes(int(rng.choice([0, 1, 50, 5_000]))))

    def scans() -> list[Any] | None:
        if rng.random() < 0.2:
            return None
        return [
            None
            if rng.random() < 0.2
            else {
                "deep": None if rng.random() < 0.2 else [value() for _ in range(rng.integers(0, 4))],
                "one": value(),
                "n": 1,
            }
            for _ in range(rng.integers(0, 4))
        ]

    rows: list[dict[str, Any]] = [{"scans": scans(), "top": value()} for _ in range(200)]
    schema = pa.schema([("scans", kind), pa.field("top", STORED)])
    expected: dict[str, bytes] = {}
    for row in rows:
        found = [row["top"]]
        for scan in row["scans"] or ():
            found += [] if scan is None else [scan["one"], *(scan["deep"] or ())]
        expected |= {one["path"]: one["bytes"] for one in found if one is not None}
    path = tmp_path / "a.parquet"
    shard_of(path, rows, schema, compression="none", use_dictionary=False, data_page_size=4_000, row_group_size=70)
    got: dict[str, bytes] = {}
    with open_shard(str(path)) as shard:
        assert [place.steps for place in shard.files] == [
            ("scans", "[]", "deep", "[]", "bytes"), ("scans", "[]", "one", "bytes"), ("top", "bytes"),
        ]  # fmt: skip
        for group in range(shard.footer.row_groups):
            for place in shard.files:
                assert shard.is_plain(group, place)
                for name, found_value in shard.values(group, place):
                    if found_value is not None:
                        assert isinstance(found_value, Range)
                        assert name is not None
                        got[name] = os.pread(shard.fd, found_value.length, found_value.offset)
    assert got == expected


def test_a_value_is_copied_without_being_held(tmp_path: Path) -> None:
    """80 MB through a process whose data may not grow by more than 40 MB."""
    size = 80 << 20
    source = tmp_path / "scan.nii"
    with open(source, "wb") as f:
        f.write(os.urandom(1 << 10))
        f.truncate(size)
    root = tmp_path / "ds"
    (root / "sub-1" / "anat").mkdir(parents=True)
    source.rename(root / "sub-1" / "anat" / "sub-1_T1w.nii")
    publish(root, tmp_path / "shards")
    code = (
        "import sys, resource; from penstock.media.export import export; from penstock import memory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (memory.data_size() + (40 << 20),) * 2)\n"
        "print(export(sys.argv[1], sys.argv[2], bids=True).files)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "shards"), str(tmp_path / "back")], capture_output=True, text=True
    )
    assert done.stdout == "1\n", done.stderr
    back = tmp_path / "back" / "sub-1" / "anat" / "sub-1_T1w.nii"
    assert back.stat().st_size == size
    assert subprocess.run(["cmp", back, root / "sub-1" / "anat" / "sub-1_T1w.nii"]).returncode == 0


def test_a_compressed_value_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    schema = pa.schema([("image", STORED)])
    shard_of(tmp_path / "a.parquet", [{"image": media("a", bytes(30 << 20))}], schema, compression="zstd")
    with pytest.raises(DoesNotFit, match="the smallest budget that works is --memory"):
        export(tmp_path / "a.parquet", tmp_path / "out", memory="100MB")
    assert files_of(tmp_path / "out") == {}
    assert export(tmp_path / "a.parquet", tmp_path / "out", memory="1GB").bytes == 30 << 20


@pytest.mark.parametrize(
    "name", ["../out.txt", "/etc/passwd", "a/../../b", "a//b", "./a", "", "a\0b", ".penstock-export/x", "x" * 300]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    schema = pa.schema([("subject", pa.string()), ("image", STORED)])
    shard_of(tmp_path / "a.parquet", [{"subject": "1", "image": media(name, b"bad")}], schema, compression="none")
    with pytest.raises(BadRow, match="holds a file named"):
        export(tmp_path / "a.parquet", tmp_path / "in" / "dest", bids=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "in"]
    assert files_of(tmp_path / "in" / "dest") == {}


def test_kept_names_of_texts_are_not_trusted_either(tmp_path: Path) -> None:
    kind = pa.struct([("nifti", STORED), ("events", pa.string()), ("events_path", pa.string())])
    schema = pa.schema([("subject", pa.string()), ("bold", pa.list_(kind))])
    scan = {"nifti": media("a_bold.nii", b"1"), "events": "x", "events_path": "../../evil"}
    shard_of(tmp_path / "a.parquet", [{"subject": "1", "bold": [scan]}], schema)
    with pytest.raises(BadRow, match=r"'\.\./\.\./evil', which is no path below a folder"):
        export(tmp_path / "a.parquet", tmp_path / "dest", bids=True)


def test_links_in_the_destination_are_not_followed(tmp_path: Path) -> None:
    schema = pa.schema([("subject", pa.string()), ("image", STORED)])
    shard_of(tmp_path / "a.parquet", [{"subject": "1", "image": media("sub-1/a.txt", b"bad")}], schema)
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "sub-1").symlink_to(outside)
    with pytest.raises(DestinationConflict, match="is a link or a file where a folder has to be"):
        export(tmp_path / "a.parquet", tmp_path / "dest", bids=True)
    (tmp_path / "dest" / "sub-1").unlink()
    (tmp_path / "dest" / "sub-1").mkdir()
    (outside / "a.txt").write_bytes(b"bad")
    (tmp_path / "dest" / "sub-1" / "a.txt").symlink_to(outside / "a.txt")
    with pytest.raises(DestinationConflict, match="is there already, and is another file"):
        export(tmp_path / "a.parquet", tmp_path / "dest", bids=True)
    assert list(outside.iterdir()) == [outside / "a.txt"]


def test_one_name_twice(tmp_path: Path) -> None:
    """The same content is one file; other content is an error in a tree, and numbered in a folder of a column."""
    schema = pa.schema([("subject", pa.string()), ("image", STORED)])
    names = ("a.nii.gz", "a.nii.gz", "A.nii.gz", "a-2.nii.gz", "a.nii.gz")
    contents = (b"1", b"2", b"3", b"4", b"1")
    rows = [{"subject": "1", "image": media(*one)} for one in zip(names, contents, strict=True)]
    shard_of(tmp_path / "a.parquet", rows, schema, row_group_size=2)
    with pytest.raises(BadRow, match=r"two files of the dataset are named 'a\.nii\.gz' and differ"):
        export(tmp_path / "a.parquet", tmp_path / "tree", bids=True)
    for _ in range(2):
        made = export(tmp_path / "a.parquet", tmp_path / "dest")
        assert (made.files, made.numbered) == (5, 4)
        assert files_of(tmp_path / "dest") == {
            "image/a.nii.gz": b"1", "image/a-2.nii.gz": b"2", "image/A-3.nii.gz": b"3", "image/a-2-2.nii.gz": b"4",
            "image/a-4.nii.gz": b"1",
        }  # fmt: skip
    assert made.written == 0
    shard_of(tmp_path / "same.parquet", [rows[0], rows[4]], schema)
    assert export(tmp_path / "same.parquet", tmp_path / "same", bids=True).files == 1


def test_what_lies_there_is_not_overwritten(tmp_path: Path) -> None:
    schema = pa.schema([("image", STORED)])
    shard_of(tmp_path / "a.parquet", [{"image": media("a.txt", b"right")}], schema, compression="none")
    place = tmp_path / "dest" / "image" / "a.txt"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"mine!!")
    with pytest.raises(DestinationConflict, match="choose an empty folder"):
        export(tmp_path / "a.parquet", tmp_path / "dest")
    place.write_bytes(b"wrong")
    assert export(tmp_path / "a.parquet", tmp_path / "dest").written == 0, "the size is right"
    with pytest.raises(DestinationConflict):
        export(tmp_path / "a.parquet", tmp_path / "dest", verify=True)
    assert place.read_bytes() == b"wrong"


def test_a_killed_export_leaves_whole_files_and_goes_on(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=4, sessions=2, runs=2)
    publish(root, tmp_path / "shards")
    code = (
        "import sys; from penstock.media import target; from penstock.media.export import export\n"
        "target.WAITING_FILES = 40; target.LARGE = 1_150\n"
        "export(sys.argv[1], sys.argv[2], bids=True)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "shards"), str(tmp_path / "back")]
    for files in (40, 200):
        running = subprocess.Popen(words)
        while running.poll() is None and len(list((tmp_path / "back").rglob("*"))) < files:
            time.sleep(0.005)
        running.send_signal(signal.SIGKILL)
        running.wait()
        whole = files_of(root)
        there = {path: data for path, data in files_of(tmp_path / "back").items() if not path.startswith(target.STATE)}
        assert {path: whole[path] for path in there} == there
    export(tmp_path / "shards", tmp_path / "back", bids=True)
    assert not (tmp_path / "back" / target.STATE).exists()
    back = files_of(tmp_path / "back")
    assert back == {path: data for path, data in files_of(root).items() if path in back}
    assert len(back) == made_files(root)


def made_files(root: Path) -> int:
    tree = scan_bids(root)
    return tree.files + len(tree.beside)


def test_a_path_without_its_bytes_is_reported_after_all_others(tmp_path: Path) -> None:
    schema = pa.schema([("image", STORED)])
    rows = [{"image": media("gone.png", None)}, {"image": media("a.png", b"a")}]
    shard_of(tmp_path / "a.parquet", rows, schema)
    with pytest.raises(BadRow, match=r"1 values name a file but do not hold it, the first .*gone\.png"):
        export(tmp_path / "a.parquet", tmp_path / "dest")
    assert set(files_of(tmp_path / "dest")) >= {"image/a.png"}


def test_splits_and_configs_are_those_of_the_card(tmp_path: Path) -> None:
    schema = pa.schema([("image", STORED)])
    folder = tmp_path / "ds"
    (folder / "data").mkdir(parents=True)
    for name in ("train-0", "test-0", "other"):
        shard_of(folder / "data" / f"{name}.parquet", [{"image": media(f"{name}.png", name.encode())}], schema)
    export(folder, tmp_path / "all")
    assert set(files_of(tmp_path / "all")) == {"image/train-0.png", "image/test-0.png", "image/other.png"}
    export(folder, tmp_path / "test", split="test")
    assert set(files_of(tmp_path / "test")) == {"image/test-0.png"}
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "- config_name: b\n  data_files:\n  - split: test\n    path: data/other*\n---\n"
    )
    with pytest.raises(UsageError, match="has several configs; choose with --config: a, b"):
        export(folder, tmp_path / "none")
    export(folder, tmp_path / "b", config="b")
    assert set(files_of(tmp_path / "b")) == {"image/other.png"}
    with pytest.raises(UsageError, match="has no split 'train'; choose with --split: test"):
        export(folder, tmp_path / "b", config="b", split="train")


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("raw", pa.binary())])
    shard_of(tmp_path / "a.parquet", [{"id": 1, "raw": b"x"}], schema)
    with pytest.raises(NotFound, match="holds no media files; name columns of plain bytes with --column"):
        export(tmp_path / "a.parquet", tmp_path / "x")
    with pytest.raises(UsageError, match="has no column 'scan'; its columns are id, raw"):
        export(tmp_path / "a.parquet", tmp_path / "x", columns="scan")
    with pytest.raises(UsageError, match="was not made of a BIDS tree"):
        export(tmp_path / "a.parquet", tmp_path / "x", bids=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="holds no Parquet files"):
        export(tmp_path / "empty", tmp_path / "x")
    refused(called("export", tmp_path / "none", tmp_path / "x"), 2, "there is no such folder")
    refused(called("export", tmp_path / "a.parquet", tmp_path / "x", "--bids", "--column", "raw"), 2, "exported whole")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    schema = pa.schema([("image", STORED)])
    path = tmp_path / "a.parquet"
    shard_of(path, [{"image": media("a.png", b"a" * 5_000)}], schema, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    at = data.index((5_000).to_bytes(4, "little") + b"aaaa")
    data[at : at + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(BadFile, match=r"a value of 1,073,741,824 bytes at .* goes beyond its page"):
        export(path, tmp_path / "x")


def test_the_report_is_json(tmp_path: Path) -> None:
    shard_of(tmp_path / "a.parquet", [{"image": media("a.png", b"abc")}], pa.schema([("image", STORED)]))
    said = json.loads(ok(called("export", tmp_path / "a.parquet", tmp_path / "x", "--json")).stdout)
    assert {key: said[key] for key in ("files", "bytes", "written", "numbered", "shards")} == {
        "files": 1, "bytes": 3, "written": 1, "numbered": 0, "shards": 1,
    }  # fmt: skip

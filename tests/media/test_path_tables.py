"""Tables of paths: from every kind of table the same references, and what is wrong is named."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from limits import require_kernel_limits, run_limited
from penstock.errors import BadFile, BadRow, NotFetched, NotFound, UsageError
from penstock.media import files, found
from penstock.media.files import files_table
from penstock.media.found import Found
from penstock.media.kinds import LARGEST_VALUE, REFERENCE, leaves_of

PATHS = ["b.nii.gz", None, "sub/a.nii.gz", "b.nii.gz"]
IDS = [1, 2, 3, 4]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.nii.gz").write_bytes(b"b" * 100)
    (tmp_path / "sub" / "a.nii.gz").write_bytes(b"a" * 33)
    (tmp_path / "cat.jpg").write_bytes(b"")
    return tmp_path


def rows_of(found: Found) -> list[dict[str, Any]]:
    rows = []
    for batch in found.batches():
        batch.validate(full=True)
        assert batch.schema.equals(found.schema, check_metadata=True)
        rows += batch.to_pylist()
    return rows


def reference(path: Path) -> dict[str, Any]:
    about = path.stat()
    return {
        "bytes": None,
        "path": path.name,
        "file": str(path),
        "size": about.st_size,
        "modified": about.st_mtime_ns,
    }


def write_csv(folder: Path) -> Path:
    pyarrow.csv.write_csv(pa.table({"id": IDS, "t1w": PATHS}), folder / "t.csv")
    return folder / "t.csv"


def write_tsv(folder: Path) -> str:
    pd.DataFrame({"id": IDS, "t1w": PATHS}).to_csv(folder / "t.TSV", sep="\t", index=False)
    return str(folder / "t.TSV")


def write_jsonl(folder: Path) -> Path:
    lines = [json.dumps({"id": n, "t1w": path}) for n, path in zip(IDS, PATHS, strict=True)]
    (folder / "t.jsonl").write_text("\n".join(lines))
    return folder / "t.jsonl"


def write_parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"id": IDS, "t1w": PATHS}), folder / "t.parquet", row_group_size=3)
    return folder / "t.parquet"


MADE: dict[str, Callable[[Path], object]] = {
    "csv": write_csv,
    "tsv": write_tsv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrow": lambda _: pa.table({"id": IDS, "t1w": PATHS}),
    "coded": lambda _: pa.table({"id": IDS, "t1w": pa.array(PATHS).dictionary_encode()}),
    "pandas": lambda _: pd.DataFrame({"id": IDS, "t1w": PATHS}),
    "objects": lambda _: pd.DataFrame({"id": IDS, "t1w": pd.Series([p and Path(p) for p in PATHS], dtype=object)}),
    "polars": lambda _: pl.DataFrame({"id": IDS, "t1w": PATHS}),
    "columns": lambda _: {"id": IDS, "t1w": [p and Path(p) for p in PATHS]},
    "rows": lambda _: [{"id": n, "t1w": p} for n, p in zip(IDS, PATHS, strict=True)],
}


@pytest.mark.parametrize("media", [{"t1w": "nifti"}, ["t1w"], None], ids=["kinds", "names", "told"])
@pytest.mark.parametrize("made", list(MADE))
def test_every_table_gives_the_same_references(here: Path, made: str, media: Any) -> None:
    found = files_table(MADE[made](here), media=media, root=here)
    assert [(leaf.path, leaf.kind) for leaf in leaves_of(found.schema)] == [("t1w", "nifti")]
    assert found.schema.field("t1w").type == REFERENCE
    b, a = reference(here / "b.nii.gz"), reference(here / "sub" / "a.nii.gz")
    want = [{"id": n, "t1w": value} for n, value in zip(IDS, [b, None, a, b], strict=True)]
    assert rows_of(found) == want
    assert rows_of(found) == want


def test_relative_paths_start_at_the_tables_folder_or_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_of(files_table(write_csv(here)))[2]["t1w"]["file"] == str(here / "sub" / "a.nii.gz")
    monkeypatch.chdir(here / "sub")
    (row,) = rows_of(files_table({"x": ["a.nii.gz"]}))
    assert row["x"]["file"] == str(here / "sub" / "a.nii.gz")
    (row,) = rows_of(files_table({"x": ["b.nii.gz"]}, root=".."))
    assert os.path.samefile(row["x"]["file"], here / "b.nii.gz")
    with pytest.raises(NotFound, match="there is no such folder; correct root="):
        files_table({"x": ["b.nii.gz"]}, root="nowhere")


def test_values_of_every_sort_and_lists_of_them(here: Path) -> None:
    b = here / "b.nii.gz"
    column = [
        [str(b), b, b"inline", None, {"bytes": None, "path": str(b)}, {"bytes": b"", "path": "x/y.nii"}],
        [],
        None,
        [None],
        (memoryview(b"view"),),
    ]
    for table in ({"s": column}, pd.DataFrame({"s": column})):
        found = files_table(table, media={"s": "nifti"})
        assert found.schema.field("s").type == pa.list_(REFERENCE)
        first, *others = [row["s"] for row in rows_of(found)]
        whole = reference(b)
        inline = {"bytes": b"inline", "path": None, "file": None, "size": 6, "modified": None}
        named = {"bytes": b"", "path": "x/y.nii", "file": None, "size": 0, "modified": None}
        assert first == [whole, whole, inline, None, whole, named]
        assert others == [[], None, [None], [{**inline, "bytes": b"view", "size": 4}]]


def test_bytes_and_structs_in_arrow(here: Path) -> None:
    struct = pa.array([{"path": str(here / "b.nii.gz")}, None, {"path": None}])
    table = pa.table({"raw": pa.array([b"xy", None, b""], pa.large_binary()), "named": struct})
    rows = rows_of(files_table(table, media={"raw": "bytes", "named": "nifti"}))
    assert [row["raw"] and row["raw"]["bytes"] for row in rows] == [b"xy", None, b""]
    assert [row["named"] and row["named"]["size"] for row in rows] == [100, None, None]


def test_mixed_lists_and_single_values_are_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="column 's' holds a list in row 1 and a single value in row 0"):
        files_table({"s": ["b.nii.gz", ["b.nii.gz"]]}, media=["s"], root=here)
    with pytest.raises(UsageError, match=r"column s, row 1: a float stands where a file is meant"):
        rows_of(files_table({"s": ["b.nii.gz", 1.5]}, media={"s": "nifti"}, root=here))
    with pytest.raises(UsageError, match="column s holds int64, not paths"):
        rows_of(files_table(pa.table({"s": [1]}), media={"s": "nifti"}))


def test_kinds_that_endings_do_not_tell(here: Path) -> None:
    (here / "scan").write_bytes(b"x")
    mixed = {"s": ["b.nii.gz", "cat.jpg"], "t": ["scan", None], "u": [None, None]}
    with pytest.raises(UsageError, match=r"column 's' do not tell .*say it: media=\{'s': …\}, one of image, audio"):
        files_table(mixed, media=["s"], root=here)
    with pytest.raises(UsageError, match="such as 'scan'"):
        files_table(mixed, media=["t"], root=here)
    with pytest.raises(UsageError, match="has no path to tell by"):
        files_table(mixed, media=["u"], root=here)
    with pytest.raises(UsageError, match="no column holds paths"):
        files_table(mixed, root=here)
    with pytest.raises(UsageError, match="there is no column 'v'; one of s, t, u"):
        files_table(mixed, media=["v"], root=here)
    with pytest.raises(UsageError, match="media kind 'scan' is not known"):
        files_table(mixed, media={"s": "scan"}, root=here)
    with pytest.raises(UsageError, match=r"pass media=\['s'\]"):
        files_table(mixed, media="s", root=here)
    with pytest.raises(UsageError, match="a int is no table of paths"):
        files_table(3)


def test_addresses_and_labels_are_not_taken_for_files(here: Path) -> None:
    table = {"scan": ["b.nii.gz"], "source": ["https://example.org/b.nii.gz"], "was": ["old/gone.jpg"]}
    found = files_table(table, root=here)
    assert [leaf.path for leaf in leaves_of(found.schema)] == ["scan"]


def test_missing_files_are_named_and_counted_over_the_whole_table(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "BATCH_ROWS", 4)
    paths = ["b.nii.gz"] * 5 + [f"gone{n}.nii.gz" for n in range(20)] + ["gone0.nii.gz", "b.nii.gz/inner.nii.gz"]
    whole = files_table({"t1w": [[path] for path in paths]}, media=["t1w"], root=here)
    given = []
    with pytest.raises(
        NotFound,
        match=r"^a dict of columns: 21 files do not exist: 'gone0.nii.gz' \(column t1w\[\], row 5\),"
        r" 'gone1.nii.gz' \(column t1w\[\], row 6\), 'gone2.nii.gz' \(column t1w\[\], row 7\) and 18 more; correct",
    ):
        for batch in whole.batches():
            given += [batch.num_rows]
    assert given == [4]
    as_null = rows_of(files_table({"t1w": paths}, media=["t1w"], root=here, on_missing="null"))
    assert [row["t1w"] is None for row in as_null] == [False] * 5 + [True] * 22
    with pytest.raises(UsageError, match="on_missing='drop' is not known"):
        rows_of(files_table({"t1w": paths}, media=["t1w"], root=here, on_missing="drop"))  # type: ignore[arg-type]


def test_what_is_wrong_in_different_ways_is_told_at_once(here: Path) -> None:
    table = {"x": ["b.nii.gz", "sub", "s3://bucket/a.nii.gz", "", "nul\0.nii", "gone.nii"]}
    with pytest.raises(UsageError) as caught:
        rows_of(files_table(table, media={"x": "nifti"}, root=here))
    assert str(caught.value) == (
        "a dict of columns: 1 path is a folder, not a file: 'sub' (column x, row 1); 1 path is not on this machine;"
        " 1 path is empty; 1 path holds a zero byte; 1 file does not exist; name the files in it"
    )
    with pytest.raises(UsageError, match="remote paths are not supported here"):
        rows_of(files_table({"x": ["hf://datasets/a/b.nii"]}, media=["x"], root=here))


def test_pipes_and_files_that_may_not_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(here / "pipe.nii")
    with pytest.raises(UsageError, match="1 path is neither a file nor a folder"):
        rows_of(files_table({"x": ["pipe.nii"]}, root=here))
    (here / "b.nii.gz").chmod(0)
    if os.geteuid() == 0:  # who may read everything: then the mode is believed
        monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & stat.S_IRUSR))
    with pytest.raises(UsageError, match=r"1 file may not be read: 'b.nii.gz' .*change their permissions"):
        rows_of(files_table({"x": ["b.nii.gz"]}, root=here))


def test_a_value_over_what_parquet_can_hold_is_refused_and_an_empty_file_is_not(here: Path) -> None:
    with (here / "big.nii").open("wb") as big:
        big.truncate(LARGEST_VALUE + 1)
    with pytest.raises(UsageError, match=r"1 file is larger than the .* a Parquet value can be: 'big.nii' .*split"):
        rows_of(files_table({"x": ["big.nii"]}, root=here))
    assert rows_of(files_table({"x": ["cat.jpg"]}, root=here))[0]["x"]["size"] == 0


def test_what_an_annex_has_not_fetched_is_told_with_the_command(here: Path) -> None:
    subprocess.run(["git", "init", "-q", str(here)], check=True)
    (here / "sub" / "link.nii.gz").symlink_to(
        "../.git/annex/objects/xx/yy/MD5E-s4--900150983cd24fb0d6963f7d28e17f72.nii.gz/"
        "MD5E-s4--900150983cd24fb0d6963f7d28e17f72.nii.gz"
    )
    (here / "pointer.nii.gz").write_text("/annex/objects/MD5E-s4--900150983cd24fb0d6963f7d28e17f72.nii.gz\n")
    (here / "lfs.nii.gz").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    )
    for name, tool in (("sub/link.nii.gz", "annex get"), ("pointer.nii.gz", "annex get"), ("lfs.nii.gz", "lfs pull")):
        with pytest.raises(NotFetched, match=rf"1 file is not fetched: .{name}. .*fetch the content first: .*{tool}"):
            rows_of(files_table({"x": ["b.nii.gz", name]}, root=here))
    # Not fetched is not missing: null in its place would lose it without a word.
    with pytest.raises(NotFetched, match="not fetched"):
        rows_of(files_table({"x": ["b.nii.gz", "lfs.nii.gz"]}, root=here, on_missing="null"))


def test_names_that_are_not_utf8_are_named(here: Path) -> None:
    odd = os.fsdecode(os.fsencode(here) + b"/odd\xff.nii")
    Path(odd).write_bytes(b"x")
    for table in ({"x": [odd]}, {"x": [Path(odd)]}, pd.DataFrame({"x": pd.Series([Path(odd)], dtype=object)})):
        with pytest.raises(UsageError, match=r"column x, row 0: the file name '.*odd.*xff\.nii' is not UTF-8; rename"):
            rows_of(files_table(table, media={"x": "nifti"}))
    (here / "new\nline é.nii").write_bytes(b"xyz")
    (row,) = rows_of(files_table({"x": ["new\nline é.nii"]}, root=here))
    assert (row["x"]["path"], row["x"]["size"]) == ("new\nline é.nii", 3)


def test_types_in_csv_are_told_by_all_rows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TEXT_BLOCK", 256)
    rows = ["id,subject,age,late,flag,big,day,none,scan,text"]
    for number in range(200):
        late = "" if number < 150 else "x" if number == 199 else "7"
        age = "3.5" if number == 180 else str(number)
        big = "9007199254740993" if number < 199 else "0.5"
        rows.append(f'{number},{number + 1:03},{age},{late},{number % 2 == 0},{big},2024-01-05,,b.nii.gz,"a, ""b""\n2"')
    (here / "t.csv").write_text("\n".join(rows) + "\n")
    found = files_table(here / "t.csv")
    types = {one.name: str(one.type) for one in found.schema if one.name != "scan"}
    assert types == {
        "id": "int64",
        "subject": "string",
        "age": "double",
        "late": "string",
        "flag": "bool",
        "big": "string",
        "day": "string",
        "none": "string",
        "text": "string",
    }
    made = rows_of(found)
    assert len(made) == 200
    assert [made[row]["subject"] for row in (0, 199)] == ["001", "200"]
    assert (made[180]["age"], made[199]["late"], made[150]["late"], made[0]["late"]) == (3.5, "x", "7", None)
    assert made[0]["text"] == 'a, "b"\n2'


def test_paths_that_look_like_numbers_stay_paths(here: Path) -> None:
    (here / "12").write_bytes(b"x")
    (here / "t.csv").write_text("scan\n12\n")
    assert rows_of(files_table(here / "t.csv", media={"scan": "nifti"}))[0]["scan"]["path"] == "12"


@pytest.mark.parametrize(
    ("name", "text", "error", "match"),
    [
        ("t.csv", "", BadFile, "is empty"),
        ("t.csv", "a,b\n1,2\n1\n", BadFile, "cannot be read .*Expected 2 columns, got 1"),
        ("t.csv", "a,a\n1,2\n", UsageError, "two columns named 'a'"),
        ("t.jsonl", "", BadFile, "holds no rows"),
        ("t.jsonl", '{"a": 1}\n{"a"', BadRow, "line 2"),
        ("t.parquet", "no", BadFile, "cannot be read"),
        ("t.xlsx", "no", UsageError, "its ending tells no table"),
    ],
)
def test_tables_that_cannot_be_read(here: Path, name: str, text: str, error: type[Exception], match: str) -> None:
    (here / name).write_text(text)
    with pytest.raises(error, match=match):
        files_table(here / name)


def test_tables_that_are_not_there(here: Path) -> None:
    with pytest.raises(NotFound, match="there is no such file"):
        files_table(here / "none.csv")
    with pytest.raises(UsageError, match="is a folder"):
        files_table(here / "sub")
    with pytest.raises(UsageError, match="remote paths are not read"):
        files_table("hf://datasets/a/t.csv")


def test_slow_file_systems_are_asked_from_many_threads(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "SLOW_STAT", 0.0)
    for number in range(300):
        (here / f"{number}.nii").write_bytes(b"x" * number)
    rows = rows_of(files_table({"x": [f"{number}.nii" for number in reversed(range(300))]}, root=here))
    assert [row["x"]["size"] for row in rows] == list(reversed(range(300)))


def test_wide_rows_come_in_bounded_batches(here: Path) -> None:
    lists = pa.array([["b.nii.gz"] * 500] * 200)
    batches = list(files_table(pa.table({"x": lists}), media=["x"], root=here).batches())
    assert sum(batch.num_rows for batch in batches) == 200
    assert max(len(batch.column(0).flatten()) for batch in batches) <= found.BATCH_ROWS


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_long_table_is_streamed_under_a_kernel_limit(here: Path, ending: str) -> None:
    """300,000 rows, as references 124 MB beside the 70 MB of interpreter and Arrow, in 184 MB (CSV takes 160)."""
    require_kernel_limits()
    for number in range(10):
        (here / f"{'n' * 100}{number}.nii").write_bytes(b"x" * number)
    path = here / f"t.{ending}"
    names = [f"{'n' * 100}{number % 10}.nii" for number in range(300_000)]
    text = "t" * 100
    if ending == "jsonl":
        lines = (f'{{"id": {number}, "scan": "{name}", "text": "{text}"}}\n' for number, name in enumerate(names))
        path.write_text("".join(lines))
    else:
        table = pa.table({"id": range(300_000), "scan": names, "text": [text] * 300_000})
        pyarrow.csv.write_csv(table, path) if ending == "csv" else pq.write_table(table, path, use_dictionary=False)
    code = (
        "import sys\n"
        "from penstock.media.files import files_table\n"
        "rows = size = 0\n"
        "for batch in files_table(sys.argv[1]).batches():\n"
        "    rows += batch.num_rows\n"
        "    size += batch.nbytes\n"
        "    assert batch.nbytes < 16 << 20 and batch.num_rows <= 16_384\n"
        "print(rows, size)\n"
    )
    done = run_limited([sys.executable, "-c", code, str(path)], limit=176 << 20, timeout=120)
    assert (done.returncode, done.kernel_kills) == (0, 0), done.stderr
    rows, size = map(int, done.stdout.split())
    assert rows == 300_000
    assert size > 120_000_000

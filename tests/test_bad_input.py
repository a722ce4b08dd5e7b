"""Bad input and bad places, through the real command: one line with the file and what to do, and nothing lost."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import as_lines, called, digests, make_parquet, make_table, ok, penstock, read_back, receipt_of, refused

MEMORY = ("--memory", "400MB")


class FileSystemMissing(UserWarning):
    """Tests that need a file system of their own did not run; pytest prints this in its summary."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_parquet(tmp_path / "source")
    return tmp_path / "source"


def mounted(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        text = f"NOT TESTED on a file system of its own: {' '.join(words)}: {done.stderr.strip()}"
        warnings.warn(text, FileSystemMissing, stacklevel=2)
        pytest.skip(text)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 32 MB."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as f:
        f.truncate(32 << 20)
    folder.mkdir()
    mounted(["mkfs.ext4", "-q", "-m", "0", str(image)])
    mounted(["mount", "-o", "loop", str(image), str(folder)])
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder nobody may write to, root included."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounted(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)])
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# -- what is named is not there ---------------------------------------------------------------------------------------


def test_missing_path(tmp_path: Path) -> None:
    ran = penstock("convert", tmp_path / "nowhere", tmp_path / "out")
    refused(ran, 2, "nowhere", "no such file or folder", "check the path")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["plan", "count", "show"])
def test_missing_path_of_other_commands(command: str, tmp_path: Path) -> None:
    refused(called(command, tmp_path / "nowhere"), 2, "nowhere", "no such file or folder", "check the path")


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(penstock("convert", tmp_path / "empty", tmp_path / "out"), 2, "empty", "holds no data files", "parquet")
    assert not (tmp_path / "out").exists()


def test_glob_that_matches_nothing(tmp_path: Path) -> None:
    refused(called("convert", f"{tmp_path}/*.parquet", tmp_path / "out"), 2, "*.parquet", "check the pattern")


def test_ending_that_tells_no_format(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    refused(called("convert", tmp_path / "notes.txt", tmp_path / "out"), 2, "notes.txt", "format")


def test_pipeline_file_that_is_not_there(tmp_path: Path) -> None:
    refused(called("run", tmp_path / "p.yaml"), 2, "p.yaml", "check the path")


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl", "b.jsonl.gz", "b.jsonl.zst"])
def test_zero_byte_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    if name.endswith("parquet"):
        pq.write_table(make_table(10), folder / "a.parquet")
    else:
        (folder / "a.jsonl").write_text(as_lines(make_table(10)))
    (folder / name).touch()
    run = penstock if name in ("b.parquet", "b.jsonl") else called
    refused(run("convert", folder, tmp_path / "out", *MEMORY), 1, name, "empty (0 bytes)", "fetch it again")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", [(), ("--rewrite",)])
def test_parquet_cut_in_half(how: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    whole = (source / "01.parquet").read_bytes()
    (source / "01.parquet").write_bytes(whole[: len(whole) // 2])
    refused(penstock("convert", source, tmp_path / "out", *MEMORY, *how), 1, "01.parquet", "again")
    assert not (tmp_path / "out").exists()
    assert (source / "01.parquet").read_bytes() == whole[: len(whole) // 2]


def test_parquet_with_a_damaged_page(source: Path, tmp_path: Path) -> None:
    """The footer is whole, so only decoding can tell."""
    broken = bytearray((source / "01.parquet").read_bytes())
    chunk = pq.ParquetFile(source / "01.parquet").metadata.row_group(0).column(1)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    broken[start + 40 : start + 240] = bytes(200)
    (source / "01.parquet").write_bytes(broken)
    refused(penstock("convert", source, tmp_path / "out", *MEMORY, "--rewrite"), 1, "01.parquet", "again")
    assert digests(tmp_path / "out") == {}


def test_corrupt_zstd_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    with pa.output_stream(path, compression="zstd") as stream:
        stream.write(as_lines(make_table(3_000)).encode())
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0x5A for byte in data[middle : middle + 64])
    path.write_bytes(data)
    refused(penstock("convert", path, tmp_path / "out", *MEMORY), 1, "a.jsonl.zst", "zstd", "fetch it again")
    assert digests(tmp_path / "out") == {}


def test_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    data = gzip.compress(as_lines(make_table(3_000)).encode())
    path.write_bytes(data[: len(data) // 2])
    refused(penstock("convert", path, tmp_path / "out", *MEMORY), 1, "a.jsonl.gz", "cut short", "fetch it again")
    assert digests(tmp_path / "out") == {}


def malformed(tmp_path: Path) -> Path:
    lines = as_lines(make_table(100)).splitlines(keepends=True)
    lines[41] = '{"id": 41, "text": "never closed\n'
    lines[77] = "not json at all\n"
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return tmp_path / "a.jsonl"


def test_malformed_json_line(tmp_path: Path) -> None:
    ran = penstock("convert", malformed(tmp_path), tmp_path / "out", *MEMORY)
    refused(ran, 1, "a.jsonl", "line 42", "skip")
    assert digests(tmp_path / "out") == {}


def test_malformed_json_lines_skipped_are_counted_and_reported(tmp_path: Path) -> None:
    path, out = malformed(tmp_path), tmp_path / "out"
    ran = ok(penstock("convert", path, out, *MEMORY, "--on-error", "skip"))
    assert "dropped 2 rows: malformed" in ran.stdout
    assert "line 42" in ran.stdout
    assert read_back(out)["id"].to_pylist() == [at for at in range(100) if at not in (41, 77)]
    rows = receipt_of(out)["rows"]
    assert (rows["written"], rows["dropped"]) == (98, {"malformed": 2})
    assert "line 42" in rows["first_error"]


@pytest.mark.parametrize("how", [(), ("--rewrite",)])
def test_schema_clash_between_parquet_files(how: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["one"], "text": ["a"], "score": [0.5]}), source / "02.parquet")
    refused(penstock("convert", source, tmp_path / "out", *MEMORY, *how), 1, "00.parquet", "02.parquet", "'id'")
    assert not (tmp_path / "out").exists()


def test_schema_clash_between_jsonl_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"id": 1, "text": "a"}\n')
    (tmp_path / "in" / "b.jsonl").write_text('{"id": 2, "text": {"deep": true}}\n')
    refused(penstock("convert", tmp_path / "in", tmp_path / "out", *MEMORY), 1, "a.jsonl", "b.jsonl", "'text'")
    assert digests(tmp_path / "out") == {}


# -- destinations -----------------------------------------------------------------------------------------------------


def test_destination_with_other_content(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    refused(penstock("convert", source, out, *MEMORY), 2, "out", "thesis.tex", "empty or a new folder")
    refused(called("convert", source, out, *MEMORY, "--restart"), 2, "thesis.tex")
    assert (out / "thesis.tex").read_text() == "years of work"
    assert [entry.name for entry in out.iterdir()] == ["thesis.tex"]


def test_destination_inside_the_source(source: Path) -> None:
    refused(penstock("convert", source, source / "out", *MEMORY), 2, "lies inside the source", "another folder")
    assert not (source / "out").exists()


def test_source_inside_the_destination(source: Path, tmp_path: Path) -> None:
    before = digests(source)
    refused(called("convert", source, source, *MEMORY), 2, "inside", "another folder")
    refused(called("convert", source / "00.parquet", tmp_path, *MEMORY), 2, "00.parquet", "another folder")
    assert digests(source) == before


def test_destination_that_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    refused(penstock("convert", source, tmp_path / "out", *MEMORY), 2, "is a file", "name a folder")
    assert (tmp_path / "out").read_text() == "precious"


def test_destination_below_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    refused(penstock("convert", source, tmp_path / "file" / "out", *MEMORY), 2, "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_scratch_that_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    refused(penstock("convert", source, tmp_path / "out", *MEMORY, "--scratch", tmp_path / "file"), 2, "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_read_only_destination(source: Path, read_only: Path) -> None:
    refused(penstock("convert", source, read_only, *MEMORY), 2, "read-only", "Read-only file system", "may write to")
    refused(penstock("convert", source, read_only / "new", *MEMORY), 2, "read-only", "may write to")


@pytest.mark.parametrize("how", [(), ("--rewrite",)])
def test_full_disk_then_space_freed(how: tuple[str, ...], small_disk: Path, tmp_path: Path) -> None:
    """The run stops and says so; what is committed stays; with space freed the same command goes on."""
    source = tmp_path / "source"
    source.mkdir()
    for at in range(6):  # random bytes, which do not compress: about 2 MB a file
        noise = pa.array([os.urandom(2_000) for _ in range(1_000)], pa.binary())
        ids = pa.array(range(at * 1_000, at * 1_000 + 1_000))
        pq.write_table(pa.table({"id": ids, "noise": noise}), source / f"{at}.parquet")
    options = ("--memory", "400MB", "--max-shard-size", "2MB", *how)
    words: list[str | Path] = ["convert", source, small_disk / "out", *options]
    ok(penstock("convert", source, tmp_path / "whole", *options))
    room = os.statvfs(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - (5 << 20)))
    refused(penstock(*words), 1, "disk", "free some space and run the same command again")
    assert digests(small_disk / "out") == {} if (small_disk / "out").exists() else True
    journal = small_disk / "out" / ".penstock" / "journal.jsonl"
    done = journal.read_text().count('"key":"task/') if journal.exists() else 0
    ballast.unlink()
    ok(penstock(*words))
    assert digests(small_disk / "out") == digests(tmp_path / "whole")
    tasks = receipt_of(small_disk / "out")["tasks"]
    assert tasks["run"] == tasks["planned"] - done
    if how:  # spliced shards are sized before the run; what is encoded is only known while it is written
        assert 0 < done < tasks["planned"]


def test_scratch_on_tmpfs_that_does_not_fit(tmp_path: Path, shm: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    noise = pa.array([os.urandom(100_000) for _ in range(400)], pa.binary())
    pq.write_table(pa.table({"noise": noise}), source / "a.parquet", row_group_size=100, use_dictionary=False)
    ran = penstock("convert", source, tmp_path / "out", "--memory", "70MB", "--scratch", shm / "scratch")
    refused(ran, 2, "tmpfs, which is memory", "put it on a disk")
    assert digests(tmp_path / "out") == {} if (tmp_path / "out").exists() else True


def test_scratch_on_tmpfs_that_fits(source: Path, tmp_path: Path, shm: Path) -> None:
    words = (*MEMORY, "--rewrite", "--max-shard-size", "100kB")
    ok(penstock("convert", source, tmp_path / "whole", *words))
    ok(penstock("convert", source, tmp_path / "out", *words, "--scratch", shm / "scratch"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert len(digests(tmp_path / "out")) > 1
    assert list((shm / "scratch").iterdir()) == []


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)])
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# -- words ------------------------------------------------------------------------------------------------------------


def pipeline(tmp_path: Path, text: str) -> Path:
    (tmp_path / "p.yaml").write_text(text.format(source=tmp_path / "source", out=tmp_path / "out"))
    return tmp_path / "p.yaml"


def test_filter_that_returns_one_bool(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def keep(batch):\n    return True\n")
    text = 'read: {source}\nsteps:\n  - filter: {{fn: "mine:keep"}}\nwrite: {out}\nmemory: 400MB\n'
    ran = penstock("run", pipeline(tmp_path, text), env={"PYTHONPATH": str(tmp_path)})
    refused(ran, 1, "step 1 (filter)", "00.parquet rows 0 to 499", "returned one bool for a batch of 500 rows")
    assert digests(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("step", "hint"),
    [
        ("select: [id, txet]", "did you mean 'text'?"),
        ("drop: scores", "did you mean 'score'?"),
        ("rename: {{ids: key}}", "did you mean 'id'?"),
        ("select: [zzz]", "there are 'id', 'text', 'score'"),
    ],
)
@pytest.mark.parametrize("rewrite", ["false", "true"])
def test_unknown_columns(step: str, hint: str, rewrite: str, source: Path, tmp_path: Path) -> None:
    text = f"read: {{source}}\nsteps:\n  - {step}\nwrite: {{{{to: {{out}}, rewrite: {rewrite}}}}}\n"
    refused(called("run", pipeline(tmp_path, text)), 2, step.partition(":")[0], "there is no column", hint)
    assert not (tmp_path / "out").exists()


def test_unknown_column_to_read(source: Path, tmp_path: Path) -> None:
    ran = called("convert", source, tmp_path / "out", "--columns", "id,txet")
    refused(ran, 2, "there is no column 'txet'", "did you mean 'text'?")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--memory", "lots"), ("memory 'lots' is not a size", '"512MB"')),
        (("--memory", "0"), ("memory must be more than zero",)),
        (("--memory", "-1GB"), ("memory '-1GB' is not a size",)),
        (("--max-shard-size", "5 elephants"), ("max_shard_size '5 elephants' is not a size",)),
        (("--disk", "much"), ("disk 'much' is not a size",)),
        (("--workers", "0"), ("workers must be at least 1",)),
        (("--format", "csv"), ("cannot write format 'csv'", "parquet, jsonl")),
        (("--disk", "1kB"), ("--disk allows 1 kB", "raise --disk")),
    ],
)
def test_bad_options(words: tuple[str, ...], names: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    joined = "=".join(words)  # a value that begins with a minus sign would look like an option
    refused(called("convert", source, tmp_path / "out", joined), 2, *names)
    assert not (tmp_path / "out").exists()


def test_bad_size_in_the_environment(source: Path, tmp_path: Path) -> None:
    refused(penstock("convert", source, tmp_path / "out", env={"PENSTOCK_MEMORY": "lots"}), 2, "memory 'lots'")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("raed: {source}\nwrite: {out}\n", ("does not know 'raed'", "did you mean 'read'?")),
        ("write: {out}\n", ("has no `read:`",)),
        ("read: {source}\n", ("has no `write:`",)),
        ("read: {source}\nwrite: {{to: {out}, max_shard: 5MB}}\n", ("write", "'max_shard'", "'max_shard_size'")),
        ("read: {{from: {source}, colums: [id]}}\nwrite: {out}\n", ("read", "'colums'", "'columns'")),
        ("read: {source}\nsteps:\n  - limt: 5\nwrite: {out}\n", ("step 1", "there is no step 'limt'", "limit")),
        ("read: {source}\nsteps:\n  - limit: many\nwrite: {out}\n", ("limit", "'many'")),
        ("read: {source}\nsteps:\n  - limit\nwrite: {out}\n", ("step 1", "limit")),
        ("read: {source}\nsteps:\n  - sample: {{fraction: 7}}\nwrite: {out}\n", ("sample", "0 to 1")),
        ("read: {source}\nsteps:\n  - sample: {{share: 0.5}}\nwrite: {out}\n", ("step 1", "sample", "share")),
        ("read: {source}\nsteps:\n  - map: clean\nwrite: {out}\n", ("step 1", '"module:function"')),
        ("read: {source}\nsteps:\n  - map: not_there:clean\nwrite: {out}\n", ("step 1", "not_there")),
        ("read: {source}\nsteps:\n  - map: json:clean\nwrite: {out}\n", ("step 1", "'json' has no 'clean'")),
        ("read: {source}\nsteps: 5\nwrite: {out}\n", ("steps",)),
        ("read: 5\nwrite: {out}\n", ("read",)),
        ("read: {source}\nwrite: {out}\nmemory: heaps\n", ("memory 'heaps' is not a size",)),
        ("read: {source}\nwrite: {out}\nworkers: two\n", ("workers", "'two'")),
        ("read: [unclosed\n", ("is not YAML",)),
        ("just words\n", ("read:",)),
    ],
)
def test_wrong_words_in_a_pipeline(text: str, names: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    refused(called("run", pipeline(tmp_path, text)), 2, *names)
    assert not (tmp_path / "out").exists()


def test_pipeline_module_that_breaks_when_imported(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise ValueError('no luck')\n")
    text = "read: {source}\nsteps:\n  - map: mine:clean\nwrite: {out}\n"
    refused(called("run", pipeline(tmp_path, text)), 2, "step 1", "mine", "no luck")


def test_errors_as_json(source: Path, tmp_path: Path) -> None:
    ran = penstock("convert", source, tmp_path / "out", "--memory", "lots", "--json")
    assert ran.returncode == 2
    said = json.loads(ran.stdout)
    assert (said["error"], said["exit_code"]) == ("UsageError", 2)
    assert "not a size" in said["message"]

"""`penstock check`: every kind of problem, told with what to do; counts against what was expected; bounded memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import called, ok, penstock, refused
from limits import require_kernel_limits, run_limited
from penstock.errors import NotFound, UsageError
from penstock.media import check as room
from penstock.media.check import Checked, check
from penstock.media.check_expect import expected, pattern
from penstock.media.check_files import Item, check_file, pack, unpack
from penstock.media.check_same import same
from penstock.meter import Status

FEW: dict[str, Any] = {"workers": 1, "memory": "200MB"}


def scan(seed: int, shape: tuple[int, int, int] = (8, 8, 8)) -> bytes:
    head = bytearray(352)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<8h", head, 40, 3, *shape, 1, 1, 1, 1)
    struct.pack_into("<2h", head, 70, 4, 16)
    struct.pack_into("<f", head, 108, 352)
    head[344:348] = b"n+1\0"
    data = np.random.default_rng(seed).integers(-900, 900, shape).astype("<i2").tobytes()
    return gzip.compress(bytes(head) + data, 1, mtime=0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Six whole scans with sidecars that are all the same, and a table of participants."""
    root = tmp_path / "ds"
    for at in range(6):
        folder = root / f"sub-{at:02d}" / "anat"
        folder.mkdir(parents=True)
        (folder / f"sub-{at:02d}_T1w.nii.gz").write_bytes(scan(at))
        (folder / f"sub-{at:02d}_T1w.json").write_text('{"EchoTime": 0.003}')
    (root / "participants.tsv").write_text("participant_id\tage\n" + "".join(f"sub-{at:02d}\t40\n" for at in range(6)))
    (root / "README").write_text("A dataset.\n")
    (root / ".git").mkdir()
    (root / ".git" / "index").write_bytes(b"")
    return root


def t1w(root: Path, at: int) -> Path:
    return root / f"sub-{at:02d}" / "anat" / f"sub-{at:02d}_T1w.nii.gz"


def only(checked: Checked) -> room.Problem:
    (one,) = checked.problems
    assert checked.counts == {one.problem: 1}
    assert not checked.ok
    return one


# -- good -------------------------------------------------------------------------------------------------------------


def test_everything_good(tree: Path) -> None:
    seen: list[Status] = []
    checked = check(tree, watch=seen.append, **FEW)
    assert checked.ok
    assert checked.problems == ()
    assert {kind: (one.files, one.bad) for kind, one in checked.kinds.items()} == {
        "json": (6, 0),
        "nifti": (6, 0),
        "other": (1, 0),
        "table": (1, 0),
    }
    assert checked.files == 14
    assert checked.bytes == sum(
        path.stat().st_size for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts
    )
    assert 0 < checked.memory["measured"] <= checked.memory["allowed"] == 200_000_000
    assert seen[-1].phase == "check"
    assert seen[-1].total == checked.bytes


def test_command_when_all_is_good(tree: Path) -> None:
    ran = ok(penstock("check", tree, "--memory", "200MB"))
    assert "nifti" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("good: 14 files, ")


def test_json_is_one_object(tree: Path) -> None:
    t1w(tree, 3).write_bytes(b"")
    ran = penstock("check", tree, "--json", "--workers", "1", "--memory", "200MB")
    assert ran.returncode == 1
    assert ran.stderr == ""
    found = ran.json()
    assert (found["ok"], found["files"], found["counts"], found["more"]) == (False, 14, {"zero-byte": 1}, 0)
    assert found["kinds"]["nifti"]["bad"] == 1
    assert found["problems"] == [
        {"path": str(t1w(tree, 3)), "problem": "zero-byte", "detail": "is empty (0 bytes)",
         "do": "fetch or make it again, or leave it out"}
    ]  # fmt: skip


# -- one problem each ---------------------------------------------------------------------------------------------


def test_a_scan_cut_in_half(tree: Path) -> None:
    data = t1w(tree, 2).read_bytes()
    t1w(tree, 2).write_bytes(data[: len(data) // 2])
    one = only(check(tree, **FEW))
    assert (one.path, one.problem, one.do) == (str(t1w(tree, 2)), "truncated", "fetch or make it again")
    ran = called("check", str(tree), "--workers", "1", "--memory", "200MB")
    assert ran.returncode == 1
    assert f"truncated     {t1w(tree, 2)}: its gzip data ends at byte" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("NOT GOOD: 1 truncated; 14 files")


def test_undecodable(tree: Path) -> None:
    t1w(tree, 2).write_bytes(b"<html>404</html>")
    one = only(check(tree, **FEW))
    assert (one.problem, "web page" in one.detail) == ("undecodable", True)


def test_missing(tree: Path, tmp_path: Path) -> None:
    checked = check([tree, tmp_path / "gone.nii.gz"], **FEW)
    assert only(checked).problem == "missing"
    assert checked.files == 14
    (tree / "sub-00" / "dangling.nii").symlink_to("nowhere.nii")
    one = only(check(tree, **FEW))
    assert (one.problem, "is a link to nowhere.nii" in one.detail) == ("missing", True)


def test_unreadable(tree: Path) -> None:
    """A folder where a file should be; what permissions deny is the next test."""
    table = tree / "paths.csv"
    table.write_text("scan\nsub-00/anat\n")
    one = only(check(table, column="scan", **FEW))
    assert (one.problem, one.detail) == ("unreadable", "is a folder where a file should be")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permissions_deny(tree: Path) -> None:
    t1w(tree, 0).chmod(0)
    (tree / "sub-01").chmod(0)
    checked = check(tree, **FEW)
    (tree / "sub-01").chmod(0o755)
    assert checked.counts == {"unreadable": 2}
    assert {one.do for one in checked.problems} == {"change its permissions"}


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(bytes(3_000_000))
    real = os.readv

    def growing(fd: int, buffers: Any) -> int:
        with path.open("ab") as file:
            file.write(b"x" if path.stat().st_size < 3_000_010 else b"")
        return real(fd, buffers)

    monkeypatch.setattr(os, "readv", growing)
    (found,) = check_file(Item(str(path))).found
    assert (found.problem, "changed while it was read" in found.detail) == ("unreadable", True)


# -- git-annex ----------------------------------------------------------------------------------------------------


def annexed(path: Path, key: str, content: bytes | None) -> None:
    """Put a file under git-annex: a link with a key, and its content where it is here."""
    root = next(folder for folder in path.parents if (folder / ".git").exists())
    target = root / ".git" / "annex" / "objects" / "Gx" / "4w" / key / key
    path.unlink()
    path.symlink_to(os.path.relpath(target, path.parent))
    if content is not None:
        target.parent.mkdir(parents=True)
        target.write_bytes(content)


def test_not_fetched(tree: Path) -> None:
    (tree / ".datalad").mkdir()
    digest = hashlib.md5(b"").hexdigest()
    annexed(t1w(tree, 1), f"MD5E-s1234--{digest}.nii.gz", None)
    t1w(tree, 2).write_text(f"/annex/objects/MD5E-s77--{digest}.nii.gz\n")
    checked = check(tree, **FEW)
    assert checked.counts == {"not-fetched": 2}
    link, pointer = checked.problems
    assert (link.path, link.detail) == (str(t1w(tree, 1)), "its content of 1,234 bytes is not here (annex link)")
    assert (pointer.path, pointer.detail) == (str(t1w(tree, 2)), "its content of 77 bytes is not here (annex pointer)")
    assert link.do == f"cd {tree.resolve()} && datalad get sub-01/anat/sub-01_T1w.nii.gz"
    assert checked.kinds["nifti"] == room.Count(6, checked.kinds["nifti"].bytes, 2)


def test_a_subdataset_that_is_not_here(tree: Path) -> None:
    (tree / "sourcedata").mkdir()
    assert check(tree, **FEW).ok
    (tree / ".gitmodules").write_text('[submodule "s"]\n\tpath = sourcedata\n')
    one = only(check(tree, **FEW))
    assert (one.problem, one.do) == ("not-fetched", f"cd {tree.resolve()} && git submodule update --init sourcedata")


def test_content_against_its_key(tree: Path) -> None:
    data = scan(1)
    digest = hashlib.sha256(data).hexdigest()
    right = f"SHA256E-s{len(data)}--{digest}.nii.gz"
    annexed(t1w(tree, 1), right, data)
    assert check(tree, **FEW).ok
    annexed(t1w(tree, 2), f"SHA256E-s{len(data)}--{'0' * 64}.nii.gz", data)
    one = only(check(tree, duplicates="none", **FEW))
    assert (one.path, one.problem) == (str(t1w(tree, 2)), "wrong-digest")
    assert "git annex fsck sub-02/anat/sub-02_T1w.nii.gz; then git annex get" in one.do
    annexed(t1w(tree, 2), f"SHA256E-s{len(data) + 1}--{digest}.nii.gz", data)
    assert only(check(tree, duplicates="none", **FEW)).problem == "wrong-size"


def test_broken_as_it_was_recorded(tree: Path) -> None:
    """The digest is right, so that fetching again would bring the same."""
    data = scan(1)[:-100]
    annexed(t1w(tree, 1), f"MD5E-s{len(data)}--{hashlib.md5(data).hexdigest()}.nii.gz", data)
    one = only(check(tree, **FEW))
    assert (one.problem, "it was added like this" in one.do) == ("truncated", True)


# -- duplicates ---------------------------------------------------------------------------------------------------


def test_duplicates(tree: Path) -> None:
    """The same scan twice is told; the same sidecar six times is how it should be."""
    shutil.copy(t1w(tree, 1), t1w(tree, 4))
    one = only(check(tree, **FEW))
    assert (one.path, one.problem, one.detail) == (
        str(t1w(tree, 4)), "duplicate", f"has the same content as {t1w(tree, 1)}",
    )  # fmt: skip
    assert check(tree, duplicates="none", **FEW).ok
    assert check(tree, duplicates="all", **FEW).counts == {"duplicate": 6}


def test_a_file_named_twice_is_no_duplicate(tree: Path) -> None:
    checked = check([tree, t1w(tree, 1), f"{tree}/sub-01/../sub-01/anat/sub-01_T1w.nii.gz"], **FEW)
    assert checked.ok
    assert checked.files == 16


def test_same() -> None:
    rng = random.Random(0)
    digests = [rng.randbytes(16) for _ in range(1_000)]
    digests[500] = digests[10]
    digests[900] = digests[10]
    digests[901] = digests[11]
    digests[902] = digests[12][:8] + rng.randbytes(8)  # agrees in its first half
    digests[20] = digests[30] = bytes(16)
    blocks = [b"".join(digests[:300]), b"".join(digests[300:])]
    assert sorted(group.tolist() for group in same(blocks)) == [[10, 500, 900], [11, 901]]
    assert list(same([])) == []
    assert list(same([bytes(16)])) == []


# -- expectations -------------------------------------------------------------------------------------------------


def test_nothing_checked_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one = only(check(tmp_path / "empty", **FEW))
    assert (one.problem, one.detail) == ("nothing", "no file was checked")
    assert only(check(str(tmp_path / "*.nii.gz"), **FEW)).problem == "nothing"
    ran = called("check", str(tmp_path / "empty"))
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1] == "NOT GOOD: 1 nothing; no file was read"


def test_nothing_of_the_kinds_asked_for(tree: Path) -> None:
    assert only(check(tree, kinds=["video"], **FEW)).problem == "nothing"
    assert check(tree, kinds=["nifti"], **FEW).files == 6


def test_counts(tree: Path) -> None:
    assert check(tree, expect={"nifti": 6, "sub-*/anat/*_T1w.json": 6, "*.tsv": 1, "video": 0}, **FEW).ok
    one = only(check(tree, expect={"nifti": 7}, **FEW))
    assert (one.path, one.problem) == ("nifti", "wrong-count")
    assert one.detail == "6 are there, 1 fewer than the 7 expected"
    assert "1 more than the 5 expected" in only(check(tree, expect="*_T1w.nii.gz=5", **FEW)).detail


def test_counts_on_the_command_line(tree: Path) -> None:
    words = ["check", str(tree), "--workers", "1", "--memory", "200MB", "--expect"]
    ran = called(*words, "nifti=6", "--expect", "sub-*/anat/*.json=6")
    assert ran.returncode == 0
    assert "nifti: 6, as expected" in ran.stdout
    assert called(*words, "nifti=5").returncode == 1


def test_a_broken_file_is_still_counted(tree: Path) -> None:
    t1w(tree, 0).write_bytes(b"")
    assert check(tree, expect={"nifti": 6}, **FEW).counts == {"zero-byte": 1}


def test_files_that_are_listed(tree: Path) -> None:
    listed = {
        path.relative_to(tree).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }
    (tree.parent / "expect.json").write_text(json.dumps({"counts": {"nifti": 6}, "files": listed}))
    assert check(tree, expect=tree.parent / "expect.json", **FEW).ok

    (tree / "sub-00" / "extra.txt").write_text("more")
    t1w(tree, 1).unlink()
    t1w(tree, 2).write_bytes(scan(77))
    checked = check(tree, expect=tree.parent / "expect.json", **FEW)
    assert {(one.problem, os.path.basename(one.path)) for one in checked.problems} == {
        ("extra", "extra.txt"),
        ("missing", "sub-01_T1w.nii.gz"),
        ("wrong-digest", "sub-02_T1w.nii.gz"),
        ("wrong-count", "nifti"),
    }


def test_what_sha256sum_and_md5sum_print(tree: Path) -> None:
    (tree / ".bidsignore").write_text("*_rec-*\n")  # hidden, and listed: it is looked for
    paths = [path for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts]
    for kind in ("sha256", "md5"):
        sums = tree.parent / f"{kind.upper()}SUMS"
        sums.write_text(
            "".join(
                f"{hashlib.new(kind, path.read_bytes()).hexdigest()}  ./{path.relative_to(tree)}\n" for path in paths
            )
        )
        checked = check(tree, expect=sums, **FEW)
        assert checked.ok, checked.problems
        assert checked.files == 15


def test_expectations_in_tables(tree: Path) -> None:
    counts = tree.parent / "counts.tsv"
    counts.write_text("kind\tcount\nnifti\t6\n*_T1w.json\t6\n")
    assert check(tree, expect=counts, **FEW).ok
    files = tree.parent / "files.tsv"
    files.write_text(f"path\tsize\nparticipants.tsv\t{(tree / 'participants.tsv').stat().st_size}\n")
    assert check(tree / "participants.tsv", expect=files, **FEW).ok
    files.write_text("path\tsize\nparticipants.tsv\t1\n")
    assert only(check(tree / "participants.tsv", expect=files, **FEW)).problem == "wrong-size"


@pytest.mark.parametrize(
    ("glob", "name", "match"),
    [
        ("*.nii.gz", "sub-01/anat/a.nii.gz", True),
        ("sub-*/*.nii.gz", "sub-01/anat/a.nii.gz", False),
        ("sub-*/**/*.nii.gz", "sub-01/anat/a.nii.gz", True),
        ("**/a.nii.gz", "a.nii.gz", True),
        ("sub-0[12]/?", "sub-02/x", True),
        ("sub-0[!12]/?", "sub-02/x", False),
        ("a+b.nii", "a+b.nii", True),
    ],
)
def test_patterns(glob: str, name: str, match: bool) -> None:
    assert (pattern(glob).fullmatch(name) is not None) is match


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("niftis=3", "'niftis' is no kind of file"),
        ("nowhere.json", "neither KIND=N, PATTERN=N nor a file"),
        ({"nifti": -1}, "-1 is no count"),
        ({"nifti": True}, "True is no count"),
        ({"files": {"a": "xyz"}}, "'xyz' is no digest"),
    ],
)
def test_expectations_that_are_none(given: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        expected(given)
    assert says in str(caught.value)


def test_wrong_words_are_exit_code_2(tree: Path) -> None:
    refused(called("check", str(tree), "--kinds", "nift"), 2, "'nift' is no kind of file")
    refused(called("check", str(tree), "--expect", "nifti=many"), 2, "nifti=many")
    refused(called("check", str(tree / "none.csv"), "--column", "path"), 2, "there is no such table")
    (tree / "t.csv").write_text("a,b\n1,2\n")
    refused(called("check", str(tree / "t.csv"), "--column", "path"), 2, "has no column path; it has a, b")
    with pytest.raises(UsageError, match="duplicates is one of"):
        check(tree, duplicates="some")
    with pytest.raises(UsageError, match="nothing to check"):
        check([])


# -- tables -------------------------------------------------------------------------------------------------------


def rows(tree: Path) -> list[dict[str, Any]]:
    """A row a subject: a path, a list of paths, and a null."""
    return [
        {
            "id": at,
            "t1w": str(t1w(tree, at).relative_to(tree)) if at else str(t1w(tree, at)),
            "more": [f"sub-{at:02d}/anat/sub-{at:02d}_T1w.json"] if at % 2 else [],
        }
        for at in range(6)
    ] + [{"id": 6, "t1w": None, "more": None}]


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "jsonl"])
def test_tables_of_paths(tree: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.parent)  # relative paths are the table's folder's, not ours
    table = tree / f"table.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows(tree)), table)
    elif ending == "jsonl":
        table.write_text("".join(json.dumps(row) + "\n" for row in rows(tree)))
    else:
        mark = "," if ending == "csv" else "\t"
        lines = [
            [str(row["id"]), row["t1w"] or "n/a", json.dumps(row["more"]) if row["more"] else ""] for row in rows(tree)
        ]
        text = [[cell.replace('"', '""') for cell in line] for line in lines]
        table.write_text(
            "\n".join(
                mark.join(f'"{cell}"' if '"' in cell else cell for cell in line)
                for line in [["id", "t1w", "more"], *text]
            )
        )
    checked = check(table, column=["t1w", "more"], expect={"nifti": 6, "json": 3}, **FEW)
    assert checked.ok, checked.problems
    assert checked.relative == 8
    t1w(tree, 3).unlink()
    one = only(check(table, column="t1w", **FEW))
    assert (one.path, one.problem) == (str(t1w(tree, 3)), "missing")


def test_one_name_in_two_folders(tree: Path) -> None:
    (tree / "a").mkdir()
    (tree / "b").mkdir()
    for name in ("a", "b"):
        (tree / name / "scan.nii.gz").write_bytes(scan(ord(name)))
    table = tree / "table.csv"
    table.write_text("path\na/scan.nii.gz\nb/scan.nii.gz\nb/scan.nii.gz\n")
    one = only(check(table, column="path", **FEW))
    assert (one.path, one.problem) == (str(tree / "b" / "scan.nii.gz"), "duplicate-name")
    assert f"has the same name as {tree / 'a' / 'scan.nii.gz'}" in one.detail
    assert check([tree / "a", tree / "b"], **FEW).ok  # in folders, names repeat


def test_tables_that_cannot_be_read(tree: Path) -> None:
    with pytest.raises(NotFound):
        check(tree / "none.csv", column="path")
    (tree / "n.jsonl").write_text('{"path": 3}\n')
    with pytest.raises(UsageError, match="holds int values, not paths"):
        check(tree / "n.jsonl", column="path")
    with pytest.raises(UsageError, match="no table that is read here"):
        check(tree / "README", column="path")


# -- bounds -------------------------------------------------------------------------------------------------------


def test_tasks_carry_any_name() -> None:
    items = [Item("a b\n.nii", "size:3"), Item(os.fsdecode(b"\xff\xfe.nii")), Item("é")]
    assert list(unpack(pack(items))) == items


def test_a_million_names_take_a_few_megabytes() -> None:
    paths = [
        f"/data/ds004884/sub-M{at // 40:05d}/ses-{at % 40}/func/sub-M{at // 40:05d}_ses-{at % 40}_bold.nii.gz"
        for at in range(25_600)
    ]
    packed = sum(len(pack([Item(path) for path in paths[at : at + 256]])) for at in range(0, len(paths), 256))
    assert packed / len(paths) < 20


def test_problems_are_counted_all_and_listed_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LISTED", 7)
    for at in range(60):
        (tmp_path / f"{at:02d}.nii").write_bytes(b"")
    checked = check(tmp_path, **FEW)
    assert checked.counts == {"zero-byte": 60}
    assert [os.path.basename(one.path) for one in checked.problems] == [f"{at:02d}.nii" for at in range(7)]
    assert checked.more == checked.as_json()["more"] == 53


def test_command_shows_a_few_of_each(tmp_path: Path) -> None:
    for at in range(60):
        (tmp_path / f"{at:02d}.nii").write_bytes(b"")
    ran = called("check", str(tmp_path), "--workers", "1", "--show", "5", "--memory", "200MB")
    assert ran.stdout.count("is empty (0 bytes)") == 5
    assert "… and 55 more" in ran.stdout


def test_links_to_folders_above_end(tree: Path) -> None:
    (tree / "sub-00" / "up").symlink_to("..")
    (tree / "sub-00" / "other").symlink_to("../sub-01")
    checked = check(tree, duplicates="none", **FEW)
    assert checked.files == 16


def test_bounded_whatever_a_file_inflates_to(tmp_path: Path) -> None:
    """800 MB in 0.8 MB of gzip, beside long JSON and a wide table, inside a kernel limit of 80 MB."""
    require_kernel_limits()
    head = bytearray(352)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<8h", head, 40, 4, 1000, 1000, 100, 4, 1, 1, 1)
    struct.pack_into("<2h", head, 70, 4, 16)
    struct.pack_into("<f", head, 108, 352)
    head[344:348] = b"n+1\0"
    block = gzip.compress(bytes(80_000_000), 6)
    (tmp_path / "zeros.nii.gz").write_bytes(gzip.compress(bytes(head)) + block * 10)
    assert (tmp_path / "zeros.nii.gz").stat().st_size * 500 < 800_000_000
    (tmp_path / "long.json").write_bytes(b"[" + b"[[1, 2]]," * 600_000 + b"0]")
    (tmp_path / "deep.json").write_bytes(b"[" + b"[]," * 340_000 + b"0]")
    (tmp_path / "a.tsv").write_bytes(b"a\tb\n" * 1_000_000)
    words = [sys.executable, "-m", "penstock.cli.main", "check", str(tmp_path), "--memory", "80MB", "--json"]
    run = run_limited(words, limit=80_000_000, timeout=120)
    assert (run.returncode, run.kernel_kills, run.left) == (0, 0, 0), run.stderr
    found = json.loads(run.stdout)
    assert found["files"] == 4
    assert found["memory"]["measured"] <= 80_000_000
    assert run.anonymous <= 80_000_000

"""BIDS trees as rows: no run, no companion and no file of a tree is lost, whatever is a row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from media.bids_tree import annexed, files_of, make_bids, unlocked
from penstock.errors import BadFile, BadRow, NotFetched, NotFound, SourceChanged, UsageError
from penstock.media.bids import BidsTree, scan_bids
from penstock.media.bids.names import companion, parse
from penstock.media.bids.selection import Ignore
from penstock.media.kinds import leaves_of, references_in


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bids(tmp_path_factory.mktemp("bids") / "ds", subjects=3, sessions=2)


def rows_of(tree: BidsTree) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for batch in tree.batches():
        batch.validate(full=True)
        assert batch.schema == tree.schema
        found += batch.to_pylist()
    return found


def references(tree: BidsTree) -> list[dict[str, Any]]:
    """Every reference in every row."""
    return [
        value
        for batch in tree.batches()
        for leaf in leaves_of(tree.schema)
        for value in references_in(batch.column(leaf.column), leaf).to_pylist()
        if value is not None
    ]


def texts_in(value: Any) -> dict[str, str]:
    """Paths and texts of every companion in a row, wherever it is."""
    found: dict[str, str] = {}
    for scan in value if isinstance(value, list) else [value]:
        if not isinstance(scan, dict):
            continue
        path = (scan.get("nifti") or {}).get("path") or scan.get("path")
        for member in ("sidecar", "events", "bval", "bvec", "channels"):
            if scan.get(member) is not None:
                assert path is not None
                found[scan.get(f"{member}_path") or companion(path, member)] = scan[member]
    return found


@pytest.mark.parametrize("row", ["session", "subject", "file"])
@pytest.mark.parametrize("derivatives", [False, True])
@pytest.mark.parametrize("sidecars", [False, True])
def test_every_file_is_in_a_row_or_beside(tree: Path, row: str, derivatives: bool, sidecars: bool) -> None:
    found = scan_bids(tree, row=row, derivatives=derivatives, sidecars=sidecars)
    rows = rows_of(found)
    here: dict[str, bytes] = {}
    media = references(found)
    assert len({value["path"] for value in media}) == len(media), "a file is in two places"
    for value in media:
        assert value["file"] == str(tree / value["path"])
        about = os.stat(value["file"])
        assert (value["size"], value["modified"]) == (about.st_size, about.st_mtime_ns)
        here[value["path"]] = Path(value["file"]).read_bytes()
    for one in rows:
        for column in [one] if row == "file" else one.values():
            for path, text in texts_in(column).items():
                assert here.setdefault(path, text.encode()) == text.encode()
    in_rows = {path: data for path, data in here.items() if path not in {f.path_in_tree for f in found.beside}}
    assert found.files == len(in_rows)
    assert found.bytes == sum(map(len, in_rows.values()))
    for file in found.beside:
        data = Path(file.file).read_bytes()
        assert here.setdefault(file.path_in_tree, data) == data
        assert file.size == len(data)
    expected = files_of(tree)
    for path in ("extra/notes.txt", "sub-0001/sub-0001_scratch.txt"):
        del expected[path]
    if not derivatives:
        expected = {path: data for path, data in expected.items() if not path.startswith("derivatives/")}
    assert here == expected
    assert found.ignored == 2
    assert found.rows == len(rows)


def test_rows_are_sessions_in_order_and_tables_are_joined(tree: Path) -> None:
    found = scan_bids(tree)
    rows = rows_of(found)
    assert [(row["subject"], row["session"]) for row in rows] == [
        ("0001", "1"), ("0001", "2"), ("0002", "1"), ("0002", "2"), ("0003", None),
    ]  # fmt: skip
    kinds = {field.name: field.type for field in found.schema}
    assert (kinds["age"], kinds["weight"], kinds["sex"]) == (pa.int64(), pa.float64(), pa.string())
    assert kinds["code"] == pa.string(), "a label with zeros before it stays one"
    assert [row["age"] for row in rows] == [21, 21, 22, 22, 23]
    assert [row["sex"] for row in rows] == [None, None, "F", "F", "F"]
    assert [row["score"] for row in rows] == [1.5, 2.5, 1.5, 2.5, None]
    assert [row["session_age"] for row in rows] == [41, 42, 41, 42, None], "a clash of names is set apart"
    assert [row["participant_bold"] for row in rows] == ["yes"] * 5
    assert isinstance(rows[0]["bold"], list)


def test_every_run_is_kept_with_what_sets_it_apart(tree: Path) -> None:
    row = rows_of(scan_bids(tree))[0]
    assert [(one["task"], one["run"], one["echo"]) for one in row["bold"]] == [
        ("nback", 1, 1), ("nback", 1, 2), ("nback", 2, 1), ("nback", 2, 2), ("rest", 1, None), ("rest", 2, None),
        ("tap", None, None),
    ]  # fmt: skip
    assert [json.loads(one["sidecar"])["EchoTime"] for one in row["t1w"]] == [0.003, 0.004], "two T1w in one session"
    assert [one["dir"] for one in row["dwi"]] == ["AP", "PA"]
    assert [(one["datatype"], one["task"]) for one in row["sbref"]] == [
        ("func", "nback"), ("func", "nback"), ("dwi", None),
    ]  # fmt: skip
    assert row["flair"] == [], "none is an empty list"
    assert "sidecar" not in row["sbref"][0]


def test_companions_go_with_their_scans(tree: Path) -> None:
    row = rows_of(scan_bids(tree))[0]
    bold = {(one["task"], one["run"], one["echo"]): one for one in row["bold"]}
    shared = bold["nback", 1, 1]
    assert shared["events"] == bold["nback", 1, 2]["events"] == "onset\tduration\n1.0\t1\n"
    assert shared["events_path"] == "sub-0001/ses-1/func/sub-0001_ses-1_task-nback_run-01_events.tsv"
    assert bold["tap", None, None]["events"] == "onset\tduration\r\n0.0\tn/a\r\n"
    assert bold["tap", None, None]["events_path"] is None
    assert [Path(one["path"]).name for one in bold["rest", 1, None]["others"]] == [
        "sub-0001_ses-1_task-rest_run-01_recording-pulse_physio.json",
        "sub-0001_ses-1_task-rest_run-01_recording-pulse_physio.tsv.gz",
    ]
    ways = {one["dir"]: one for one in row["dwi"]}
    assert (ways["AP"]["bval"], ways["AP"]["bval_path"]) == ("0 800\n", None)
    assert (ways["PA"]["bval"], ways["PA"]["bval_path"]) == ("0 1000\n", "dwi.bval"), "inherited from the root"
    assert "µ" in row["t2w"][0]["sidecar"]
    magnitude = row["magnitude2"][0]
    assert [one["path"] for one in magnitude["others"]] == ["sub-0001/ses-1/fmap/sub-0001_ses-1_magnitude2.json"]
    assert {Path(one["path"]).name for one in row["others"]} == {"sub-0001_ses-1_scans.tsv", "defaced.txt"}


def test_metadata_are_inherited_the_nearest_winning(tree: Path) -> None:
    rows = rows_of(scan_bids(tree))
    rest = next(one for one in rows[0]["bold"] if one["task"] == "rest")
    assert json.loads(rest["metadata"]) == {
        "RepetitionTime": 2.0, "TaskName": "rest", "Manufacturer": "of sub-0001", "FlipAngle": 71,
    }  # fmt: skip
    assert next(one for one in rows[0]["bold"] if one["task"] == "nback")["metadata"] is None
    alone = next(one for one in rows[-1]["bold"] if one["task"] == "rest")
    assert "Manufacturer" not in json.loads(alone["metadata"])


def test_rows_of_subjects_say_the_session_of_each_scan(tree: Path) -> None:
    rows = rows_of(scan_bids(tree, row="subject"))
    assert [row["subject"] for row in rows] == ["0001", "0002", "0003"]
    assert [one["session"] for one in rows[0]["t1w"]] == ["1", "1", "2", "2"]
    assert [one["session"] for one in rows[2]["t1w"]] == [None, None]
    assert rows[0]["sessions"][1] == {"session": "2", "acq_time": "2020-01-03", "score": 2.5, "age": 42}
    assert "sub-0001/sub-0001_sessions.tsv" in {one["path"] for one in rows[0]["others"]}


def test_rows_of_files(tree: Path) -> None:
    found = scan_bids(tree, row="file", derivatives="lesions")
    rows = rows_of(found)
    t1w = [row for row in rows if row["suffix"] == "T1w"]
    assert len(t1w) == 10
    assert all(row["datatype"] == "anat" and row["nifti"]["path"].endswith("_T1w.nii.gz") for row in t1w)
    assert t1w[0]["bytes"] is None
    assert t1w[0]["run"] == 1
    assert {row["derivative"] for row in rows} == {None, "lesions"}
    alone = next(row for row in rows if (row["path"] or "").endswith("_scans.tsv"))
    assert (alone["nifti"], alone["suffix"]) == (None, None)


def test_derivatives_are_matched_to_their_rows(tree: Path) -> None:
    found = scan_bids(tree, derivatives=["lesions"])
    rows = {(row["subject"], row["session"]): row for row in rows_of(found)}
    assert len(rows) == 5
    assert [len(row["lesions_mask"]) for row in rows.values()] == [1, 1, 0, 0, 1]
    mask = rows["0001", "2"]["lesions_mask"][0]
    assert (mask["space"], mask["label"], mask["sidecar"]) == ("T1w", "lesion", '{\n  "Type": "ROI"\n}\n')
    assert found.derivatives_left_out == ["fmriprep"]
    with pytest.raises(NotFound, match="no derivatives named 'masks'; there are fmriprep, lesions"):
        scan_bids(tree, derivatives="masks")


def test_what_was_derived_without_sessions(tmp_path: Path) -> None:
    """Of a subject's only session it goes into that row; of several it has a row of its own."""
    for path in (
        "sub-1/ses-a/anat/sub-1_ses-a_T1w.nii.gz",
        "sub-2/ses-a/anat/sub-2_ses-a_T1w.nii.gz",
        "sub-2/ses-b/anat/sub-2_ses-b_T1w.nii.gz",
        "derivatives/sub-1/anat/sub-1_lesion-msk.nii.gz",
        "derivatives/sub-2/anat/sub-2_lesion-msk.nii.gz",
        "derivatives/sub-3/anat/sub-3_lesion-msk.nii.gz",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    rows = rows_of(scan_bids(tmp_path, derivatives=True))
    assert [(row["subject"], row["session"], len(row["derivatives_lesion_msk"])) for row in rows] == [
        ("1", "a", 1), ("2", None, 1), ("2", "a", 0), ("2", "b", 0), ("3", None, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("include", "exclude", "columns"),
    [
        ("bold", None, {"bold"}),
        (["anat"], "T2w", {"t1w", "flair"}),
        (None, ["func", "fmap", "dwi"], {"t1w", "t2w", "flair"}),
        ("*_T1w.nii.gz", None, {"t1w"}),
        ("sub-0002/ses-1/*/*_dwi.nii.gz", None, {"dwi"}),
    ],
)
def test_include_and_exclude(tree: Path, include: Any, exclude: Any, columns: set[str]) -> None:
    found = scan_bids(tree, include=include, exclude=exclude)
    assert set(found.counts) == columns
    rows = rows_of(found)
    everything = scan_bids(tree)
    assert found.left_out + found.files + len(found.beside) == everything.files + len(everything.beside)
    if columns == {"bold"}:
        assert all(one["sidecar"] for row in rows for one in row["bold"] if one["task"] != "tap"), "companions go along"
        assert all(one["events"] for row in rows for one in row["bold"] if one["task"] != "rest")
        assert all(row["others"] == [] for row in rows)
    if columns == {"dwi"}:
        assert [(row["subject"], row["session"]) for row in rows] == [("0002", "1")]


def test_excluded_files_leave_rows_and_root(tree: Path) -> None:
    found = scan_bids(tree, exclude=["events", "code", "sub-0003"])
    rows = rows_of(found)
    assert {row["subject"] for row in rows} == {"0001", "0002"}
    assert "events" not in {field.name for field in found.schema.field("bold").type.value_type}
    assert not [file for file in found.beside if file.path_in_tree.startswith("code/")]


def test_recordings_of_many_files_stay_together(tmp_path: Path) -> None:
    """EEG in three files, MEG in a folder, and things that fit nowhere."""
    names = [
        "sub-1/eeg/sub-1_task-a_eeg.vhdr",
        "sub-1/eeg/sub-1_task-a_eeg.vmrk",
        "sub-1/eeg/sub-1_task-a_eeg.eeg",
        "sub-1/eeg/sub-1_task-a_eeg.json",
        "sub-1/eeg/sub-1_task-a_channels.tsv",
        "sub-1/eeg/sub-1_space-CapTrak_electrodes.tsv",
        "sub-1/meg/sub-1_task-a_meg.ds/sub-1.meg4",
        "sub-1/meg/sub-1_task-a_meg.ds/deep/sub-1.res4",
        "sub-1/meg/sub-1_task-a_meg.json",
        "sub-1/anat/no entities.nii.gz",
        "sub-1/anat/sub-1_others.nii.gz",
        "sub-1/odd/deep/er/file.bin",
        "sub-1_loose.txt",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = scan_bids(tmp_path)
    (row,) = rows_of(found)
    (eeg,) = row["eeg"]
    assert eeg["path"].endswith(".vhdr")
    assert [Path(one["path"]).suffix for one in eeg["others"]] == [".eeg", ".vmrk"]
    assert (eeg["sidecar"], eeg["channels"]) == (names[3], names[4])
    assert [one["path"] for one in row["meg"]] == [names[7], names[6]]
    assert [one["sidecar"] for one in row["meg"]] == [names[8], None]
    assert {one["path"] for one in row["others"]} == {names[5], names[9], names[10], names[11]}
    assert [file.path_in_tree for file in found.beside] == [names[12]]


def test_entities_that_clash_with_members_or_are_no_numbers(tmp_path: Path) -> None:
    for name in ("sub-1_run-1_path-a_bold.nii.gz", "sub-1_run-2b_bold.nii.gz"):
        (tmp_path / "sub-1" / "func").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sub-1" / "func" / name).write_bytes(b"")
    (row,) = rows_of(scan_bids(tmp_path))
    assert [(one["run"], one["entity_path"]) for one in row["bold"]] == [("1", "a"), ("2b", None)]


def test_content_in_an_annex_is_followed(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=2, sessions=1, runs=1)
    plain = scan_bids(root)
    before = (plain.rows, plain.files, plain.bytes)
    annexed(root)
    linked = scan_bids(root)
    assert (linked.rows, linked.files, linked.bytes) == before
    assert not linked.problems
    assert all(Path(value["file"]).is_symlink() for value in references(linked) if value["path"].endswith(".nii.gz"))


def test_what_is_not_fetched_is_named_with_the_command_that_fetches_all(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=2, sessions=1, runs=1)
    whole = scan_bids(root).bytes
    lost = annexed(root, lost=3)
    found = scan_bids(root)
    assert found.problem_count == 3
    assert [problem.path for problem in found.problems] == [path.relative_to(root).as_posix() for path in lost]
    assert "datalad get" in found.problems[0].do
    assert found.bytes == whole, "an annex key tells the size"
    assert "cannot be read: 3 files" in found.summary()
    with pytest.raises(NotFetched) as caught:
        next(found.batches())
    text = str(caught.value)
    assert str(lost[0]) in text
    assert "2 more" in text
    assert text.endswith("datalad get .")


def test_a_pointer_file_is_not_fetched(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=1, sessions=1, runs=1)
    (root / ".git").mkdir()
    unlocked(root, next(root.glob("sub-*/**/*_T2w.nii.gz")))
    with pytest.raises(NotFetched, match=r"is not fetched \(annex pointer\).*git annex get \."):
        scan_bids(root).check()


def test_links_to_nothing_and_to_themselves(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=1, sessions=1, runs=1)
    (root / "code" / "gone").symlink_to(root / "nowhere")
    with pytest.raises(NotFound, match="code/gone: is a link to nothing; restore its target"):
        scan_bids(root).check()
    (root / "code" / "gone").unlink()
    (root / "code" / "around").symlink_to(root / "code")
    with pytest.raises(BadFile, match="is a link back to a folder above it"):
        scan_bids(root)


def test_a_tree_that_changes_is_noticed(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=2, sessions=1, runs=1)
    found = scan_bids(root)
    (root / "sub-0001/ses-1/anat/sub-0001_ses-1_new_PDw.nii.gz").write_bytes(b"x")
    (root / "sub-0001/ses-1/anat/sub-0001_ses-1_PDw.nii.gz").write_bytes(b"x")
    with pytest.raises(SourceChanged, match="is new since the tree was looked through"):
        list(found.batches())
    (root / "sub-0001/ses-1/anat/sub-0001_ses-1_PDw.nii.gz").unlink()
    with pytest.raises(SourceChanged, match=r"now .* in 2; run it again"):
        list(found.batches())


def test_folders_that_only_look_special(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=2, sessions=1, runs=1)
    whole = scan_bids(root)
    for name in ("derivatives_old/sub-0001/a.nii.gz", "sub-readme.txt", "sourcedata/sub-0001/x.dcm", ".git"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    found = scan_bids(root)
    assert {file.path_in_tree for file in found.beside} - {file.path_in_tree for file in whole.beside} == {
        "derivatives_old/sub-0001/a.nii.gz",
        "sourcedata/sub-0001/x.dcm",
        "sub-readme.txt",
    }
    assert found.files == whole.files
    (root / ".bidsignore").write_text("/sub-0001/\n")
    ignoring = scan_bids(root)
    assert (ignoring.subjects, ignoring.ignored) == (["0002"], sum(p.is_file() for p in (root / "sub-0001").rglob("*")))
    assert len(rows_of(ignoring)) == 1


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no such folder"):
        scan_bids(tmp_path / "none")
    with pytest.raises(NotFound, match="holds no folder named sub-"):
        scan_bids(tmp_path)
    with pytest.raises(UsageError, match='row is "session", "subject" or "file", not \'scan\''):
        scan_bids(tmp_path, row="scan")
    with pytest.raises(UsageError, match="include is a word"):
        scan_bids(tmp_path, include=[])


def test_tables_that_are_damaged_are_named(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=1, sessions=1, runs=1)
    (root / "participants.tsv").write_text("participant_id\tage\nsub-0001\t20\t30\n")
    with pytest.raises(BadRow, match=r"participants\.tsv: line 2 has 3 cells for 2 columns"):
        scan_bids(root)
    (root / "participants.tsv").write_bytes(b"participant_id\tname\nsub-0001\t\xe9\n")
    with pytest.raises(BadFile, match=r"participants\.tsv: is not UTF-8"):
        scan_bids(root)
    (root / "participants.tsv").write_bytes(b"\xef\xbb\xbfparticipant_id\tage\r\n0001\t20\r\n")
    assert rows_of(scan_bids(root))[0]["age"] == 20


def test_long_texts_are_kept_as_files(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=1, sessions=1, runs=1)
    events = next(root.glob("sub-*/**/*_task-nback_*_events.tsv"))
    events.write_bytes(b"x" * (1 << 20) + b"y")
    found = scan_bids(root)
    row = rows_of(found)[0]
    bold = [one for one in row["bold"] if one["task"] == "nback"]
    assert [one["events"] for one in bold] == [None, None]
    assert [[Path(other["path"]).name for other in one["others"]] for one in bold] == [[events.name], []]


def test_batches_are_bounded_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.media.bids import batches

    root = make_bids(tmp_path / "ds", subjects=6, sessions=1, runs=1, size=0)
    whole = rows_of(scan_bids(root))
    monkeypatch.setattr(batches, "BATCH_FILES", 30)
    some = list(scan_bids(root).batches())
    assert len(some) > 2
    assert [row for batch in some for row in batch.to_pylist()] == whole


def test_all_subjects_of_a_larger_tree_are_there(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "ds", subjects=40, sessions=2, runs=3, size=0)
    found = scan_bids(root)
    table = pa.Table.from_batches(list(found.batches()), schema=found.schema)
    assert table.num_rows == 79
    assert pc.sum(pc.list_value_length(table["bold"])).as_py() == 79 * 10
    assert found.counts["bold"] == (790, 79)
    assert found.counts["dwi"] == (158, 79)


def test_description(tree: Path) -> None:
    found = scan_bids(tree)
    assert (found.description["Name"], found.description["License"]) == ("Synthetic scans", "CC0")
    text = found.summary()
    assert "3 subjects, 5 rows (one per session)" in text
    assert "  bold: 35 in 5 rows" in text
    assert "derivatives not asked for: fmriprep, lesions" in text


@pytest.mark.parametrize(
    ("pattern", "matches", "misses"),
    [
        ("*.log", ["a.log", "deep/a.log"], ["a.logs"]),
        ("/root.txt", ["root.txt"], ["deep/root.txt"]),
        ("extra/", ["extra/a", "deep/extra/b"], ["extra"]),
        ("sub-*/extra", ["sub-1/extra", "sub-1/extra/a"], ["deep/sub-1/extra"]),
        ("**/tmp/*.nii", ["tmp/a.nii", "a/b/tmp/c.nii"], ["tmp/a/b.nii"]),
        ("code/**", ["code/a", "code/a/b"], ["codes/a"]),
        ("run[!1].txt", ["run2.txt"], ["run1.txt"]),
        ("a\\*b", ["a*b"], ["aXb"]),
        ("# note", [], ["# note"]),
    ],
)
def test_bidsignore(pattern: str, matches: list[str], misses: list[str]) -> None:
    ignore = Ignore(pattern + "\n\n")
    assert all(map(ignore, matches))
    assert not any(map(ignore, misses))
    assert not any(map(Ignore(f"{pattern}\n!*\n"), matches))


def test_names() -> None:
    odd = parse("sub-01_res-1.5mm_T1w.nii.gz")
    assert odd is not None
    assert (odd.suffix, odd.ending, odd.entities["res"]) == ("T1w", ".nii.gz", "1.5mm")
    assert parse("dataset_description.json") is None
    assert parse("README") is not None
    assert companion("sub-1/dwi/sub-1_dir-AP_dwi.nii", "bvec") == "sub-1/dwi/sub-1_dir-AP_dwi.bvec"

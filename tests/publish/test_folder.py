"""Publishing to a folder: the layout of the Hub, all of it visible at once, nothing of anybody else's touched."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from command import until
from forks import Forks
from hubs import digests, digests_of_paths, scan_table, undecoded
from penstock.errors import DestinationConflict, SourceChanged, UsageError
from penstock.publish.card import read_card, visible_files
from penstock.publish.folder import FolderPlace
from penstock.receipt import Receipt

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def scans(folder: Path, rows: int = 4, *, size: int = 2_000) -> Path:
    return scan_table(folder, rows, size=size)


def push(table: Path, to: str | Path, **given: Any) -> Receipt:
    return ps.push(ps.read_files(table, media=["scan"]), to, **{"max_shard_size": "5kB", **given})


def files(folder: Path) -> dict[str, str]:
    """Every file there is, hidden ones included, by digest."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def seen(folder: Path) -> dict[str, str]:
    """What `load_dataset` of the folder would see."""
    there = {path: digest for path, digest in files(folder).items() if not path.startswith(".penstock/")}
    text = (folder / "README.md").read_text() if (folder / "README.md").exists() else None
    return {path: there[path] for path in visible_files(read_card(text), sorted(there)) if path.endswith(".parquet")}


def rows_of(table: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    return [{"id": row["id"], "scan": digests_of_paths(table.parent / row["scan"])} for row in rows]


def loaded(folder: Path, cache: Path, **given: Any) -> Any:
    import datasets

    found = datasets.load_dataset(str(folder), cache_dir=str(cache), **given)
    return {split: [digests(row) for row in undecoded(rows)] for split, rows in found.items()}


# -- one push ---------------------------------------------------------------------------------------------------------


def test_what_is_published_is_loaded_verified_and_exported(tmp_path: Path, the_forks: Forks) -> None:
    table, to = scans(tmp_path / "d"), tmp_path / "out"
    receipt = push(table, to)
    assert loaded(to, tmp_path / "cache") == {"train": rows_of(table)}
    token = receipt.shards[0]["path"].split("/")[1]
    assert sorted(files(to)) == [
        ".penstock/default/train.json",
        "README.md",
        f"data/{token}/00000-of-00002.parquet",
        f"data/{token}/00001-of-00002.parquet",
    ]
    assert str(tmp_path) not in (to / "README.md").read_text() + (to / ".penstock/default/train.json").read_text()

    def said(*words: str | Path) -> tuple[int, str]:
        ran = the_forks.start(*words, env={}, streams=tmp_path / f"said-{next(_numbers)}").ended()
        return ran.returncode, ran.stdout + ran.stderr

    assert said("verify", to)[0] == 0
    assert said("export", to, tmp_path / "back")[0] == 0
    back = {path.name: path.read_bytes() for path in (tmp_path / "back").rglob("*.nii.gz")}
    assert back == {path.name: path.read_bytes() for path in (tmp_path / "d" / "scans").iterdir()}
    shard = to / receipt.shards[0]["path"]
    data = bytearray(shard.read_bytes())
    data[200] ^= 1
    shard.write_bytes(data)
    assert said("verify", to)[0] == 1


def test_a_folder_holds_what_the_hub_would(tmp_path: Path, at_hub: Any) -> None:
    table = scans(tmp_path / "d")
    push(table, at_hub.repo)
    to = tmp_path / at_hub.repo.partition("/")[2]
    push(table, to)
    there, here = at_hub.hub.files(at_hub.repo), files(to)
    assert {path for path in there if path != ".gitattributes"} == set(here)
    assert all(here[path] == there[path] for path in here if path != "README.md")  # names the dataset


def test_the_same_push_again_does_nothing(tmp_path: Path) -> None:
    table, to = scans(tmp_path / "d"), tmp_path / "out"
    push(table, to)
    first = files(to)
    assert push(table, to).already_done
    assert push(table, f"file://{to}").already_done
    (to / next(path for path in first if path.endswith(".parquet"))).unlink()
    assert not push(table, to).already_done
    assert files(to) == first


def test_a_replaced_split_goes_and_everything_else_stays(tmp_path: Path) -> None:
    to = tmp_path / "out"
    (to / "data").mkdir(parents=True)
    (to / "LICENSE").write_text("do as you like\n")
    (to / "data" / "notes.txt").write_text("by hand\n")
    (to / "README.md").write_text("---\nlicense: mit  # really\n---\n# Tides\n")
    a, b, c = (scans(tmp_path / name) for name in "abc")
    push(a, to)
    push(b, to, split="test")
    push(c, to)
    assert loaded(to, tmp_path / "cache") == {"train": rows_of(c), "test": rows_of(b)}
    assert len(list(to.glob("data/*/*.parquet"))) == 4
    assert len(list(to.glob("data/*"))) == 3
    assert (to / "LICENSE").read_text() == "do as you like\n"
    assert (to / "data" / "notes.txt").read_text() == "by hand\n"
    text = (to / "README.md").read_text()
    assert "license: mit  # really\n" in text
    assert text.endswith("# Tides\n")


def test_data_that_no_receipt_lists_is_left_alone(tmp_path: Path) -> None:
    """It was a split by its name; its files stay, and the card names the new ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, to = scans(tmp_path / "d"), tmp_path / "out"
    (to / "data").mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), to / "data" / "train-00000-of-00001.parquet")
    before = files(to)
    push(table, to)
    assert loaded(to, tmp_path / "cache") == {"train": rows_of(table)}
    assert before.items() <= files(to).items()


def test_another_config_and_several_splits_lie_beside_each_other(tmp_path: Path) -> None:
    to = tmp_path / "out"
    a, b = scans(tmp_path / "a"), scans(tmp_path / "b")
    both = {name: ps.read_files(table, media=["scan"]) for name, table in (("train", a), ("test", b))}
    ps.push(both, to, config_name="raw")
    push(a, to)
    push(b, to, config_name="other", split="validation")
    assert loaded(to, tmp_path / "cache", name="raw") == {"train": rows_of(a), "test": rows_of(b)}
    assert loaded(to, tmp_path / "cache", name="default") == {"train": rows_of(a)}
    assert loaded(to, tmp_path / "cache", name="other") == {"validation": rows_of(b)}
    assert not (to / ".penstock" / "work").exists()


def test_a_second_default_config_is_refused_before_it_shows(tmp_path: Path) -> None:
    a, to = scans(tmp_path / "a"), tmp_path / "out"
    push(a, to, config_name="raw", set_default=True)
    before = files(to)
    with pytest.raises(UsageError, match="config 'raw' is the default, and one named 'default' would be a second"):
        push(a, to)
    assert before.items() <= files(to).items()
    assert loaded(to, tmp_path / "cache") == {"train": rows_of(a)}


def test_files_that_go_beside_clash_only_with_others_own(tmp_path: Path) -> None:
    tree, to = tmp_path / "tree", tmp_path / "out"
    (tree / "sub-01" / "anat").mkdir(parents=True)
    (tree / "dataset_description.json").write_text('{"Name": "Tides", "BIDSVersion": "1.9.0"}')
    (tree / "README").write_text("")
    (tree / "CHANGES").write_text("")  # as the one above: two files of one content
    (tree / "sub-01" / "anat" / "sub-01_T1w.nii.gz").write_bytes(os.urandom(2_000))
    (to / "bids").mkdir(parents=True)
    (to / "bids" / "README").write_text("somebody's own\n")
    with pytest.raises(DestinationConflict, match="another bids/README is there, and the dataset brings its own"):
        ps.push(ps.read_bids(tree), to)
    assert [path for path in files(to) if "work" not in path] == ["bids/README"]
    (to / "bids" / "README").unlink()
    ps.push(ps.read_bids(tree), to)
    assert {"bids/README", "bids/CHANGES", "bids/dataset_description.json"} <= set(files(to))
    (tree / "README").write_text("now with a text\n")
    ps.push(ps.read_bids(tree), to)
    assert (to / "bids" / "README").read_text() == "now with a text\n"


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """As good as a kill: nothing that was written down is taken back."""


@pytest.mark.parametrize("fresh", [True, False], ids=["a new folder", "a split replaced"])
def test_stopped_at_any_step_it_goes_on_and_shows_one_state_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    old, new = scans(tmp_path / "old"), scans(tmp_path / "new")
    reference = tmp_path / "reference" / "out"
    if not fresh:
        push(old, reference)
    before = seen(reference) if not fresh else {}
    push(new, reference)
    left = [0]

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def stopping(*given: Any, **words: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return step(*given, **words)

        return stopping

    monkeypatch.setattr("penstock.publish.folder.write_whole", counted(ps.files.write_whole))
    monkeypatch.setattr("penstock.publish.folder.Writing", counted(ps.files.Writing))
    monkeypatch.setattr("penstock.publish.folder.shutil.rmtree", counted(__import__("shutil").rmtree))
    for name in ("replace", "unlink", "rmdir"):
        monkeypatch.setattr(f"penstock.publish.folder.Path.{name}", counted(getattr(Path, name)))
    for steps in itertools.count():
        to = tmp_path / f"after-{steps}" / "out"
        left[0] = 1_000_000
        if not fresh:
            push(old, to)
        left[0] = steps
        stopped = False
        try:
            push(new, to)
        except Crash:
            stopped = True
        left[0] = 1_000_000
        assert (seen(to) if to.exists() else {}) in (before, seen(reference))
        push(new, to)
        assert files(to) == files(reference), steps
        if not stopped:
            break
    assert steps > 8


def test_killed_at_random_moments_it_ends_as_if_it_never_was(
    tmp_path: Path, the_forks: Forks, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = scans(tmp_path / "d", 40, size=400_000)
    push(table, tmp_path / "reference" / "out", max_shard_size="1MB")
    whole = files(tmp_path / "reference" / "out")
    to, killed, rng = tmp_path / "out", 0, random.Random(5)
    command = ("push", table, to, "--media", "scan", "--max-shard-size", "1MB")
    while True:
        run = the_forks.start(
            *command, env={"PENSTOCK_STATE": str(tmp_path / "other")}, streams=tmp_path / f"said-{next(_numbers)}"
        )
        laid = len(list(to.glob(".penstock/work/*/*")))
        until(lambda: run.has_ended() or len(list(to.glob(".penstock/work/*/*"))) > laid, why="work")  # noqa: B023
        if not run.has_ended(timeout=rng.random() * 0.15):
            run.signal(signal.SIGKILL)
            killed += 1
        if run.ended().returncode == 0:
            break
        assert seen(to) in ({}, {path: digest for path, digest in whole.items() if path.endswith(".parquet")})
        assert killed < 100
    assert killed >= 1  # how often a run comes far enough is the machine's affair
    assert files(to) == whole


def test_a_file_that_changed_behind_its_date_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, to = scans(tmp_path / "d", 1), tmp_path / "out"
    real = FolderPlace.send

    def changed(self: FolderPlace, *given: Any) -> str:
        for scan in (tmp_path / "d" / "scans").iterdir():
            about = scan.stat()
            scan.write_bytes(b"\1" * about.st_size)
            os.utime(scan, ns=(about.st_atime_ns, about.st_mtime_ns))
        return real(self, *given)

    monkeypatch.setattr(FolderPlace, "send", changed)
    with pytest.raises(SourceChanged, match="a source of it is not what was hashed before; put it back"):
        push(table, to)
    assert seen(to) == {}


def test_starting_over_takes_away_what_was_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, to = scans(tmp_path / "a"), scans(tmp_path / "b"), tmp_path / "out"

    def stop(self: FolderPlace, *given: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(FolderPlace, "publish", stop)
        push(a, to)
    assert len(list(to.glob(".penstock/work/*/*"))) == 2
    with pytest.raises(DestinationConflict, match="an unfinished run of another plan"):
        push(b, to)
    push(b, to, restart=True)
    assert loaded(to, tmp_path / "cache") == {"train": rows_of(b)}
    assert not (to / ".penstock" / "work").exists()


# -- said before any work ---------------------------------------------------------------------------------------------


def test_destinations_that_cannot_be(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = scans(tmp_path / "d")
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationConflict, match="file: is a file; name a folder"):
        push(table, tmp_path / "file")
    with pytest.raises(UsageError, match="names another machine, elsewhere; name it file:///A/PATH"):
        push(table, "file://elsewhere/data")
    with pytest.raises(UsageError, match="create_pr means something only on the Hub"):
        push(table, "./out", create_pr=True)
    parquet = tmp_path / "p"
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet.mkdir()
    pq.write_table(pa.table({"a": [1]}), parquet / "a.parquet")
    with pytest.raises(DestinationConflict, match=r"the source .*a\.parquet lies inside the destination"):
        ps.push(ps.read(parquet), parquet)
    with pytest.raises(DestinationConflict, match="lies inside the source"):
        ps.push(ps.read(parquet), parquet / "out")
    assert not list(state.glob("push/*"))


def test_folders_are_told_from_repositories_by_how_they_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.publish.api import place_of
    from penstock.publish.hub import HubPlace

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for words, folder in (
        ("./org/name", tmp_path / "org" / "name"),
        ("../name", tmp_path.parent / "name"),
        (".", tmp_path),
        ("~/name", tmp_path / "home" / "name"),
        (Path("org/name"), tmp_path / "org" / "name"),
        ("file:///a%20b/c", Path("/a b/c")),
    ):
        place = place_of(words)
        assert isinstance(place, FolderPlace)
        assert place.folder == folder
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert isinstance(place_of("org/name"), HubPlace)


def test_the_plan_says_where_it_goes_and_leaves_nothing(tmp_path: Path, the_forks: Forks) -> None:
    table, to = scans(tmp_path / "d"), tmp_path / "out"
    words = ("push", table, to, "--media", "scan", "--dry-run")
    said = the_forks.start(*words, env={}, streams=tmp_path / "said").ended()
    assert said.returncode == 0, said.stderr
    assert f"to       {to} (will be created)\n" in said.stdout
    assert "visible  at once, with the card; the receipt comes last\n" in said.stdout
    assert not to.exists()

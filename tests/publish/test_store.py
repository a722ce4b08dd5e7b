"""Publishing to an S3-style store: nothing visible before everything is there, the receipt last, nothing sent twice."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import penstock as ps
from command import until
from forks import Forked, Forks
from hubs import digests, digests_of_paths, make_scans, make_table
from limits import require_kernel_limits, run_limited
from penstock.errors import DestinationConflict, NotAllowed, NotFound, RemoteFailed, SourceChanged, UsageError
from penstock.publish.store import PART, part_size
from penstock.receipt import Receipt
from penstock.testing import Faults, LoopbackS3, Rule
from penstock.testing.s3 import S3Process

BUCKET = "sets"
SMALL = 1 << 20  # bytes of a part within this process: what is tested does not hang on their size
PARTS_OF_A_SHARD = 2
_numbers = itertools.count()


@dataclass
class Shelf:
    """A user before a store: a prefix of their own, files to push, a state folder."""

    s3: S3Process
    forks: Forks
    folder: Path
    prefix: str

    @property
    def to(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    def env(self) -> dict[str, str]:
        state = str(self.folder / "state")
        return {**self.s3.env(), "PENSTOCK_STATE": state, "PENSTOCK_RETRY_SECONDS": "0.001"}

    def table(self, rows: int = 3, *, size: int = SMALL + 1000, name: str = "table") -> Path:
        """A scan a row; a shard of one of them is two parts."""
        scans = make_scans(self.folder / name, rows, size=size)
        return make_table(self.folder, {"id": list(range(rows)), "scan": scans}, name=f"{name}.jsonl")

    def push(self, table: Path, **given: Any) -> Receipt:
        return ps.push(ps.read_files(table, media=["scan"]), self.to, **{"max_shard_size": SMALL, **given})

    def start(self, table: Path, *words: str) -> Forked:
        streams = self.folder / f"said-{next(_numbers)}"
        command: tuple[str | Path, ...] = ("push", table, self.to, "--media", "scan", "--max-shard-size", "9MB", *words)
        return self.forks.start(*command, env=dict(self.env()), streams=streams)

    def objects(self) -> dict[str, str]:
        """What is visible: path -> SHA-256."""
        found = self.s3.objects(BUCKET)
        under = self.prefix + "/"
        return {key.removeprefix(under): one["sha256"] for key, one in found.items() if key.startswith(under)}

    def uploads(self) -> list[dict[str, Any]]:
        return [one for one in self.s3.uploads(BUCKET) if one["key"].startswith(self.prefix + "/")]

    def receipt(self, split: str = "train") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.read(f".penstock/default/{split}.json"))
        return found

    def read(self, path: str) -> bytes:
        got: bytes = client().get_object(Bucket=BUCKET, Key=f"{self.prefix}/{path}")["Body"].read()
        return got

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """What a reader who goes by the receipt finds, files by digest."""
        rows: list[dict[str, Any]] = []
        for shard in self.receipt(split)["shards"]:
            data = self.read(shard["path"])
            assert (len(data), sha256(data).hexdigest()) == (shard["bytes"], shard["sha256"])
            rows += pq.read_table(io.BytesIO(data)).to_pylist()
        return [digests(row) for row in rows]

    def asked(self, pattern: str = "") -> list[str]:
        """Requests that went well, in the order in which they were answered."""
        log = [one for one in self.s3.log() if one["status"] // 100 == 2 and f"/{self.prefix}/" in one["path"]]
        lines = (f"{one['method']} {one['path']}" for one in log)
        return [line for line in lines if re.search(pattern, line)]

    def parts(self) -> Counter[str]:
        """How often each part came to its end."""
        return Counter(self.asked(r"^PUT .*partNumber="))

    def journal(self, kind: str) -> list[dict[str, Any]]:
        found = list((self.folder / "state").glob("push/*/journal.jsonl"))
        lines = found[0].read_bytes().split(b"\n")[1:-1] if found else []
        records = [json.loads(line.partition(b" ")[2]) for line in lines]
        return [record for record in records if record["key"].startswith(kind)]


def expected(table: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    return [{"id": row["id"], "scan": digests_of_paths(table.parent / row["scan"])} for row in rows]


def client() -> Any:
    import boto3

    return boto3.client("s3")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Process]:
    with LoopbackS3.start_process(tmp_path_factory.mktemp("s3"), min_part=SMALL) as server:
        yield server


@pytest.fixture
def shelf(s3: S3Process, the_forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    s3.set_faults()
    s3.clear_log()
    made = Shelf(s3, the_forks, tmp_path, f"lab/set-{next(_numbers)}")
    for name, value in made.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("penstock.publish.store.PART", SMALL)
    if BUCKET not in s3.state()["buckets"]:
        client().create_bucket(Bucket=BUCKET)
    return made


# -- one push ---------------------------------------------------------------------------------------------------------


def test_everything_is_there_before_anything_is_visible_and_the_receipt_comes_last(shelf: Shelf) -> None:
    table = shelf.table()
    receipt = shelf.push(table)
    assert shelf.rows() == expected(table)
    assert shelf.uploads() == []
    assert receipt.published is not None
    assert receipt.published["to"] == shelf.to
    shards = [shard["path"] for shard in receipt.shards]
    assert shards == [f"data/train-{at:05d}-{shelf.objects()[path][:12]}.parquet" for at, path in enumerate(shards)]
    assert set(shelf.objects()) == {*shards, ".penstock/default/train.json"}
    steps = [
        {"PUT": "part", "POST": "complete"}[line[: line.index(" ")]] if "uploadId" in line else "receipt"
        for line in shelf.asked(r"^(PUT|POST) .*(uploadId=|train\.json)")
    ]
    assert steps == ["part"] * 3 * PARTS_OF_A_SHARD + ["complete"] * 3 + ["receipt"]
    assert shelf.asked("^DELETE") == shelf.asked(r"^DELETE .*/\.penstock/probe\?uploadId=")


def test_the_same_push_again_sends_nothing_even_where_its_state_is_lost(shelf: Shelf) -> None:
    table = shelf.table()
    shelf.push(table)
    first = shelf.objects()
    shelf.s3.clear_log()
    assert shelf.push(table).already_done
    for path in (shelf.folder / "state" / "push").glob("*/receipt.json"):
        path.unlink()
    assert not shelf.push(table).already_done
    assert shelf.asked("^PUT") == []
    assert shelf.objects() == first


def test_a_replaced_split_goes_once_the_new_one_is_there_and_the_others_stay(shelf: Shelf) -> None:
    old, new = shelf.table(), shelf.table(2, name="new")
    shelf.push(old)
    shelf.push(old, split="test")
    before = shelf.objects()
    shelf.s3.clear_log()
    shelf.push(new)
    assert shelf.rows() == expected(new)
    assert shelf.rows("test") == expected(old)
    kept = {path for path in before if "test" in path}
    assert set(shelf.objects()) == kept | {shard["path"] for shard in shelf.receipt()["shards"]} | {
        ".penstock/default/train.json"
    }
    order = [line.partition("?")[0] for line in shelf.asked(r"^DELETE .*/data/|^PUT .*train\.json")]
    assert order[0].startswith("PUT")
    assert len(order) == 4


def test_rows_that_are_made_and_files_that_go_beside_are_published_the_same_way(shelf: Shelf) -> None:
    tree = shelf.folder / "tree"
    (tree / "sub-01" / "anat").mkdir(parents=True)
    (tree / "dataset_description.json").write_text('{"Name": "Tides", "BIDSVersion": "1.9.0"}')
    (tree / "README").write_text("")  # nothing in it, and it goes along
    (tree / "sub-01" / "anat" / "sub-01_T1w.nii.gz").write_bytes(os.urandom(2_000))
    ps.push(ps.read_bids(tree), shelf.to)
    found = shelf.objects()
    assert found["bids/README"] == sha256(b"").hexdigest()
    assert {"bids/README", "bids/dataset_description.json"} <= {one["path"] for one in shelf.receipt()["beside"]}
    dataset = ps.read_files(shelf.table(4, size=1_000), media=["scan"])
    ps.push(dataset.filter(pc.field("id") > 1), shelf.to, split="test")
    assert [row["id"] for row in shelf.rows("test")] == [2, 3]
    # What goes beside stays for as long as the receipt of any split lists it.
    ps.push(ps.read_bids(tree), shelf.to, config_name="other")
    ps.push(dataset, shelf.to)
    assert {path for path in shelf.objects() if path.startswith("bids/")} == {path for path in found if "bids/" in path}
    ps.push(dataset, shelf.to, config_name="other")
    assert not any(path.startswith("bids/") for path in shelf.objects())


def test_what_is_published_is_verified_from_anywhere(shelf: Shelf) -> None:
    receipt = shelf.push(shelf.table(size=3_000), max_shard_size=4_000)
    found = ps.verify(shelf.to)
    assert (found.ok, found.files, found.rows, found.read < 40_000) == (True, 3, 3, True)
    assert ps.verify(shelf.to, full=True).read > sum(shard["bytes"] for shard in receipt.shards)
    first, second, third = (f"{shelf.prefix}/{shard['path']}" for shard in receipt.shards)
    data = bytearray(client().get_object(Bucket=BUCKET, Key=second)["Body"].read())
    data[100] ^= 1
    client().put_object(Bucket=BUCKET, Key=second, Body=bytes(data))
    client().put_object(Bucket=BUCKET, Key=first.replace("train-00000-", "train-00003-"), Body=b"")
    client().put_object(Bucket=BUCKET, Key=f"{shelf.prefix}/data/notes.txt", Body=b"by hand")
    client().delete_object(Bucket=BUCKET, Key=third)
    problems = [(one.problem, f"{shelf.prefix}/{one.path}") for one in ps.verify(shelf.to).problems]
    assert problems == [
        ("missing", third),
        ("different", second),
        ("extra", first.replace("train-00000-", "train-00003-")),
    ]
    with pytest.raises(UsageError, match="a store has no revisions"):
        ps.verify(shelf.to, revision="main")


def test_the_plan_says_where_it_goes_and_when_it_shows(shelf: Shelf) -> None:
    table = shelf.table(size=1_000)
    said = shelf.start(table, "--dry-run").ended()
    assert said.returncode == 0, said.stderr
    assert f"to       {shelf.to} at {shelf.s3.url} (the bucket exists, and may be written to)" in said.stdout
    assert "visible  at once for who goes by the receipt, which is put last" in said.stdout
    assert "commits" not in said.stdout
    assert shelf.objects() == {}
    assert shelf.uploads() == []


def test_parts_are_few_enough_for_the_store_and_small_enough_to_hold() -> None:
    assert PART >= 5 << 20  # S3's least
    for size in (0, 1, PART, 500_000_000, 80 << 30, 200 << 30, 5 << 40):
        part = part_size(size)
        assert part >= PART
        assert part % (1 << 20) == 0
        assert -(-size // part) <= 10_000
    assert part_size(500_000_000) == PART


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_errors_resets_and_lost_answers_are_met_with_patience(shelf: Shelf) -> None:
    rules = (
        Rule(r"PUT .*partNumber=1", "reset", after_bytes=3 << 20, times=2),
        Rule(r"PUT .*partNumber=2", "lose_answer"),
        Rule(r"POST .*\?uploads", "status:503", times=2),
        Rule(r"POST .*uploadId=", "lose_answer", times=2),
        Rule(r"PUT .*train\.json", "lose_answer"),
    )
    shelf.s3.set_faults(Faults(error_rate=0.1, statuses=(500, 503, 429), seed=4, rules=rules))
    table = shelf.table()
    shelf.push(table)
    shelf.s3.set_faults()
    assert shelf.rows() == expected(table)
    # An upload whose beginning was not answered stays behind, without a part.
    assert [one["parts"] for one in shelf.uploads()] == [[]] * len(shelf.uploads())


def test_stopped_at_any_request_it_goes_on_and_nothing_is_sent_twice(shelf: Shelf) -> None:
    """Each run is allowed two requests more than the last, and then refused everything; what it did stays."""
    old = shelf.table()
    shelf.push(old)
    before = shelf.objects()
    new = shelf.table(2, name="new")
    shelf.s3.clear_log()
    stops = 0
    for stops in range(4, 100, 2):  # with fewer than four it is refused before any work
        shelf.s3.set_faults(rules=[Rule("", "status:403", times=10_000, skip=stops)])
        try:
            shelf.push(new)
        except NotAllowed as error:
            assert "run the same command again: what was sent stays" in str(error)
        else:
            break
        named = {shard["path"] for shard in json.loads(stored_receipt(shelf))["shards"]}
        assert named <= set(shelf.objects())
        assert named <= set(before) or shelf_holds(shelf, new, named)
    assert stops > 4
    shelf.s3.set_faults()
    shelf.push(new)
    assert shelf.rows() == expected(new)
    assert shelf.uploads() == []
    assert set(shelf.objects()) == {shard["path"] for shard in shelf.receipt()["shards"]} | {
        ".penstock/default/train.json"
    }
    assert set(shelf.parts().values()) == {1}
    assert len(shelf.parts()) == 2 * PARTS_OF_A_SHARD


def stored_receipt(shelf: Shelf) -> bytes:
    """Read where the store keeps it: the store itself refuses everything."""
    keys = shelf.s3.folder.glob(f"buckets/{BUCKET}/keys/*.json")
    entries = (json.loads(path.read_bytes()) for path in keys)
    data: str = next(one["data"] for one in entries if one["key"] == f"{shelf.prefix}/.penstock/default/train.json")
    return (shelf.s3.folder / "buckets" / BUCKET / "data" / data).read_bytes()


def shelf_holds(shelf: Shelf, table: Path, named: set[str]) -> bool:
    return len(named) == len(expected(table)) and named <= set(shelf.objects())


def test_killed_at_random_moments_it_ends_as_if_it_never_was(shelf: Shelf) -> None:
    table = shelf.table(4, size=PART + 1000)
    # Slow enough for every kill to meet a push under way.
    slow = [Rule(r"(PUT|POST) .*uploadId=|train\.json", "hang:0.06", times=10_000)]
    shelf.s3.set_faults(rules=slow)
    rng = random.Random(3)
    noted: set[tuple[str, int]] = set()
    for kill in range(10):
        had = len(noted)
        push = shelf.start(table)
        if kill < 5 and had < 4 * PARTS_OF_A_SHARD:
            until(lambda: len(shelf.journal("task/part/")) > had, why="one part more")  # noqa: B023
        else:
            until(lambda: len(shelf.journal("task/sent/")) == 4, why="all sent")
        assert not push.has_ended(timeout=rng.random() * 0.05)
        push.signal(signal.SIGKILL)
        assert push.has_ended(timeout=10)
        assert ".penstock/default/train.json" not in shelf.objects()
        noted |= {(record["upload"], record["number"]) for record in shelf.journal("task/part/")}
    shelf.s3.set_faults()
    shelf.push(table, max_shard_size="9MB")
    assert shelf.rows() == expected(table)
    times = Counter(
        (found[1], int(found[2]))
        for line in shelf.parts().elements()
        if (found := re.search(r"uploadId=(\w+)&partNumber=(\d+)", line))
    )
    assert {part: times[part] for part in noted} == dict.fromkeys(noted, 1)


def test_an_upload_that_the_store_has_dropped_is_sent_again(shelf: Shelf) -> None:
    table = shelf.table()
    shelf.s3.set_faults(rules=[Rule(r"POST .*uploadId=", "status:403", times=1_000)])
    with pytest.raises(NotAllowed, match=r"completing data/train-0000\d-\w{12}\.parquet was refused"):
        shelf.push(table)
    shelf.s3.set_faults()
    assert len(shelf.uploads()) == 3
    first, second, _ = shelf.uploads()
    client().abort_multipart_upload(Bucket=BUCKET, Key=first["key"], UploadId=first["id"])
    client().abort_multipart_upload(Bucket=BUCKET, Key=second["key"], UploadId=second["id"])
    shelf.s3.clear_log()
    shelf.push(table)
    assert len(shelf.parts()) == 2 * PARTS_OF_A_SHARD
    assert shelf.rows() == expected(table)
    assert shelf.uploads() == []


def test_an_upload_dropped_while_it_is_completed_is_named(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.publish.store import StorePlace

    table = shelf.table()
    real = StorePlace.publish

    def dropped(self: StorePlace, *given: Any) -> Any:
        for one in shelf.uploads()[:1]:
            client().abort_multipart_upload(Bucket=BUCKET, Key=one["key"], UploadId=one["id"])
        return real(self, *given)

    monkeypatch.setattr(StorePlace, "publish", dropped)
    with pytest.raises(RemoteFailed, match="has dropped it since it was sent; run again: it is sent anew"):
        shelf.push(table)
    monkeypatch.setattr(StorePlace, "publish", real)
    shelf.push(table)
    assert shelf.rows() == expected(table)


def test_parts_of_another_size_are_not_mixed_with_these(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    table = shelf.table(1, size=2 * SMALL + 1000)
    shelf.s3.set_faults(rules=[Rule(r"PUT .*partNumber=3", "status:403", times=1_000)])
    with pytest.raises(NotAllowed):
        shelf.push(table)
    shelf.s3.set_faults()
    monkeypatch.setattr("penstock.publish.store.PART", 2 * SMALL)
    shelf.push(table)
    assert shelf.rows() == expected(table)
    assert shelf.uploads() == []


def test_another_plan_waits_for_this_one_unless_it_is_told_to_start_over(shelf: Shelf) -> None:
    table, other = shelf.table(), shelf.table(2, name="other")
    shelf.s3.set_faults(rules=[Rule(r"PUT .*partNumber=2", "status:403", times=1_000)])
    with pytest.raises(NotAllowed):
        shelf.push(table)
    shelf.s3.set_faults()
    assert shelf.uploads() != []
    with pytest.raises(DestinationConflict, match="an unfinished run of another plan lies here"):
        shelf.push(other)
    shelf.push(other, restart=True)
    assert shelf.uploads() == []
    assert shelf.rows() == expected(other)


def test_a_file_that_changed_behind_its_date_is_not_published(shelf: Shelf) -> None:
    table = shelf.table()
    shelf.s3.set_faults(rules=[Rule(r"PUT .*partNumber=2", "status:403", times=1_000)])
    with pytest.raises(NotAllowed):
        shelf.push(table)
    shelf.s3.set_faults()
    for scan in (shelf.folder / "table").iterdir():
        about = scan.stat()
        data = scan.read_bytes()
        scan.write_bytes(b"\1" + data[1:])
        os.utime(scan, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(SourceChanged, match="a source of it is not what was hashed before; put it back"):
        shelf.push(table)
    assert shelf.objects() == {}
    assert shelf.push(table, restart=True).shards
    assert shelf.rows() == expected(table)


# -- said before any work ---------------------------------------------------------------------------------------------


def nothing_done(shelf: Shelf) -> None:
    assert not list((shelf.folder / "state").glob("push/*/journal.jsonl"))
    assert shelf.uploads() == []


def test_a_bucket_that_is_not_there(shelf: Shelf) -> None:
    with pytest.raises(NotFound, match=r"s3://nowhere/a: there is no bucket 'nowhere' at http://.*; make it"):
        ps.push(ps.read_files(shelf.table(size=100), media=["scan"]), "s3://nowhere/a")
    nothing_done(shelf)


def test_keys_that_are_not_known_or_not_there(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    table = shelf.table(size=100)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    with pytest.raises(NotAllowed, match=r"beginning an upload was refused \(InvalidAccessKeyId: .*AWS_PROFILE"):
        shelf.push(table)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(shelf.folder / "none"))
    with pytest.raises(NotAllowed, match=r"there are no credentials for it; give credentials"):
        shelf.push(table)
    nothing_done(shelf)


def test_a_right_to_look_that_is_missing(shelf: Shelf) -> None:
    shelf.s3.set_faults(rules=[Rule(r"HEAD ", "status:403")])
    with pytest.raises(NotAllowed, match=r"looking at \.penstock/probe was refused"):
        shelf.push(shelf.table(size=100))
    nothing_done(shelf)


@pytest.mark.parametrize(
    ("to", "given", "says"),
    [
        ("s3://", {}, "names no bucket; name it s3://BUCKET/PREFIX"),
        ("s3://UPPER CASE/a", {}, "is not a name S3 takes"),
        ("gs://bucket/a", {}, "is no place that can be published to"),
        ("s3://sets/a", {"revision": "main"}, "revision means something only on the Hub"),
        ("s3://sets/a", {"private": True}, "private means something only on the Hub"),
    ],
)
def test_words_that_mean_no_store(shelf: Shelf, to: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ps.push(ps.read_files(shelf.table(size=100), media=["scan"]), to, **given)
    nothing_done(shelf)


def test_boto3_is_asked_for_by_name(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match=r"needs boto3; install it: pip install 'penstock\[s3\]'"):
        shelf.push(shelf.table(size=100))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_value_larger_than_the_kernel_allows_passes_through(shelf: Shelf) -> None:
    require_kernel_limits()
    scan = shelf.folder / "large.nii.gz"
    with scan.open("wb") as f:
        for _ in range(200):
            f.write(os.urandom(1_000_000))
    table = make_table(shelf.folder, {"id": [0], "scan": [scan]})
    command = [sys.executable, "-m", "penstock.cli.main", "push", str(table), shelf.to, "--media", "scan"]
    run = run_limited([*command, "--memory", "160MB"], limit=160_000_000, timeout=60, env={**os.environ, **shelf.env()})
    assert (run.returncode, run.kernel_kills) == (0, 0), run.stderr
    assert run.anonymous < 140_000_000
    shards = shelf.receipt()["shards"]
    found = shelf.objects()
    assert [shard["sha256"] for shard in shards] == [found[shard["path"]] for shard in shards]
    assert shards[0]["bytes"] > 200_000_000

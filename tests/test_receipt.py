"""What a run leaves behind, field by field: it can be checked, published, and read by a later version of itself."""

from __future__ import annotations

import getpass
import hashlib
import json
import socket
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from command import make_parquet, read_back, receipt_of, state_of
from penstock import receipt
from penstock.receipt import Trace


def three_of_four(batch: pa.RecordBatch) -> list[bool]:
    return [number % 4 > 0 for number in batch["id"].to_pylist()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("receipt")
    make_parquet(folder / "source", rows=4_000, files=4)
    (folder / "source" / "deep").mkdir()
    (folder / "source" / "03.parquet").rename(folder / "source" / "deep" / "03.parquet")
    ps.read(folder / "source").filter(three_of_four).write(
        folder / "out", memory="400MB", max_shard_size="100kB", workers=2
    )
    return folder


def test_shards_as_they_are(written: Path) -> None:
    shards = receipt_of(written / "out")["shards"]
    assert [shard["path"] for shard in shards] == sorted(path.name for path in (written / "out").glob("part-*"))
    assert len(shards) > 1
    for at, shard in enumerate(shards):
        assert shard["path"] == f"part-{at:05d}-of-{len(shards):05d}.parquet"
        data = (written / "out" / shard["path"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert sum(shard["rows"] for shard in shards) == 3_000 == len(read_back(written / "out"))


def test_what_was_read_and_dropped(written: Path) -> None:
    found = receipt_of(written / "out")
    assert found["rows"]["read"] == 4_000
    assert found["rows"]["written"] == 3_000
    assert found["rows"]["dropped"] == {"filter": 1_000}
    names = ["00.parquet", "01.parquet", "02.parquet", "deep/03.parquet"]
    assert [one["path"] for one in found["inputs"]] == names
    for one in found["inputs"]:
        assert one["bytes"] == (written / "source" / one["path"]).stat().st_size
        assert len(one["fingerprint"]) == 32


def test_memory_disk_tasks(written: Path) -> None:
    found = receipt_of(written / "out")
    memory = found["memory"]
    assert memory["allowed"] == 400_000_000
    assert 0 < memory["reserved"] <= memory["measured"] <= memory["allowed"]
    assert memory["reserved"] < memory["projected"] <= memory["allowed"]
    assert memory["workers"] in (1, 2)
    assert max(count for _, count in memory["trace"]) == memory["measured"]
    assert found["disk"]["measured"] >= sum(shard["bytes"] for shard in found["shards"])
    assert found["disk"]["projected"] > 0
    assert found["tasks"]["run"] == found["tasks"]["planned"] > 1
    assert found["seconds"] > 0
    assert {"python", "penstock", "pyarrow"} <= set(found["versions"])


def test_nothing_of_the_machine_or_the_user(written: Path) -> None:
    """People publish receipts."""
    text = (written / "out" / ".penstock" / "receipt.json").read_text()
    assert str(written) not in text
    assert socket.gethostname() not in text or len(socket.gethostname()) < 3
    assert str(Path.home()) not in text
    assert f"/{getpass.getuser()}/" not in text


def test_plan_is_the_same_whatever_ran_it(written: Path) -> None:
    other = (
        ps.read(written / "source")
        .filter(three_of_four)
        .write(written / "other", memory="2GB", max_shard_size="100kB", workers=1)
    )
    first = receipt_of(written / "out")
    assert other.plan_key == first["plan_key"]
    assert other.plan == first["plan"]
    assert other.shards == first["shards"]


def test_only_the_receipt_stays(written: Path) -> None:
    assert state_of(written / "out") == ["receipt.json"]


def test_saved_and_loaded(written: Path, tmp_path: Path) -> None:
    found = receipt.load(written / "out" / ".penstock")
    assert found is not None
    found.save(tmp_path)
    assert receipt.load(tmp_path) == found


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 99}', '{"format": 1, "odd": true}', "\x00"])
def test_what_is_no_receipt_counts_for_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_text(text)
    assert receipt.load(tmp_path) is None
    assert receipt.load(tmp_path / "nowhere") is None


def test_trace_is_bounded_and_keeps_the_peak() -> None:
    trace = Trace()
    for at in range(100_000):
        trace.add(at / 100, 777 if at == 31_415 else at % 13)
    points = trace.as_json()
    assert len(points) <= 241
    assert max(count for _, count in points) == 777
    assert [seconds for seconds, _ in points] == sorted(seconds for seconds, _ in points)
    assert points[-1][0] > 900
    assert json.dumps(points)

"""Verifying: every kind of harm that can come to a folder or a repository is found, and nothing else is."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

import penstock as ps
from command import called, make_parquet, ok
from hubs import Desk, scan_table
from penstock.errors import NotFound, RemoteFailed, UsageError
from penstock.publish import verify as verifying
from penstock.publish.card import read_card, with_split
from penstock.publish.features import features_of
from penstock.publish.retry import Patience
from penstock.publish.verify import Verified, verify
from penstock.testing import Faults, Rule
from penstock.testing.hub import HubProcess

QUICK = Patience(attempts=4, first=0.01)


def found(verified: Verified) -> list[tuple[str, str]]:
    return [(one.problem, one.path) for one in verified.problems]


# A folder ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    make_parquet(folder / "source", rows=4_000, files=4)
    ps.read(folder / "source").write(folder / "out", memory="400MB", max_shard_size="100kB", workers=1)
    return folder / "out"


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "out")
    return tmp_path / "out"


def part(folder: Path, at: int = 1) -> Path:
    return sorted(folder.glob("part-*"))[at]


def test_a_folder_as_it_was_written(folder: Path) -> None:
    verified = verify(folder)
    shards = sorted(folder.glob("part-*"))
    assert verified.ok
    assert (verified.files, verified.rows, verified.receipts) == (len(shards), 4_000, 1)
    assert verified.bytes == sum(path.stat().st_size for path in shards)
    assert verified.samples == min(8, len(shards)) > 1
    assert verify(str(folder), sample=0).ok
    assert json.loads(json.dumps(verified.as_json()))["ok"] is True


def flip(path: Path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def make_extra(path: Path) -> None:
    shutil.copy(path, path.with_name("part-99999-of-99999.parquet"))


def make_deep_extra(path: Path) -> None:
    (path.parent / "deep").mkdir()
    shutil.copy(path, path.parent / "deep" / "x.jsonl")


@pytest.mark.parametrize(
    ("harm", "problem", "detail"),
    [
        (lambda path: path.unlink(), "missing", "bytes are promised"),
        (flip, "different", "SHA-256"),
        (cut, "different", "bytes, not"),
        (lambda path: path.write_bytes(b""), "different", "0 bytes, not"),
        (make_extra, "extra", "receipt.json does not list it"),
        (make_deep_extra, "extra", "does not list it"),
    ],
    ids=["missing", "flipped", "cut", "empty", "extra", "deep"],
)
def test_a_folder_that_came_to_harm(harm: Callable[[Path], None], problem: str, detail: str, folder: Path) -> None:
    harm(part(folder))
    verified = verify(folder)
    assert not verified.ok
    assert [one.problem for one in verified.problems] == [problem]
    assert detail in verified.problems[0].detail


def test_several_harms_are_all_named(folder: Path) -> None:
    flip(part(folder, 0))
    part(folder, 1).unlink()
    make_extra(part(folder, 1))
    assert [problem for problem, _ in found(verify(folder))] == ["missing", "different", "extra"]


def test_what_is_no_data_is_not_extra(folder: Path) -> None:
    (folder / "notes.txt").write_text("x")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.parquet").write_bytes(b"x")
    assert verify(folder).ok


def test_a_receipt_that_lies_about_rows(folder: Path) -> None:
    """Size and digest are right, and still it is not what was promised."""
    path = folder / ".penstock" / "receipt.json"
    stated = json.loads(path.read_text())
    stated["shards"][0]["rows"] += 1
    path.write_text(json.dumps(stated))
    assert found(verify(folder)) == [("different", stated["shards"][0]["path"])]
    assert "rows, not" in verify(folder).problems[0].detail


def receipted(folder: Path, data: bytes, *, rows: int = 1) -> None:
    """A folder whose one shard is these bytes, with a receipt that says so."""
    (folder / ".penstock").mkdir(parents=True)
    (folder / "part-0.parquet").write_bytes(data)
    shard = {"path": "part-0.parquet", "rows": rows, "bytes": len(data), "sha256": sha256(data).hexdigest()}
    (folder / ".penstock" / "receipt.json").write_text(json.dumps({"format": 1, "shards": [shard]}))


def test_rows_are_decoded(tmp_path: Path) -> None:
    """A shard that was damaged before it was hashed: footer and digest are right, its pages are not."""
    pq.write_table(pa.table({"a": [f"text {at}" for at in range(5_000)]}), tmp_path / "x.parquet", compression="zstd")
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[40:400] = bytes(360)
    receipted(tmp_path / "out", bytes(data), rows=5_000)
    verified = verify(tmp_path / "out")
    assert found(verified) == [("unreadable", "part-0.parquet")]
    assert "cannot be read as Parquet" in verified.problems[0].detail
    assert verify(tmp_path / "out", sample=0).ok  # which is why a sample is read


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet, but long enough", b"PAR1\xff\xff\xff\xffPAR1"])
def test_what_is_no_parquet(data: bytes, tmp_path: Path) -> None:
    receipted(tmp_path / "out", data)
    assert found(verify(tmp_path / "out")) == [("unreadable", "part-0.parquet")]


def test_heavy_columns_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "COLUMN_LIMIT", 10_000)
    pq.write_table(
        pa.table({"big": [b"x" * 50_000], "small": [1], "deep": [[{"a": 1, "b": b"y" * 20_000}]]}),
        tmp_path / "x.parquet",
        compression="none",
        use_dictionary=False,
    )
    group = pq.read_metadata(tmp_path / "x.parquet").row_group(0)
    assert verifying._light_columns(group) == ["small", "deep.list.element.a"]
    receipted(tmp_path / "out", (tmp_path / "x.parquet").read_bytes())
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "shards": []}', '{"format": 1}', "[" * 100_000])
def test_a_damaged_receipt(text: str, folder: Path) -> None:
    (folder / ".penstock" / "receipt.json").write_text(text)
    verified = verify(folder)
    assert found(verified) == [("unreadable", ".penstock/receipt.json")]
    assert "damaged" in verified.problems[0].detail


@pytest.mark.parametrize("path", ["../x.parquet", "/etc/hostname", "", 3, "a/../../x"])
def test_a_receipt_names_nothing_outside(path: object, folder: Path) -> None:
    stated = {"format": 1, "shards": [{"path": path, "rows": 1, "bytes": 1, "sha256": "0" * 64}]}
    (folder / ".penstock" / "receipt.json").write_text(json.dumps(stated))
    assert [problem for problem, _ in found(verify(folder))] == ["unreadable"]


def test_nothing_to_verify_is_a_failure(tmp_path: Path) -> None:
    verified = verify(tmp_path)
    assert (verified.ok, verified.files, found(verified)) == (False, 0, [("no receipt", ".penstock")])
    (tmp_path / ".penstock").mkdir()
    (tmp_path / ".penstock" / "receipt.json").write_text('{"format": 1, "shards": []}')
    assert not verify(tmp_path).ok


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no revisions"):
        verify(tmp_path, revision="main")
    with pytest.raises(UsageError, match="sample must be"):
        verify(tmp_path, sample=-1)
    with pytest.raises(UsageError, match="no place"):
        verify("ftp://x/y")


def test_the_command_of_a_folder(folder: Path) -> None:
    good = ok(called("verify", folder))
    assert good.stdout.startswith(f"good: {folder}: ")
    assert "4,000 rows" in good.stdout
    flip(part(folder))
    bad = called("verify", folder)
    assert bad.returncode == 1
    assert bad.stdout.splitlines()[0].startswith(f"different   {part(folder).name}: SHA-256")
    assert "NOT GOOD: 1 problem:" in bad.stdout
    as_json = called("verify", folder, "--json")
    assert (as_json.returncode, as_json.json()["problems"][0]["problem"]) == (1, "different")
    assert called("verify", folder.parent / "nowhere").returncode == 2


# A repository --------------------------------------------------------------------------------------------------------


class Repo:
    """A dataset on the loopback Hub, published by hand so that every harm can be done to it."""

    def __init__(self, hub: HubProcess, name: str, *, private: bool = False) -> None:
        self.hub, self.id = hub, f"org/{name}"
        self.api = HfApi(endpoint=hub.url, token="hf_writer")
        self.api.create_repo(self.id, repo_type="dataset", private=private)
        self.files: dict[str, bytes] = {}

    def commit(self, files: dict[str, bytes], gone: tuple[str, ...] = ()) -> None:
        # As file objects, which the client does not send through Xet.
        operations = [CommitOperationAdd(path, io.BytesIO(data)) for path, data in files.items()]
        self.api.create_commit(
            self.id,
            [*operations, *(CommitOperationDelete(path) for path in gone)],
            commit_message="x",
            repo_type="dataset",
        )
        self.files.update(files)

    def verify(self, **given: Any) -> Verified:
        return verify(self.id, **{"endpoint": self.hub.url, "token": "hf_writer", "patience": QUICK, **given})


def shard_bytes(rows: int, *, seed: int) -> bytes:
    out = pa.BufferOutputStream()
    table = pa.table({"id": range(seed, seed + rows), "data": [bytes([seed]) * 30_000 for _ in range(rows)]})
    pq.write_table(table, out, compression="none", use_dictionary=False, row_group_size=2)
    return bytes(out.getvalue())


def listed(path: str, data: bytes, rows: int | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": path, "bytes": len(data), "sha256": sha256(data).hexdigest()}
    if rows is not None:
        stretch = data[4:1_004]
        entry |= {"rows": rows, "sample": {"offset": 4, "length": 1_000, "sha256": sha256(stretch).hexdigest()}}
    return entry


def publish(repo: Repo, split: str = "train", *, shards: int = 3) -> list[str]:
    """Shards, a file beside them, a card and a receipt, as a push leaves them."""
    folder = f"data/{split}-1a2b"
    files = {f"{folder}/{at}.parquet": shard_bytes(3 + at, seed=at) for at in range(shards)}
    beside = {f"beside/{split} 100%.tsv": b"a\tb\n"}
    rows = [pq.read_metadata(pa.BufferReader(data)).num_rows for data in files.values()]
    receipt = {
        "format": 1,
        "config": "default",
        "split": split,
        "shards": [listed(path, data, count) for (path, data), count in zip(files.items(), rows, strict=True)],
        "beside": [listed(path, data) for path, data in beside.items()],
    }
    schema = pq.read_schema(pa.BufferReader(next(iter(files.values()))))
    card = with_split(
        read_card(repo.files.get("README.md", b"").decode()),
        config_name="default",
        split=split,
        data_files=f"{folder}/*.parquet",
        features=features_of(schema),
        num_examples=sum(rows),
        num_bytes=1,
        download_size=1,
    )
    texts = {"README.md": card.render(), f".penstock/default/{split}.json": json.dumps(receipt)}
    repo.commit({**files, **beside, **{path: text.encode() for path, text in texts.items()}})
    return list(files)


@pytest.fixture
def repo(the_hub: HubProcess, request: pytest.FixtureRequest) -> Repo:
    the_hub.set_faults()
    made = Repo(the_hub, f"verify-{abs(hash(request.node.name))}")
    publish(made)
    the_hub.clear_log()
    return made


def test_a_repository_as_it_was_published(repo: Repo) -> None:
    verified = repo.verify()
    assert verified.ok, verified.problems
    assert (verified.files, verified.rows, verified.samples, verified.receipts) == (4, 12, 3, 1)
    assert verified.revision == repo.hub.history(repo.id)[-1]["oid"]
    assert verified.read < verified.bytes  # digests come from the Hub
    full = repo.verify(full=True)
    assert full.ok, full.problems
    assert full.read > full.bytes
    assert repo.verify(token=None).ok  # public: no token is needed
    assert repo.verify(sample=1).samples == 1


def test_only_ranges_are_read(repo: Repo) -> None:
    repo.verify(sample=1)
    got = [one for one in repo.hub.log() if "/resolve/" in one["path"] and one["path"].endswith(".parquet")]
    assert {one["status"] for one in got} <= {206, 302}
    assert len({one["path"] for one in got}) == 1


def test_a_file_that_is_gone(repo: Repo) -> None:
    repo.commit({}, gone=("data/train-1a2b/1.parquet",))
    assert found(repo.verify()) == [("missing", "data/train-1a2b/1.parquet")]


def test_a_file_that_is_another(repo: Repo) -> None:
    data = bytearray(repo.files["data/train-1a2b/1.parquet"])
    data[50] ^= 1
    repo.commit({"data/train-1a2b/1.parquet": bytes(data), "beside/train 100%.tsv": b"c\tb\n"})
    assert found(repo.verify()) == [("different", "beside/train 100%.tsv"), ("different", "data/train-1a2b/1.parquet")]


def test_a_file_too_many(repo: Repo) -> None:
    repo.commit({"data/train-1a2b/9.parquet": b"PAR1", "data/train-1a2b/notes.txt": b"x", "other.parquet": b"x"})
    assert found(repo.verify()) == [("extra", "data/train-1a2b/9.parquet")]


def test_a_card_that_names_another_file_for_the_split(repo: Repo) -> None:
    card = repo.files["README.md"].decode().replace("data/train-1a2b/*.parquet", "oth*.parquet")
    repo.commit({"README.md": card.encode(), "other.parquet": b"x"})
    assert found(repo.verify()) == [
        ("extra", "other.parquet"),
        *(("unseen", f"data/train-1a2b/{at}.parquet") for at in range(3)),
    ]


def test_a_card_that_is_gone(repo: Repo) -> None:
    repo.commit({}, gone=("README.md",))
    assert {problem for problem, _ in found(repo.verify())} == {"unseen"}


def test_a_card_that_is_damaged(repo: Repo) -> None:
    repo.commit({"README.md": b"---\na: [1\n---\n"})
    verified = repo.verify()
    assert found(verified) == [("unreadable", "README.md")]
    assert "not valid YAML" in verified.problems[0].detail


def test_a_stretch_that_reads_back_otherwise(repo: Repo) -> None:
    """What the Hub says of a file is right, and what it gives is not: only reading it back tells."""
    receipt = json.loads(repo.files[".penstock/default/train.json"])
    receipt["shards"][1]["sample"]["sha256"] = "0" * 64
    repo.commit({".penstock/default/train.json": json.dumps(receipt).encode()})
    assert found(repo.verify()) == [("different", "data/train-1a2b/1.parquet")]
    assert "do not read back" in repo.verify().problems[0].detail
    assert repo.verify(sample=0).ok


def test_rows_that_are_fewer(repo: Repo) -> None:
    receipt = json.loads(repo.files[".penstock/default/train.json"])
    receipt["shards"][2]["rows"] = 6
    repo.commit({".penstock/default/train.json": json.dumps(receipt).encode()})
    assert found(repo.verify()) == [("different", "data/train-1a2b/2.parquet")]
    assert repo.verify().problems[0].detail == "5 rows, not 6"


def test_several_splits_and_one_without_a_receipt(repo: Repo) -> None:
    publish(repo, "test", shards=1)
    verified = repo.verify()
    assert (verified.ok, verified.receipts, verified.files) == (True, 2, 6)
    repo.commit({}, gone=(".penstock/default/test.json",))
    verified = repo.verify()
    assert (verified.ok, verified.receipts, verified.files, verified.unlisted) == (True, 1, 4, 1)


def test_an_older_revision(repo: Repo) -> None:
    before = repo.hub.history(repo.id)[-1]["oid"]
    repo.commit({}, gone=("data/train-1a2b/1.parquet",))
    assert repo.verify(revision=before).ok
    assert not repo.verify(revision="main").ok
    with pytest.raises(NotFound, match="no revision 'nowhere'"):
        repo.verify(revision="nowhere")


def test_a_repository_without_a_receipt(repo: Repo) -> None:
    repo.commit({}, gone=(".penstock/default/train.json",))
    assert found(repo.verify()) == [("no receipt", ".penstock")]


def test_no_such_repository_and_one_that_is_private(the_hub: HubProcess) -> None:
    the_hub.set_faults()
    with pytest.raises(NotFound, match=r"no such dataset repository.*token"):
        verify("org/nowhere-at-all", endpoint=the_hub.url, token="hf_writer", patience=QUICK)
    hidden = Repo(the_hub, "verify-hidden", private=True)
    publish(hidden)
    assert hidden.verify(token="hf_reader").ok
    with pytest.raises(NotFound):
        hidden.verify(token="hf_stranger")


def test_faults_are_waited_out(repo: Repo) -> None:
    """Resets and 5xx in the middle of reading: it goes on where it was."""
    repo.hub.set_faults(
        Faults(
            rules=(
                Rule(r"GET .*/resolve/.*1\.parquet", "status:503", times=2),
                Rule(r"GET .*/resolve/.*2\.parquet", "reset"),
                Rule(r"GET .*/tree/", "status:429", retry_after=0),
            )
        )
    )
    verified = repo.verify(full=True)
    assert verified.ok, verified.problems
    repo.hub.set_faults(Faults(rules=(Rule(r"GET .*/resolve/", "status:503", times=1_000),)))
    with pytest.raises(RemoteFailed, match="4 times"):
        repo.verify()


def test_the_command_of_a_repository_and_its_token(desk: Desk) -> None:
    """A real push verified by a real command, from the receipt in the repository alone."""
    table = scan_table(desk.folder / "data", 12)
    ok(desk.run("push", table, desk.repo, "--media", "scan", "--max-shard-size", "8KB"))
    good = ok(desk.run("verify", desk.repo, "--json", token=None))
    assert (good.json()["ok"], good.json()["rows"]) == (True, 12)
    assert good.json()["samples"] > 1
    assert ok(desk.run("verify", desk.repo, "--full", token=None)).stdout.startswith(f"good: {desk.repo} at ")
    shard = next(path for path in desk.files() if path.endswith(".parquet"))
    api = HfApi(endpoint=desk.hub.url, token="hf_writer")
    api.delete_file(shard, desk.repo, repo_type="dataset")
    bad = desk.run("verify", desk.repo, token="hf_writer")
    assert (bad.returncode, bad.stdout.splitlines()[0].split(":")[0]) == (1, f"missing     {shard}")
    refused = desk.run("verify", "org/nowhere-at-all", token="hf_secret_token")
    assert refused.returncode != 0
    assert "hf_secret_token" not in refused.stdout + refused.stderr

"""The loopback Hub through the real `huggingface_hub` and `datasets`: it takes what the Hub takes, in its own words."""

from __future__ import annotations

import http.client
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfFileSystem
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from penstock.testing import LoopbackHub, Rule
from penstock.testing.hub import HubControl

REPO = "org/scans"
BIG = os.urandom(300_000)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub") as started:
        yield started


class Client:
    """The real client on one dataset. It sends file objects: bytes and paths would go by Xet where it is installed."""

    def __init__(self, hub: HubControl, token: str | None = "hf_writer") -> None:
        self.api = HfApi(endpoint=hub.url, token=token or False)

    def create(self, **how: Any) -> None:
        self.api.create_repo(REPO, repo_type="dataset", **how)

    def commit(self, files: dict[str, bytes], delete: tuple[str, ...] = (), **how: Any) -> Any:
        adds = [CommitOperationAdd(path, io.BytesIO(data)) for path, data in files.items()]
        self.api.preupload_lfs_files(REPO, adds, repo_type="dataset", create_pr=how.get("create_pr"))
        gone = [CommitOperationDelete(path) for path in delete]
        return self.api.create_commit(REPO, [*adds, *gone], commit_message="a change", repo_type="dataset", **how)

    def tree(self, path: str | None = None, **how: Any) -> list[Any]:
        return list(self.api.list_repo_tree(REPO, path, repo_type="dataset", **how))


@pytest.fixture
def client(hub: LoopbackHub) -> Client:
    made = Client(hub)
    made.create()
    return made


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {path: sha256(data).hexdigest() for path, data in files.items()}


def without_attributes(files: dict[str, str]) -> dict[str, str]:
    return {path: digest for path, digest in files.items() if path != ".gitattributes"}


def puts(hub: HubControl) -> int:
    return sum(entry["method"] == "PUT" for entry in hub.log())


def test_a_repository_is_made_once_and_stays_as_it_was_made(hub: LoopbackHub) -> None:
    api = Client(hub).api
    assert str(api.create_repo(REPO, repo_type="dataset", private=True)) == f"{hub.url}/datasets/{REPO}"
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(REPO, repo_type="dataset")
    api.create_repo(REPO, repo_type="dataset", exist_ok=True, private=False)
    about = api.dataset_info(REPO)
    assert (about.private, about.id, [file.rfilename for file in about.siblings or []]) == (
        True,
        REPO,
        [".gitattributes"],
    )
    assert [commit["title"] for commit in hub.history(REPO)] == ["initial commit"]
    api.update_repo_settings(REPO, repo_type="dataset", private=False)
    assert api.dataset_info(REPO).private is False
    api.delete_repo(REPO, repo_type="dataset")
    assert (api.repo_exists(REPO, repo_type="dataset"), hub.history(REPO)) == (False, [])


def test_who_asks_is_told_who_they_are(hub: LoopbackHub) -> None:
    about = Client(hub).api.whoami()
    assert (about["name"], [(org["name"], org["roleInOrg"]) for org in about["orgs"]]) == ("writer", [("org", "write")])
    assert about["auth"]["accessToken"]["role"] == "write"
    assert Client(hub, "hf_reader").api.whoami()["auth"]["accessToken"]["role"] == "read"


@pytest.mark.parametrize("parts", [1, 3])
def test_files_are_uploaded_committed_and_read_back(tmp_path: Path, parts: int) -> None:
    files = {
        "data/a.parquet": BIG,
        "data/b.parquet": b"small",
        "README.md": b"---\nlicense: mit\n---\nHello",
        "empty": b"",
    }
    over = 1 << 30 if parts == 1 else 100_000
    with LoopbackHub(tmp_path / "hub", multipart_over=over, part_size=100_000) as hub:
        client = Client(hub)
        client.create()
        client.commit(files)
        assert puts(hub) == parts + 1
        assert without_attributes(hub.files(REPO)) == digests(files)
        hub.clear_log()
        client.commit({"data/again.parquet": BIG})
        assert puts(hub) == 0, "the store has it already"
        for path, data in files.items():
            got = client.api.hf_hub_download(REPO, path, repo_type="dataset", cache_dir=tmp_path / "cache")
            assert Path(got).read_bytes() == data
        assert list((hub.folder / "uploads").iterdir()) == []


def test_a_part_that_is_missing_or_wrong_is_noticed(tmp_path: Path) -> None:
    with LoopbackHub(tmp_path, multipart_over=100_000, part_size=100_000) as hub:
        client = Client(hub)
        client.create()
        oid = sha256(BIG).hexdigest()
        body = {"operation": "upload", "transfers": ["multipart"], "objects": [{"oid": oid, "size": len(BIG)}]}
        _, told = raw(hub, "POST", f"/datasets/{REPO}.git/info/lfs/objects/batch", body)
        link = told["objects"][0]["actions"]["upload"]["href"].removeprefix(hub.url)
        assert list(told["objects"][0]["actions"]["upload"]["header"]) == ["chunk_size", "00001", "00002", "00003"]
        tags = []
        for number in (1, 2):
            status, tag = raw(hub, "PUT", f"{link}/{number}?chunk=100000", BIG[:100_000])
            assert status == 200
            tags.append({"partNumber": number, "etag": tag})
        status, said = raw(hub, "POST", link, {"oid": oid, "parts": [*tags, {"partNumber": 3, "etag": "x"}]})
        assert (status, said["error"]) == (400, "part 3 was not uploaded, or not with this ETag")
        status, said = raw(hub, "POST", link, {"oid": oid, "parts": tags})
        assert (status, said["error"].startswith("the parts' SHA-256 is ")) == (400, True)
        status, said = raw(hub, "PUT", f"{link}/1?chunk=100000", BIG)
        assert (status, said["error"]) == (400, "part 1 is longer than 100,000 bytes")


def raw(hub: HubControl, method: str, path: str, body: Any) -> tuple[int, Any]:
    """A request no well-meaning client makes. What it is answered, or the answer's tag when there is nothing."""
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=10)
    data = body if isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, data, {"Authorization": "Bearer hf_writer"})
    answer = connection.getresponse()
    text = answer.read()
    return answer.status, json.loads(text) if text else answer.headers["ETag"]


def test_a_commit_on_a_stale_parent_is_refused(hub: LoopbackHub, client: Client) -> None:
    first = client.commit({"a.txt": b"a"})
    client.commit({"b.txt": b"b"}, parent_commit=first.oid)
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as caught:
        client.commit({"c.txt": b"c"}, parent_commit=first.oid)
    assert caught.value.response.status_code == 412
    assert sorted(without_attributes(hub.files(REPO))) == ["a.txt", "b.txt"]


def test_a_commit_that_points_at_nothing_is_refused_by_name(hub: LoopbackHub, client: Client) -> None:
    nothing = sha256(b"nothing").hexdigest()
    pointer = {"key": "lfsFile", "value": {"path": "data/x.parquet", "algo": "sha256", "oid": nothing, "size": 7}}
    lines = [{"key": "header", "value": {"summary": "s"}}, pointer]
    status, said = raw(hub, "POST", f"/api/datasets/{REPO}/commit/main", "\n".join(map(json.dumps, lines)).encode())
    assert status == 400
    assert f"Offending file: data/x.parquet ({nothing})" in said["error"]
    for path in ("../x", "/x", "a//b", ".git/config"):
        lines = [{"key": "header", "value": {"summary": "s"}}, {"key": "deletedFile", "value": {"path": path}}]
        assert (
            raw(hub, "POST", f"/api/datasets/{REPO}/commit/main", "\n".join(map(json.dumps, lines)).encode())[0] == 400
        )
    assert len(hub.history(REPO)) == 1


def test_files_and_folders_are_deleted(hub: LoopbackHub, client: Client) -> None:
    client.commit({"data/a.parquet": b"a", "data/old/b.parquet": b"b", "data/old/c.txt": b"c", "d.txt": b"d"})
    client.commit({"e.txt": b"e"}, delete=("data/old/", "d.txt"))
    assert sorted(without_attributes(hub.files(REPO))) == ["data/a.parquet", "e.txt"]
    for missing in ("d.txt", "data/old/"):
        with pytest.raises(EntryNotFoundError):
            client.commit({}, delete=(missing,))
    assert [len(commit["files"]) for commit in hub.history(REPO)] == [1, 5, 3]


def test_a_tree_is_listed_page_by_page(tmp_path: Path) -> None:
    files = {f"data/{at}/{at:03d}.txt": b"%d" % at for at in range(7)} | {"data/big.parquet": BIG}
    with LoopbackHub(tmp_path, page=4) as hub:
        client = Client(hub)
        client.create()
        client.commit(files)
        client.commit({"last.txt": b"x"})
        hub.clear_log()
        listed = {item.path: item for item in client.tree(recursive=True, expand=True)}
        assert len(hub.log()) == 5, "18 entries in pages of 4"
        folders = {"data", *(f"data/{at}" for at in range(7))}
        assert set(listed) == {*files, *folders, ".gitattributes", "last.txt"}
        big = listed["data/big.parquet"]
        assert (big.size, big.lfs.size, big.lfs.sha256) == (len(BIG), len(BIG), sha256(BIG).hexdigest())
        commits = hub.history(REPO)
        assert big.last_commit.oid == listed["data"].last_commit.oid == commits[1]["oid"]
        assert listed["last.txt"].last_commit.oid == commits[2]["oid"]
        assert [item.path for item in client.tree()] == [".gitattributes", "data", "last.txt"]
        assert [item.path for item in client.tree("data/3")] == ["data/3/003.txt"]
        with pytest.raises(EntryNotFoundError):
            client.tree("nowhere")
        found = client.api.get_paths_info(REPO, ["data", "data/3/003.txt", "nowhere"], repo_type="dataset")
        assert [(type(item).__name__, item.path) for item in found] == [
            ("RepoFolder", "data"), ("RepoFile", "data/3/003.txt"),
        ]  # fmt: skip


def test_branches_tags_and_pull_requests(hub: LoopbackHub, client: Client) -> None:
    api = client.api
    client.commit({"a.txt": b"a"})
    api.create_branch(REPO, branch="new/look", repo_type="dataset")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(REPO, branch="new/look", repo_type="dataset")
    client.commit({"b.txt": b"b"}, revision="new/look")
    api.create_tag(REPO, tag="v1", revision="new/look", repo_type="dataset")
    pull = Client(hub, "hf_stranger").commit({"c.parquet": BIG}, create_pr=True)
    assert pull.pr_revision == "refs/pr/1"
    Client(hub).commit({"d.txt": b"d"}, revision="refs/pr/1")
    refs = api.list_repo_refs(REPO, repo_type="dataset", include_pull_requests=True)
    assert [ref.name for ref in refs.branches] == ["main", "new/look"]
    assert [ref.name for ref in refs.tags] == ["v1"]
    assert [ref.ref for ref in refs.pull_requests or []] == ["refs/pr/1"]
    names = {
        ref: sorted(without_attributes(hub.files(REPO, revision=ref))) for ref in ("main", "new/look", "refs/pr/1")
    }
    assert names == {"main": ["a.txt"], "new/look": ["a.txt", "b.txt"], "refs/pr/1": ["a.txt", "c.parquet", "d.txt"]}
    assert api.dataset_info(REPO, revision="v1").sha == hub.history(REPO, revision="new/look")[-1]["oid"]
    history = api.list_repo_commits(REPO, repo_type="dataset", revision="refs/pr/1")
    assert [(commit.title, commit.authors) for commit in history] == [
        ("a change", ["writer"]), ("a change", ["stranger"]), ("a change", ["writer"]), ("initial commit", ["writer"]),
    ]  # fmt: skip
    with pytest.raises(HfHubHTTPError):
        client.commit({"e.txt": b"e"}, revision=history[0].commit_id)
    api.delete_branch(REPO, branch="new/look", repo_type="dataset")
    with pytest.raises(RevisionNotFoundError):
        client.commit({"e.txt": b"e"}, revision="new/look")


def test_ranges_are_read_without_the_rest(hub: LoopbackHub, client: Client) -> None:
    client.commit({"data/a b+ü.parquet": BIG})
    files = HfFileSystem(endpoint=hub.url, token="hf_writer", skip_instance_cache=True)
    path = f"datasets/{REPO}/data/a b+ü.parquet"
    with files.open(path, block_size=1 << 16) as file:
        file.seek(1_000)
        assert file.read(10) == BIG[1_000:1_010]
    assert files.cat_file(path, start=299_990, end=300_000) == BIG[-10:]
    assert files.cat_file(path, start=-5) == BIG[-5:]


def info(client: Client) -> object:
    return client.api.dataset_info(REPO)


def write(client: Client) -> object:
    return client.commit({"a.txt": b"a"})


def download(client: Client) -> object:
    return client.api.hf_hub_download(REPO, "nothing", repo_type="dataset")


REFUSALS: dict[str, tuple[str | None, Callable[[Client], object], type[Exception], int, str]] = {
    "nobody sees what is private": (None, info, RepositoryNotFoundError, 401, "Invalid username or password"),
    "nor does a stranger": ("hf_stranger", info, RepositoryNotFoundError, 404, "Repository Not Found"),
    "nor who may not read it": ("hf_stranger", download, RepositoryNotFoundError, 404, "Repository Not Found"),
    "a token nobody knows": ("hf_x", info, HfHubHTTPError, 401, "Invalid credentials in Authorization header"),
    "nor its holder": ("hf_x", lambda one: one.api.whoami(), HfHubHTTPError, 401, "Invalid user token"),
    "a reader may not write": ("hf_reader", write, HfHubHTTPError, 403, "you must use a write token"),
    "no such file": ("hf_reader", download, EntryNotFoundError, 404, "Entry Not Found"),
    "no such revision": (
        "hf_reader", lambda one: one.api.dataset_info(REPO, revision="x"), RevisionNotFoundError, 404, "Invalid rev id",
    ),
    "no such repository": (
        "hf_writer", lambda one: one.api.dataset_info("org/x"), RepositoryNotFoundError, 404, "Repository Not Found",
    ),
    "a foreign namespace": (
        "hf_writer", lambda one: one.api.create_repo("else/x"), HfHubHTTPError, 403, 'model under the namespace "else"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS.keys())
def test_what_is_refused_is_refused_as_the_hub_does(hub: LoopbackHub, case: tuple[Any, ...]) -> None:
    token, act, kind, status, said = case
    Client(hub).create(private=True)
    with pytest.raises(kind, match=said) as caught:
        act(Client(hub, token))
    assert isinstance(caught.value, HfHubHTTPError)
    assert caught.value.response.status_code == status


def test_what_is_public_is_read_by_anybody_and_written_by_its_own(hub: LoopbackHub, client: Client) -> None:
    for token in (None, "hf_stranger", "hf_reader"):
        assert Client(hub, token).api.dataset_info(REPO).private is False
    with pytest.raises(HfHubHTTPError, match="you don't have write access to org/scans"):
        write(Client(hub, "hf_stranger"))
    with pytest.raises(HfHubHTTPError, match="Invalid username or password"):
        write(Client(hub, None))


@pytest.mark.parametrize("name", ["a b", "..", "x/y", "é" * 97])
def test_a_repository_needs_a_name(hub: LoopbackHub, name: str) -> None:
    status, said = raw(hub, "POST", "/api/repos/create", {"type": "dataset", "organization": "org", "name": name})
    assert (status, said) == (400, {"error": f"invalid repository name: {f'org/{name}'!r}"})


def test_a_token_runs_out(tmp_path: Path) -> None:
    tokens: dict[str, dict[str, Any]] = {
        "hf_short": {"name": "me", "role": "write", "expires_after": 2},
        "hf_long": {"name": "me", "role": "write"},
    }
    with LoopbackHub(tmp_path, tokens=tokens) as hub:
        short, long = Client(hub, "hf_short").api, Client(hub, "hf_long").api
        short.create_repo("me/a", repo_type="dataset")
        short.dataset_info("me/a")
        with pytest.raises(HfHubHTTPError, match='User Access Token "me" is expired'):
            short.dataset_info("me/a")
        long.dataset_info("me/a")
        hub.expire("hf_long")
        with pytest.raises(HfHubHTTPError, match="is expired"):
            long.dataset_info("me/a")


def test_faults_reach_the_real_client(hub: LoopbackHub, client: Client) -> None:
    hub.set_faults(rules=(Rule("PUT /_lfs/", "reset", after_bytes=70_000), Rule(r"POST .*/commit/", "lose_answer")))
    with pytest.raises(Exception, match="disconnected"):
        client.commit({"data/a.parquet": BIG})
    assert puts(hub) == 2, "the client sent it again after the reset"
    assert "data/a.parquet" in hub.files(REPO), "the commit went through all the same"


def test_commits_at_once_are_made_one_after_the_other(hub: LoopbackHub, client: Client) -> None:
    head = hub.history(REPO)[-1]["oid"]

    def commit(at: int) -> bool:
        header = {"summary": f"{at}"} | ({"parentCommit": head} if at >= 8 else {})
        file = {"path": f"{at}.txt", "content": "x", "encoding": "utf-8"}
        lines = [{"key": "header", "value": header}, {"key": "file", "value": file}]
        return (
            raw(hub, "POST", f"/api/datasets/{REPO}/commit/main", "\n".join(map(json.dumps, lines)).encode())[0] == 200
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(commit, range(8)))
        assert not any(pool.map(commit, range(8, 12)))
    assert sorted(without_attributes(hub.files(REPO))) == [f"{at}.txt" for at in range(8)]
    assert [len(made["files"]) for made in hub.history(REPO)] == list(range(1, 10))


def test_a_killed_hub_goes_on_where_it_was(tmp_path: Path) -> None:
    hub = LoopbackHub.start_process(tmp_path)
    client = Client(hub)
    client.create(private=True)
    client.commit({"data/a.parquet": BIG})
    before = hub.state()
    half = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    half.putrequest("PUT", f"/_lfs/{sha256(b'x' * 100).hexdigest()}")
    half.putheader("Content-Length", "100")
    half.endheaders(b"x" * 50)
    while not list(tmp_path.glob("uploads/*")):
        time.sleep(0.01)
    hub.kill()
    with LoopbackHub.start_process(tmp_path, port=hub.port) as again:
        assert (again.url, again.state()) == (hub.url, before)
        assert list(tmp_path.glob("uploads/*")) == []
        client.commit({"data/b.parquet": BIG})
        assert (puts(again), len(again.history(REPO))) == (0, 3)
    assert not any(b"hf_writer" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_it_is_sent_does_not_count_in_its_memory(tmp_path: Path) -> None:
    sent = tmp_path / "big.parquet"
    with sent.open("wb") as out:
        out.truncate(128 << 20)
    for over in (1 << 30, 1 << 20):
        with LoopbackHub.start_process(tmp_path / str(over), multipart_over=over) as hub, sent.open("rb") as file:
            client = Client(hub)
            client.create()
            add = CommitOperationAdd("data/big.parquet", file)
            client.api.create_commit(REPO, [add], commit_message="m", repo_type="dataset")
            link = f"{hub.url}/datasets/{REPO}/resolve/main/data/big.parquet"
            assert client.api.get_hf_file_metadata(url=link).size == 128 << 20
            status = Path(f"/proc/{hub.pid}/status").read_text()
            peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
            assert peak < 48 << 20


DATASETS = """
import datasets, sys
made = datasets.Dataset.from_dict({"n": list(range(100)), "t": [f"row {n}" for n in range(100)]})
made.push_to_hub("org/rows", num_shards=3, private=True)
datasets.DatasetDict({"train": made, "test": made.select(range(5))}).push_to_hub("org/rows", config_name="both")
whole = datasets.load_dataset("org/rows", "both")
assert whole["train"].to_dict() == made.to_dict() and whole["test"].num_rows == 5
stream = datasets.load_dataset("org/rows", split="train", streaming=True)
assert list(stream) == list(made)
"""


def test_datasets_pushes_to_it_and_loads_from_it(tmp_path: Path) -> None:
    with LoopbackHub(tmp_path / "hub") as hub:
        done = subprocess.run(
            [sys.executable, "-c", DATASETS], env=os.environ | hub.env(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        names = sorted(without_attributes(hub.files("org/rows")))
        assert names == [
            "README.md", "both/test-00000-of-00001.parquet", "both/train-00000-of-00001.parquet",
            *(f"data/train-0000{at}-of-00003.parquet" for at in range(3)),
        ]  # fmt: skip
        assert hub.state()["repos"]["datasets/org/rows"]["private"] is True

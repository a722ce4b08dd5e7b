"""Publishing at full size, with the real client against a Hub on this machine. `make proof` prints the figures."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import ok
from forks import Forks
from hubs import Desk, make_table, nothing_sent_twice, png, under_way, waits
from limits import Limited, run_limited
from media.bids_tree import make_bids
from penstock.testing import LoopbackHub, Rule
from proof.measured import PENSTOCK, Data, figures, mb, say

pytestmark = pytest.mark.proof

KILLS, LATE = 20, 3  # so many of them when there is nothing left to do but to commit
# Loads a dataset as its readers do and prints the digest of every file, column by column.
LOAD = """
import hashlib, json, sys
import datasets

def digests(value):
    if isinstance(value, dict):
        return hashlib.sha256(value["bytes"]).hexdigest()
    return [digests(one) for one in value] if isinstance(value, list) else value

held = datasets.load_dataset(sys.argv[1], split="train", streaming=sys.argv[2:] == ["streaming"])
found = {name: [] for name in held.column_names}
for batch in held.with_format("arrow").iter(1):
    for name, value in batch.to_pylist()[0].items():
        found[name].append(digests(value))
print(json.dumps(found))
"""
PUSH = """
import json, sys
import datasets
import penstock as ps

table, repo, memory = sys.argv[1:]
features = datasets.Features(
    {
        "id": datasets.Value("int64"),
        "t1w": datasets.Nifti(),
        "bold": datasets.List(datasets.Nifti()),
        "picture": datasets.Image(),
        "report": datasets.Pdf(),
    }
)
held = datasets.Dataset.from_dict(json.load(open(table)), features=features)
receipt = ps.push(held, repo, memory=memory)
print(json.dumps(receipt.as_json()))
"""


@pytest.fixture
def desk(work: Path) -> Iterator[Desk]:
    with LoopbackHub.start_process(work / "hub") as hub:
        forks = Forks(hub.env())
        (work / "desk").mkdir()
        yield Desk(hub, forks, work / "desk")
        forks.close()


def scans_of(folder: Path, sizes: list[int], ending: str = ".nii") -> list[Path]:
    """Files that do not compress, of these sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    block = np.random.default_rng(len(sizes)).bytes(1 << 24)
    made = []
    for at, size in enumerate(sizes):
        path = folder / f"{at:05d}{ending}"
        with path.open("wb") as f:
            f.write(at.to_bytes(8, "little"))  # no two are alike
            for start in range(8, size, len(block)):
                f.write(block[: size - start])
        made.append(path)
    return made


def digests_of(value: Any) -> Any:
    if isinstance(value, Path):
        with value.open("rb") as f:
            return file_digest(f, "sha256").hexdigest()
    return [digests_of(one) for one in value] if isinstance(value, list) else value


def python(desk: Desk, code: str, *words: str | Path, limit: int | None = None) -> Limited | str:
    """Python of its own, turned to the Hub; in a kernel limit, or not."""
    tests = Path(__file__).resolve().parents[1]
    env = {**os.environ, **desk.env(), "PYTHONPATH": str(tests), "HF_DATASETS_CACHE": str(desk.folder / "loaded")}
    command = [sys.executable, "-c", code, *map(str, words)]
    if limit is not None:
        return run_limited(command, limit=limit, timeout=3_600, env=env)
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3_600)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def loaded(desk: Desk, *words: str) -> dict[str, Any]:
    said = python(desk, LOAD, desk.repo, *words)
    assert isinstance(said, str)
    found: dict[str, Any] = json.loads(said)
    return found


def bounded(run: Limited, limit: int) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    assert (run.kernel_kills, run.left) == (0, 0)
    made: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    memory = made["memory"]
    say(figures(run, memory))
    assert memory["measured"] <= memory["projected"] <= memory["allowed"] == limit
    assert memory["measured"] == pytest.approx(run.anonymous, rel=0.15, abs=8_000_000)
    return made


# -- bounded ----------------------------------------------------------------------------------------------------------


def test_rows_of_1_5_gb_in_200_mb_of_memory_and_50_mb_of_disk(desk: Desk, data: Data) -> None:
    scans = scans_of(desk.folder / "scans", [data.bytes(500e6)] * 6)
    columns = {"a": scans[0::3], "b": scans[1::3], "c": scans[2::3]}
    table = make_table(desk.folder, {"id": [0, 1], **columns})
    words = ["push", table, desk.repo, "--media", "a", "--media", "b", "--media", "c"]
    words += ["--memory", "200MB", "--disk", "50MB", "--json"]
    run = run_limited([*PENSTOCK, *map(str, words)], limit=200_000_000, timeout=3_600, env={**os.environ, **desk.env()})
    made = bounded(run, 200_000_000)
    assert made["disk"]["measured"] == 0
    assert desk.left() == ["receipt.json"]
    say(f"{mb(sum(path.stat().st_size for path in scans))} at {mb(made['shards'][0]['bytes'] / run.seconds)}/s")
    assert loaded(desk) == {"id": [0, 1], **{name: digests_of(column) for name, column in columns.items()}}


def test_lists_of_1_5_gb_in_200_mb_of_memory_and_50_mb_of_disk(desk: Desk, data: Data) -> None:
    """Two rows hold more than 2 GiB in one list: `load_dataset` reads them as a stream, and cannot otherwise."""
    scans = scans_of(desk.folder / "scans", [data.bytes(500e6)] * 6)
    table = make_table(desk.folder, {"id": [0, 1], "runs": [scans[:3], scans[3:]]})
    words = ["push", table, desk.repo, "--media", "runs", "--memory", "200MB", "--disk", "50MB", "--json"]
    run = run_limited([*PENSTOCK, *map(str, words)], limit=200_000_000, timeout=3_600, env={**os.environ, **desk.env()})
    bounded(run, 200_000_000)
    assert loaded(desk, "streaming") == {"id": [0, 1], "runs": digests_of([scans[:3], scans[3:]])}


def test_a_hugging_face_dataset_of_8_gb_of_files_in_512_mb(desk: Desk, data: Data) -> None:
    rows, each = 200, data.bytes(8e9) // 200
    scans = scans_of(desk.folder / "t1w", [35 * each // 100] * rows)
    runs = scans_of(desk.folder / "bold", [30 * each // 100] * (3 * rows))
    pictures = [png(desk.folder / "pictures" / f"{at:05d}.png", seed=at, side=64) for at in range(rows)]
    reports = scans_of(desk.folder / "reports", [21 * each // 100] * rows, ".pdf")
    table: dict[str, list[Any]] = {
        "id": list(range(rows)),
        "t1w": scans,
        "bold": [runs[3 * at : 3 * at + at % 4] for at in range(rows)],
        "picture": pictures,
        "report": [None if at % 50 == 7 else path for at, path in enumerate(reports)],
    }
    (desk.folder / "table.json").write_text(json.dumps(table, default=str))
    run = python(desk, PUSH, desk.folder / "table.json", desk.repo, "512MB", limit=512_000_000)
    assert isinstance(run, Limited)
    made = bounded(run, 512_000_000)
    say(f"{mb(sum(shard['bytes'] for shard in made['shards']))} in {len(made['shards'])} shards")
    assert loaded(desk) == {name: digests_of(column) for name, column in table.items()}


def test_902_sessions_of_a_bids_tree(desk: Desk, data: Data) -> None:
    """No run and no sidecar is lost: the tree that comes back is the tree that went."""
    subjects, sessions = (54, 17) if data.full else (7, 4)
    rows = (subjects - 1) * sessions + 1
    started = time.monotonic()
    large = make_bids(desk.folder / "large", subjects=subjects, sessions=sessions, size=15_000_000)
    said = f"made in {time.monotonic() - started:.1f} s"
    started = time.monotonic()
    plan = ok(desk.run("push", "--bids", large, desk.repo, "--dry-run", "--json", timeout=600)).json()
    say(f"{said}; a plan of {mb(plan['bytes']['train'])} in {time.monotonic() - started:.1f} s")
    assert plan["rows"] == {"train": rows}
    scans = sum(path.stat().st_size for path in large.glob("sub-*/**/*.nii.gz"))
    assert scans <= plan["bytes"]["train"] <= 1.02 * scans
    assert plan["commits"] <= 20
    tree = make_bids(desk.folder / "tree", subjects=subjects, sessions=sessions, size=40_000)
    words = ("push", "--bids", tree, desk.repo, "--max-shard-size", "20MB", "--memory", "400MB")
    done = ok(desk.run(*words, "--json", timeout=3_600)).json()
    assert done["rows"]["written"] == rows
    assert done["published"]["commits"] <= 20
    say(f"{rows} rows in {len(done['shards'])} shards, {done['published']['commits']} commits, {done['seconds']:.0f} s")
    ok(desk.run("verify", desk.repo, timeout=3_600))
    ok(desk.run("export", desk.repo, desk.folder / "back", "--bids", timeout=3_600))
    assert files_of(desk.folder / "back") == files_of(tree)


def files_of(tree: Path) -> dict[str, str]:
    """Every file of a tree that is pushed with it, by digest."""
    found = (path for path in tree.rglob("*") if path.is_file())
    names = {path.relative_to(tree).as_posix(): path for path in found}
    return {
        name: digests_of(path)
        for name, path in names.items()
        if "_scratch." not in name and not name.startswith(("extra/", "derivatives/"))
    }


# -- killed -----------------------------------------------------------------------------------------------------------


def test_killed_at_20_random_moments(desk: Desk, data: Data) -> None:
    """Over an older state, in three commits: the same files as a push never killed, and what is seen changes once."""
    rows = 240
    sizes = [data.bytes(4e6) + at for at in range(rows)]
    old = make_table(desk.folder, {"id": [0], "scan": scans_of(desk.folder / "old", [1_000])}, name="old.jsonl")
    new = make_table(desk.folder, {"id": list(range(rows)), "scan": scans_of(desk.folder / "new", sizes)})
    before = ("push", old, desk.repo, "--media", "scan")
    words = ("push", new, desk.repo, "--media", "scan", "--max-shard-size", str(sizes[-1] + 100))
    ok(desk.run(*before))
    visible = desk.states()[-1]
    desk.hub.clear_log()
    slow = (Rule(r"POST .*/commit/", "hang:1.5", times=99), Rule(r"PUT /_lfs/", "hang:0.05", times=9_999))
    desk.hub.set_faults(rules=slow)
    rng = random.Random(20)
    for at in range(KILLS):
        # A push first asks who one is, then plans, sends, and looks at what is there before it commits.
        late = at >= KILLS - LATE
        push = under_way(desk, *words, asked="/tree/" if late else "whoami" if at % 4 == 0 else "PUT /_lfs/")
        time.sleep(rng.uniform(0, 1.4 if late else 0.5))
        push.signal(signal.SIGKILL)
        push.ended()
        say(f"killed: {desk.hashed()} hashed, {desk.sent()} sent, {len(desk.commits()) - 1} commits")
    desk.hub.set_faults()
    ok(desk.run(*words, timeout=600))
    nothing_sent_twice(desk)
    assert sum(desk.uploads().values()) == rows
    states = desk.states()
    assert states[states.index(visible) :] == [visible, states[-1]]
    assert len(states[-1]) == rows
    assert desk.left() == ["receipt.json"]
    other = Desk(desk.hub, desk.forks, desk.folder / "whole", f"{desk.repo}-whole")
    other.folder.mkdir()
    for one in (before, words):
        ok(other.run(*[other.repo if word == desk.repo else word for word in one], timeout=600))
    assert other.files() == desk.files()


def test_a_pull_request_that_was_killed_goes_on_as_the_same(desk: Desk) -> None:
    """Killed when it was open and held the first files."""
    scans = scans_of(desk.folder / "scans", [1_000 + at for at in range(210)])
    table = make_table(desk.folder, {"id": list(range(210)), "scan": scans})
    words = ("push", table, desk.repo, "--media", "scan", "--max-shard-size", "1300", "--create-pr")
    desk.hub.set_faults(rules=(Rule(r"POST .*/commit/", "hang:3", skip=1, times=99),))
    push = desk.start(*words)
    waits(desk, lambda: any(line["key"].startswith("commit/") for line in desk.journal()), push, why="it is open")
    push.signal(signal.SIGKILL)
    push.ended()
    desk.hub.set_faults()
    ok(desk.run(*words, timeout=600))
    repo = desk.hub.state()["repos"][f"datasets/{desk.repo}"]
    assert [ref for ref in repo["refs"] if ref.startswith("refs/pr/")] == ["refs/pr/1"]
    assert len(desk.shards(revision="refs/pr/1")) == 210
    assert desk.commits() == []
    nothing_sent_twice(desk)


def test_a_fragment_that_reaches_into_two_shards_outlives_the_first_to_be_sent(work: Path) -> None:
    """Rows that are made: the second shard is sent, the first is not, and the push is killed."""
    with LoopbackHub.start_process(work / "hub", multipart_over=20 << 20, part_size=10 << 20) as hub:
        forks = Forks(hub.env())
        desk = Desk(hub, forks, work / "desk")
        (desk.folder / "data").mkdir(parents=True)
        rng = np.random.default_rng(0)
        for name in "ab":
            with (desk.folder / "data" / f"{name}.jsonl").open("w") as f:
                for at in range(24_000):
                    f.write(json.dumps({"id": at, "text": rng.bytes(1_000).hex()}) + "\n")
        words = ("push", desk.folder / "data", desk.repo, "--max-shard-size", "75MB", "--memory", "1GB")
        hub.set_faults(rules=(Rule(r"PUT /_lfs/\w+/\w+/1", "hang:60", times=99),))
        push = desk.start(*words)
        waits(desk, lambda: desk.sent() >= 1, push, why="one shard is sent")
        push.signal(signal.SIGKILL)
        push.ended()
        hub.set_faults()
        ok(desk.run(*words))
        nothing_sent_twice(desk)
        assert desk.left() == ["receipt.json"]
        found = loaded(desk)
        assert found["id"] == 2 * list(range(24_000))
        forks.close()


# -- faults -----------------------------------------------------------------------------------------------------------


def test_902_shards_through_every_fault(desk: Desk, data: Data) -> None:
    """One request in twenty fails, bodies are cut, commits are refused or their answers lost: at most 20 commits."""
    rows = 902 if data.full else 210
    scans = scans_of(desk.folder / "scans", [20_000 + at for at in range(rows)])
    table = make_table(desk.folder, {"id": list(range(rows)), "scan": scans})
    words = ("push", table, desk.repo, "--media", "scan", "--max-shard-size", "21KB")
    commit = r"POST .*/commit/"
    rules = (
        Rule(commit, "status:429", retry_after=2),
        Rule(commit, "lose_answer"),
        Rule(commit, "status:409"),
        Rule(commit, "status:503"),
        *(Rule(r"PUT /_lfs/", "reset", skip=20 * at, after_bytes=9_000) for at in range(1, 5)),
    )
    desk.hub.set_faults(error_rate=0.05, statuses=(500, 502, 503, 504), seed=7, rules=rules)
    started = time.monotonic()
    for _ in range(3):  # a streak of failures may end a push; the same command goes on
        ran = desk.run(*words, timeout=3_600)
        if ran.returncode == 0:
            break
        assert "run the same command again later" in ran.stderr
    ok(ran)
    met = sum(one["fault"] is not None for one in desk.hub.log())
    say(f"{met} faults met; {len(desk.commits())} commits; {time.monotonic() - started:.0f} s")
    desk.hub.set_faults()
    assert len(desk.commits()) <= 20
    *early, last = desk.commits()
    assert [desk.seen(one) for one in early] == [{}] * len(early)
    assert len(desk.seen(last)) == rows
    nothing_sent_twice(desk)
    assert loaded(desk)["scan"] == digests_of(scans)

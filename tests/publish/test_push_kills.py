"""Pushes that are killed, stopped, or meet another: the Hub shows the old state or the new, and nothing goes twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from command import make_parquet, ok, refused, until
from forks import Forked
from hubs import (
    Desk,
    digests,
    digests_of_paths,
    loaded,
    make_scans,
    nothing_sent_twice,
    scan_table,
    under_way,
    waits,
)
from penstock.testing import Rule

SHARDS = 99  # more than one commit takes


def tiny(desk: Desk, rows: int = SHARDS, *, name: str = "data") -> tuple[str | Path, ...]:
    """Words that push so many rows, each a shard of its own."""
    table = scan_table(desk.folder / name, rows, size=300)
    return ("push", table, desk.repo, "--media", "scan", "--max-shard-size", "350")


def scans_of(desk: Desk) -> list[Path]:
    return sorted((desk.folder / "data" / "scans").iterdir())


def reference(desk: Desk, words: tuple[str | Path, ...], *before: tuple[str | Path, ...]) -> dict[str, str]:
    """What the same pushes leave in another repository when nobody kills them."""
    other = Desk(desk.hub, desk.forks, desk.folder / "reference", f"{desk.repo}-whole", desk.here)
    other.folder.mkdir()
    for one in (*before, words):
        ok(other.run(*[other.repo if word == desk.repo else word for word in one]))
    return other.files()


def one_state_before_and_one_after(desk: Desk, before: dict[str, str]) -> None:
    """Over the whole history, what `load_dataset` finds changed once."""
    states = desk.states()
    at = states.index(before)
    assert states[at:] == [before, states[-1]] != [before, before]


# -- SIGKILL ----------------------------------------------------------------------------------------------------------


def kill(push: Forked) -> None:
    push.signal(signal.SIGKILL)
    assert push.ended().returncode == -signal.SIGKILL


@pytest.mark.parametrize("fresh", [True, False], ids=["a fresh repository", "over an older state"])
def test_killed_at_random_moments_it_ends_as_one_that_was_never_killed(at_hub: Desk, fresh: bool) -> None:
    import datasets

    at_hub.here = False  # every push a process of its own
    rng = random.Random(f"kills {fresh}")
    before: tuple[tuple[str | Path, ...], ...] = ()
    if not fresh:
        before = (tiny(at_hub, 3, name="more-1"), (*tiny(at_hub, 2, name="more-2"), "--split", "test"))
        for one in before:
            ok(at_hub.run(*one))
    visible = at_hub.states()[-1] if before else {}
    words = tiny(at_hub)
    slow = (Rule(r"POST .*/commit/", "hang:0.2", times=99), Rule(r"PUT /_lfs/", "hang:0.02", times=999))
    at_hub.hub.set_faults(rules=slow)
    for asked in ("whoami", "PUT /_lfs/", "PUT /_lfs/"):
        push = under_way(at_hub, *words, asked=asked)
        time.sleep(rng.uniform(0, 0.4))
        kill(push)
    # Then in the middle of a commit: the Hub makes it, and nobody hears of it.
    push = at_hub.start(*words)
    waits(at_hub, lambda: at_hub.sent() == SHARDS, push, why="everything was sent")
    time.sleep(rng.uniform(0, 0.5))
    kill(push)
    at_hub.hub.set_faults()
    ok(at_hub.run(*words))
    assert len(at_hub.commits()) >= len(before) + 2
    assert at_hub.files() == reference(at_hub, words, *before)
    one_state_before_and_one_after(at_hub, visible)
    nothing_sent_twice(at_hub)
    assert at_hub.left() == ["receipt.json"]
    early = at_hub.commits()[len(before)]
    assert sum(path.endswith(".parquet") for path in early["files"]) > 90
    if fresh:
        with pytest.raises((datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ValueError)):
            datasets.load_dataset(at_hub.repo, revision=early["oid"])
    else:
        assert len(loaded(at_hub, split="train", revision=early["oid"])) == 3
    back = loaded(at_hub)
    assert digests(back["train"]["scan"][:]) == digests_of_paths(scans_of(at_hub))
    assert ("test" in back) == (not fresh)


def test_killed_while_hashing_sending_and_committing(desk: Desk) -> None:
    """One large file, to be in the middle of, and a few small ones."""
    data = desk.folder / "data"
    table = scan_table(data, 4, size=9_000_000)
    words = ("push", table, desk.repo, "--media", "scan", "--max-shard-size", "10MB")
    # hashing: the journal is there, no digest is
    push = desk.start(*words)
    waits(desk, desk.started, push, why="it has a journal")
    kill(push)
    assert desk.sent() == 0
    # sending: two are on their way, and stop there
    desk.hub.set_faults(rules=(Rule(r"PUT /_lfs/", "hang:0.3", times=99),))
    push = desk.start(*words)
    waits(desk, lambda: desk.hashed() >= 2, push, why="two are hashed")
    time.sleep(0.1)
    kill(push)
    hashed = desk.hashed()
    time.sleep(0.4)
    # some sent, others not
    desk.hub.set_faults(rules=(Rule(r"PUT /_lfs/.*/3", "hang:1", skip=2, times=9),))
    push = desk.start(*words)
    waits(desk, lambda: desk.sent() >= 2, push, why="two are sent")
    kill(push)
    # the answer of a request that a dead client waited for is not in the way of the next
    time.sleep(1.1)
    sent = desk.sent()
    assert 2 <= sent < 4
    # committing
    desk.hub.set_faults(rules=(Rule(r"POST .*/commit/", "hang:0.5"),))
    push = desk.start(*words)
    waits(desk, lambda: desk.sent() == 4 and desk.asked("validate-yaml"), push, why="the commit is under way")
    time.sleep(0.1)
    kill(push)
    desk.hub.set_faults()
    ok(desk.run(*words))
    assert hashed >= 2
    assert desk.files() == reference(desk, words)
    one_state_before_and_one_after(desk, {})
    nothing_sent_twice(desk)


def test_what_was_hashed_is_not_read_again_before_it_is_sent(desk: Desk) -> None:
    """A killed push had hashed everything: the next one sends without a first pass."""
    table = scan_table(desk.folder / "data", 3, size=1_000)
    words = ("push", table, desk.repo, "--media", "scan", "--max-shard-size", "1500")
    desk.hub.set_faults(rules=(Rule(r"POST .*/preupload/", "hang:1", times=9),))
    push = desk.start(*words)
    waits(desk, lambda: desk.hashed() == 3, push, why="all are hashed")
    kill(push)
    desk.hub.set_faults()
    before = [line for line in desk.journal() if line["key"].startswith("task/hashed/")]
    desk.hub.set_faults(rules=(Rule(r"POST .*/commit/", "hang:0.5"),))
    push = desk.start(*words)
    waits(desk, lambda: desk.sent() == 3, push, why="all are sent")
    assert [line for line in desk.journal() if line["key"].startswith("task/hashed/")] == before
    ok(push.ended())


def test_tables_that_a_killed_push_left_are_cleaned_up_by_the_next(desk: Desk) -> None:
    table = scan_table(desk.folder / "data", 3)
    words = ("push", table, desk.repo, "--media", "scan")
    desk.hub.set_faults(rules=(Rule(r"repos/create", "hang:2"),))
    push = desk.start(*words)
    waits(desk, desk.started, push, why="it has a journal")
    kill(push)
    assert len(list((desk.state / "tables").iterdir())) == 1
    desk.hub.set_faults()
    ok(desk.run(*words))
    assert list((desk.state / "tables").iterdir()) == []


def test_a_hub_that_forgot_what_was_sent_gets_it_again(desk: Desk) -> None:
    """No commit named it yet, so the Hub may drop it."""
    words = tiny(desk, 6)
    desk.hub.set_faults(rules=(Rule(r"POST .*/commit/", "hang:1"),))
    push = desk.start(*words)
    waits(desk, lambda: desk.sent() == 6, push, why="all are sent")
    kill(push)
    time.sleep(1.1)
    gone = next(line["sha256"] for line in desk.journal() if line["key"] == "task/hashed/train/000003")
    desk.hub.set_faults()
    if desk.commits():  # the Hub made the commit all the same
        pytest.fail("the push was killed too late")
    desk.blob(gone).unlink()
    ok(desk.run(*words))
    assert {digest: times for digest, times in desk.uploads().items() if times > 1} == {gone: 2}
    assert all(shard.exists() for shard in desk.shards())
    assert len(desk.shards()) == 6


SLOW = """
import os, sys, time
sys.path.insert(0, os.getcwd())
import penstock as ps

def slowly(batch):
    with open("calls", "a") as calls:
        calls.write(f"{batch.column('id')[0].as_py()}\\n")
    time.sleep(0.05)
    return batch

if __name__ == "__main__":
    made = ps.read("data").map(slowly, version="1")
    made.push(sys.argv[1], max_shard_size="60KB", memory="600MB", workers=1)
"""


def test_killed_while_rows_are_made_it_makes_none_of_them_again(at_hub: Desk) -> None:
    """Every file is a task: those that were done before the kill are not called again, and are not sent again."""
    make_parquet(at_hub.folder / "data", rows=2_400, files=12, groups=1)
    (at_hub.folder / "job.py").write_text(SLOW)
    words = [sys.executable, "job.py", at_hub.repo]
    env = {**os.environ, **at_hub.env()}
    calls = at_hub.folder / "calls"
    process = subprocess.Popen(words, cwd=at_hub.folder, env=env)
    until(lambda: calls.exists() and at_hub.sent() >= 2, seconds=30, why="two shards are sent")
    process.kill()
    process.wait()
    done = [line for line in at_hub.journal() if line["key"].startswith("task/sent/")]
    called = calls.read_text().split()
    assert len(set(called)) == len(called) < 12
    again = subprocess.run(words, cwd=at_hub.folder, env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    times = Counter(calls.read_text().split())
    assert len(times) == 12
    assert sum(times.values()) <= 12 + 2  # what was under way when it was killed
    assert 2 <= len(done) < len(at_hub.shards())
    nothing_sent_twice(at_hub)
    assert at_hub.left() == ["receipt.json"]
    assert loaded(at_hub, split="train")["id"][:] == list(range(2_400))


# -- changed in between -----------------------------------------------------------------------------------------------


def test_files_changed_between_a_killed_push_and_the_next_are_noticed(desk: Desk) -> None:
    table = scan_table(desk.folder / "data", 6, size=300)
    words = ("push", table, desk.repo, "--media", "scan", "--max-shard-size", "350")
    desk.hub.set_faults(rules=(Rule(r"PUT /_lfs/", "hang:2", skip=3, times=9),))
    push = desk.start(*words)
    waits(desk, lambda: desk.sent() >= 2, push, why="some are sent")
    kill(push)
    desk.hub.set_faults()
    changed = desk.folder / "data" / "scans" / "scan-0001.nii.gz"
    changed.write_bytes(b"other content of another size")
    ran = desk.run(*words)
    refused(ran, 2, "unfinished run of another plan", "table.jsonl has changed", "--restart")
    assert desk.commits() == []
    ok(desk.run(*words, "--restart"))
    assert len(desk.commits()) == 1
    assert [shard.stat().st_size for shard in desk.shards()] == [shard["bytes"] for shard in desk.receipt()["shards"]]
    assert any(b"other content of another size" in shard.read_bytes() for shard in desk.shards())


def test_another_push_to_the_same_place_says_that_one_is_unfinished(desk: Desk) -> None:
    first, second = tiny(desk, 4), tiny(desk, 5, name="more-5")
    desk.hub.set_faults(rules=(Rule(r"PUT /_lfs/", "hang:2", skip=2, times=9),))
    push = desk.start(*first)
    waits(desk, lambda: desk.sent() >= 1, push, why="one is sent")
    kill(push)
    desk.hub.set_faults()
    refused(desk.run(*second), 2, "unfinished run of another plan")
    ok(desk.run(*first))
    ok(desk.run(*second))
    assert len(desk.shards()) == 5


# -- stopped, and met -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_push_that_is_stopped_says_how_to_go_on(desk: Desk, number: signal.Signals) -> None:
    words = tiny(desk, 8)
    desk.hub.set_faults(rules=(Rule(r"PUT /_lfs/", "hang:0.3", times=99),))
    push = desk.start(*words)
    waits(desk, lambda: desk.sent() >= 2, push, why="two are sent")
    push.signal(number)
    ran = push.ended(timeout=10)
    assert ran.returncode == 130
    assert "Traceback" not in ran.stderr
    said = ran.stderr.splitlines()[-1]
    assert said.startswith("penstock: stopped; what is committed stays, go on with: penstock push ")
    assert desk.repo in said
    assert desk.commits() == []
    assert list((desk.state / "tables").iterdir()) == []
    desk.hub.set_faults()
    time.sleep(0.4)
    ok(desk.run(*words))
    assert len(desk.shards()) == 8
    nothing_sent_twice(desk)


def test_two_pushes_to_one_repository_at_once(desk: Desk) -> None:
    words = tiny(desk, 3)
    desk.hub.set_faults(rules=(Rule(r"repos/create", "hang:1.5"),))
    first = desk.start(*words)
    waits(desk, desk.started, first, why="it holds the place")
    refused(desk.run(*words), 1, "another run is writing here", "wait for it to end")
    ok(first.ended())
    assert len(desk.commits()) == 1


def test_somebody_elses_commit_between_our_look_and_our_last_commit_stays(at_hub: Desk) -> None:
    from huggingface_hub import HfApi

    words = tiny(at_hub, 3)
    ok(at_hub.run(*tiny(at_hub, 2, name="more-3")))
    at_hub.hub.set_faults(rules=(Rule(r"POST .*/commit/", "hang:1.5"),))
    at_hub.hub.clear_log()
    push = at_hub.start(*words)
    waits(at_hub, lambda: at_hub.asked("validate-yaml"), push, why="our commit is on its way")
    time.sleep(0.2)
    api = HfApi(token="hf_writer")
    api.upload_file(path_or_fileobj=b"theirs\n", path_in_repo="theirs.txt", repo_id=at_hub.repo, repo_type="dataset")
    assert not push.has_ended()
    ok(push.ended())
    assert [one["status"] for one in at_hub.asked(r"POST .*/commit/", answered=False)] == [200, 412, 200]
    titles = [commit["title"] for commit in at_hub.commits()]
    assert len(titles) == 3
    assert "theirs.txt" in titles[1]
    assert at_hub.stored(at_hub.files()["theirs.txt"]) == b"theirs\n"
    assert len(at_hub.shards()) == len(loaded(at_hub, split="train")) == 3


def test_somebody_elses_split_pushed_meanwhile_stays(desk: Desk) -> None:
    """Two machines, two splits of one repository, the same moment."""
    mine, theirs = tiny(desk, 3), (*tiny(desk, 2, name="more-9"), "--split", "test")
    other = Desk(desk.hub, desk.forks, desk.folder / "elsewhere", desk.repo)
    other.folder.mkdir()
    desk.hub.set_faults(rules=(Rule(r"POST .*/commit/", "hang:1"),))
    first = desk.start(*mine)
    waits(desk, lambda: desk.asked("validate-yaml"), first, why="our commit is on its way")
    second = ok(other.run(*theirs))
    ok(first.ended())
    assert "published" in second.stdout
    splits = {one["split"] for one in desk.card()["configs"][0]["data_files"]}
    assert splits == {"train", "test"}
    assert (len(desk.shards()), len(desk.shards("test"))) == (3, 2)


def test_a_push_of_python_that_fails_leaves_no_thread_behind(at_hub: Desk) -> None:
    import penstock as ps
    from penstock.errors import SourceChanged

    scans = make_scans(at_hub.folder / "data", 6, size=1_000)
    dataset = ps.read_files({"scan": [str(path) for path in scans]}, media=["scan"])
    scans[4].unlink()
    at_hub.hub.set_faults(rules=(Rule(r"PUT /_lfs/", "hang:0.3", times=9),))
    before = set(threading.enumerate())
    with pytest.raises(SourceChanged, match=r"scan-0004\.nii\.gz"):
        ps.push(dataset, at_hub.repo, max_shard_size="1500")
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(threading.enumerate()) - before == set()
    shutil.rmtree(at_hub.folder / "data")

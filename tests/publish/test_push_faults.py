"""Pushes to a Hub where things go wrong: they complete, or stop with what to do and go on when run again."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from command import Ran, Running, make_parquet, ok, penstock, refused, until
from forks import Forks
from hubs import BRIEF, Desk, digests_of_paths, loaded, nothing_sent_twice, scan_table, waits
from hubs import digests as digests_in
from penstock.testing import LoopbackHub, Rule

COMMIT = r"POST .*/commit/"
PUT = r"PUT /_lfs/"


def few(desk: Desk, rows: int = 4, *, size: int = 300) -> tuple[str | Path, ...]:
    """Words that push so many rows, each a shard of its own."""
    table = scan_table(desk.folder / "data", rows, size=size)
    return ("push", table, desk.repo, "--media", "scan", "--max-shard-size", str(size + 50))


def scans(desk: Desk) -> list[Path]:
    return sorted((desk.folder / "data" / "scans").iterdir())


def whole(desk: Desk, *, commits: int = 1) -> None:
    """Everything is there, once, and loads."""
    assert len(desk.commits()) == commits
    back = loaded(desk, split="train")
    assert digests_in(back["scan"][:]) == digests_of_paths(scans(desk))
    nothing_sent_twice(desk)


# -- answers that may be better next time -----------------------------------------------------------------------------


def test_one_request_in_twenty_fails(at_hub: Desk) -> None:
    words = few(at_hub, 30)
    at_hub.hub.set_faults(error_rate=0.05, statuses=(500, 502, 503, 504), seed=4)
    ok(at_hub.run(*words))
    failed = [one for one in at_hub.hub.log() if one["fault"]]
    assert failed
    at_hub.hub.set_faults()
    whole(at_hub)


def test_a_commit_that_is_refused_for_now_is_made_again(at_hub: Desk) -> None:
    words = few(at_hub)
    statuses = (409, 429, 500, 502, 503, 504)
    rules = tuple(Rule(COMMIT, f"status:{status}") for status in statuses)
    at_hub.hub.set_faults(rules=rules)
    ok(at_hub.run(*words))
    assert [one["status"] for one in at_hub.asked(COMMIT, answered=False)] == [*statuses, 200]
    whole(at_hub)


def test_a_parent_that_has_moved_on_is_looked_at_again(at_hub: Desk) -> None:
    words = few(at_hub)
    at_hub.hub.set_faults(rules=(Rule(COMMIT, "status:412", times=3),))
    ok(at_hub.run(*words))
    assert [one["status"] for one in at_hub.asked(COMMIT, answered=False)] == [412, 412, 412, 200]
    whole(at_hub)


def test_a_parent_that_always_moves_on_is_not_chased_for_ever(desk: Desk) -> None:
    words = few(desk)
    desk.hub.set_faults(rules=(Rule(COMMIT, "status:412", times=10_000),))
    ran = desk.run(*words, timeout=20)
    assert ran.returncode == 1
    assert "run the same command again later" in ran.stderr
    assert len(desk.asked(COMMIT, answered=False)) <= 20
    desk.hub.set_faults()
    ok(desk.run(*words))
    assert len(desk.commits()) == 1


def test_as_long_as_the_hub_asks_for_is_waited(desk: Desk) -> None:
    words = few(desk)
    desk.hub.set_faults(rules=(Rule(COMMIT, "status:429", retry_after=1.2),))
    started = time.monotonic()
    ok(desk.run(*words))
    assert time.monotonic() - started > 1.2  # waits of our own are hundredths of a second here
    assert [one["status"] for one in desk.asked(COMMIT, answered=False)] == [429, 200]


def test_every_call_is_made_again(at_hub: Desk) -> None:
    words = few(at_hub, 2)
    faults = {
        "whoami": "status:429",
        "GET /api/datasets/[^/]+/[^/]+$": "reset",
        "repos/create": "lose_answer",
        "preupload": "status:503",
        "objects/batch": "reset",
        "verify": "lose_answer",
        "tree": "status:500",
    }
    at_hub.hub.set_faults(rules=tuple(Rule(place, action) for place, action in faults.items()))
    ok(at_hub.run(*words))
    assert Counter(one["fault"] for one in at_hub.hub.log() if one["fault"]) == Counter(faults.values())
    whole(at_hub)


def test_a_connection_reset_in_the_middle_of_a_body(at_hub: Desk) -> None:
    words = few(at_hub, 2, size=3_000_000)
    at_hub.hub.set_faults(rules=(Rule(PUT, "reset", times=2, after_bytes=1_000_000),))
    ok(at_hub.run(*words))
    cut = [one["bytes_in"] for one in at_hub.asked(PUT, answered=False) if one["status"] == 0]
    assert cut == [1_000_000, 1_000_000]
    whole(at_hub)


def test_an_upload_whose_answer_is_lost(at_hub: Desk) -> None:
    words = few(at_hub, 3)
    at_hub.hub.set_faults(rules=(Rule(PUT, "lose_answer"),))
    ok(at_hub.run(*words))
    assert sorted(at_hub.uploads().values()) == [1, 1, 2]  # the client itself cannot know that it had arrived
    assert len(at_hub.commits()) == 1


def test_a_large_shard_goes_in_parts_and_through_faults(at_hub: Desk) -> None:
    words = few(at_hub, 2, size=9_000_000)
    at_hub.hub.set_faults(
        rules=(
            Rule(r"PUT /_lfs/\w+/\w+/2", "reset", after_bytes=500_000),
            Rule(r"PUT /_lfs/\w+/\w+/3", "status:503"),
        )
    )
    ok(at_hub.run(*words))
    assert len(at_hub.asked(r"PUT /_lfs/\w+/\w+/\d")) == 6
    whole(at_hub)


def test_a_commit_that_went_through_and_whose_answer_was_lost_is_not_made_again(at_hub: Desk) -> None:
    words = few(at_hub)
    at_hub.hub.set_faults(rules=(Rule(COMMIT, "lose_answer"),))
    ran = ok(at_hub.run(*words))
    assert "1 commit," in ran.stdout
    assert len(at_hub.asked(COMMIT, answered=False)) == 1
    whole(at_hub)


def test_the_answers_of_several_commits_are_lost(desk: Desk) -> None:
    words = few(desk, 99)
    desk.hub.set_faults(rules=(Rule(COMMIT, "lose_answer", times=2),))
    ok(desk.run(*words))
    assert len(desk.commits()) == len(desk.asked(COMMIT, answered=False)) == 2
    assert [len(desk.seen(commit)) for commit in desk.commits()] == [0, 99]
    nothing_sent_twice(desk)


def test_a_hub_that_stays_down_is_given_up_and_gone_on_with(desk: Desk) -> None:
    words = few(desk)
    desk.hub.set_faults(rules=(Rule(COMMIT, "status:503", times=999),))
    ran = desk.run(*words)
    assert ran.returncode == 1
    assert "failed 10 times" in ran.stderr
    assert "run the same command again later: what was sent stays" in ran.stderr
    assert desk.commits() == []
    desk.hub.set_faults()
    desk.hub.clear_log()
    ok(desk.run(*words))
    assert desk.asked(PUT, answered=False) == []
    assert len(desk.commits()) == 1


def test_a_hub_that_is_killed_and_comes_back(tmp_path: Path, the_forks: Forks) -> None:
    """A Hub of its own, and a real command: what `the_forks` forks knows another Hub."""
    hub = LoopbackHub.start_process(tmp_path / "hub")
    desk = Desk(hub, the_forks, tmp_path / "desk")
    desk.folder.mkdir()
    words = few(desk, 8)
    hub.set_faults(rules=(Rule(PUT, "hang:0.3", times=99),))
    push = Running(*words, env=desk.env())
    until(lambda: desk.sent() >= 1, why="one is sent")
    hub.kill()
    with LoopbackHub.start_process(tmp_path / "hub", port=hub.port) as again:
        desk.hub = again
        ran = push.ended()
        if ran.returncode:  # it was away for longer than ten attempts of hundredths of a second
            assert "run the same command again later" in ran.stderr
            ok(penstock(*words, env=desk.env()))
        assert len(desk.commits()) == 1
        assert len(desk.shards()) == 8


# -- answers that will not be -----------------------------------------------------------------------------------------


def test_a_token_that_expires_half_way(at_hub: Desk) -> None:
    words = few(at_hub, 40)
    ran = at_hub.run(*words, token="hf_brief")
    assert ran.returncode == 2
    said = ran.stderr.splitlines()[-1]
    assert said.startswith("penstock: ")
    assert "expired" in said
    assert "give a token that may write here (hf auth login, HF_TOKEN or token=) and run the same command again" in said
    assert 1 <= at_hub.sent() < 40
    assert at_hub.commits() == []
    assert at_hub.says("hf_brief") == []
    before = at_hub.uploads()
    assert sum(before.values()) < BRIEF
    ok(at_hub.run(*words))
    assert at_hub.says("hf_writer") == []
    whole(at_hub)
    assert sum(at_hub.uploads().values()) == 40


def test_a_token_that_is_revoked_before_the_commit(at_hub: Desk) -> None:
    words = few(at_hub, 3)
    at_hub.hub.set_faults(rules=(Rule(COMMIT, "status:403"),))
    ran = at_hub.run(*words)
    refused_at_the_end(ran, 2, "the commit was refused (403")
    ok(at_hub.run(*words))
    whole(at_hub)


def refused_at_the_end(ran: Ran, code: int, *names: str) -> None:
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("penstock: ")]
    for name in names:
        assert name in said


def test_what_the_hub_will_never_take_is_said_with_its_words(desk: Desk) -> None:
    words = few(desk, 3)
    desk.hub.set_faults(rules=(Rule(COMMIT, "status:400"),))
    refused_at_the_end(desk.run(*words), 1, "Bad Request (injected)")
    assert desk.asked(COMMIT, answered=False)[0]["status"] == 400
    assert len(desk.asked(COMMIT, answered=False)) == 1


# -- files that do not hold still -------------------------------------------------------------------------------------


def touched(path: Path) -> None:
    """Other bytes, the same size."""
    about = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1_000))


CHANGES = {
    "gone": lambda path: path.unlink(),
    "shorter": lambda path: os.truncate(path, 100),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "other bytes": touched,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_between_plan_and_upload_is_named(desk: Desk, change: str) -> None:
    words = few(desk)
    desk.hub.set_faults(rules=(Rule("repos/create", "hang:0.7"),))
    push = desk.start(*words)
    waits(desk, desk.started, push, why="it is planned")
    CHANGES[change](scans(desk)[2])
    refused_at_the_end(push.ended(), 1, "scan-0002.nii.gz")
    assert desk.commits() == []
    assert desk.asked(COMMIT, answered=False) == []


def test_a_file_that_changes_between_hashing_and_sending_is_named(desk: Desk) -> None:
    words = few(desk, 2)
    desk.hub.set_faults(rules=(Rule("preupload", "hang:0.7", times=2),))
    push = desk.start(*words)
    waits(desk, lambda: desk.hashed() == 2, push, why="both are hashed")
    touched(scans(desk)[1])
    refused_at_the_end(push.ended(), 1, "scan-0001.nii.gz")
    assert desk.commits() == []


def test_a_file_that_changes_while_it_is_sent_is_named(desk: Desk) -> None:
    """The Hub reads slowly: the first bytes are sent, the last are not yet read."""
    words = few(desk, 1, size=24_000_000)
    desk.hub.set_faults(rules=(Rule(PUT, "hang:0.7"),))
    push = desk.start(*words)
    waits(desk, lambda: desk.asked("objects/batch"), push, why="it is on its way")
    time.sleep(0.2)
    os.truncate(scans(desk)[0], 20_000_000)
    refused_at_the_end(push.ended(), 1, "scan-0000.nii.gz")
    assert desk.commits() == []


def test_a_parquet_file_that_changes_is_named(desk: Desk) -> None:
    make_parquet(desk.folder / "data", rows=400, files=2, groups=2)
    words = ("push", desk.folder / "data", desk.repo, "--max-shard-size", "20KB")
    desk.hub.set_faults(rules=(Rule("repos/create", "hang:0.7"),))
    push = desk.start(*words)
    waits(desk, desk.started, push, why="it is planned")
    make_parquet(desk.folder / "data", rows=400, files=2, groups=2, seed=8)
    refused_at_the_end(push.ended(), 1, ".parquet")
    assert desk.commits() == []


def test_a_file_that_is_not_there_at_all_is_named_before_anything(desk: Desk) -> None:
    words = few(desk)
    scans(desk)[3].unlink()
    refused(desk.run(*words), 2, "scan-0003.nii.gz", "row 3")
    assert {entry["method"] for entry in desk.hub.log()} == {"GET"}  # who the token is, and what is there

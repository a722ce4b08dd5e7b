"""Killed, stopped, changed, torn: what the same command does next. Every end is that of a run nobody disturbed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import penstock as ps
from command import Ran, Running, digests, make_parquet, make_table, ok, penstock, receipt_of, refused, state_of, until
from penstock import run
from penstock.errors import DestinationConflict

ROWS, HELD_FROM = 4_000, 2_000

FUNCTIONS = """
import os
import time

WORD = "first"


def note(batch):
    with open(os.environ["CALLS"], "a") as f:
        f.write(f"{batch.column('id')[0].as_py()}\\n")
    while batch.column("id")[0].as_py() >= 2000 and os.path.exists(os.environ["HOLD"]):
        time.sleep(0.005)
    return batch
"""


@dataclass
class Job:
    """A pipeline whose later tasks wait while a file is there: so a run can be met half way."""

    folder: Path
    source: Path
    words: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def hold(self) -> Path:
        return self.folder / "hold"

    @property
    def journal(self) -> Path:
        return self.out / ".penstock" / "journal.jsonl"

    @property
    def work(self) -> Path:
        return self.out / ".penstock" / "work"

    def env(self) -> dict[str, str]:
        return {"CALLS": str(self.folder / "calls"), "HOLD": str(self.hold)}

    def calls(self) -> list[int]:
        return [int(line) for line in (self.folder / "calls").read_text().split()]

    def write_pipeline(self, **changes: Any) -> None:
        said: dict[str, Any] = {
            "memory": "400MB",
            "workers": 1,
            "read": str(self.source),
            "steps": [{"map": "mine:note"}],
            "write": {"to": str(self.out), "max_shard_size": "100kB"},
        }
        (self.folder / "p.yaml").write_text(json.dumps({**said, **changes}))

    def start(self) -> Running:
        return Running("run", self.folder / "p.yaml", *self.words, env=self.env())

    def run(self, *words: str) -> Ran:
        return penstock("run", self.folder / "p.yaml", *self.words, *words, env=self.env())

    def committed(self) -> int:
        return self.journal.read_text().count('"key":"task/') if self.journal.exists() else 0

    def start_and_hold(self) -> Running:
        """Under way, with every task committed that does not wait."""
        self.hold.touch()
        running = self.start()
        until(lambda: self.committed() >= 4 or running.process.poll() is not None, why="tasks before the held ones")
        assert running.process.poll() is None, running.ended()
        return running

    def killed_half_way(self) -> int:
        """SIGKILL of everything, half way; gives how many tasks were committed."""
        running = self.start_and_hold()
        for pid in running.alive():
            os.kill(pid, signal.SIGKILL)
        running.process.communicate()
        self.hold.unlink()
        return self.committed()


def make_job(folder: Path, source: Path) -> Job:
    (folder / "mine.py").write_text(FUNCTIONS)
    job = Job(folder, source)
    job.write_pipeline()
    return job


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "source"
    make_parquet(folder, rows=ROWS, files=8, groups=1)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of a run nobody disturbed."""
    job = make_job(tmp_path_factory.mktemp("whole"), source)
    ok(job.run())
    return digests(job.out)


@pytest.fixture
def job(source: Path, tmp_path: Path) -> Iterator[Job]:
    made = make_job(tmp_path, source)
    yield made
    made.hold.unlink(missing_ok=True)


@pytest.fixture
def own_source(tmp_path: Path) -> Job:
    """A job killed half way whose source the test may change."""
    make_parquet(tmp_path / "source", rows=ROWS, files=8, groups=1)
    job = make_job(tmp_path, tmp_path / "source")
    job.killed_half_way()
    return job


@pytest.fixture(scope="module")
def killed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = make_job(tmp_path_factory.mktemp("killed"), source)
    made.killed_half_way()
    return made


@pytest.fixture
def half(killed: Job, tmp_path: Path) -> Job:
    """A job that was killed half way: a copy of one such moment."""
    made = make_job(tmp_path, killed.source)
    shutil.copytree(killed.out, made.out)
    shutil.copy(killed.folder / "calls", made.folder / "calls")
    return made


def finished_as(whole: dict[str, str], job: Job) -> None:
    ok(job.run())
    assert digests(job.out) == whole
    assert state_of(job.out) == ["receipt.json"]


# -- after success, and other plans -----------------------------------------------------------------------------------


def test_same_command_after_success_is_already_done(tmp_path: Path) -> None:
    make_parquet(tmp_path / "source")
    out = tmp_path / "out"
    words = ("convert", tmp_path / "source", out, "--memory", "300MB")
    ok(penstock(*words))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert ok(penstock(*words)).stdout.startswith("already done")
    assert ok(penstock(*words, "--workers", "1", "--memory", "1GB", "--json")).json()["already_done"] is True
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_shard_that_went_away_after_success_is_noticed(tmp_path: Path) -> None:
    make_parquet(tmp_path / "source")
    dataset = ps.read(tmp_path / "source")
    dataset.write(tmp_path / "out", memory="300MB")
    next((tmp_path / "out").glob("part-*")).unlink()
    with pytest.raises(DestinationConflict, match=r"part-00000-of-00001.*restart"):
        dataset.write(tmp_path / "out", memory="300MB")
    assert dataset.write(tmp_path / "out", memory="300MB", restart=True).rows["written"] == 1_000


def test_another_plan_is_refused_with_what_differs(tmp_path: Path) -> None:
    make_parquet(tmp_path / "source")
    source, out = tmp_path / "source", tmp_path / "out"
    ps.read(source).write(out, memory="300MB")
    before = digests(out)
    ran = penstock("convert", source, out, "--max-shard-size", "3MB")
    refused(ran, 2, "write.max_shard_size was 500000000, is now 3000000", "--restart")
    with pytest.raises(DestinationConflict, match=r"steps was 0 entries, is now 1 entries|steps.*select"):
        ps.read(source).select("id").write(out, memory="300MB")
    pq.write_table(make_table(10), source / "02.parquet")
    refused(penstock("convert", source, out), 2, "02.parquet", "--restart")
    assert digests(out) == before


def test_another_plan_is_refused_while_one_is_unfinished(half: Job, whole: dict[str, str]) -> None:
    half.write_pipeline(write={"to": str(half.out), "max_shard_size": "1MB"})
    refused(half.run(), 2, "unfinished", "max_shard_size was 100000, is now 1000000", "--restart")
    half.write_pipeline()
    finished_as(whole, half)


def test_restart_starts_over(half: Job, whole: dict[str, str]) -> None:
    half.write_pipeline(write={"to": str(half.out), "max_shard_size": "50kB"})
    ok(half.run("--restart"))
    assert len(digests(half.out)) > len(whole)
    half.write_pipeline()
    ok(half.run("--restart"))
    assert digests(half.out) == whole
    assert state_of(half.out) == ["receipt.json"]
    tasks = receipt_of(half.out)["tasks"]
    assert tasks["run"] == tasks["planned"]


def test_two_at_once_one_wins(job: Job, whole: dict[str, str]) -> None:
    first = job.start_and_hold()
    refused(job.run(), 1, "out", "another run is writing here", "wait for it to end")
    refused(job.run("--restart"), 1, "another run is writing here")
    assert first.process.poll() is None
    job.hold.unlink()
    ok(first.ended())
    assert digests(job.out) == whole


def test_run_that_finished_while_another_was_planning_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both looked before either had finished: the second must look again once it holds the lock."""
    make_parquet(tmp_path / "source", rows=4_000)
    source, out = ps.read(tmp_path / "source"), tmp_path / "out"
    plan_ahead = run.Run.plan_ahead

    def other_finishes_first(self: run.Run) -> Any:
        monkeypatch.setattr(run.Run, "plan_ahead", plan_ahead)
        source.write(out, memory="300MB", max_shard_size="50kB")
        return plan_ahead(self)

    monkeypatch.setattr(run.Run, "plan_ahead", other_finishes_first)
    with pytest.raises(DestinationConflict):
        source.select("id").write(out, memory="300MB", max_shard_size="10kB")
    receipt = receipt_of(out)
    assert sorted(digests(out)) == [shard["path"] for shard in receipt["shards"]]
    assert receipt["plan"]["write"]["max_shard_size"] == 50_000


# -- stopped and killed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGINT to all, as a terminal sends it"])
def test_stopped(how: str, job: Job, whole: dict[str, str]) -> None:
    job.write_pipeline(workers=2)
    running = job.start_and_hold()
    until(lambda: len(running.alive()) == 3, why="the command and two workers")
    began = time.monotonic()
    if how == "SIGTERM":
        os.kill(running.process.pid, signal.SIGTERM)
    elif how == "SIGINT":
        os.kill(running.process.pid, signal.SIGINT)
    else:
        os.killpg(running.process.pid, signal.SIGINT)
    ran = running.ended(timeout=20)
    assert time.monotonic() - began < 5
    assert ran.returncode == 130
    assert ran.stderr.count("\n") == 1
    assert "what is committed stays" in ran.stderr
    assert f"penstock run {job.folder / 'p.yaml'}" in ran.stderr
    assert running.alive() == []
    assert not [path for path in job.out.rglob("*") if path.name.endswith(".tmp")]
    done = job.committed()
    assert done >= 4
    if how == "SIGINT":
        job.hold.unlink()
        finished_as(whole, job)
        tasks = receipt_of(job.out)["tasks"]
        assert tasks["run"] == tasks["planned"] - done


def test_how_to_go_on_can_be_typed_again(job: Job, tmp_path: Path) -> None:
    """A path with a space and a quoted glob: what is said must be a command a shell takes."""
    renamed = job.folder / "my pipeline*.yaml"
    (job.folder / "p.yaml").rename(renamed)
    job.hold.touch()
    running = Running("run", renamed, env=job.env())
    until(lambda: job.committed() >= 1, why="a task")
    os.kill(running.process.pid, signal.SIGINT)
    ran = running.ended(timeout=20)
    said = ran.stderr.strip().partition("go on with: ")[2]
    assert shlex.split(said) == ["penstock", "run", str(renamed)]


def test_supervisor_killed_alone_leaves_no_worker(job: Job, whole: dict[str, str]) -> None:
    job.write_pipeline(workers=2)
    running = job.start_and_hold()
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.communicate()
    until(lambda: running.alive() == [], seconds=10, why="workers end with their supervisor")
    job.hold.unlink()
    finished_as(whole, job)


def test_killed_and_gone_on_runs_only_what_is_missing(half: Job, whole: dict[str, str]) -> None:
    done = half.committed()
    before = half.calls()
    finished_as(whole, half)
    tasks = receipt_of(half.out)["tasks"]
    assert tasks["run"] == tasks["planned"] - done
    # Every batch once, and again only those that were in hand when it was killed.
    assert set(half.calls()) == set(range(0, ROWS, ROWS // 8))
    assert len(half.calls()) <= tasks["planned"] + 2
    assert not set(before[:done]) & set(half.calls()[len(before) :])


def test_killed_and_gone_on_with_another_scratch(job: Job, whole: dict[str, str]) -> None:
    """Scratch is no part of the plan: work committed in one place is found, or made again, from another."""
    job.killed_half_way()
    job.words = ["--scratch", str(job.folder / "scratch")]
    finished_as(whole, job)
    assert list(job.folder.glob("scratch/*")) == []


def test_killed_and_gone_on_without_the_scratch(job: Job, whole: dict[str, str]) -> None:
    job.words = ["--scratch", str(job.folder / "scratch")]
    job.killed_half_way()
    assert any((job.folder / "scratch").rglob("*.parquet"))
    shutil.rmtree(job.folder / "scratch")
    finished_as(whole, job)


def test_killed_between_receipt_and_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_parquet(tmp_path / "source")
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("penstock.destination.Destination.clean", lambda self: None)
        ps.read(tmp_path / "source").write(out, memory="300MB", rewrite=True)
    assert "journal.jsonl" in state_of(out)
    again = ps.read(tmp_path / "source").write(out, memory="300MB", rewrite=True)
    assert again.already_done
    assert state_of(out) == ["receipt.json"]


def test_killed_while_shards_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shards have their names and there is no receipt yet: the next run names the others."""
    make_parquet(tmp_path / "source", files=4)
    dataset, out = ps.read(tmp_path / "source"), tmp_path / "out"
    dataset.write(tmp_path / "whole", memory="300MB", max_shard_size="20kB")
    replace, renamed = Path.replace, 0

    def breaks_off(self: Path, target: Path) -> Path:
        nonlocal renamed
        renamed += Path(target).name.startswith("part-")
        if renamed == 3:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", breaks_off)
        dataset.write(out, memory="300MB", max_shard_size="20kB")
    assert 0 < len(digests(out)) < len(digests(tmp_path / "whole"))
    assert dataset.write(out, memory="300MB", max_shard_size="20kB").tasks["run"] == 0
    assert digests(out) == digests(tmp_path / "whole")
    assert state_of(out) == ["receipt.json"]


# -- what changed meanwhile -------------------------------------------------------------------------------------------


def test_source_file_changed_between_kill_and_resume(own_source: Job) -> None:
    pq.write_table(make_table(ROWS // 8, seed=99), own_source.source / "00.parquet")
    refused(own_source.run(), 2, "00.parquet", "--restart")
    ok(own_source.run("--restart"))
    first = pq.read_table(sorted(own_source.out.glob("part-*"))[0])
    assert first["text"][0].as_py() == make_table(ROWS // 8, seed=99)["text"][0].as_py()


def test_source_file_changed_with_its_size_and_times_kept(own_source: Job) -> None:
    """The fingerprint holds a hash of head and tail, where footers are."""
    path = own_source.source / "03.parquet"
    about, data = path.stat(), bytearray(path.read_bytes())
    data[100] ^= 0xFF
    with path.open("r+b") as f:
        f.write(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    refused(own_source.run(), 2, "03.parquet", "--restart")


def test_source_file_changed_while_running(tmp_path: Path) -> None:
    make_parquet(tmp_path / "source", rows=ROWS, files=8, groups=1)
    job = make_job(tmp_path, tmp_path / "source")
    running = job.start_and_hold()
    pq.write_table(make_table(ROWS // 8, seed=99), job.source / "07.parquet")
    job.hold.unlink()
    ran = running.ended()
    refused(ran, 1, "07.parquet", "changed since this run was planned", "--restart")


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda code: code.replace("return batch", "return batch.slice(0)"), True),
        (lambda code: "# moved down\n\n\n" + code + "\n# and more below\n", False),
    ],
    ids=["edited", "moved to another line"],
)
def test_map_function_between_kill_and_resume(
    change: Callable[[str], str], noticed: bool, half: Job, whole: dict[str, str]
) -> None:
    (half.folder / "mine.py").write_text(change(FUNCTIONS))
    if noticed:
        refused(half.run(), 2, "map.code", "--restart")
    else:
        finished_as(whole, half)


def test_closure_that_changed_is_noticed(tmp_path: Path) -> None:
    make_parquet(tmp_path / "source")

    def adds(number: int) -> Callable[[Any], Any]:
        return lambda columns: {"id": columns["id"] + number}

    def write(number: int) -> ps.Receipt:
        dataset = ps.read(tmp_path / "source").map(adds(number), format="numpy")
        return dataset.write(tmp_path / "out", memory="300MB")

    write(1)
    assert write(1).already_done
    with pytest.raises(DestinationConflict, match="code"):
        write(2)


# -- torn and missing -------------------------------------------------------------------------------------------------


def test_torn_journal_tail(half: Job, whole: dict[str, str]) -> None:
    with half.journal.open("r+b") as f:
        f.truncate(half.journal.stat().st_size - 7)
    finished_as(whole, half)


def test_garbage_after_the_journal(half: Job, whole: dict[str, str]) -> None:
    done = half.committed()
    with half.journal.open("ab") as f:
        f.write(b'{"key": "task/p0/000007"}\n' + os.urandom(300))
    finished_as(whole, half)
    tasks = receipt_of(half.out)["tasks"]
    assert tasks["run"] == tasks["planned"] - done


def test_committed_fragment_that_went_away(half: Job, whole: dict[str, str]) -> None:
    """Somebody tidied up: its task is run again."""
    sorted(half.work.glob("*.parquet"))[0].unlink()
    finished_as(whole, half)


def test_committed_fragment_that_was_torn(half: Job, whole: dict[str, str]) -> None:
    """Scratch is not synced, so a power cut may leave one short: its task is run again."""
    fragment = sorted(half.work.glob("*.parquet"))[0]
    with fragment.open("r+b") as f:
        f.truncate(fragment.stat().st_size // 2)
    finished_as(whole, half)


def test_temporary_files_left_behind(half: Job, whole: dict[str, str]) -> None:
    (half.work / ".p0-000006-0000.parquet.12345.tmp").write_bytes(b"half a file")
    (half.work / "p0-000006-0000.parquet").write_bytes(b"renamed, never committed")
    (half.out / ".penstock" / ".receipt.json.12345.tmp").write_bytes(b"{")
    finished_as(whole, half)

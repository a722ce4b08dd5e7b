"""Workers and their supervisor: functions that raise, end, kill, overrun and print, and what the run says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from command import as_lines, digests, make_parquet, ok, penstock, read_back, receipt_of
from limits import require_kernel_limits, run_limited
from penstock.errors import FunctionFailed, OverBudget, PenstockError, WorkerDied

MANY_TASKS: dict[str, Any] = {"memory": "400MB", "max_shard_size": "30kB", "workers": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 rows in four files, one row group each: about 200 kB."""
    folder = tmp_path_factory.mktemp("engine") / "source"
    make_parquet(folder, rows=1_000, files=4, groups=1)
    return folder


def at_row(number: int, do: Callable[[], object]) -> Callable[[Any], Any]:
    """A function that does something in the batch that holds a row, and nothing to the others."""

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        first = batch.column("id")[0].as_py()
        if first <= number < first + batch.num_rows:
            do()
        return batch

    return function


# -- death ------------------------------------------------------------------------------------------------------------


def test_task_that_kills_its_worker_again_and_again(source: Path, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"

    def die() -> None:
        with deaths.open("a") as f:
            f.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    dataset = ps.read(source).map(at_row(600, die))
    with pytest.raises(WorkerDied) as caught:
        dataset.write(tmp_path / "out", **MANY_TASKS)
    assert "step 1 (map), 02.parquet rows 0 to 249" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    assert "3 times" in str(caught.value)
    assert deaths.read_text() == "xxx"
    assert caught.value.exit_code == 1
    assert digests(tmp_path / "out") == {}
    journal = (tmp_path / "out" / ".penstock" / "journal.jsonl").read_text()
    assert journal.count('"key":"task/') >= 2  # finished work is kept


def test_task_that_kills_its_worker_once_is_tried_again(source: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def die_once() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    ps.read(source).map(at_row(600, die_once)).write(tmp_path / "out", **MANY_TASKS)
    assert mark.exists()
    assert read_back(tmp_path / "out")["id"].to_pylist() == list(range(1_000))


# -- exceptions -------------------------------------------------------------------------------------------------------


def test_function_that_raises(source: Path, tmp_path: Path) -> None:
    def broken() -> None:
        raise KeyError("no such word")

    with pytest.raises(FunctionFailed) as caught:
        ps.read(source).select(["id", "text"]).map(at_row(999, broken)).write(tmp_path / "out", **MANY_TASKS)
    said = str(caught.value)
    assert "step 2 (map), 03.parquet rows 0 to 249" in said
    assert "KeyError: 'no such word'" in said
    assert "test_local.py, line" in said
    assert "what is committed stays" in said
    assert digests(tmp_path / "out") == {}


def test_error_is_one_line_whatever_the_exception_says(source: Path, tmp_path: Path) -> None:
    def talkative() -> None:
        raise ValueError("first line\nsecond line\n\n  third")

    with pytest.raises(FunctionFailed) as caught:
        ps.read(source).map(at_row(0, talkative)).write(tmp_path / "out", **MANY_TASKS)
    assert "\n" not in str(caught.value)
    assert "first line" in str(caught.value)


def test_exception_that_cannot_be_pickled(source: Path, tmp_path: Path) -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")
            self.file = sys.stderr

    def odd() -> None:
        raise Odd(1, 2)

    with pytest.raises(FunctionFailed, match="Odd: 1 and 2"):
        ps.read(source).map(at_row(0, odd)).write(tmp_path / "out", **MANY_TASKS)


def test_sys_exit_in_a_function(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FunctionFailed, match=r"step 1 \(map\), 01\.parquet rows 0 to 249.*SystemExit"):
        ps.read(source).map(at_row(300, sys.exit)).write(tmp_path / "out", **MANY_TASKS)


def test_os_exit_in_a_function(source: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"step 1 \(map\), 01\.parquet rows 0 to 249.*code 7"):
        ps.read(source).map(at_row(300, lambda: os._exit(7))).write(tmp_path / "out", **MANY_TASKS)


def test_function_that_cannot_be_sent(source: Path, tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(PenstockError):
        ps.read(source).map(lambda batch: (lock, batch)[1], version="1").write(tmp_path / "out", **MANY_TASKS)


# -- where functions come from ----------------------------------------------------------------------------------------

SCRIPT = """
import sys
import penstock as ps

def double(columns):
    return {"id": columns["id"], "twice": [helper(number) for number in columns["id"]]}

def helper(number):
    return number * FACTOR

FACTOR = 2
offset = 5
kept = ps.read(sys.argv[1]).filter(lambda batch: [number % 2 == 0 for number in batch["id"].to_pylist()])

def shifted(by):
    return lambda row: {**row, "shifted": row["id"] + by}

print("script runs")
kept.map(double, format="python").map(shifted(offset), format="rows").write(sys.argv[2], memory="400MB", workers=2)
"""


def test_script_with_no_guard(source: Path, tmp_path: Path) -> None:
    """Functions of `__main__`, lambdas and closures; the script is not run again in its workers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(source), str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "script runs\n"
    even = list(range(0, 1_000, 2))
    made = read_back(tmp_path / "out").to_pydict()
    assert made == {"id": even, "twice": [2 * n for n in even], "shifted": [n + 5 for n in even]}


# -- memory -----------------------------------------------------------------------------------------------------------

OVERRUN = """
import numpy as np

def grow(batch):
    if batch.column("id")[0].as_py() >= 500:
        held = [np.ones(4_000_000) for _ in range({count})]
    return batch

def below(batch):
    import subprocess, sys
    if batch.column("id")[0].as_py() >= 500:
        code = "import time; h = []\\nfor _ in range(60): h.append(bytearray(b'x' * 10_000_000)); time.sleep(0.02)"
        subprocess.run([sys.executable, "-c", code])
    return batch
"""


def overrunning(tmp_path: Path, source: Path, function: str, *, count: int = 100) -> Path:
    (tmp_path / "mine.py").write_text(OVERRUN.replace("{count}", str(count)))
    (tmp_path / "p.yaml").write_text(
        f"read: {source}\nsteps:\n  - map: mine:{function}\n"
        f"write: {{to: {tmp_path / 'out'}, max_shard_size: 30kB}}\nmemory: 300MB\nworkers: 2\n"
    )
    return tmp_path / "p.yaml"


@pytest.mark.parametrize("function", ["grow", "below"], ids=["itself", "a process it starts"])
def test_overrun_is_stopped_before_the_kernel_has_to(function: str, source: Path, tmp_path: Path) -> None:
    require_kernel_limits()
    words = [sys.executable, "-m", "penstock.cli.main", "run", str(overrunning(tmp_path, source, function))]
    run = run_limited(words, limit=500_000_000, timeout=60)
    assert run.returncode == 1, run.stderr
    assert (run.kernel_kills, run.left) == (0, 0)
    assert run.stderr.count("\n") == 1
    for name in ("step 1 (map)", "02.parquet rows 0 to 249", "--memory 300MB", "what is committed stays"):
        assert name in run.stderr
    assert run.anonymous <= 330_000_000  # what can be allocated between two looks of the supervisor
    assert digests(tmp_path / "out") == {}
    assert (tmp_path / "out" / ".penstock" / "journal.jsonl").read_text().count('"key":"task/') >= 2


def test_one_allocation_far_beyond_the_budget(source: Path, tmp_path: Path) -> None:
    """Too fast for any sampler: the backstop turns it into the same error."""

    def leap() -> None:
        np.ones(8_000_000_000 // 8)

    with pytest.raises(OverBudget, match=r"step 1 \(map\), 00\.parquet rows 0 to 249"):
        ps.read(source).map(at_row(0, leap)).write(tmp_path / "out", **MANY_TASKS)


def test_overrun_keeps_finished_work_and_can_be_gone_on_with(source: Path, tmp_path: Path) -> None:
    """The budget is no part of the plan: the same pipeline with more memory runs only what is missing."""
    pipeline = overrunning(tmp_path, source, "grow", count=10)  # 320 MB
    first = penstock("run", pipeline)
    assert first.returncode == 1, first.stderr
    ok(penstock("run", pipeline, "--memory", "1GB"))
    tasks = receipt_of(tmp_path / "out")["tasks"]
    assert tasks["run"] <= tasks["planned"] - 2
    assert read_back(tmp_path / "out")["id"].to_pylist() == list(range(1_000))


def test_workers_is_a_ceiling(source: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        made = ps.read(source).write(
            tmp_path / str(workers), memory="2GB", max_shard_size="30kB", rewrite=True, workers=workers
        )
        assert 1 <= made.memory["workers"] <= workers


def test_workers_that_do_not_fit_are_not_started(source: Path, tmp_path: Path) -> None:
    words = ["--memory", "190MB", "--max-shard-size", "30kB", "--rewrite", "--workers", "4"]
    ok(penstock("convert", source, tmp_path / "out", *words))
    memory = receipt_of(tmp_path / "out")["memory"]
    assert memory["workers"] == 1
    assert memory["measured"] <= memory["projected"] <= 190_000_000


@pytest.mark.parametrize("what", ["splice", "rewrite", "jsonl"])
def test_smallest_budget_named_works(what: str, source: Path, tmp_path: Path) -> None:
    if what == "jsonl":
        (tmp_path / "a.jsonl").write_text(as_lines(pq.read_table(source)))
        source = tmp_path / "a.jsonl"
    words = ["convert", str(source), str(tmp_path / "out"), *(["--rewrite"] if what == "rewrite" else [])]
    refusal = penstock(*words, "--memory", "20MB")
    assert refusal.returncode == 3, refusal.stderr
    assert refusal.stderr.count("\n") == 1
    assert digests(tmp_path / "out") == {}
    named = refusal.stderr.strip().rpartition("--memory ")[2]
    ok(penstock(*words, "--memory", named))


def test_heavy_caller_is_not_held_against_the_budget(source: Path, tmp_path: Path) -> None:
    """A notebook that holds data of its own: law 1 covers what Penstock was granted."""
    held = np.ones(50_000_000)
    made = ps.read(source).write(tmp_path / "out", memory="300MB", rewrite=True)
    assert made.memory["measured"] < 300_000_000
    assert held.nbytes == 400_000_000


# -- order and silence ------------------------------------------------------------------------------------------------


def test_prints_of_functions_do_not_reach_standard_output(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, sys\ndef loud(batch):\n    print('hello from the function')\n"
        "    os.write(1, b'and from below\\n')\n    return batch\n"
    )
    (tmp_path / "p.yaml").write_text(f"read: {source}\nsteps: [{{map: 'mine:loud'}}]\nwrite: {tmp_path / 'out'}\n")
    ran = ok(penstock("run", tmp_path / "p.yaml", "--json", "--memory", "400MB"))
    assert ran.json()["rows"]["written"] == 1_000
    assert "hello from the function" in ran.stderr
    shown = ok(penstock("show", tmp_path / "p.yaml", "--json"))
    assert len(shown.json()["rows"]) == 3


def test_no_worker_is_left_after_an_error(source: Path, tmp_path: Path) -> None:
    before = set(children())

    def broken() -> None:
        raise ValueError

    with pytest.raises(FunctionFailed):
        ps.read(source).map(at_row(0, broken)).write(tmp_path / "out", **MANY_TASKS)
    assert set(children()) <= before


def children() -> list[int]:
    from penstock.memory import children

    return children(os.getpid())


def test_spliced_worker_is_small(source: Path, tmp_path: Path) -> None:
    """It imports no Arrow: the whole tree of a splice takes what two interpreters do."""
    ok(penstock("convert", source, tmp_path / "out", "--memory", "100MB", "--workers", "1"))
    assert receipt_of(tmp_path / "out")["memory"]["measured"] < 60_000_000
    assert pq.read_table(tmp_path / "out").num_rows == 1_000

"""The promises at full size, one test for each, against the kernel's own count. `make proof` prints the figures."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from limits import limited_group
from penstock.dataset import write_options
from penstock.plan import plan_pass
from proof.measured import PENSTOCK, Data, digest, figures, files_of, limited, mb, receipt_of, say, shards

pytestmark = pytest.mark.proof

BUDGET = 400_000_000
MEMORY = ("--memory", "400MB")
KILLS = 20

FUNCTIONS = '''
import os

import numpy as np
import pyarrow as pa


def across(batch):
    """Looks across its batch: it must see the same batches whatever the budget."""
    if "CALLS" in os.environ:
        with open(os.environ["CALLS"], "a") as f:
            f.write(f"{batch.column('id')[0].as_py()}\\\\n")
    place = pa.array(np.arange(batch.num_rows, dtype=np.int32))
    return batch.append_column("place", place).append_column("of", pa.array([batch.num_rows] * batch.num_rows))


def leap(batch):
    if batch.column("id")[0].as_py() >= LATE:
        held = np.ones(3_000_000_000 // 8)
    return batch


def climb(batch):
    if batch.column("id")[0].as_py() >= LATE:
        held = [np.ones(1_000_000) for _ in range(375)]
    return batch


LATE = 0
'''


def bounded(run: Any, dest: Path, *, limit: int, user: bool = False) -> dict[str, Any]:
    """Nothing was killed, and the receipt agrees with the kernel."""
    assert run.returncode == 0, run.stderr
    assert (run.kernel_kills, run.left) == (0, 0)
    memory: dict[str, Any] = receipt_of(dest)["memory"]
    say(figures(run, memory))
    assert memory["measured"] <= memory["allowed"] == limit
    assert memory["measured"] == pytest.approx(run.anonymous, rel=0.15, abs=8_000_000)
    if not user:
        assert memory["measured"] <= memory["projected"] <= 2 * memory["measured"]
    return memory


def pipeline(
    folder: Path, source: list[Path], function: str, out: Path, *, late: int = 0, shard: str = "500MB"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(FUNCTIONS.replace("\\\\n", "\\n").replace("LATE = 0", f"LATE = {late}"))
    said = {
        "read": [str(path) for path in source],
        "steps": [{"map": f"mine:{function}"}],
        "write": {"to": str(out), "max_shard_size": shard},
    }
    (folder / "p.yaml").write_text(json.dumps(said))
    return folder / "p.yaml"


# -- bounded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(), ("--rewrite",)], ids=["splice", "rewrite"])
def test_convert_of_6_gb_of_text_in_a_kernel_limit_that_is_the_budget(how: tuple[str], data: Data, work: Path) -> None:
    paths = data.text()
    run = limited(["convert", *paths, work / "out", *MEMORY, *how], limit=BUDGET)
    bounded(run, work / "out", limit=BUDGET)
    assert digest(shards(work / "out")) == data.digest("text", paths)


def test_rewrite_of_one_row_group_of_more_than_1_5_gb(data: Data, work: Path) -> None:
    paths = data.one_row_group()
    run = limited(["convert", *paths, work / "out", *MEMORY, "--rewrite"], limit=BUDGET)
    bounded(run, work / "out", limit=BUDGET)
    assert digest(shards(work / "out")) == data.digest("one-row-group", paths)


def test_jsonl_zst_that_inflates_more_than_100_fold(data: Data, work: Path) -> None:
    path, inflated, expected = data.inflating()
    say(f"{mb(path.stat().st_size)} that inflate to {mb(inflated)}, {inflated / path.stat().st_size:,.0f}-fold")
    assert inflated > 100 * path.stat().st_size
    run = limited(["convert", path, work / "out", *MEMORY], limit=BUDGET)
    bounded(run, work / "out", limit=BUDGET)
    assert digest(shards(work / "out")) == expected


@pytest.mark.parametrize("how", [(), ("--rewrite",)], ids=["splice", "rewrite"])
def test_memory_is_flat_over_1_4_and_16_times_the_data(how: tuple[str], data: Data, work: Path) -> None:
    paths = data.text()
    sixteen = [*paths, *paths, *paths][:16]
    peaks: dict[int, tuple[int, int]] = {}
    for times in (1, 4, 16):
        run = limited(["convert", *sixteen[:times], work / "out", *MEMORY, "--workers", "2", *how], limit=BUDGET)
        memory = bounded(run, work / "out", limit=BUDGET)
        peaks[times] = (memory["measured"], run.anonymous)
        shutil.rmtree(work / "out")
    for at, who in enumerate(("receipt", "kernel")):
        seen = [peak[at] for peak in peaks.values()]
        spread = (max(seen) - min(seen)) / min(seen)
        say(f"{who}: {', '.join(f'{times}x {mb(peak[at])}' for times, peak in peaks.items())}: {spread:.1%}")
        assert spread < 0.10 or not data.full


@pytest.mark.parametrize("what", ["splice", "rewrite", "jsonl"])
def test_smallest_budget_accepted_for_ordinary_data(what: str, data: Data, work: Path) -> None:
    """At most 256 MB; and it works, in a kernel limit that is this budget."""
    paths = data.lines() if what == "jsonl" else data.text()[:1]
    words = ["convert", *paths, work / "out", *(["--rewrite"] if what == "rewrite" else [])]
    refusal = subprocess.run(
        [*PENSTOCK, *map(str, words), "--memory", "10MB"], capture_output=True, text=True, check=False
    )
    assert refusal.returncode == 3, refusal.stderr
    named = refusal.stderr.strip().rpartition("--memory ")[2]
    limit = int(named.removesuffix("MB")) * 10**6
    say(f"{what}: the smallest budget named is {named}")
    assert limit <= 256_000_000
    bounded(limited([*words, "--memory", limit], limit=limit), work / "out", limit=limit)


# -- durable ----------------------------------------------------------------------------------------------------------


def test_20_sigkills_of_a_convert_with_a_map(data: Data, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, nothing left over, and no more tasks than the plan's and those in hand at each kill."""
    source = data.text()[:4]
    workers, chance = 2, random.Random(20)
    monkeypatch.setenv("CALLS", str(work / "calls"))
    words = [*PENSTOCK, "run", str(pipeline(work / "p", source, "across", work / "out", shard="100MB")),
             "--workers", str(workers), "--memory", "600MB"]  # fmt: skip
    began = time.monotonic()
    subprocess.run(words, check=True, capture_output=True)
    seconds = time.monotonic() - began
    whole = files_of(work / "out")
    planned = receipt_of(work / "out")["tasks"]["planned"]
    starts = first_rows_of_tasks(source, "100MB")
    assert count_tasks(work / "calls", starts) == len(starts)
    kills = rounds = most = 0
    while kills < KILLS:
        shutil.rmtree(work / "out")
        (work / "calls").write_text("")
        rounds, here, ended = rounds + 1, 0, False
        with limited_group(4_000_000_000) as group:
            while not ended and kills < KILLS:
                run = subprocess.Popen(group.enter_command(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                time.sleep(chance.uniform(0.1, 1.5 + seconds / 8))
                group.kill_all()
                errors = run.communicate()[1]
                ended = run.returncode == 0
                assert ended or run.returncode == -9, errors.decode()
                kills, here = kills + (not ended), here + (not ended)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert files_of(work / "out") == whole
        assert not list(work.rglob("*.tmp"))
        executed = count_tasks(work / "calls", starts)
        most = max(most, executed - len(starts))
        say(f"{here} kills: {executed} tasks executed of {len(starts)} planned; at most {len(starts) + here * workers}")
        assert executed <= len(starts) + here * workers
    say(f"{kills} kills in {rounds} rounds of a run of {seconds:.1f} s, {planned} tasks; {len(whole)} shards equal")


def first_rows_of_tasks(source: list[Path], shard: str) -> set[int]:
    """The id of the first row of each task: a function that notes the first id of its batch so counts executions."""
    import pyarrow.parquet as pq

    dataset = ps.read(source).map(lambda batch: batch)
    planned = plan_pass(dataset._chains, write_options(max_shard_size=shard), folder="")
    offsets = [pq.read_table(path, columns=["id"]).column(0)[0].as_py() for path in source]
    return {offsets[task.payload[1].spans[0].file] + task.payload[1].spans[0].first_row for task in planned.tasks}


def count_tasks(calls: Path, starts: set[int]) -> int:
    return sum(int(line) in starts for line in calls.read_text().split())


# -- deterministic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["rewrite", "map across its batch"])
def test_budgets_and_workers_give_the_same_bytes(what: str, data: Data, work: Path) -> None:
    source = data.text()[:1]

    def words(memory: str, workers: int, out: Path) -> list[str]:
        how = ["--memory", memory, "--workers", str(workers)]
        if what == "rewrite":
            return [*PENSTOCK, "convert", *map(str, source), str(out), "--rewrite", "--max-shard-size", "100MB", *how]
        return [*PENSTOCK, "run", str(pipeline(work / "p", source, "across", out, shard="100MB")), *how]

    first: dict[str, str] = {}
    seconds = 0.0
    for memory in ("300MB", "1GB", "4GB"):
        for workers in (1, 2, 3):
            began = time.monotonic()
            subprocess.run(words(memory, workers, work / "out"), check=True, capture_output=True)
            seconds = time.monotonic() - began
            used = receipt_of(work / "out")["memory"]["workers"]
            say(f"{memory}, {workers} workers ({used} started): {seconds:.1f} s")
            first = first or files_of(work / "out")
            assert files_of(work / "out") == first
            shutil.rmtree(work / "out")
    chance = random.Random(what)
    for one, other in ((("300MB", 1), ("4GB", 3)), (("4GB", 3), ("300MB", 1))):
        with limited_group(8_000_000_000) as group:
            run = subprocess.Popen(group.enter_command(words(*one, work / "out")), stderr=subprocess.DEVNULL)
            time.sleep(chance.uniform(0.3, 0.8) * seconds)
            group.kill_all()
            run.wait()
        subprocess.run(words(*other, work / "out"), check=True, capture_output=True)
        say(f"killed under {one}, finished under {other}: ended with {run.returncode}, then equal")
        assert files_of(work / "out") == first
        shutil.rmtree(work / "out")


# -- refused and stopped ----------------------------------------------------------------------------------------------


def test_refusal_of_a_value_of_900_mb(data: Data, work: Path) -> None:
    path, value = data.large_value(among=1), data.value()
    budget = "512MB" if data.full else "250MB"
    began = time.monotonic()
    refusal = subprocess.run(
        [*PENSTOCK, "convert", str(path), str(work / "out"), "--rewrite", "--memory", budget],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    say(f"a value of {mb(value)}: {refusal.stderr.strip()} ({seconds:.2f} s)")
    assert refusal.returncode == 3
    assert seconds < 3
    assert refusal.stderr.count("\n") == 1
    assert "a.parquet" in refusal.stderr and "row group 0" in refusal.stderr
    assert not (work / "out").exists()
    named = re.search(r"smallest budget that works is --memory (\d+)MB", refusal.stderr)
    assert named is not None
    limit = int(named[1]) * 10**6
    run = limited(["convert", path, work / "out", "--rewrite", "--memory", limit], limit=limit)
    bounded(run, work / "out", limit=limit)
    assert digest(shards(work / "out")) == data.digest("large-value-1", [path])


@pytest.mark.parametrize("among", [1, 100_000])
def test_value_of_900_mb_is_spliced_in_any_budget(among: int, data: Data, work: Path) -> None:
    path = data.large_value(among=among)
    run = limited(["convert", path, work / "out", "--memory", "100MB"], limit=100_000_000)
    bounded(run, work / "out", limit=100_000_000)
    assert digest(shards(work / "out")) == data.digest(f"large-value-{among}", [path])


def test_value_of_900_mb_hidden_among_100_000_small_rows(data: Data, work: Path) -> None:
    path = data.large_value(among=100_000)
    limit = 512_000_000 if data.full else 250_000_000
    run = limited(["convert", path, work / "out", "--rewrite", "--memory", limit], limit=limit)
    say(f"exit {run.returncode}: {run.stderr.strip()}; the kernel saw {mb(run.anonymous)}, {run.kernel_kills} kills")
    assert run.returncode in (1, 3)
    assert (run.kernel_kills, run.left) == (0, 0)
    assert run.anonymous <= limit
    assert "a.parquet" in run.stderr


@pytest.mark.parametrize("function", ["leap", "climb"])
def test_overrun_of_a_function_that_takes_3_gb(function: str, data: Data, work: Path) -> None:
    """Stopped with the step, the piece and the rows; finished work kept; the kernel kills nothing in 1 GB."""
    source = data.text()[:2]
    late = int(0.7 * sum(ps.read([path]).count() for path in source))
    run = limited(
        ["run", pipeline(work / "p", source, function, work / "out", late=late, shard="50MB"), "--memory", "512MB"],
        limit=1_000_000_000,
    )
    say(f"{run.stderr.strip()}; the kernel saw {mb(run.anonymous)}, {run.kernel_kills} kills, {run.seconds:.1f} s")
    assert run.returncode == 1
    assert (run.kernel_kills, run.left) == (0, 0)
    assert re.search(r"step 1 \(map\), part-\d+\.parquet rows [\d,]+ to [\d,]+", run.stderr)
    kept = (work / "out" / ".penstock" / "journal.jsonl").read_text().count('"key":"task/')
    say(f"{kept} tasks kept")
    assert kept > 0
    assert run.anonymous < 600_000_000


# -- light ------------------------------------------------------------------------------------------------------------


def test_help_is_quick_and_import_is_light() -> None:
    times = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([*PENSTOCK, "--help"], check=True, capture_output=True)
        times.append(time.monotonic() - began)
    say(f"penstock --help: {min(times):.3f} to {max(times):.3f} s")
    assert sorted(times)[2] < 0.5
    code = "import penstock, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "ray", "datasets", "transformers", "pandas", "pyarrow"} & set(found)

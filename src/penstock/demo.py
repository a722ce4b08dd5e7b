"""The whole job on a sample it makes itself: larger than its budget, killed half way, and finished all the same."""

from __future__ import annotations

import filecmp
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.budget import budget_words, format_size, parse_size
from penstock.dataset import read
from penstock.errors import DestinationConflict, PenstockError

if TYPE_CHECKING:
    import pyarrow as pa

MARK = ".penstock-demo"  # a folder that has it is ours, and what an earlier demo left in it may go
FILES, GROUPS = 4, 16  # of the sample: files, and row groups in each
SHARDS = 12
KEPT = 0.8

FUNCTIONS = f'''\
"""What the demo does to each batch. Change it and run again: Penstock notices that it is another plan."""

import pyarrow.compute as pc


def good(batch):
    return pc.less(batch.column("score"), {KEPT})


def tidy(batch):
    text = pc.utf8_trim_whitespace(batch.column("text"))
    return batch.set_column(1, "text", text).append_column("spaces", pc.count_substring(text, " "))
'''
PIPELINE = """\
memory: {memory}
read: sample
steps:
  - filter: functions:good
  - map: functions:tidy
write: {{to: {to}, max_shard_size: {shard}}}
"""


def demo(to: str, *, size: str, memory: str) -> int:
    """Every promise shown once on real work, and checked. Ends with 0 only if all of them held."""
    total, allowed = parse_size(size, name="--size"), parse_size(memory, name="--memory")
    folder = _empty_folder(Path(to))
    _say(f"1. A sample: {format_size(total)} of text; the job may take {format_size(allowed)} of memory")
    ids = _make_sample(folder / "sample", total)
    (folder / "functions.py").write_text(FUNCTIONS)
    for name in ("clean", "again"):
        words = PIPELINE.format(memory=budget_words(allowed), to=name, shard=budget_words(total // SHARDS))
        (folder / f"{name}.yaml").write_text(words)
    _say(f"made {to}/sample, and a filter and a function of our own in {to}/functions.py")

    _say("\n2. The plan, before anything is read")
    planned = json.loads(_penstock(folder, "plan", "clean.yaml", "--json", show=False))["tasks"]
    _penstock(folder, "plan", "clean.yaml")

    _say("\n3. The run, and a kill -9 half way")
    done = _run_and_kill(folder, "clean", after=max(1, planned // 2))
    _say(f"killed when {done} of {planned} tasks were done; nothing half made shows in {to}/clean")

    _say("\n4. The same command again: it goes on")
    _penstock(folder, "run", "clean.yaml")
    receipt = json.loads((folder / "clean/.penstock/receipt.json").read_text())
    tasks, used, shards = receipt["tasks"], receipt["memory"], [shard["path"] for shard in receipt["shards"]]
    _check(tasks["run"] <= tasks["planned"] - done, f"it ran {tasks['run']} of {tasks['planned']} tasks: only the rest")
    found = [number for batch in read(folder / "clean").batches() for number in batch.column("id").to_pylist()]
    _check(found == ids, f"all {len(ids):,} rows that belong there are there, once, in order")
    peak = f"peak {format_size(used['measured'])}, projected {format_size(used['projected'])}"
    _check(used["measured"] <= allowed, f"{peak}, allowed {format_size(allowed)}")

    _say("\n5. From the start, never killed, with twice the memory and two workers")
    _penstock(folder, "run", "again.yaml", "--workers", "2", "--memory", budget_words(2 * allowed))
    same, _, _ = filecmp.cmpfiles(folder / "clean", folder / "again", shards, shallow=False)
    _check(same == shards, f"the same {len(shards)} files, byte for byte")

    _say("\n6. A splice: Parquet re-sharded without decoding it")
    _penstock(
        folder, "convert", "sample", "resharded", "--max-shard-size", budget_words(total // 3), "--memory", "100MB"
    )
    _check(read(folder / "resharded").count() == read(folder / "sample").count(), "every row is there")
    _say(f"\nAll of it is in {to}, yours to look at: penstock show {shlex.quote(to)}/clean")
    return 0


def _empty_folder(folder: Path) -> Path:
    """A new or empty folder, or that of an earlier demo without what it made."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / MARK).exists():
        raise DestinationConflict("holds what no demo made", where=str(folder), do="choose an empty or a new --to")
    (folder / MARK).touch()
    for name in ("sample", "clean", "again", "resharded"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def _make_sample(folder: Path, total: int) -> list[int]:
    """Write it a row group at a time; the ids that must come out at the end."""
    import pyarrow.parquet as pq

    folder.mkdir()
    ids: list[int] = []
    groups = _row_groups(total // (FILES * GROUPS))
    for at in range(FILES):
        batch = next(groups)
        with pq.ParquetWriter(folder / f"part-{at}.parquet", batch.schema, compression="zstd") as writer:
            for left in reversed(range(GROUPS)):
                writer.write_batch(batch)
                ids += batch.column("id").to_numpy()[batch.column("score").to_numpy() < KEPT].tolist()
                batch = next(groups) if left else None
    return ids


def _row_groups(size: int) -> Iterator[pa.RecordBatch]:
    """Texts of 100 to 2,000 characters, in words that follow Zipf's law, each with a space after it."""
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(7)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)[random.integers(0, 26, (1 << 13, 9))]
    words = pa.array([bytes(word[: 2 + at % 7]).decode() + " " for at, word in enumerate(letters)])
    share = np.cumsum(1 / np.arange(1, len(words) + 1))
    rank_of = np.searchsorted(share / share[-1], np.arange(1 << 16) / (1 << 16)).astype(np.int32)
    first = 0
    while True:
        ends = np.cumsum(random.integers(100, 2_000, 1 + size // 1_070))
        text = words.take(pa.array(rank_of[random.integers(0, 1 << 16, ends[-1] // 4)]))
        starts = np.frombuffer(text.buffers()[1], np.int32)
        cuts = starts[np.searchsorted(starts, ends, side="right") - 1]  # each text ends with a word
        offsets = pa.py_buffer(np.concatenate([[0], cuts]).astype(np.int32))
        column = pa.StringArray.from_buffers(len(ends), offsets, text.buffers()[2])
        ids, score = np.arange(first, first + len(ends)), random.random(len(ends))
        yield pa.record_batch([pa.array(ids), column, pa.array(score)], names=["id", "text", "score"])
        first += len(ends)


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *words]


def _penstock(folder: Path, *words: str, show: bool = True) -> str:
    """Run a command in the demo's folder, as a reader could type it there; what it printed."""
    if show:
        _say(f"$ {shlex.join(['penstock', *words])}")
    done = subprocess.run(_command(*words), cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if show and done.stdout:
        _say(done.stdout.rstrip())
    if done.returncode != 0:
        raise PenstockError(f"`penstock {words[0]}` ended with code {done.returncode}; its message is above")
    return done.stdout


def _run_and_kill(folder: Path, name: str, *, after: int) -> int:
    """Start the run in a session of its own and SIGKILL all of it as soon as some tasks are in its journal."""
    _say(f"$ penstock run {name}.yaml")
    child = subprocess.Popen(_command("run", f"{name}.yaml"), cwd=folder, start_new_session=True)
    journal = folder / name / ".penstock" / "journal.jsonl"
    done = 0
    try:
        while done < after and child.poll() is None:
            time.sleep(0.01)
            with suppress(FileNotFoundError):
                done = journal.read_bytes().count(b'"key":"task/')
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.wait() != -signal.SIGKILL:
        raise PenstockError(f"`penstock run` ended with code {child.returncode} before it was half way")
    return done


def _check(held: bool, what: str) -> None:
    if not held:
        raise PenstockError(f"this did not hold: {what}")
    _say(f"✓ {what}")


def _say(text: str) -> None:
    clear = "\r\x1b[K" if sys.stdout.isatty() else ""  # what a killed run's progress left on this line
    sys.stdout.write(f"{clear}{text}\n")
    sys.stdout.flush()

"""The command line as a user runs it, and what of a run these tests look at."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.cli.main import main

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found


def penstock(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120
) -> Ran:
    """Run a command to its end."""
    done = subprocess.run(
        [*PENSTOCK, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def called(*words: str | Path) -> Ran:
    """The same command within this process: for words that are refused before anything starts."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    path = list(sys.path)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.path[:] = path
    return Ran(code, out.getvalue(), err.getvalue())


def ok(ran: Ran) -> Ran:
    assert ran.returncode == 0, ran.stderr
    return ran


def refused(ran: Ran, code: int, *names: str) -> str:
    """It ended with this code and one line on standard error that names all of these."""
    assert ran.returncode == code, ran.stderr
    assert ran.stdout == ""
    assert ran.stderr.startswith("penstock: ")
    assert ran.stderr.count("\n") == 1, ran.stderr
    for name in names:
        assert name in ran.stderr
    return ran.stderr


class Running:
    """A command under way. Everything it starts carries a mark, so that what is left of it can be found."""

    def __init__(self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._mark = f"PENSTOCK_TEST_MARK={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [*PENSTOCK, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **(env or {}), name: value},
            start_new_session=True,
        )

    def ended(self, *, timeout: float = 60) -> Ran:
        out, err = self.process.communicate(timeout=timeout)
        return Ran(self.process.returncode, out, err)

    def alive(self) -> list[int]:
        """Every live process of this command, the command itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                marked = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marked and state != "Z":
                found.append(int(entry.name))
        return found


def until(true: Callable[[], object], *, seconds: float = 60, why: str = "") -> None:
    """Look again and again until something holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {why or true}"
        time.sleep(0.01)


def digests(dest: Path) -> dict[str, str]:
    """Every file a destination shows, by digest."""
    return {
        path.relative_to(dest).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(dest.rglob("*"))
        if path.is_file() and ".penstock" not in path.parts
    }


def state_of(dest: Path) -> list[str]:
    """What the state folder holds; after success only the receipt."""
    return sorted(path.relative_to(dest / ".penstock").as_posix() for path in (dest / ".penstock").rglob("*"))


def receipt_of(dest: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((dest / ".penstock" / "receipt.json").read_text())
    return found


def make_table(rows: int, *, first: int = 0, seed: int = 0) -> pa.Table:
    """An id, a text of a few words, a score: the id is the row's place."""
    rng = np.random.default_rng(seed + first)
    words = np.array(["ebb", "sluice", "gate", "turbine", "weir", "head", "race", "spill"])
    texts = [" ".join(words[rng.integers(0, len(words), count)]) for count in rng.integers(5, 60, rows)]
    return pa.table({"id": np.arange(first, first + rows), "text": texts, "score": rng.random(rows)})


def make_parquet(folder: Path, *, rows: int = 1_000, files: int = 2, groups: int = 2, seed: int = 0) -> pa.Table:
    """A folder of Parquet files; gives the table they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    table = make_table(rows, seed=seed)
    each = -(-rows // files)
    for at in range(files):
        part = table.slice(at * each, each)
        pq.write_table(part, folder / f"{at:02d}.parquet", row_group_size=max(1, -(-len(part) // groups)))
    return table


def as_lines(table: pa.Table) -> str:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist())


def read_back(dest: Path) -> pa.Table:
    """All shards of a folder in order, read by pyarrow."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(dest.glob("part-*.parquet"))])

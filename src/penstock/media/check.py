"""The check of a collection of files: every one opened to its end, in parallel and in bounded memory.

What the supervisor holds for a file is its name, compressed, and 24 bytes to find its equals, and twice those while it
looks for them: a million files take 100 MB at the end, ten million a gigabyte. Problems are counted all and listed up
to `LISTED`.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from penstock.budget import resolve_budget
from penstock.engines.local import LocalEngine
from penstock.engines.task import Result, Task, Wave
from penstock.errors import UsageError
from penstock.media.check_expect import Expected, Given, expected, is_kind, pattern
from penstock.media.check_files import CheckJob, Item, pack, unpack
from penstock.media.check_sources import Meant, Paths, meant, roots, words_of
from penstock.media.probes import KINDS, kind_of
from penstock.media.probes.images import DECODED
from penstock.media.probes.reader import XZ_MEMORY
from penstock.meter import Meter, Watcher

if TYPE_CHECKING:
    import re

LISTED = 10_000
DUPLICATES = ("data", "all", "none")
# A task is as many files as make up so many bytes or so many files, whichever comes first.
GROUP_BYTES = 64 << 20
GROUP_FILES = 256
# What a worker takes beside its imports: pieces of a megabyte in, inflated and decoded, a JSON document parsed whole
# (25 times a megabyte at worst). Measured: 6 MB for a .nii.gz that inflates a thousandfold, 27 MB for JSON.
COST = 32 << 20


@dataclass(frozen=True)
class Problem:
    """What is wrong, where, and what to do about it."""

    path: str
    problem: str
    detail: str
    do: str = ""


@dataclass(frozen=True)
class Count:
    """How many files of a kind there were, their bytes, and how many of them were not whole."""

    files: int
    bytes: int
    bad: int


@dataclass(frozen=True)
class Checked:
    """What a check found. `ok` only if something was checked and nothing was wrong."""

    files: int
    bytes: int
    kinds: dict[str, Count]
    counts: dict[str, int]  # of problems, all of them, by kind of problem
    problems: tuple[Problem, ...]  # the first `LISTED`, by path
    expected: dict[str, tuple[int, int]]  # kind or pattern: asked for, found
    relative: int  # paths a table gave relative to its folder
    seconds: float
    memory: dict[str, int]

    @property
    def ok(self) -> bool:
        return self.files > 0 and not self.counts

    @property
    def more(self) -> int:
        """Problems that are counted and not listed."""
        return sum(self.counts.values()) - len(self.problems)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "files": self.files,
            "bytes": self.bytes,
            "kinds": {kind: asdict(count) for kind, count in self.kinds.items()},
            "counts": self.counts,
            "problems": [asdict(problem) for problem in self.problems],
            "more": self.more,
            "expected": {what: {"expected": a, "found": b} for what, (a, b) in self.expected.items()},
            "relative": self.relative,
            "seconds": self.seconds,
            "memory": self.memory,
        }


def check(
    source: Paths,
    *,
    column: str | Sequence[str] | None = None,
    expect: Given | None = None,
    kinds: Sequence[str] | None = None,
    duplicates: str = "data",
    memory: str | int | None = None,
    workers: int | None = None,
    watch: Watcher | None = None,
) -> Checked:
    """Open every file to its end and say what is missing, not fetched, empty, truncated, undecodable or there twice.

    Parameters
    ----------
    source
        A file, a folder, a glob, or a list of them; with `column`, tables whose columns hold paths.
    column
        The columns of a CSV, TSV, Parquet or JSON lines table that hold paths or lists of paths; relative ones are
        taken from the table's folder.
    expect
        What there must be: counts by kind or pattern (`{"nifti": 902}`, `"nifti=902"`), or a file that holds counts
        or lists files with their digests. Where files are listed, any other is reported too.
    kinds
        Check files of these kinds only, told by their names.
    duplicates
        Files that may not be there twice: "data" (all but text, which is often rightly the same), "all" or "none".
    memory, workers
        As in `Dataset.write`.
    """
    from penstock.dataset import worker_count

    if duplicates not in DUPLICATES:
        raise UsageError(f"duplicates is one of {', '.join(DUPLICATES)}, not {duplicates!r}")
    for kind in kinds or ():
        if not is_kind(kind):
            raise UsageError(f"{kind!r} is no kind of file; one of {', '.join(KINDS)}")
    columns = () if column is None else (column,) if isinstance(column, str) else tuple(column)
    budget, most = resolve_budget(memory), worker_count(workers)
    plan = _Plan(expected(expect), frozenset(kinds) if kinds else None, in_tables=bool(columns))
    for one in meant(source, columns=columns):
        plan.add(one)
    plan.look_for_the_rest(roots(source) if not columns else [])
    plan.close_group()
    if not plan.tasks and not plan.problems.counts:
        plan.problems.add(Problem(", ".join(words_of(source)[:3]), "nothing", "no file was checked", "check the path"))
    meter = Meter(budget.allowed, watch or (lambda status: None))
    tally = _Tally(plan)
    measured = 0
    if plan.tasks:
        with LocalEngine(budget, workers=most, on_sample=meter.on_sample) as engine:
            job = CheckJob(duplicates, tuple(sorted(plan.imports)))
            engine.prepare(job)
            engine.check(plan.tasks)
            meter.begin("check", plan.tasks, total=plan.bytes, done=0, rows=0)

            def on_done(task: Task, result: Result) -> None:
                tally.take(int(task.key), result)
                meter.task_done(rows=len(result["digests"]) // 16, held=0)

            engine.run(Wave(job, plan.tasks, on_done))
            measured = engine.measured
    tally.find_same(names=bool(columns))
    return tally.checked(meter.seconds(), {"allowed": budget.allowed, "measured": measured})


@dataclass
class _Problems:
    """All are counted; the first by path are kept."""

    counts: Counter[str] = field(default_factory=Counter)
    kept: list[Problem] = field(default_factory=list)

    def add(self, problem: Problem, *, times: int = 1) -> None:
        self.counts[problem.problem] += times
        self.kept.append(problem)
        if len(self.kept) >= 2 * LISTED:
            self.kept = self.first()

    def first(self) -> list[Problem]:
        return sorted(self.kept, key=lambda one: (one.path, one.problem))[:LISTED]


class _Plan:
    """Files gathered into tasks, and held against what was expected of their names."""

    def __init__(self, expect: Expected, kinds: frozenset[str] | None, *, in_tables: bool) -> None:
        self.expect = expect
        self.problems = _Problems()
        self.tasks: list[Task] = []
        self.imports: set[str] = set()
        self.paths = array("q")  # a hash of each file's path: one that is named twice is no duplicate of itself
        self.names = array("q")  # and of the last part of it, in tables
        self.bytes = self.relative = 0
        self._kinds, self._in_tables = kinds, in_tables
        self._patterns: dict[str, re.Pattern[str]] = {
            word: pattern(word) for word in expect.counts if not is_kind(word)
        }
        self.matched = dict.fromkeys(self._patterns, 0)
        self._left = set(expect.files or ())
        self._group: list[Item] = []
        self._group_bytes = self._group_cost = 0

    def add(self, one: Meant) -> None:
        kind = kind_of(one.name)
        if self._kinds is not None and kind not in self._kinds:
            return
        there = one.bytes > 0 or os.path.lexists(one.path)
        for word, form in self._patterns.items():
            self.matched[word] += there and form.fullmatch(one.name) is not None
        stated = ""
        if self.expect.files is not None:
            name = os.path.normpath(one.name)
            self._left.discard(name)
            if name in self.expect.files:
                stated = self.expect.files[name]
            elif there:
                self.problems.add(
                    Problem(one.path, "extra", "is not among the files expected", "leave it out, or list it")
                )
        self.relative += one.relative
        self.paths.append(hash(os.path.normpath(one.path) if "/." in one.path or "//" in one.path else one.path))
        if self._in_tables:
            self.names.append(hash(os.path.basename(one.path)))
        self._group.append(Item(one.path, stated))
        self._group_bytes += one.bytes
        self._group_cost = max(self._group_cost, self._cost(one, kind))
        # Groups grow with the number there is: a task costs 600 bytes here, and many are balanced with fewer.
        grown = 1 + len(self.tasks) // 1_000
        if self._group_bytes >= GROUP_BYTES * grown or len(self._group) >= GROUP_FILES * grown:
            self.close_group()

    def look_for_the_rest(self, folders: Sequence[str]) -> None:
        """Files that are expected and were not met: hidden ones are there all the same, the others are missing."""
        for name in sorted(self._left):
            if self._kinds is not None and kind_of(name) not in self._kinds:
                continue
            there = next((path for root in folders if os.path.lexists(path := os.path.join(root, name))), None)
            if there is not None:
                self.add(Meant(there, name, 0))
            else:
                where = os.path.join(folders[0], name) if len(folders) == 1 else name
                self.problems.add(Problem(where, "missing", "is expected and not there", "put it back"))

    def close_group(self) -> None:
        if not self._group:
            return
        label = self._group[0].path
        more = f" and {len(self._group) - 1:,} more" if len(self._group) > 1 else ""
        self.tasks.append(
            Task(str(len(self.tasks)), pack(self._group), COST + self._group_cost, label + more, "reading files")
        )
        self.bytes += self._group_bytes
        self._group, self._group_bytes, self._group_cost = [], 0, 0

    def _cost(self, one: Meant, kind: str) -> int:
        """What a file takes beyond `COST`; and what its worker must import."""
        lower = one.name.lower()
        if kind in ("table", "array"):
            self.imports.add("numpy")
        if lower.endswith(".zst"):
            self.imports.add("pyarrow")
            return _window(one.path)
        if lower.endswith((".xz", ".txz")):
            return XZ_MEMORY
        if kind == "parquet":
            return 4 * _footer(one.path)
        if kind == "image" and _has_pillow():
            self.imports.add("PIL.Image")
            return DECODED
        return 0


@lru_cache(1)
def _has_pillow() -> bool:
    return find_spec("PIL") is not None


def _window(path: str) -> int:
    from penstock.errors import PenstockError
    from penstock.sources.lines import LARGEST_WINDOW, zstd_window

    try:
        return min(zstd_window(path), LARGEST_WINDOW) + (16 << 20)
    except (OSError, PenstockError):
        return 0


def _footer(path: str) -> int:
    try:
        with open(path, "rb") as file:
            file.seek(-8, os.SEEK_END)
            tail = file.read(8)
    except OSError:
        return 0
    return min(int.from_bytes(tail[:4], "little"), os.path.getsize(path)) if tail[4:] == b"PAR1" else 0


class _Tally:
    """What the tasks have told so far."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._problems = plan.problems
        self._kinds: dict[str, list[int]] = {}
        self._digests: list[bytes] = [b""] * len(plan.tasks)

    def take(self, task: int, result: Result) -> None:
        for kind, numbers in result["kinds"].items():
            total = self._kinds.setdefault(kind, [0, 0, 0, 0])
            for at, number in enumerate(numbers):
                total[at] += number
        self._digests[task] = result["digests"]
        if result["problems"]:
            items = list(unpack(self._plan.tasks[task].payload))
            for at, problem, detail, do in result["problems"]:
                self._problems.add(Problem(items[at].path, problem, detail, do))

    def find_same(self, *, names: bool) -> None:
        """Files of one content; in tables, also files of one name in several folders, since only the name is stored."""
        import numpy as np

        from penstock.media.check_same import same

        paths = np.frombuffer(self._plan.paths, np.int64)
        starts = [0, *accumulate(len(one) // 16 for one in self._digests)]
        tasks = self._plan.tasks

        @lru_cache(64)
        def items(task: int) -> list[Item]:
            return list(unpack(tasks[task].payload))

        def path_of(ordinal: int) -> str:
            task = bisect_right(starts, ordinal) - 1
            return items(task)[ordinal - starts[task]].path

        def report(groups: Iterable[Any], problem: str, say: str, do: str) -> None:
            for group in groups:
                # By path, each once: a file that is named twice is one file.
                _, first = np.unique(paths[group], return_index=True)
                if len(first) < 2:
                    continue
                shown = sorted(path_of(int(ordinal)) for ordinal in np.sort(group[first])[: LISTED + 1])
                if problem == "duplicate-name" and len({os.path.basename(path) for path in shown}) > 1:
                    continue  # two names of one hash
                for path in shown[1:]:
                    self._problems.add(Problem(path, problem, f"{say} {shown[0]}", do))
                self._problems.counts[problem] += len(first) - len(shown)

        report(
            same(self._digests),
            "duplicate",
            "has the same content as",
            "leave one out, or allow it (--duplicates none)",
        )
        self._digests = []
        if names:
            # Two words each: the hash, and one that is never zero.
            words = np.stack([np.frombuffer(self._plan.names, np.int64), np.ones(len(paths), np.int64)], axis=1)
            report(
                same([words.tobytes()]),
                "duplicate-name",
                "has the same name as",
                "rename one: names are stored without folders",
            )

    def checked(self, seconds: float, memory: Mapping[str, int]) -> Checked:
        plan = self._plan
        found = {
            word: self._kinds.get(word, [0])[0] if is_kind(word) else plan.matched[word] for word in plan.expect.counts
        }
        for word, count in plan.expect.counts.items():
            if found[word] != count:
                less = "fewer" if found[word] < count else "more"
                self._problems.add(
                    Problem(
                        word,
                        "wrong-count",
                        f"{found[word]:,} are there, {abs(found[word] - count):,} {less} than the {count:,} expected",
                        "fetch what is missing" if less == "fewer" else "leave out what does not belong",
                    )
                )
        kinds = {kind: Count(files, size, bad) for kind, (files, size, bad, _) in sorted(self._kinds.items()) if files}
        return Checked(
            files=sum(one.files for one in kinds.values()),
            bytes=sum(one.bytes for one in kinds.values()),
            kinds=kinds,
            counts=dict(sorted(self._problems.counts.items())),
            problems=tuple(self._problems.first()),
            expected={word: (count, found[word]) for word, count in plan.expect.counts.items()},
            relative=plan.relative,
            seconds=round(seconds, 3),
            memory=dict(memory),
        )

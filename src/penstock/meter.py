"""How far a run is and what it has taken so far: what progress shows and the receipt states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engines.local import Sample
from penstock.engines.task import Task
from penstock.receipt import Trace


@dataclass(frozen=True)
class Status:
    """A run at one moment, for whoever shows it."""

    phase: str
    done: int  # Arrow bytes
    total: int
    rows: int
    tasks_done: int
    tasks: int
    anonymous: int
    allowed: int
    workers: int
    seconds: float


Watcher = Callable[[Status], None]


class Meter:
    """Counts tasks, bytes and rows phase by phase, and keeps the trace of measured memory."""

    def __init__(self, allowed: int, watch: Watcher) -> None:
        self.allowed = allowed
        self.trace = Trace()
        self.planned = 0  # tasks, over all phases
        self.run = 0
        self.projected = 0  # peak memory
        self.disk_projected = 0
        self.disk_measured = 0
        self._watch = watch
        self._started = time.monotonic()
        self._phase, self._total, self._tasks = "plan", 0, 0
        self._done = self._rows = self._bytes = 0

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def begin(self, phase: str, tasks: Sequence[Task], *, total: int, done: int, rows: int) -> None:
        """A phase of some tasks, `done` of which and `rows` of whose rows an earlier run has made."""
        self._phase, self._total, self._tasks = phase, total, len(tasks)
        self._done, self._rows = done, rows
        self.planned += len(tasks)

    def task_done(self, *, rows: int, held: int) -> None:
        self.run += 1
        self._done += 1
        self._rows += rows
        self.disk_measured = max(self.disk_measured, held)

    def begin_bytes(self, phase: str, *, total: int, tasks: int) -> None:
        """A phase that is counted in bytes as they pass, each of them twice: as it is hashed, and as it is sent."""
        self._phase, self._total, self._tasks = phase, total, 0
        self._done = self._rows = self._bytes = 0
        self.planned += tasks

    def bytes_passed(self, count: int) -> None:
        self._bytes += count

    def thing_done(self) -> None:
        self.run += 1

    def sampled(self, anonymous: int) -> None:
        """What a phase without an engine holds right now."""
        seconds = self.seconds()
        self.trace.add(seconds, anonymous)
        done = min(self._bytes // 2, self._total)
        self._watch(Status(self._phase, done, self._total, self._rows, 0, 0, anonymous, self.allowed, 0, seconds))

    def on_sample(self, sample: Sample) -> None:
        seconds = self.seconds()
        self.trace.add(seconds, sample.anonymous)
        finished = self._total * self._done // max(1, self._tasks)
        reading = min(sum(place.bytes_read for place in sample.places), self._total - finished)
        self._watch(
            Status(
                phase=self._phase,
                done=finished + reading,
                total=self._total,
                rows=self._rows + sum(place.rows_written for place in sample.places),
                tasks_done=self._done,
                tasks=self._tasks,
                anonymous=sample.anonymous,
                allowed=self.allowed,
                workers=sample.workers,
                seconds=seconds,
            )
        )

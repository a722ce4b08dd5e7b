"""The local engine: worker processes on this machine, admitted by projected bytes and guarded by measured ones.

One thread, one loop. A worker that dies is noticed at once (its socket closes), its task is tried again, and a task
that keeps ending its worker fails the run with the place it noted last.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from penstock import memory
from penstock.budget import Budget, budget_words, format_size
from penstock.engines.channel import Channel
from penstock.engines.notes import Notes, Place, new_page
from penstock.engines.task import Job, Task, Wave
from penstock.errors import OverBudget, PenstockError, UsageError, WorkerDied

SAMPLE_SECONDS = 0.01
CHILDREN_SECONDS = 0.2
READY_SECONDS = 120.0
MOST_DEATHS = 3
# A worker keeps about 28 MB of codecs, decoders and half-filled pages after its first task, and uses them again. One
# that drifts up from there by this much is replaced, so that long runs stay flat.
DRIFT = 12 << 20
RETAINED = 64 << 20
CALLERS_IMPORTS = 96 << 20

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from penstock.engines.worker import main; main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))"
)
# A worker uses one core: its neighbours use the others, and every thread an import starts reserves memory.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    # Arrow's allocator gives back at once: a peak of 107 MB for work that took 154 MB without. (Its arenas must stay:
    # without them a megabyte was lost for every file opened.)
    "MIMALLOC_PURGE_DELAY": "0",
}


@dataclass(frozen=True)
class Sample:
    """What the kernel says the tree holds right now, and how far the tasks in hand are."""

    anonymous: int
    workers: int
    places: tuple[Place, ...]


@dataclass
class _Running:
    task: Task
    peak: int = 0
    started: float = field(default_factory=time.monotonic)


class _Worker:
    """A process, its socket, its page of notes, and what it is doing."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        page = new_page()
        fds = (theirs.fileno(), page)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), *map(str, fds), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a user's function prints must not mix with ours
            process_group=0,  # Ctrl-C is the supervisor's to answer
            pass_fds=fds,
            env={**_WORKER_ENVIRONMENT, **os.environ},
        )
        theirs.close()
        self.channel = Channel(ours)
        self.notes = Notes(page)
        os.close(page)
        self.ready = False
        self.started = time.monotonic()
        self.reserved = 0
        self.settled = 0  # what it held after its first task
        self.anonymous = 0
        self.running: _Running | None = None
        self._children: list[int] = []
        self._looked = 0.0

    def sample(self, now: float) -> int:
        if now - self._looked > CHILDREN_SECONDS:
            self._children, self._looked = memory.children(self.process.pid), now
        own = memory.anonymous(self.process.pid)
        self.anonymous = own + sum(memory.anonymous(child) for child in self._children)
        if self.running is not None:
            self.running.peak = max(self.running.peak, self.anonymous)
        return self.anonymous

    def grant(self) -> int:
        """What the plan lets it hold: reserved, and the task in hand."""
        return self.reserved + (self.running.task.projected if self.running else 0)

    def end(self) -> None:
        for child in memory.children(self.process.pid):
            _kill(child)
        self.process.kill()
        self.process.wait()
        self.channel.close()
        self.notes.close()


class LocalEngine:
    """Runs waves of tasks in worker processes under a budget."""

    def __init__(
        self,
        budget: Budget,
        *,
        workers: int,
        others: int = 0,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        self.budget = budget
        self._workers_asked = self.ceiling = workers
        self.others = others  # bytes that count against the budget and are nobody's heap: scratch on tmpfs
        self.on_sample = on_sample
        self.measured = 0
        self.reserved = 0
        self.most_workers = 0
        self.task_peaks: dict[str, int] = {}
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._job: bytes | None = None
        self._worker_reserved = 0
        own = memory.anonymous()
        # Law 1 covers what Penstock was granted, not the caller's heap. An interpreter and its imports count; what a
        # notebook holds beyond them was there before, and is its own.
        self._heap = max(0, own - CALLERS_IMPORTS)

    # -- the job, and what a worker costs before any data ---------------------------------------------------------

    def prepare(self, job: Job) -> int:
        """Send the job to a first worker and measure what it costs: the reserved bytes of one worker."""
        import cloudpickle

        self._retire(list(self._workers))
        memory.release()  # what planning took and left is not what the run will hold
        try:
            self._job = cloudpickle.dumps(job)
        except Exception as error:
            raise UsageError(
                f"a function of this pipeline cannot be sent to workers ({error})",
                do="let it make locks, files and connections when it is called, not hold them",
            ) from error
        self.ceiling = min(self._workers_asked, job.most_workers)
        self._start()
        while not self._workers[0].ready:
            self._turn(on_message=self._no_task_message)
        self._worker_reserved = self._workers[0].reserved
        self.reserved = max(self.reserved, self.own() + self._worker_reserved)
        return self._worker_reserved

    def own(self) -> int:
        """What the supervising process itself counts for, scratch in memory included."""
        return max(0, memory.anonymous() - self._heap) + self.others

    def check(self, tasks: Sequence[Task]) -> int:
        """The projected peak of these tasks; a task that does not fit with nothing beside it is refused."""
        largest = max(tasks, key=lambda task: task.projected, default=None)
        if largest is not None:
            alone = self.own() + self._worker_reserved + largest.projected
            self.budget.check(alone, what=largest.smallest_for, where=largest.label)
        return self.schedule([task.projected for task in tasks])[1]

    def schedule(self, projected: list[int]) -> tuple[int, int]:
        """How many workers the budget holds for these tasks, and the peak that makes: (workers, projected peak)."""
        largest = sorted(projected, reverse=True)
        own = self.own()
        count, peak = 1, own + self._worker_reserved + (largest[0] if largest else 0)
        while count < min(self.ceiling, len(largest)):
            more = peak + self._worker_reserved + largest[count]
            if more > self.budget.grantable:
                break
            count, peak = count + 1, more
        return count, peak

    # -- a wave ---------------------------------------------------------------------------------------------------

    def run(self, wave: Wave) -> None:
        """Run the tasks of a wave. The job must have been prepared. Raises the first error; committed work stays."""
        queue = deque(wave.tasks)
        deaths: dict[str, int] = {}
        alone: set[str] = set()

        def on_message(worker: _Worker, message: tuple[Any, ...]) -> None:
            running = worker.running
            assert running is not None
            if message[0] == "said":
                wave.on_said(running.task, message[2])
            elif message[0] == "done":
                worker.running = None
                self.task_peaks[running.task.key] = running.peak
                wave.on_done(running.task, message[2])
                worker.sample(time.monotonic())
                worker.settled = worker.settled or worker.anonymous
                if worker.anonymous > min(worker.settled + DRIFT, worker.reserved + RETAINED):
                    self._retire([worker])
            elif message[0] == "out of memory":
                on_overrun(worker, "asked for more memory than it was granted")
            else:
                error: PenstockError = message[2]
                error.add_note(message[3])
                raise error

        def on_overrun(worker: _Worker, how: str) -> None:
            running = worker.running
            assert running is not None
            place, task = worker.notes.read(), running.task
            self._retire([worker])
            if task.key in alone or (not self._busy() and not wave_has_neighbours):
                raise _over_budget(self.budget, task, place, how)
            alone.add(task.key)
            queue.appendleft(task)

        wave_has_neighbours = len(wave.tasks) > 1
        while queue or self._busy():
            if wave.enough():
                self._retire([worker for worker in self._workers if worker.running])
                return
            self._admit(queue, wave, alone)
            for worker in self._turn(on_message=on_message):
                running, code = worker.running, worker.process.returncode
                place = None if running is None else worker.notes.read()
                self._forget(worker)
                if running is None or place is None:
                    continue
                task = running.task
                deaths[task.key] = deaths.get(task.key, 0) + 1
                if deaths[task.key] >= MOST_DEATHS:
                    raise WorkerDied(
                        f"the worker {_how_it_ended(code)}, {MOST_DEATHS} times here",
                        where=_spot(task, place),
                        do="what is committed stays; if the kernel ended it, lower --workers or raise --memory",
                    )
                alone.add(task.key)  # if the kernel ended it for want of memory, it must not want for it again
                queue.appendleft(task)
            self._guard(on_overrun)

    def _admit(self, queue: deque[Task], wave: Wave, alone: set[str]) -> None:
        """Hand out tasks in order while their projected bytes fit; start a worker only where it will fit too."""
        while queue:
            task = queue[0]
            running = [worker for worker in self._workers if worker.running]
            beside = [worker.running.task for worker in running if worker.running]
            if beside and (task.key in alone or any(other.key in alone for other in beside)):
                return
            if not wave.may_start(task, beside):
                return
            idle = [worker for worker in self._workers if worker.ready and not worker.running]
            starting = [worker for worker in self._workers if not worker.ready]
            if task.key in alone and len(self._workers) > 1:
                self._retire((idle + starting)[: len(self._workers) - 1])
                continue
            room = self.budget.grantable - self._spoken_for()
            # Alone with one worker every task fits: `check` has refused the others before the run.
            if idle and (task.projected <= room or len(self._workers) == 1):
                queue.popleft()
                worker = idle[0]
                worker.running = _Running(task)
                worker.channel.send(("task", task.key, task.payload, dict(wave.shared), self.budget.allowed))
            elif idle and not running:
                self._retire([*idle[1:], *starting])
            elif (
                not idle
                and not starting
                and len(self._workers) < self.ceiling
                and (not self._workers or task.projected + self._worker_reserved <= room)
            ):
                self._start()
                return
            else:
                return

    def _spoken_for(self) -> int:
        """What the supervisor and all workers hold or may yet take. What an idle worker retains, its next task uses."""
        return self.own() + sum(
            max(worker.grant(), worker.anonymous if worker.running else 0) if worker.ready else self._worker_reserved
            for worker in self._workers
        )

    def _guard(self, on_overrun: Callable[[_Worker, str], None]) -> None:
        """End the worker that went furthest past its grant when the tree passes what may be granted."""
        own = self.own()
        total = own + sum(worker.anonymous for worker in self._workers)
        # The margin's other half is for what is allocated before the kernel has ended the worker.
        if total <= self.budget.allowed - self.budget.margin // 2:
            return
        guilty = max(
            (worker for worker in self._workers if worker.running),
            key=lambda worker: worker.anonymous - worker.grant(),
            default=None,
        )
        if guilty is not None:
            on_overrun(guilty, f"held {format_size(guilty.anonymous)} when it was ended")

    # -- processes ------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return any(worker.running for worker in self._workers)

    def _start(self) -> None:
        worker = _Worker()
        self._workers.append(worker)
        self.most_workers = max(self.most_workers, len(self._workers))
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        worker.channel.send(("job", self._job))

    def _turn(self, *, on_message: Callable[[_Worker, tuple[Any, ...]], None]) -> list[_Worker]:
        """Wait for messages or the next sample, whichever is first. Gives the workers that have died."""
        dead: list[_Worker] = []
        for key, _ in self._selector.select(SAMPLE_SECONDS):
            worker: _Worker = key.data
            if worker not in self._workers:
                continue
            try:
                message = worker.channel.receive()
            except EOFError:
                worker.process.wait()
                dead.append(worker)
                continue
            if message[0] == "ready":
                worker.ready = True
                worker.reserved = worker.sample(time.monotonic())
            elif message[0] == "broken":
                raise message[1]
            else:
                on_message(worker, message)
        self._sample()
        for worker in self._workers:
            if not worker.ready and worker not in dead and time.monotonic() - worker.started > READY_SECONDS:
                raise WorkerDied(f"a worker did not start within {READY_SECONDS:.0f} seconds")
        return dead

    def _sample(self) -> None:
        now = time.monotonic()
        total = self.own() + sum(worker.sample(now) for worker in self._workers)
        self.measured = max(self.measured, total)
        self.on_sample(
            Sample(total, len(self._workers), tuple(w.notes.read() for w in self._workers if w.running is not None))
        )

    def _no_task_message(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        raise PenstockError(f"a worker said {message[0]!r} before it had a task")

    def _forget(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return
        was_ready = worker.ready
        self._retire([worker])
        if not was_ready:
            raise WorkerDied(
                f"a worker {_how_it_ended(worker.process.returncode)} while it was starting",
                do="run again with --workers 1 and a larger --memory",
            )

    def _retire(self, workers: list[_Worker]) -> None:
        for worker in workers:
            if worker in self._workers:
                self._workers.remove(worker)
                self._selector.unregister(worker.channel)
                worker.end()

    def close(self) -> None:
        self._retire(list(self._workers))
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _spot(task: Task, place: Place) -> str:
    rows = f" rows {place.first_row:,} to {place.stop_row - 1:,}" if place.stop_row > place.first_row else ""
    return f"{place.step or 'start'}, {place.where or task.label}{rows}"


def _over_budget(budget: Budget, task: Task, place: Place, how: str) -> OverBudget:
    return OverBudget(
        f"the worker {how}, and --memory {budget_words(budget.allowed)} is for the whole process tree",
        where=_spot(task, place),
        do=("make the function take less at once, or " if place.step.startswith("step") else "")
        + "raise --memory; what is committed stays",
    )


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
        return f"was ended by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return f"ended with code {code}"


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)

"""What an engine is handed: a job that is sent to each worker once, and tasks that are small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.engines.notes import Notes

Result = dict[str, Any]


class Job(Protocol):
    """The work that all tasks of a wave share. It is pickled, user functions and all, and sent to each worker once."""

    @property
    def most_workers(self) -> int:
        """How many tasks it pays to run at once; the disk may be the limit."""

    def warm_up(self) -> None:
        """Import and touch all that any task needs, so that what is measured after it is *reserved* memory."""

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        """Run one task. `say` tells the supervisor something before the task is done."""


@dataclass(frozen=True)
class Task:
    """One stage on one piece: idempotent, so it may be run again after any death."""

    key: str
    payload: Any
    projected: int  # bytes it takes above its worker's reserved memory
    label: str = ""  # the piece, for messages
    smallest_for: str = ""  # what makes it as large as it is, for a refusal


@dataclass
class Wave:
    """Tasks that may run in any order, and what to do as they finish."""

    job: Job
    tasks: list[Task]
    on_done: Callable[[Task, Result], None]
    on_said: Callable[[Task, Any], None] = lambda task, said: None
    # Whether a task may start beside these: it may have to wait for what one of them tells, such as a map's schema.
    may_start: Callable[[Task, list[Task]], bool] = lambda task, running: True
    enough: Callable[[], bool] = lambda: False
    # Later tasks are handed this beside their payload, whatever `on_said` and `on_done` have put there by then.
    shared: Mapping[str, Any] = field(default_factory=dict)

"""The waves of a run: the survey, a pass, putting fragments together. Each runs only what is not journalled."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.assemble import AssembleJob
from penstock.chains import Chain
from penstock.destination import Destination
from penstock.engines.local import LocalEngine
from penstock.engines.task import Job, Result, Task, Wave
from penstock.journal import Journal
from penstock.meter import Meter
from penstock.plan import Pass, Surveys, spans_of
from penstock.sinks import sink_of
from penstock.sinks.base import Fragment
from penstock.sources import source_of
from penstock.sources.base import Surveyed
from penstock.stage import Schemas, StageJob
from penstock.survey import SurveyJob, from_record

if TYPE_CHECKING:
    import pyarrow as pa

Learned = dict[tuple[int, int], "pa.Schema"]  # (branch, step counted from the end) -> its schema


@dataclass(frozen=True)
class Crew:
    """What every wave works with."""

    engine: LocalEngine
    journal: Journal
    meter: Meter
    place: Destination

    def run(self, phase: str, job: Job, tasks: Sequence[Task], *, total: int, **rules: Any) -> None:
        """Run the tasks that are not done, and journal each as it is."""
        records = self.journal.records
        done = [task for task in tasks if task.key in records]
        rows = sum(records[task.key].get("written", 0) for task in done)
        self.meter.begin(phase, tasks, total=total, done=len(done), rows=rows)
        after: Callable[[Task], None] = rules.pop("after", lambda task: None)

        def on_done(task: Task, result: Result) -> None:
            self.journal.commit(task.key, result)
            self.meter.task_done(rows=result.get("written", 0), held=self.place.held())
            after(task)

        left = [task for task in tasks if task.key not in records]
        if left:
            self.engine.run(Wave(job, left, on_done, **rules))


def survey(crew: Crew, job: SurveyJob, tasks: Sequence[Task]) -> Surveys:
    """Read text sources once for their types, rows and longest row."""
    crew.run("survey", job, tasks, total=sum(task.payload[1].bytes for task in tasks))
    found: dict[tuple[int, int, int], Surveyed] = {}
    for task in tasks:
        at, span = task.payload
        found[(at, span.file, span.start)] = from_record(crew.journal.records[task.key])
    return found


def survey_tasks(chains: Sequence[Chain], prefix: str) -> tuple[SurveyJob, list[Task]] | None:
    """What must be read before these chains can be planned; None where metadata tells it all."""
    if not any(source_of(chain.read.format).surveyed for chain in chains):
        return None
    tasks = [
        Task(
            f"survey/{prefix}/{at}/{span.file}/{span.start}",
            (at, span),
            source_of(chain.read.format).cost(span),
            label=chain.read.files[span.file].name,
            smallest_for="reading a block of lines",
        )
        for at, chain in enumerate(chains)
        if source_of(chain.read.format).surveyed
        for span in spans_of(chain, at, {})
    ]
    return SurveyJob(tuple((chain.read.files, chain.read.format, chain.read.options) for chain in chains)), tasks


def run_pass(
    crew: Crew,
    planned: Pass,
    *,
    enough: int | None = None,
    after: Callable[[Task], None] = lambda task: None,
    room: Callable[[list[Task]], bool] = lambda running: True,
) -> list[Result]:
    """Run a pass; the results of all its tasks, in order, or of as many as hold enough rows.

    `after` hears of each task once it is journalled; `room` says whether what another makes has a place to lie.
    """
    records = crew.journal.records
    learned = learned_schemas(crew.journal, planned.name)
    _share(planned.job, learned)
    branch_of = {} if planned.spliced else {task.key: task.payload[1].branch for task in planned.tasks}
    unknown = _unknown_schemas(planned.job)

    def on_said(task: Task, said: tuple[int, pa.Schema]) -> None:
        at, schema = said
        branch = branch_of[task.key]
        if (branch, at) not in learned:
            text = base64.b64encode(schema.serialize().to_pybytes()).decode()
            key = f"learned/{planned.name}/{branch}/{at}"
            crew.journal.commit(key, {"branch": branch, "at": at, "schema": text})
            learned[(branch, at)] = schema
            _share(planned.job, learned)

    def may_start(task: Task, running: list[Task]) -> bool:
        """Until the schemas of a branch's maps are known, a task of it runs alone: its first batch tells."""
        branch = branch_of.get(task.key, -1)
        if not room(running):
            return False
        return not running or all((branch, at) in learned for at in unknown.get(branch, ()))

    def has_enough() -> bool:
        if enough is None:
            return False
        held: int = sum(records[key]["written"] for key in _first_done(planned.tasks, records, enough))
        return held >= enough

    crew.run(
        "splice" if planned.spliced else "write",
        planned.job,
        planned.tasks,
        total=planned.bytes,
        on_said=on_said,
        may_start=may_start,
        enough=has_enough,
        after=after,
        shared={"learned": learned},
    )
    keys = [task.key for task in planned.tasks] if enough is None else _first_done(planned.tasks, records, enough)
    return [records[key] for key in keys]


def assemble(crew: Crew, groups: Sequence[Sequence[Fragment]], format: str, *, embeds: bool = False) -> list[Fragment]:
    """A shard of each group: the fragment itself where it is alone and whole, else its fragments put together."""
    elsewhere = crew.place.elsewhere()
    job = AssembleJob(format, str(crew.place.work), str(crew.place.state), embeds)
    tasks = {
        at: Task(
            f"shard/{at:06d}",
            (f"shard-{at:06d}{sink_of(format).ending}", tuple(group)),
            AssembleJob.EMBED_COST if embeds else AssembleJob.COST,
            label=f"shard {at}",
            smallest_for="putting fragments together",
        )
        for at, group in enumerate(groups)
        if len(group) > 1 or elsewhere or embeds
    }

    def remove_fragments(task: Task) -> None:
        for fragment in task.payload[1]:
            (crew.place.work / fragment.name).unlink(missing_ok=True)

    if tasks:
        crew.engine.prepare(job)
        total = sum(fragment.bytes for at in tasks for fragment in groups[at])
        crew.run("assemble", job, list(tasks.values()), total=total, after=remove_fragments)
    return [
        Fragment(**crew.journal.records[tasks[at].key]["fragment"]) if at in tasks else group[0]
        for at, group in enumerate(groups)
    ]


def learned_schemas(journal: Journal, name: str) -> Learned:
    """What first batches of maps told in this run, or in one before it."""
    found: Learned = {}
    for key, record in journal.records.items():
        if key.startswith(f"learned/{name}/"):
            import pyarrow as pa  # not before it is needed: a splicing supervisor does without

            stored = pa.py_buffer(base64.b64decode(record["schema"]))
            found[(record["branch"], record["at"])] = pa.ipc.read_schema(stored)
    return found


def _share(job: Job, learned: Learned) -> None:
    """A step that several branches have, after a concatenation, gives one schema: what one learned, all know."""
    if isinstance(job, StageJob):
        for (branch, at), schema in list(learned.items()):
            for other, steps in enumerate(branch.steps for branch in job.branches):
                if len(steps) >= -at and steps[at] is job.branches[branch].steps[at]:
                    learned.setdefault((other, at), schema)


def _unknown_schemas(job: Job) -> dict[int, list[int]]:
    """Per branch, the maps whose schema only running can tell, counted from the end."""
    if not isinstance(job, StageJob):
        return {}
    return {
        at: [
            place - len(branch.steps)
            for place, step in enumerate(branch.steps)
            if step.calls_user and Schemas(branch, {}).after(place) is None
        ]
        for at, branch in enumerate(job.branches)
    }


def _first_done(tasks: Sequence[Task], records: Mapping[str, Any], enough: int) -> list[str]:
    """Finished tasks from the first on, without a gap, until they hold enough rows."""
    keys: list[str] = []
    rows = 0
    for task in tasks:
        if task.key not in records or rows >= enough:
            break
        keys.append(task.key)
        rows += records[task.key]["written"]
    return keys

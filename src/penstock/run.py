"""One run: a plan, a journal, an engine, and at the end shards under their names and a receipt.

What happens at each crash point is decided here: a fragment counts when the journal says so, a name is given by rename,
and the journal goes only when the receipt is there.
"""

from __future__ import annotations

import base64
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import receipt
from penstock.assemble import AssembleJob, group_fragments
from penstock.budget import Budget, budget_words, format_size
from penstock.engines.local import LocalEngine, Sample
from penstock.engines.task import Job, Result, Task, Wave
from penstock.errors import DestinationConflict, DiskFull, UsageError
from penstock.files import disk_errors, on_tmpfs, sync_folder
from penstock.journal import Journal, difference
from penstock.plan import (
    Chain, Pass, Read, Surveys, Write, describe, fingerprint, first_dynamic_limit, key_of, plan_pass, spans_of,
)  # fmt: skip
from penstock.receipt import Receipt, Trace
from penstock.sinks import sink_of
from penstock.sinks.base import Fragment, FragmentWriter
from penstock.sources import source_of
from penstock.sources.base import ReadOptions, SourceFile, Surveyed
from penstock.survey import SurveyJob, from_record

if TYPE_CHECKING:
    import pyarrow as pa

STATE = ".penstock"
SHARD_NAME = re.compile(r"part-\d{5,}-of-\d{5,}\.[a-z.]+")


@dataclass(frozen=True)
class Settings:
    """How a run is to go: none of this reaches the output."""

    budget: Budget
    workers: int
    scratch: Path | None = None
    disk: int | None = None
    restart: bool = False
    command: str = ""


@dataclass(frozen=True)
class Status:
    """How far a run is, for whoever shows it."""

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


def write(
    chains: Sequence[Chain], to: Path, what: Write, settings: Settings, *, watch: Watcher = lambda status: None
) -> Receipt:
    """Write chains to a folder. Same plan unfinished: resume. Same plan with a receipt: already done."""
    description = describe(chains, what)
    key = key_of(description)
    state = to / STATE
    check_destination(chains, to)
    if not settings.restart and (found := receipt.load(state)) is not None:
        if found.plan_key != key:
            raise DestinationConflict(
                "another plan was finished here: " + difference(found.plan, description),
                where=str(to),
                do="choose another destination, or pass --restart (restart=True) to start over",
            )
        _check_done(found, to)
        return replace(found, already_done=True)
    run = _Run(chains, to, what, settings, description, key, watch)
    return run.go()


class _Run:
    """The state of one run, from the first check to the receipt."""

    def __init__(
        self, chains: Sequence[Chain], to: Path, what: Write, settings: Settings, description: dict[str, Any], key: str,
        watch: Watcher,
    ) -> None:  # fmt: skip
        self.chains, self.to, self.what, self.settings = tuple(chains), to, what, settings
        self.description, self.key, self.watch = description, key, watch
        self.state = to / STATE
        base = settings.scratch / f"penstock-{key[:16]}" if settings.scratch is not None else self.state
        self.work = base / "work"
        self.started = time.monotonic()
        self.trace = Trace()
        self.projected = self.disk_projected = self.disk_measured = 0
        self.tasks_planned = self.tasks_run = 0
        self.phase, self.total, self.finished_bytes, self.finished_rows = "plan", 0, 0, 0
        self.tasks_done = self.tasks_now = 0

    def go(self) -> Receipt:
        others = 0
        engine = LocalEngine(
            self.settings.budget, workers=self.settings.workers, others=others, on_sample=self._on_sample
        )
        with engine:
            self.engine = engine
            first = None
            if not self._needs_survey(self.chains) and first_dynamic_limit(self.chains) is None:
                first = self._plan(self.chains, {}, "")  # refusals come before anything is written
            with disk_errors(self.state):
                self.to.mkdir(parents=True, exist_ok=True)
            with Journal(self.state, plan=self.description, key=self.key, restart=self.settings.restart) as journal:
                self.journal = journal
                try:
                    if self.settings.restart:
                        self._remove_old_shards()
                    with disk_errors(self.work):
                        self.work.mkdir(parents=True, exist_ok=True)
                    self._sweep()
                    return self._passes(first)
                except BaseException:
                    self.engine.close()
                    self._sweep()
                    raise

    # -- passes ---------------------------------------------------------------------------------------------------

    def _passes(self, ready: Pass | None) -> Receipt:
        chains = self.chains
        at = 0
        while (found := first_dynamic_limit(chains)) is not None:
            chains = self._materialise(chains, found[0], f"p{at}-")
            at += 1
        prefix = f"p{at}-"
        final = ready if ready is not None and at == 0 else self._plan(chains, self._survey(chains, prefix), prefix)
        results = self._run_pass(final, chains)
        fragments = [Fragment(**f) for result in results for f in result["fragments"]]
        shards = self._shards(final, fragments, chains)
        return self._finish(shards, results)

    def _plan(self, chains: Sequence[Chain], surveys: Surveys, prefix: str, what: Write | None = None) -> Pass:
        """Plan a pass, prepare its job in a first worker, and refuse what fits in no way."""
        what = what or self.what
        prefix = prefix or "p0-"
        planned = plan_pass(chains, what, folder=str(self.work), prefix=prefix, surveys=surveys)
        self._check_disk(planned)
        self._prepare(planned.job, planned.tasks)
        return planned

    def _prepare(self, job: Job, tasks: Sequence[Task]) -> None:
        self.engine.prepare(job)
        budget = self.settings.budget
        for task in sorted(tasks, key=lambda task: -task.projected)[:1]:
            budget.check(
                self.engine.smallest(task.projected), what=task.smallest_for, where=task.label,
                do="" if self.what.rewrite is False else "or leave out --rewrite where Parquet can be spliced",
            )  # fmt: skip
        _, peak = self.engine.schedule([task.projected for task in tasks])
        self.projected = max(self.projected, peak)

    def _run_pass(self, planned: Pass, chains: Sequence[Chain], *, enough: int | None = None) -> list[Result]:
        """Run the tasks the journal does not have; results of all, in order."""
        learned = self._learned(planned)
        branch_of = _branch_of(planned)
        unknown = _unknown_schemas(planned)
        order = [task.key for task in planned.tasks]

        def on_done(task: Task, result: Result) -> None:
            self._task_done(f"task/{task.key}", result, result["written"])

        def on_said(task: Task, said: Any) -> None:
            kind, at, schema = said
            assert kind == "learned"
            branch = branch_of[task.key]
            if (branch, at) not in learned:
                stored = base64.b64encode(schema.serialize().to_pybytes()).decode()
                self.journal.commit(
                    f"learned/{task.key[:3]}{branch}/{at}", {"branch": branch, "at": at, "schema": stored}
                )
                learned[(branch, at)] = schema

        def may_start(task: Task, running: list[Task]) -> bool:
            branch = branch_of.get(task.key)
            missing = any((branch, at) not in learned for at in unknown.get(branch, ()))
            return not missing or not any(branch_of[other.key] == branch for other in running)

        def has_enough() -> bool:
            return (
                enough is not None
                and len(_prefix(order, self.journal.records, enough)) < len(order) + 1
                and (
                    sum(
                        self.journal.records[f"task/{k}"]["written"]
                        for k in _prefix(order, self.journal.records, enough)
                    )
                    >= enough
                )
            )

        self._begin(f"{'splice' if planned.spliced else 'write'}", planned.bytes, planned.tasks)
        left = [task for task in planned.tasks if f"task/{task.key}" not in self.journal.records]
        if not has_enough():
            self.engine.run(
                Wave(planned.job, left, on_done, on_said, may_start, has_enough, shared={"learned": learned})
            )
        keys = order if enough is None else _prefix(order, self.journal.records, enough)
        return [self.journal.records[f"task/{key}"] for key in keys]

    def _learned(self, planned: Pass) -> dict[tuple[int, int], pa.Schema]:
        found: dict[tuple[int, int], pa.Schema] = {}
        prefix = planned.tasks[0].key[:3] if planned.tasks else ""
        for key, record in self.journal.records.items():
            if key.startswith(f"learned/{prefix}"):
                import pyarrow as pa

                schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["schema"])))
                found[(record["branch"], record["at"])] = schema
        return found

    def _materialise(self, chains: Sequence[Chain], limit: Any, prefix: str) -> tuple[Chain, ...]:
        """Run the chains up to a limit that only running can count off; they become one chain that reads the result."""
        inside = [chain for chain in chains if any(step is limit for step in chain.steps)]
        place = {id(chain): next(i for i, s in enumerate(chain.steps) if s is limit) for chain in inside}
        before = tuple(replace(chain, steps=chain.steps[: place[id(chain)]]) for chain in inside)
        planned = self._plan(before, self._survey(before, prefix), prefix, Write("parquet", self.what.max_shard, True))
        results = self._run_pass(planned, before, enough=limit.rows)
        files = []
        for result in results:
            for record in result["fragments"]:
                path = self.work / record["name"]
                about = path.stat()
                files.append(
                    SourceFile(
                        str(path), record["name"], about.st_size, about.st_mtime_ns, about.st_ino, record["sha256"]
                    )
                )
        if not files:
            files.append(self._empty_file(planned, before, prefix))
        after = Chain(Read(tuple(files), "parquet", ReadOptions()), inside[0].steps[place[id(inside[0])] :])
        made: list[Chain] = []
        for chain in chains:
            if chain not in inside:
                made.append(chain)
            elif chain is inside[0]:
                made.append(after)
        return tuple(made)

    def _empty_file(self, planned: Pass, chains: Sequence[Chain], prefix: str) -> SourceFile:
        fragment = self._write_empty(planned, f"{prefix}empty", sink_format="parquet")
        path = self.work / fragment.name
        about = path.stat()
        return SourceFile(str(path), fragment.name, about.st_size, about.st_mtime_ns, about.st_ino, fragment.sha256)

    # -- the survey -----------------------------------------------------------------------------------------------

    def _needs_survey(self, chains: Sequence[Chain]) -> bool:
        return any(source_of(chain.read.format).surveyed for chain in chains)

    def _survey(self, chains: Sequence[Chain], prefix: str) -> Surveys:
        """Read text sources once for their types, rows and longest row, in parallel and journalled."""
        if not self._needs_survey(chains):
            return {}
        job = SurveyJob(tuple((chain.read.files, chain.read.format, chain.read.options) for chain in chains))
        tasks = []
        total = 0
        for at, chain in enumerate(chains):
            source = source_of(chain.read.format)
            if not source.surveyed:
                continue
            for span in spans_of(chain, at, {}):
                name = chain.read.files[span.file].name
                tasks.append(
                    Task(
                        f"survey/{prefix}{at}/{span.file}/{span.start}",
                        (at, span),
                        source.cost(span),
                        label=name,
                        smallest_for="reading a block of lines",
                    )  # fmt: skip
                )
                total += span.bytes
        self._prepare(job, tasks)
        self._begin("survey", total, tasks)

        def on_done(task: Task, result: Result) -> None:
            self._task_done(task.key, result, 0)

        left = [task for task in tasks if task.key not in self.journal.records]
        self.engine.run(Wave(job, left, on_done))
        surveys: dict[tuple[int, int, int], Surveyed] = {}
        for task in tasks:
            at, span = task.payload  # type: ignore[misc]  # made above
            surveys[(at, span.file, span.start)] = from_record(self.journal.records[task.key])
        return surveys

    # -- shards ---------------------------------------------------------------------------------------------------

    def _shards(self, planned: Pass, fragments: list[Fragment], chains: Sequence[Chain]) -> list[Fragment]:
        """Fragments into shards: as they are, or neighbours put together where they are too small."""
        sink = sink_of(self.what.format)
        if not fragments:
            return [self._write_empty(planned, "empty", sink_format=self.what.format)]
        groups = [[f] for f in fragments] if planned.spliced else group_fragments(fragments, self.what.max_shard)
        elsewhere = self.work.stat().st_dev != self.to.stat().st_dev
        job = AssembleJob(self.what.format, str(self.work), str(self.state))
        tasks: list[Task] = []
        keys: list[str | None] = []
        for at, group in enumerate(groups):
            if len(group) == 1 and not elsewhere:
                keys.append(None)
                continue
            key = f"shard/{at:06d}"
            tasks.append(Task(key, (f"shard-{at:06d}{sink.ending}", group), AssembleJob.COST, label=f"shard {at}"))
            keys.append(key)
        if tasks:
            self.engine.prepare(job)
            self._begin("assemble", sum(f.bytes for group in groups for f in group if len(group) > 1), tasks)

            def on_done(task: Task, result: Result) -> None:
                self._task_done(task.key, result, 0)
                for fragment in task.payload[1]:  # type: ignore[index]  # made above
                    (self.work / fragment.name).unlink(missing_ok=True)

            left = [task for task in tasks if task.key not in self.journal.records]
            self.engine.run(Wave(job, left, on_done))
        made = []
        for key, group in zip(keys, groups, strict=True):
            made.append(group[0] if key is None else Fragment(**self.journal.records[key]["fragment"]))
        return made

    def _write_empty(self, planned: Pass, stem: str, *, sink_format: str) -> Fragment:
        """A dataset of no rows still has its columns."""
        from penstock.stage import Schemas, StageJob

        assert isinstance(planned.job, StageJob)
        branch = planned.job.branches[0]
        learned = {at + len(branch.steps): schema for (b, at), schema in self._learned(planned).items() if b == 0}
        schema = Schemas(branch, learned).last() or branch.schema
        writer = FragmentWriter(sink_of(sink_format), self.work, stem, schema, max_bytes=1)
        return writer.write_empty()[0]

    def _finish(self, shards: list[Fragment], results: list[Result]) -> Receipt:
        """Names, receipt, and nothing left over. Every part can be done twice."""
        ending = sink_of(self.what.format).ending
        count = len(shards)
        listed = []
        with disk_errors(self.to):
            for at, shard in enumerate(shards):
                name = f"part-{at:05d}-of-{count:05d}{ending}"
                staged = next((p for p in (self.work / shard.name, self.state / shard.name) if p.exists()), None)
                if staged is not None:
                    staged.replace(self.to / name)
                elif not (self.to / name).exists():
                    raise DestinationConflict(
                        "a committed shard is gone", where=str(self.to / name), do="run again with --restart"
                    )
                listed.append({"path": name, "rows": shard.rows, "bytes": shard.stored, "sha256": shard.sha256})
            sync_folder(self.to)
        made = Receipt(
            command=self.settings.command,
            plan=self.description,
            plan_key=self.key,
            inputs=[
                {"path": file.name, "bytes": file.bytes, "fingerprint": fingerprint(file)}
                for chain in self.chains
                for file in chain.read.files
            ],
            rows={
                "read": sum(result["read"] for result in results),
                "written": sum(shard.rows for shard in shards),
                "dropped": _sum_reasons(result["dropped"] for result in results),
            },
            shards=listed,
            memory={
                "allowed": self.settings.budget.allowed,
                "reserved": self.engine.reserved,
                "projected": self.projected,
                "measured": self.engine.measured,
                "workers": self.engine.most_workers,
                "trace": self.trace.as_json(),
            },
            disk={"projected": self.disk_projected, "measured": max(self.disk_measured, sum(s.stored for s in shards))},
            tasks={"planned": self.tasks_planned, "run": self.tasks_run},
            seconds=round(time.monotonic() - self.started, 3),
            versions=receipt.versions(),
        )
        made.save(self.state)
        self._clean()
        return made

    def _clean(self) -> None:
        """Everything that was only needed while running goes."""
        shutil.rmtree(self.work, ignore_errors=True)
        if self.settings.scratch is not None:
            shutil.rmtree(self.work.parent, ignore_errors=True)
        for entry in self.state.iterdir():
            if entry.name != receipt.NAME:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def _begin(self, phase: str, total: int, tasks: Sequence[Task]) -> None:
        done = [task for task in tasks if self._has(task.key)]
        self.phase, self.total = phase, total
        self.tasks_now, self.tasks_done = len(tasks), len(done)
        self.tasks_planned += len(tasks)
        self.finished_bytes = int(total * len(done) / max(1, len(tasks)))
        self.finished_rows = sum(self._record(task.key).get("written", 0) for task in done)
        self._shares = total / max(1, len(tasks))

    def _has(self, key: str) -> bool:
        return f"task/{key}" in self.journal.records or key in self.journal.records

    def _record(self, key: str) -> Mapping[str, Any]:
        return self.journal.records.get(f"task/{key}") or self.journal.records.get(key) or {}

    def _task_done(self, key: str, result: Result, rows: int) -> None:
        self.journal.commit(key, result)
        self.tasks_run += 1
        self.tasks_done += 1
        self.finished_rows += rows
        self.finished_bytes = int(self._shares * self.tasks_done)
        self.disk_measured = max(
            self.disk_measured,
            sum(f["stored"] for record in self.journal.records.values() for f in record.get("fragments", ())),
        )

    def _on_sample(self, sample: Sample) -> None:
        seconds = time.monotonic() - self.started
        self.trace.add(seconds, sample.anonymous)
        reading = min(sum(place.bytes_read for place in sample.places), max(0, self.total - self.finished_bytes))
        self.watch(
            Status(
                self.phase,
                self.finished_bytes + reading,
                self.total,
                self.finished_rows + sum(place.rows_written for place in sample.places),
                self.tasks_done,
                self.tasks_now,
                sample.anonymous,
                self.settings.budget.allowed,
                sample.workers,
                seconds,
            )  # fmt: skip
        )

    def _check_disk(self, planned: Pass) -> None:
        """Scratch holds what is written until it has its name, and one shard a worker while neighbours are joined."""
        needed = planned.stored + (
            0 if planned.spliced else min(planned.stored, self.what.max_shard) * self.settings.workers
        )
        self.disk_projected = max(self.disk_projected, needed)
        if self.settings.disk is not None and needed > self.settings.disk:
            raise UsageError(
                f"needs about {format_size(needed)} of disk, and --disk allows {format_size(self.settings.disk)}",
                where=str(self.work), do="raise --disk, or cut the input",
            )  # fmt: skip
        where = next(folder for folder in (self.work, *self.work.parents) if folder.exists())
        if on_tmpfs(where):
            raise_if_too_large(where, needed, self.settings.budget, self.engine)
        free = shutil.disk_usage(where).free
        if planned.spliced and needed > free + _held(self.work):
            raise DiskFull(
                f"needs {format_size(needed)}, and {format_size(free)} is free", where=str(where),
                do="free some space and run the same command again",
            )  # fmt: skip

    def _sweep(self) -> None:
        """Remove what no journal line speaks of: halves of files, and fragments whose task did not commit."""
        if not self.work.exists():
            return
        known = {f["name"] for record in self.journal.records.values() for f in record.get("fragments", ())}
        for entry in self.work.iterdir():
            if entry.name not in known:
                entry.unlink()
        for entry in self.state.glob(".*.tmp"):
            entry.unlink()

    def _remove_old_shards(self) -> None:
        """What an earlier run named here goes; nothing else does."""
        for entry in self.to.iterdir():
            if SHARD_NAME.fullmatch(entry.name):
                entry.unlink()


def raise_if_too_large(where: Path, needed: int, budget: Budget, engine: LocalEngine) -> None:
    """Scratch on tmpfs is memory: refused unless it fits the budget, and then counted."""
    if engine.own() + needed > budget.grantable // 2:
        raise UsageError(
            f"is on tmpfs, which is memory: the {format_size(needed)} this run stages does not fit"
            f" --memory {budget_words(budget.allowed)}",
            where=str(where),
            do="put scratch on a disk (--scratch DIR)",
        )
    engine.others = needed


def check_destination(chains: Sequence[Chain], to: Path) -> None:
    """Refuse a destination that is a file, lies in the source, or holds what is not ours."""
    if to.exists() and not to.is_dir():
        raise DestinationConflict("is a file", where=str(to), do="name a folder: shards are written into it")
    target = to.resolve()
    for chain in chains:
        for folder in chain.read.folders:
            if target.is_relative_to(folder):
                raise DestinationConflict(f"lies inside the source {folder}", where=str(to), do="choose another folder")
        for file in chain.read.files:
            if Path(file.path).resolve().is_relative_to(target):
                raise DestinationConflict(
                    f"the source file {file.name} lies inside the destination",
                    where=str(to),
                    do="choose another folder",
                )
    if to.exists() and not (to / STATE).exists():
        other = next((entry.name for entry in sorted(to.iterdir())), None)
        if other is not None:
            raise DestinationConflict(
                f"already holds other content ({other})", where=str(to), do="choose an empty or a new folder"
            )


def _check_done(found: Receipt, to: Path) -> None:
    for shard in found.shards:
        path = to / shard["path"]
        if not path.exists() or path.stat().st_size != shard["bytes"]:
            raise DestinationConflict(
                "was written by this plan, and is gone or changed since", where=str(path), do="run again with --restart"
            )


def _branch_of(planned: Pass) -> dict[str, int]:
    return {} if planned.spliced else {task.key: task.payload[1].branch for task in planned.tasks}  # type: ignore[index]


def _unknown_schemas(planned: Pass) -> dict[int, list[int]]:
    """Per branch, the steps whose schema only running can tell, counted from the end."""
    from penstock.stage import Schemas, StageJob

    if not isinstance(planned.job, StageJob):
        return {}
    unknown: dict[int, list[int]] = {}
    for at, branch in enumerate(planned.job.branches):
        unknown[at] = [
            i - len(branch.steps)
            for i, step in enumerate(branch.steps)
            if Schemas(branch, {}).after(i) is None and step.name == "map"
        ]
    return unknown


def _prefix(order: Sequence[str], records: Mapping[str, Any], enough: int) -> list[str]:
    """Finished tasks from the first on, without a gap, until they hold enough rows."""
    keys: list[str] = []
    rows = 0
    for key in order:
        record = records.get(f"task/{key}")
        if record is None or rows >= enough:
            break
        keys.append(key)
        rows += record["written"]
    return keys


def _sum_reasons(all_reasons: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for reasons in all_reasons:
        for reason, rows in reasons.items():
            total[reason] = total.get(reason, 0) + rows
    return total


def _held(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.iterdir()) if folder.exists() else 0

"""One run: a plan, a journal, an engine, and at the end shards under their names and a receipt.

What happens at each crash point is decided here: a fragment counts when the journal says so, a name is given by rename,
and the journal goes only when the receipt is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import receipt
from penstock.assemble import group_fragments
from penstock.budget import Budget, budget_words, format_size
from penstock.chains import Chain, Read, Write, describe, fingerprint, first_dynamic_limit, key_of, numbered
from penstock.destination import Destination, check_destination, check_still_there
from penstock.engines.local import LocalEngine
from penstock.engines.task import Job, Result, Task
from penstock.errors import Busy, DestinationConflict, DiskFull, UsageError
from penstock.files import Writing, disk_errors, on_tmpfs
from penstock.journal import Journal, difference, held
from penstock.meter import Meter, Watcher
from penstock.plan import Pass, Surveys, least_cost, plan_pass
from penstock.receipt import Receipt
from penstock.sinks import sink_of
from penstock.sinks.base import Fragment, FragmentWriter
from penstock.sources.base import ReadOptions, SourceFile
from penstock.stage import Schemas, StageJob
from penstock.steps.limit import Limit
from penstock.waves import Crew, assemble, learned_schemas, run_pass, survey, survey_tasks

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Settings:
    """How a run is to go: none of this reaches the output."""

    budget: Budget
    workers: int
    scratch: Path | None = None
    disk: int | None = None
    restart: bool = False
    command: str = ""


def write(chains: Sequence[Chain], to: Path, what: Write, settings: Settings, *, watch: Watcher) -> Receipt:
    """Write chains to a folder. Same plan unfinished: resume. Same plan with a receipt: already done."""
    if any(file.by_content for chain in chains for file in chain.read.files):
        from penstock.media.spool import fitted

        chains = fitted(chains, what)
    description = describe(chains, what)
    key = key_of(description)
    check_destination(
        to,
        [file for chain in chains for file in chain.read.files],
        sources=[folder for chain in chains for folder in chain.read.folders],
    )
    place = Destination(to, scratch=settings.scratch, key=key)
    if not settings.restart and (found := _already_done(place, description, key)) is not None:
        return found
    meter = Meter(settings.budget.allowed, watch)
    with LocalEngine(settings.budget, workers=settings.workers, on_sample=meter.on_sample) as engine:
        run = Run(numbered(chains), what, settings, place, meter, engine)
        ready = run.plan_ahead()  # refusals come before anything is written
        with held(place.state):
            if settings.restart:
                place.start_over()
            elif (found := _already_done(place, description, key)) is not None:
                return found  # by another run, between our look and our lock
            with Journal(place.state, plan=description, key=key) as journal:
                place.prepare(journal)
                try:
                    shards, results = run.go(Crew(engine, journal, meter, place), ready)
                except BaseException:
                    engine.close()
                    place.sweep_halves()
                    raise
            _put_beside(chains, to)
            listed = place.name_shards(shards, sink_of(what.format).ending)
            made = _receipt(chains, description, key, settings, meter, engine, listed, results)
            made.save(place.state)
            place.clean()
            return made


def _put_beside(chains: Sequence[Chain], to: Path) -> None:
    """Files that go with a dataset as they are. Done again after a crash: each is there complete or not at all."""
    from penstock.parquet.stream import Range, Section, VirtualFile

    for one in (beside for chain in chains for beside in chain.read.beside):
        path = to / one.path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        whole = Range(one.file, 0, one.bytes, one.bytes, one.modified)
        with Writing(path) as out, VirtualFile([Section(one.bytes, lambda whole=whole: [whole])]) as stream:  # type: ignore[misc]
            stream.write_to(out)
            out.commit()


def _already_done(place: Destination, description: dict[str, Any], key: str) -> Receipt | None:
    """The receipt of this same plan, its shards still there; another plan's is an error."""
    found = receipt.load(place.state)
    if found is None:
        return None
    if found.plan_key != key:
        raise DestinationConflict(
            "another plan was finished here: " + difference(found.plan, description),
            where=str(place.folder),
            do="choose another destination, or pass --restart (restart=True) to start over",
        )
    check_still_there(found, place.folder)
    if place.leftovers():
        with suppress(Busy), held(place.state):
            place.clean()
    return replace(found, already_done=True)


class Run:
    """Passes one after the other, until the last has written the output."""

    def __init__(
        self,
        chains: tuple[Chain, ...],
        what: Write,
        settings: Settings,
        place: Destination,
        meter: Meter,
        engine: LocalEngine,
    ) -> None:
        self.chains, self.what, self.settings = chains, what, settings
        self.place, self.meter, self.engine = place, meter, engine

    def plan_ahead(self) -> Pass | None:
        """The whole plan, where metadata tells it all."""
        if first_dynamic_limit(self.chains) is not None or survey_tasks(self.chains, "p0") is not None:
            return None
        return self._plan(self.chains, {}, "p0", self.what)

    def go(self, crew: Crew, ready: Pass | None) -> tuple[list[Fragment], list[Result]]:
        """The shards of the output and the results of the tasks that made them."""
        final, earlier = self.last_pass(crew, ready)
        results = run_pass(crew, final)
        fragments = _fragments(results) or [self.empty(crew, final, self.what.format)]
        groups = [[one] for one in fragments] if final.spliced else group_fragments(fragments, self.what.max_shard)
        embeds = not final.spliced and self._refers(crew, final)
        return assemble(crew, groups, self.what.format, embeds=embeds), earlier + results

    def _refers(self, crew: Crew, final: Pass) -> bool:
        """Whether fragments hold references to media that shards must hold themselves."""
        from penstock.media.kinds import leaves_of

        media = bool(leaves_of(final_schema(crew.journal, final)))
        if media and self.what.format != "parquet":
            raise UsageError("media are written as Parquet", where=self.what.format, do="choose --format parquet")
        return media

    def last_pass(self, crew: Crew, ready: Pass | None) -> tuple[Pass, list[Result]]:
        """Every pass before the last is run; the last one is planned, and the caller's to run."""
        chains = self.chains
        earlier: list[Result] = []
        at = 0
        while (limit := first_dynamic_limit(chains)) is not None:
            chains, results = self._materialise(crew, chains, limit, f"p{at}")
            earlier += results
            at += 1
        return ready or self._plan(chains, self._survey(crew, chains, f"p{at}"), f"p{at}", self.what), earlier

    def _plan(self, chains: Sequence[Chain], surveys: Surveys, name: str, what: Write) -> Pass:
        """Plan a pass, measure what its job reserves in a first worker, and refuse what fits in no way."""
        planned = plan_pass(chains, what, folder=str(self.place.work), name=name, surveys=surveys)
        self._check_disk(planned)
        self._prepare(planned.job, planned.tasks)
        return planned

    def _prepare(self, job: Job, tasks: Sequence[Task], *, least: Sequence[Task] = ()) -> None:
        self.engine.prepare(job)
        self.engine.check(least)
        peak = self.engine.check(tasks)
        self.meter.projected = max(self.meter.projected, peak)

    def _survey(self, crew: Crew, chains: Sequence[Chain], name: str) -> Surveys:
        found = survey_tasks(chains, name)
        if found is None:
            return {}
        # What the survey finds may ask for more; what the pass after it takes at least is known, and refused now.
        least = Task("", None, least_cost(chains, self.what), found[1][0].label, "reading and writing it")
        self._prepare(*found, least=[least])
        return survey(crew, *found)

    def _materialise(
        self, crew: Crew, chains: Sequence[Chain], limit: Limit, name: str
    ) -> tuple[tuple[Chain, ...], list[Result]]:
        """Run the chains up to a limit that only running can count off; they become one chain that reads the result."""
        place = {at: stop for at, chain in enumerate(chains) if (stop := chain.place_of(limit)) is not None}
        before = [replace(chains[at], steps=chains[at].steps[:stop]) for at, stop in place.items()]
        what = Write("parquet", self.what.max_shard, rewrite=True)
        planned = self._plan(before, self._survey(crew, before, name), name, what)
        results = run_pass(crew, planned, enough=limit.rows)
        fragments = _fragments(results)
        files = tuple(self._as_source(one) for one in fragments or [self.empty(crew, planned, "parquet")])
        first = next(iter(place))
        steps = chains[first].steps[place[first] :]
        after = Chain(Read(files, "parquet", ReadOptions()), steps, chains[first].base, dense=True)
        kept = (after if at == first else chain for at, chain in enumerate(chains) if at == first or at not in place)
        return tuple(kept), results

    def _as_source(self, fragment: Fragment) -> SourceFile:
        path = self.place.work / fragment.name
        about = path.stat()
        return SourceFile(str(path), fragment.name, about.st_size, about.st_mtime_ns, about.st_ino, fragment.sha256)

    def empty(self, crew: Crew, planned: Pass, format: str) -> Fragment:
        """A result of no rows still has its columns."""
        schema = final_schema(crew.journal, planned)
        writer = FragmentWriter(sink_of(format), self.place.work, f"{planned.name}-empty", schema, max_bytes=1)
        return writer.write_empty()

    def _check_disk(self, planned: Pass) -> None:
        """Work holds what is written until it has its name, and a shard a worker while neighbours are put together."""
        joining = 0 if planned.spliced else min(planned.stored, self.what.max_shard) * self.settings.workers
        needed = planned.stored + joining
        self.meter.disk_projected = max(self.meter.disk_projected, needed)
        where, budget, disk = self.place.nearest(), self.settings.budget, self.settings.disk
        if disk is not None and needed > disk:
            raise UsageError(
                f"this run needs about {format_size(needed)}, and --disk allows {format_size(disk)}",
                where=str(self.place.work),
                do="raise --disk, or write less",
            )
        if on_tmpfs(where):
            if needed > budget.grantable // 2:
                raise UsageError(
                    f"is on tmpfs, which is memory: the {format_size(needed)} this run keeps there does not fit"
                    f" --memory {budget_words(budget.allowed)}",
                    where=str(where),
                    do="put it on a disk (--scratch DIR, or another destination)",
                )
            self.engine.others = needed
        free = shutil.disk_usage(where).free
        if planned.spliced and needed > free + self.place.held():
            raise DiskFull(
                f"needs {format_size(needed)}, and {format_size(free)} is free",
                where=str(where),
                do="free some space and run the same command again",
            )


def final_schema(journal: Journal, planned: Pass) -> pa.Schema:
    """What the rows of a pass look like in the end, known from the plan or learned as it ran."""
    assert isinstance(planned.job, StageJob)  # a splice has a file to tell
    branch = planned.job.branches[0]
    learned = {
        at + len(branch.steps): schema
        for (own, at), schema in learned_schemas(journal, planned.name).items()
        if own == 0
    }
    return Schemas(branch, learned).last() or branch.schema


def _receipt(
    chains: Sequence[Chain],
    description: dict[str, Any],
    key: str,
    settings: Settings,
    meter: Meter,
    engine: LocalEngine,
    shards: list[dict[str, Any]],
    results: Sequence[Result],
) -> Receipt:
    return Receipt(
        command=settings.command,
        plan=description,
        plan_key=key,
        inputs=[
            {"path": file.name, "bytes": file.bytes, "fingerprint": fingerprint(file)}
            for chain in chains
            for file in chain.read.files
        ],
        rows={
            "read": sum(result["read"] for result in results),
            "written": sum(shard["rows"] for shard in shards),
            "dropped": added_up(result["dropped"] for result in results),
            "first_error": next((result["first_error"] for result in results if result["first_error"]), None),
        },
        shards=shards,
        memory={
            "allowed": settings.budget.allowed,
            "reserved": engine.reserved,
            "projected": meter.projected,
            "measured": engine.measured,
            "workers": engine.most_workers,
            "trace": meter.trace.as_json(),
        },
        disk={
            "projected": meter.disk_projected,
            "measured": max(meter.disk_measured, sum(shard["bytes"] for shard in shards)),
        },
        tasks={"planned": meter.planned, "run": meter.run},
        seconds=round(meter.seconds(), 3),
        versions=receipt.versions(),
    )


def _fragments(results: Iterable[Result]) -> list[Fragment]:
    return [Fragment(**record) for result in results for record in result["fragments"]]


def added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for reasons in counts:
        for reason, rows in reasons.items():
            total[reason] = total.get(reason, 0) + rows
    return total

"""Shards whose rows must be made first: built in workers while those before them are on their way.

What has been built and not yet sent is all that lies on the disk, within `disk=`. A fragment goes once the place has
confirmed the shard it is part of; the journal keeps what it weighed, so that a push that goes on cuts the same shards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.budget import Budget, format_size
from penstock.chains import Write, describe, key_of, numbered
from penstock.destination import Destination
from penstock.engines.local import LocalEngine
from penstock.engines.task import Task
from penstock.errors import UsageError
from penstock.explain import Explained, explain
from penstock.journal import Journal
from penstock.media.kinds import leaves_of
from penstock.meter import Meter
from penstock.parquet.splice import Span
from penstock.plan import Pass
from penstock.publish.plan import HUGGINGFACE, SplitPlan, form_of
from penstock.publish.send import Item, shard_item
from penstock.publish.shards import Form, Grouping, Made, Recipe, groups_of, recipe_of
from penstock.run import Run, Settings, added_up, final_schema
from penstock.splice import even_shards
from penstock.waves import Crew, run_pass

if TYPE_CHECKING:
    import pyarrow as pa

# What the threads that send come to hold beside what this process holds when the engine looks.
SENDERS = 24 << 20


def foreseen(split: SplitPlan, write: Write, settings: Settings) -> Explained:
    """What building a split is likely to make and take, the threads that send included."""
    less = Budget(settings.budget.allowed - SENDERS)
    made = explain(split.chains, replace(write, rewrite=True, num_shards=None), less, settings.workers)
    return replace(made, projected=made.projected + SENDERS)


@dataclass(frozen=True)
class Built:
    """A split that was made: its shards, and what making it took."""

    form: Form
    recipes: Sequence[Recipe]
    read: int  # rows
    dropped: dict[str, int]  # rows by reason
    workers: int


def build(
    split: SplitPlan,
    write: Write,
    give: Callable[[Item], None],
    check: Callable[[], None],
    journal: Journal,
    meter: Meter,
    settings: Settings,
    state: Path,
) -> Built:
    """Make a split's rows and give its shards away as they are complete."""
    what = replace(write, rewrite=True, num_shards=None)
    if write.num_shards is not None:  # row groups small enough to be shared out; how large rows become, nobody knows
        what = replace(what, max_shard=max(1 << 20, min(what.max_shard, split.bytes // write.num_shards // 2)))
    chains = numbered(split.chains)
    description = describe(chains, what)
    key = key_of(description)
    place = Destination(state / "build" / split.name, scratch=settings.scratch, key=key)
    place.state.mkdir(parents=True, exist_ok=True)
    own = Meter(settings.budget.allowed, lambda status: None)
    with (
        LocalEngine(settings.budget, workers=settings.workers, others=SENDERS) as engine,
        Journal(place.state, plan=description, key=key) as built,
    ):
        place.work.mkdir(parents=True, exist_ok=True)
        crew = Crew(engine, built, own, place)
        # Staged bytes are bounded as they come, not by what the whole pass would make.
        run = Run(chains, what, replace(settings, disk=None), place, own, engine)
        final, earlier = run.last_pass(crew, None)
        staged = final.stored if settings.disk is None else min(final.stored, settings.disk)
        meter.disk_projected = max(meter.disk_projected, staged)
        feeder = _Feeder(split, write, final, crew, journal, give, check, meter, settings)
        feeder.forget_what_is_gone()
        results = earlier + run_pass(crew, final, after=lambda task: feeder.go_on(), room=feeder.room)
        feeder.go_on()
        if not feeder.any:
            feeder.add_empty(place.work / run.empty(crew, final, "parquet").name)
        recipes = feeder.finish()
        meter.projected = max(meter.projected, own.projected)
        meter.planned += own.planned
        meter.run += own.run
        read = sum(result["read"] for result in results)
        return Built(feeder.form(), recipes, read, added_up(one["dropped"] for one in results), engine.most_workers)


class _Feeder:
    """Takes fragments in the order of their tasks, whichever is done first, and cuts shards of them."""

    def __init__(
        self,
        split: SplitPlan,
        write: Write,
        final: Pass,
        crew: Crew,
        journal: Journal,
        give: Callable[[Item], None],
        check: Callable[[], None],
        meter: Meter,
        settings: Settings,
    ) -> None:
        self._split, self._write, self._final, self._crew = split, write, final, crew
        self._journal, self._give, self._check, self._meter = journal, give, check, meter
        self._disk = settings.disk
        self._work = crew.place.work
        self._grouping = Grouping(write.max_shard)
        self._next = 0  # task
        self._held: list[Made] = []  # all of them, where a number of shards was asked for
        self._recipes: list[Recipe] = []
        self._unsent: dict[int, Recipe] = {}
        self._over: set[str] = set()  # fragments whose last row group has been sent
        self._lock = threading.Lock()
        self._form: Form | None = None
        self.any = False
        self._check_disk()

    def form(self) -> Form:
        if self._form is None:
            schema = final_schema(self._crew.journal, self._final)
            self._form = form_of(schema, schema_from="", leaves=leaves_of(schema), known=self._declared(schema))
        return self._form

    def _declared(self, schema: pa.Schema) -> dict[str, Any]:
        """What the sources said of columns that are still there."""
        from penstock.parquet.footer import read_footer
        from penstock.publish.features import declared_features

        found: dict[str, Any] = {}
        for chain in self._split.chains:
            if chain.read.format == "parquet":
                stated = read_footer(chain.read.files[0].path).key_values.get(HUGGINGFACE)
                found = {**declared_features(stated), **found}
        return {name: one for name, one in found.items() if name in schema.names}

    def _check_disk(self) -> None:
        if self._disk is None:
            return
        least = 2 * min(self._final.stored, self._write.max_shard) + self._piece()
        if self._write.num_shards is not None:
            least = max(least, self._final.stored)
        if least > self._disk:
            raise UsageError(
                f"building and sending a shard needs about {format_size(least)}, and --disk allows"
                f" {format_size(self._disk)}",
                where=self._split.name,
                do="raise --disk, or lower --max-shard-size",
            )

    def _piece(self) -> int:
        """What a task is likely to leave on the disk."""
        return self._final.stored // max(1, len(self._final.tasks))

    def room(self, running: list[Task]) -> bool:
        """Whether another task may start: what it makes must have a place to lie, or nothing else would make one."""
        self._check()  # what a sender has met: without it nothing would ever make room
        held = self._crew.place.held()
        self._meter.disk_measured = max(self._meter.disk_measured, held)
        if self._disk is None or held + (len(running) + 1) * self._piece() <= self._disk:
            return True
        return not running and not self._unsent

    def forget_what_is_gone(self) -> None:
        """A fragment that is gone is made again, unless all shards it is part of were sent."""
        replayed = self._replayed()
        needed = {span.path for recipe in replayed if not self._was_sent(recipe) for span in recipe.spans}
        sent = {path for recipe in replayed if self._was_sent(recipe) for path in recipe.staged} - needed
        for task in self._final.tasks:
            record = self._crew.journal.records.get(task.key)
            if record is None:
                continue
            for fragment in record["fragments"]:
                path = self._work / fragment["name"]
                if str(path) not in sent and (not path.exists() or path.stat().st_size != fragment["stored"]):
                    del self._crew.journal.records[task.key]
                    break
        known = {f["name"] for r in self._crew.journal.records.values() for f in r.get("fragments", ())}
        self._crew.place.sweep(known)

    def _replayed(self) -> list[Recipe]:
        """The shards that an earlier run cut, as far as its journal tells."""
        every: list[Made] = []
        for task in self._final.tasks:
            record = self._crew.journal.records.get(task.key)
            names = [fragment["name"] for fragment in record["fragments"]] if record is not None else []
            known = [self._journal.records.get(self._key(name)) for name in names]
            if record is None or None in known:
                return self._cut(every, complete=False)
            for name, groups in zip(names, known, strict=True):
                every += _known_groups(self._work / name, groups or {})
        return self._cut(every, complete=True)

    def _cut(self, every: Sequence[Made], *, complete: bool) -> list[Recipe]:
        """Shards of the row groups from the first on; those of a number are cut when all is there, or not at all."""
        if self._write.num_shards is not None:
            shards = even_shards(every, self._write.num_shards) if complete else ()
            return [recipe_of(at, shard) for at, shard in enumerate(shards)]
        grouping = Grouping(self._write.max_shard)
        recipes = [recipe for made in every for recipe in grouping.add(made)]
        return [*recipes, *grouping.finish()] if complete else recipes

    def _was_sent(self, recipe: Recipe) -> bool:
        return f"task/sent/{self._split.name}/{recipe.at:06d}" in self._journal.records

    def _key(self, fragment: str) -> str:
        return f"groups/{self._split.name}/{fragment}"

    def go_on(self) -> None:
        """Take the fragments of every task that is done, up to the first that is not."""
        records = self._crew.journal.records
        while self._next < len(self._final.tasks):
            record = records.get(self._final.tasks[self._next].key)
            if record is None:
                return
            for fragment in record["fragments"]:
                self.add(self._work / fragment["name"])
            self._next += 1

    def add(self, path: Path) -> None:
        self.any = True
        self._meter.disk_measured = max(self._meter.disk_measured, self._crew.place.held())
        key = self._key(path.name)
        if key not in self._journal.records:
            groups = list(groups_of(str(path)))
            record = {"rows": [made.rows for made in groups], "bytes": [made.bytes for made in groups]}
            self._journal.commit(key, record)
        for made in _known_groups(path, self._journal.records[key]):
            if self._write.num_shards is not None:
                self._held.append(made)
                continue
            for recipe in self._grouping.add(made):
                self._send(recipe)

    def add_empty(self, path: Path) -> None:
        """No rows at all: one shard that has the columns."""
        self._send(Recipe(0, (Span(str(path), 0, 0),), 0, 0, staged=(str(path),)))

    def finish(self) -> list[Recipe]:
        if self._write.num_shards is not None:
            for at, shard in enumerate(even_shards(self._held, self._write.num_shards)):
                self._send(recipe_of(at, shard))
        for recipe in self._grouping.finish():
            self._send(recipe)
        return self._recipes

    def _send(self, recipe: Recipe) -> None:
        self._recipes.append(recipe)
        self._meter.planned += 1
        with self._lock:
            self._unsent[recipe.at] = recipe
        item = shard_item(self._split.name, self.form(), replace(recipe, staged=()))

        def sent() -> None:
            item.sent()
            self._drop(recipe)

        self._give(replace(item, sent=sent))

    def _drop(self, recipe: Recipe) -> None:
        """A shard is safe: fragments that no other shard needs go. Shards are not confirmed in their order."""
        with self._lock:
            self._unsent.pop(recipe.at, None)
            self._over.update(recipe.staged)
            needed = {span.path for other in self._unsent.values() for span in other.spans}
            gone = self._over - needed
            self._over -= gone
        for path in gone:
            Path(path).unlink(missing_ok=True)


def _known_groups(path: Path, record: dict[str, Any]) -> list[Made]:
    """A fragment's row groups as the journal has them: the file itself may be gone."""
    sizes = list(zip(record["rows"], record["bytes"], strict=True))
    return [
        Made(str(path), group, rows, size, last=group + 1 == len(sizes)) for group, (rows, size) in enumerate(sizes)
    ]

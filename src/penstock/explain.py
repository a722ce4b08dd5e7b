"""The plan before the run: what will be done and why, what it will take, and whether it fits."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.budget import Budget, format_size
from penstock.chains import Chain, Write, first_dynamic_limit
from penstock.engines.local import LocalEngine
from penstock.plan import plan_pass
from penstock.sinks import sink_of
from penstock.sources import source_of


@dataclass(frozen=True)
class Explained:
    """A plan in figures. `text` says it in words."""

    inputs: int
    input_bytes: int
    formats: list[str]
    steps: list[str]
    spliced: bool
    why: str
    survey: bool
    second_pass: str
    tasks: int
    rows: int
    bytes: int
    stored: int
    shards: int
    shard_name: str
    allowed: int
    reserved: int
    projected: int
    workers: int
    disk: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        about = "about " if self.survey or self.second_pass else ""
        rows = f"{self.rows:,} rows, " if self.rows >= 0 else ""
        how = "spliced" if self.spliced else "decoded and encoded"
        lines = [
            ("read", f"{self.inputs:,} {' and '.join(self.formats)} file{'s' if self.inputs != 1 else ''},"
                     f" {format_size(self.input_bytes)}; {rows}{about}{format_size(self.bytes)} as Arrow"),
            *([("survey", "reads all of it once first, for types, rows and the longest row")] if self.survey else []),
            *([("steps", ", ".join(self.steps))] if self.steps else []),
            ("how", f"{how}: {self.why}"),
            *([("then", self.second_pass)] if self.second_pass else []),
            ("memory", f"projected peak {format_size(self.projected)} of {format_size(self.allowed)} allowed:"
                       f" {self.workers} worker{'s' if self.workers != 1 else ''},"
                       f" {format_size(self.reserved)} reserved before any data"),
            ("disk", f"about {format_size(self.disk)} while running, {format_size(self.stored)} when done"),
            ("write", f"{about}{self.shards:,} shard{'s' if self.shards != 1 else ''} such as {self.shard_name},"
                      f" in {self.tasks:,} task{'s' if self.tasks != 1 else ''}"),
        ]  # fmt: skip
        return "\n".join(f"{word:<8}{what}" for word, what in lines)


def explain(chains: Sequence[Chain], what: Write, budget: Budget, workers: int) -> Explained:
    """Plan, start one worker to measure what is reserved, and refuse what fits in no way."""
    limit = first_dynamic_limit(chains)
    ahead, second = list(chains), ""
    if limit is not None:
        ahead = [
            replace(chain, steps=chain.steps[:stop]) for chain in chains if (stop := chain.place_of(limit)) is not None
        ]
        second = f"a second pass takes the first {limit.rows:,} rows of what came out, and the steps after the limit"
    planned = plan_pass(ahead, what, folder=tempfile.gettempdir())
    with LocalEngine(budget, workers=workers) as engine:
        reserved = engine.prepare(planned.job)
        peak = engine.check(planned.tasks)
        count = engine.schedule([task.projected for task in planned.tasks])[0]
        reserved = engine.own() + count * reserved
    shard = min(planned.stored, what.max_shard) * count
    ending = sink_of(what.format).ending
    return Explained(
        inputs=sum(len(chain.read.files) for chain in chains),
        input_bytes=sum(file.bytes for chain in chains for file in chain.read.files),
        formats=sorted({chain.read.format for chain in chains}),
        steps=[step.name for step in chains[0].steps],
        spliced=planned.spliced,
        why=planned.why,
        survey=any(source_of(chain.read.format).surveyed for chain in chains),
        second_pass=second,
        tasks=len(planned.tasks),
        rows=planned.rows,
        bytes=planned.bytes,
        stored=planned.stored,
        shards=planned.shards,
        shard_name=f"part-00000-of-{planned.shards:05d}{ending}",
        allowed=budget.allowed,
        reserved=reserved,
        projected=peak,
        workers=count,
        disk=planned.stored + (0 if planned.spliced else shard),
    )

"""What a user asked for, before it is planned: sources and the steps on them, where rows go, and what that is called.

Equal descriptions mean equal bytes out: they are what a resume compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.sources.base import ReadOptions, SourceFile, Span
from penstock.steps.base import Step
from penstock.steps.limit import Limit

FORMAT = 1  # of plans: raised when the same words begin to mean other bytes


@dataclass(frozen=True)
class Beside:
    """A file that goes with a dataset as it is, such as a BIDS tree's description."""

    path: str  # where it is put, relative to the dataset
    file: str
    bytes: int
    modified: int  # ns


@dataclass(frozen=True)
class Read:
    """A source as the user named it: files of one format, and how to read them."""

    files: tuple[SourceFile, ...]
    format: str
    options: ReadOptions
    folders: tuple[str, ...] = ()  # folders named whole: a destination may not lie in them
    beside: tuple[Beside, ...] = ()  # files that go with the dataset as they are


@dataclass(frozen=True)
class Chain:
    """A source and the steps on it. A dataset is one or more of these, one after the other."""

    read: Read
    steps: tuple[Step, ...] = ()
    base: int = 0  # what its first file is called in the identity of its rows; see `numbered`
    dense: bool = False  # its files were made by a pass before: their rows are numbered through

    def place_of(self, step: Step) -> int | None:
        """Where a step stands in this chain: the very one, not one like it."""
        return next((at for at, own in enumerate(self.steps) if own is step), None)


@dataclass(frozen=True)
class Write:
    """Where rows go: what of `write`'s arguments the output bytes depend on."""

    format: str = "parquet"
    max_shard: int = 500_000_000
    rewrite: bool = False
    num_shards: int | None = None

    def describe(self) -> dict[str, Any]:
        count = {} if self.num_shards is None else {"num_shards": self.num_shards}
        return {"format": self.format, "max_shard_size": self.max_shard, "rewrite": self.rewrite, **count}


def numbered(chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """Chains with their files numbered through: identities stay when a pass puts other files in their place."""
    made: list[Chain] = []
    base = 0
    for chain in chains:
        made.append(replace(chain, base=base))
        base += len(chain.read.files)
    return tuple(made)


def describe(chains: Sequence[Chain], write: Write | None) -> dict[str, Any]:
    """The plan in words and values: what the journal compares and the receipt shows."""
    sources: list[dict[str, Any]] = []
    limits = list(_limits(chains))
    for chain in chains:
        inputs: dict[str, str] = {}
        for file in chain.read.files:
            name = file.name if file.name not in inputs else f"{file.name} ({len(inputs)})"
            inputs[name] = fingerprint(file)
        sources.append(
            {
                "read": chain.read.format,
                **chain.read.options.describe(),
                "inputs": inputs,
                **(
                    {"beside": {one.path: [one.bytes, one.modified] for one in chain.read.beside}}
                    if chain.read.beside
                    else {}
                ),
                "steps": [{step.name: _described(step, limits)} for step in chain.steps],
            }
        )
    made: dict[str, Any] = {"format": FORMAT, "sources": sources}
    if write is not None:
        made["write"] = write.describe()
    return made


def _described(step: Step, limits: Sequence[Limit]) -> dict[str, Any]:
    """A step's words; a limit also by which it is: one on a concatenation is not one on each of its parts."""
    if isinstance(step, Limit):
        return {**step.describe(), "which": next(at for at, limit in enumerate(limits) if limit is step)}
    return step.describe()


def key_of(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def fingerprint(file: SourceFile) -> str:
    place = "" if file.by_content else f"{file.modified} {file.inode} "
    about = f"{file.bytes} {place}{file.digest}"
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def limit_rows(chains: Sequence[Chain], spans: list[list[Span]]) -> list[list[Span]]:
    """Count off every limit that can be: rows known, and only row-keeping steps before it.

    A limit on a concatenation is the same `Limit` in each of its chains.
    """
    spans = [list(one) for one in spans]
    for limit in _limits(chains):
        left = limit.rows
        for at, chain in enumerate(chains):
            if chain.place_of(limit) is None:
                continue
            kept: list[Span] = []
            for span in spans[at]:
                if left <= 0:
                    break
                rows = span.rows if span.take < 0 else span.take
                kept.append(span if rows <= left else span.taking(left))
                left -= max(0, rows)
            spans[at] = kept
    return spans


def first_dynamic_limit(chains: Sequence[Chain]) -> Limit | None:
    """The first limit that only running can count off: a step before it may drop rows or make more."""
    for limit in _limits(chains):
        for chain in chains:
            before = chain.steps[: chain.place_of(limit) or 0]
            if any(not step.keeps_rows and not isinstance(step, Limit) for step in before):
                return limit
    return None


def _limits(chains: Sequence[Chain]) -> Iterator[Limit]:
    """Every limit once, in order: one on a concatenation is the same object in each of its chains."""
    seen: set[int] = set()
    for chain in chains:
        for step in chain.steps:
            if isinstance(step, Limit) and id(step) not in seen:
                seen.add(id(step))
                yield step

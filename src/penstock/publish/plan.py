"""The plan of a push: shards by real bytes, what is built first and why, commits, and what it all takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.budget import counted, format_size
from penstock.chains import Beside, Chain, Write, describe, fingerprint, first_dynamic_limit
from penstock.errors import UsageError
from penstock.media.spool import fitted
from penstock.parquet.embed import arrow_schema
from penstock.publish.commits import FILES_PER_COMMIT
from penstock.publish.features import declared_features, features_of, huggingface_metadata
from penstock.publish.shards import Form, Recipe, planned
from penstock.splice import SplicePlan

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.explain import Explained

HUGGINGFACE = "huggingface"


@dataclass(frozen=True)
class SplitPlan:
    """One split: its shards where metadata tells them, else why rows must be made first."""

    name: str
    chains: tuple[Chain, ...]
    form: Form | None
    recipes: tuple[Recipe, ...]
    why_built: str
    rows: int  # -1: only running can tell
    bytes: int
    largest_row: int | None

    @property
    def beside(self) -> tuple[Beside, ...]:
        return tuple(one for chain in self.chains for one in chain.read.beside)

    @property
    def media(self) -> bool:
        return self.form is not None and bool(self.form.leaves)


@dataclass(frozen=True)
class PushPlan:
    """All splits of one transaction."""

    splits: tuple[SplitPlan, ...]
    write: Write

    @property
    def bytes(self) -> int:
        return sum(split.bytes for split in self.splits)

    @property
    def files(self) -> int:
        return sum(len(split.recipes) + len(split.beside) for split in self.splits)

    def commits(self, more: int = 0) -> int:
        """For these files and so many more: the last one carries the card, the receipts and the deletions too."""
        return max(1, -(-(self.files + more + 1 + len(self.splits)) // FILES_PER_COMMIT))

    def describe(self) -> dict[str, Any]:
        return {split.name: describe(split.chains, self.write) for split in self.splits}

    def inputs(self) -> list[dict[str, Any]]:
        return [
            {"path": file.name, "bytes": file.bytes, "fingerprint": fingerprint(file)}
            for split in self.splits
            for chain in split.chains
            for file in chain.read.files
        ]


def plan_push(splits: Mapping[str, Sequence[Chain]], write: Write) -> PushPlan:
    if not splits:
        raise UsageError("there is no split to push", do='pass a dataset, or {"train": a, "test": b}')
    for name in splits:
        if not name or not all(
            part.isidentifier() or part.replace("-", "_").isidentifier() for part in name.split(".")
        ):
            raise UsageError(f"split {name!r} is not a name the Hub takes", do="use letters, digits, _ and .")
    return PushPlan(tuple(_plan_split(name, fitted(chains, write), write) for name, chains in splits.items()), write)


def _plan_split(name: str, chains: tuple[Chain, ...], write: Write) -> SplitPlan:
    why: tuple[SplicePlan, list[Recipe]] | str = "a limit is counted off by running"
    if first_dynamic_limit(chains) is None:
        why = planned(chains, write, name=name)
    if isinstance(why, str):
        size = sum(file.bytes for chain in chains for file in chain.read.files)
        return SplitPlan(name, chains, None, (), why, -1, size, None)
    plan, recipes = why
    job = plan.job
    schema = source_schema(job.schema_from, job.columns)
    form = form_of(
        schema,
        schema_from=job.schema_from,
        columns=job.columns,
        rename=job.rename,
        leaves=job.leaves,
        key_values=job.key_values,
    )
    return SplitPlan(name, chains, form, tuple(recipes), "", plan.rows, plan.bytes, plan.largest_row)


def source_schema(path: str, columns: Sequence[str] | None) -> pa.Schema:
    """A Parquet file's columns in the order they are published in."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    if columns is None:
        return schema
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def form_of(
    schema: pa.Schema,
    *,
    schema_from: str,
    columns: tuple[str, ...] | None = None,
    rename: Mapping[str, str] | None = None,
    leaves: Sequence[Any] = (),
    key_values: Mapping[str, str] | None = None,
    known: Mapping[str, Any] | None = None,
) -> Form:
    """How shards of this schema are laid out: media embedded, features declared as `datasets` declares them."""
    import pyarrow as pa

    rename = rename or {}
    declared = known if known is not None else declared_features((schema.metadata or {}).get(HUGGINGFACE.encode()))
    renamed = pa.schema([field.with_name(rename.get(field.name, field.name)) for field in schema])
    features = features_of(renamed, known={rename.get(name, name): one for name, one in declared.items()})
    stated = huggingface_metadata(features)
    declared_here: dict[str, str] = {HUGGINGFACE: stated.decode()}
    if not leaves:
        # Readers show the metadata inside Arrow's own schema, and no other.
        declared_here["ARROW:schema"] = arrow_schema(renamed, declared_here).decode()
    return Form(
        columns=columns,
        rename=rename,
        leaves=tuple(leaves),
        schema_from=schema_from,
        key_values={**(key_values or {}), **declared_here},
        schema=renamed,
        features=features,
    )


def plan_words(
    plan: PushPlan,
    *,
    built: Mapping[str, Explained],
    target: str,
    state: str,
    visible: str,
    projected: int,
    allowed: int,
    disk: int,
    beside_bytes: int,
) -> str:
    """The plan for people."""
    lines = [("to", f"{target} ({state})")]
    for split in plan.splits:
        rows = f"{counted(split.rows, 'row')}, " if split.rows >= 0 else ""
        if split.form is None:
            made = built[split.name]
            shards = f"about {counted(made.shards, 'shard')}"
            lines.append(
                (split.name, f"{format_size(split.bytes)} to read, {shards} of {format_size(made.stored)} to send")
            )
            lines.append(("", f"built as they are sent, not moved as they are: {split.why_built}"))
            continue
        shards = counted(len(split.recipes), "shard")
        largest = f", largest row {format_size(split.largest_row)}" if split.largest_row is not None else ""
        heaviest = max((recipe.bytes for recipe in split.recipes), default=0)
        lines.append((split.name, f"{rows}{format_size(split.bytes)} in {shards}{largest}"))
        lines.append(("", f"largest shard {format_size(heaviest)}; virtual: read from the sources as they are sent"))
    beside = sum(len(split.beside) for split in plan.splits)
    if beside:
        lines.append(("beside", f"{counted(beside, 'file')} as they are, {format_size(beside_bytes)}"))
    lines.append(("memory", f"projected peak {format_size(projected)} of {format_size(allowed)} allowed"))
    lines.append(("disk", f"{format_size(disk)} of scratch" if disk else "no scratch"))
    if visible:
        return _aligned([*lines, ("visible", visible)])
    commits = plan.commits(sum(made.shards for made in built.values()))
    about = "about " if built else ""
    how = "all in one" if commits == 1 else "all but the last add files that no config names; visible with the last one"
    return _aligned([*lines, ("commits", f"{about}{commits}: {how}")])


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{word:<9}{what}" for word, what in lines)

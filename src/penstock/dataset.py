"""Dataset: what a user holds. Lazy and immutable: sources and the steps on them, run only by a terminal operation."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.budget import parse_size, resolve_budget
from penstock.chains import Chain, Read, Write
from penstock.errors import UsageError
from penstock.sources.base import ReadOptions
from penstock.sources.local import find
from penstock.steps import make_step
from penstock.steps.base import Step
from penstock.steps.limit import Limit

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.meter import Watcher
    from penstock.receipt import Receipt

DEFAULT_SHARD = "500MB"


def read(
    source: Any,
    *,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    schema: pa.Schema | None = None,
    infer: str = "full",
    on_error: str = "raise",
) -> Dataset:
    """A dataset of the rows in some files.

    Parameters
    ----------
    source
        A file, a glob, a folder, or a list of them. Files are read in bytewise order of their relative names. Or what
        is held in memory: an Arrow table, a pandas or Polars frame, a dict of lists, a `datasets.Dataset`. Or a folder
        of images, sounds, films, PDFs, scans or meshes: see `read_files` for what such columns are.
    format
        "parquet" or "jsonl"; told from the files' endings when left out.
    columns
        Read these columns only.
    schema
        The types of a text source; without it they are inferred from all of it.
    infer
        "full" looks at every row of a text source before writing; "sample" only at its first few MiB.
    on_error
        "raise" stops at a malformed row; "skip" leaves it out and counts it.
    """
    if infer not in ("full", "sample"):
        raise UsageError(f'infer is "full" or "sample", not {infer!r}')
    if on_error not in ("raise", "skip"):
        raise UsageError(f'on_error is "raise" or "skip", not {on_error!r}')
    if (held := _not_data_files(source, format)) is not None:
        return held if columns is None else held.select(columns)
    found = find(source, format=format)
    names = None if columns is None else tuple([columns] if isinstance(columns, str) else columns)
    given = None if schema is None else schema.serialize().to_pybytes()
    options = ReadOptions(columns=names, on_error=on_error, infer=infer, schema=given)
    return Dataset((Chain(Read(found.files, found.format, options, found.folders)),))


def _not_data_files(source: Any, format: str | None) -> Dataset | None:
    """A dataset of what is held in memory, or of a folder of media; None where `source` names data files."""
    if isinstance(source, str | os.PathLike):
        if format is None and Path(source).is_dir():
            from penstock.media.folders import is_media_folder

            if (kind := is_media_folder(source)) is not None:
                from penstock.media.read import read_folder

                return read_folder(source, kind=kind)
        return None
    if isinstance(source, list | tuple) and all(isinstance(one, str | os.PathLike) for one in source):
        return None
    from penstock.media.frames import frame_batches
    from penstock.media.read import of_found

    if (found := frame_batches(source)) is None:
        raise UsageError(f"reads paths, tables and frames; {type(source).__name__} is none of them", where="read")
    return of_found(found)


def concat(datasets: Iterable[Dataset]) -> Dataset:
    """The rows of several datasets, one after the other. Columns are matched by name; a missing one is null."""
    parts = list(datasets)
    if not parts:
        raise UsageError("concat needs at least one dataset")
    return Dataset(tuple(chain for part in parts for chain in _own_limits(part._chains)))


def _own_limits(chains: tuple[Chain, ...]) -> Iterator[Chain]:
    """Chains whose limits are theirs alone: the same part given twice is limited twice."""
    copies: dict[int, Step] = {}
    for chain in chains:
        steps = (copies.setdefault(id(s), replace(s)) if isinstance(s, Limit) else s for s in chain.steps)
        yield replace(chain, steps=tuple(steps))


class Dataset:
    """A lazy pipeline. Every step gives a new one; only `write`, `batches`, `rows`, `head` and `count` run it."""

    def __init__(self, chains: tuple[Chain, ...]) -> None:
        self._chains = chains

    def __repr__(self) -> str:
        parts = [
            " -> ".join([f"{len(chain.read.files)} {chain.read.format} files", *(step.name for step in chain.steps)])
            for chain in self._chains
        ]
        return f"<penstock.Dataset: {' + '.join(parts)}>"

    def _with(self, step: Step) -> Dataset:
        return Dataset(tuple(replace(chain, steps=(*chain.steps, step)) for chain in self._chains))

    # -- steps ----------------------------------------------------------------------------------------------------

    def select(self, columns: str | Sequence[str]) -> Dataset:
        """These columns, in this order."""
        return self._with(make_step("select", columns))

    def drop(self, columns: str | Sequence[str]) -> Dataset:
        """All columns but these."""
        return self._with(make_step("drop", columns))

    def rename(self, columns: Mapping[str, str]) -> Dataset:
        """Other names for some columns: old to new."""
        return self._with(make_step("rename", columns))

    def limit(self, rows: int) -> Dataset:
        """The first rows, in order."""
        return self._with(make_step("limit", rows))

    def sample(self, *, fraction: float, seed: int = 0) -> Dataset:
        """A share of the rows, the same ones for the same seed on any machine, budget and worker count."""
        return self._with(make_step("sample", fraction, seed))

    def filter(self, fn: Any, *, format: str = "arrow", version: str | None = None) -> Dataset:
        """The rows a function gives True for: a mask of its batch's length, or an Arrow expression.

        With `format="rows"` it is called once a row. See `map` for the formats and `version`.
        """
        return self._with(make_step("filter", fn, format, version))

    def map(
        self,
        fn: Callable[[Any], object],
        *,
        format: str = "arrow",
        schema: pa.Schema | None = None,
        version: str | None = None,
    ) -> Dataset:
        """A function on every batch of at most 8 MiB and 16,384 rows: the same batches on every budget.

        Parameters
        ----------
        fn
            Takes a batch in `format` and returns one, of any length.
        format
            "arrow" (a RecordBatch), "python" (a dict of lists), "rows" (a dict, row by row), "numpy" (a dict of
            arrays), "pandas" or "polars" (a frame).
        schema
            Of what it returns; without it, that of its first batch. Later batches are cast without loss, or fail.
        version
            Stands in for the function's code when a resume asks whether it is still the same.
        """
        return self._with(make_step("map", fn, format, schema, version))

    # -- looking --------------------------------------------------------------------------------------------------

    @property
    def schema(self) -> pa.Schema:
        """Columns and types. After a `map` without `schema=` its first batch is run to tell."""
        from penstock.iterate import schema

        return schema(self._chains)

    def batches(
        self, size: int | None = None, *, columns: Sequence[str] | None = None, drop_last: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """All rows as record batches of exactly `size` rows but the last; without a size, as the plan cuts them."""
        from penstock.iterate import batches, exactly

        made = batches((self if columns is None else self.select(columns))._chains)
        return made if size is None else exactly(made, size, drop_last=drop_last)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows as dicts."""
        for batch in self.batches():
            for start in range(0, batch.num_rows, 256):
                yield from batch.slice(start, 256).to_pylist()

    def head(self, rows: int = 5) -> list[dict[str, Any]]:
        """The first few rows as dicts."""
        return list(islice(self.limit(rows).rows(), rows))

    def count(self) -> int:
        """How many rows there are: from footers where they tell, else by reading."""
        from penstock.iterate import count

        return count(self._chains)

    def explain(
        self,
        *,
        memory: str | int | None = None,
        workers: int | None = None,
        max_shard_size: str | int = DEFAULT_SHARD,
        format: str = "parquet",
        rewrite: bool = False,
    ) -> str:
        """The plan of a `write`, in words: passes, projected peak, disk and shards. Opens no data it need not."""
        from penstock.explain import explain

        what = write_options(max_shard_size=max_shard_size, format=format, rewrite=rewrite)
        return explain(self._chains, what, resolve_budget(memory), worker_count(workers)).text()

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self,
        to: str | os.PathLike[str],
        *,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_shard_size: str | int = DEFAULT_SHARD,
        format: str = "parquet",
        rewrite: bool = False,
        workers: int | None = None,
        scratch: str | os.PathLike[str] | None = None,
        engine: str = "local",
        restart: bool = False,
        watch: Watcher | None = None,
        command: str | None = None,
    ) -> Receipt:
        """Write all rows to a folder of shards, in order, under a memory budget. Run again after any kill: it goes on.

        Parameters
        ----------
        to
            A new or empty folder, or one where this same plan was begun.
        memory
            What the whole process tree may take, such as "2GB". Default: `PENSTOCK_MEMORY`, else half of what this
            process may use.
        max_shard_size
            Arrow bytes a shard holds at most, unless one row is larger.
        format
            "parquet", "jsonl", "jsonl.gz" or "jsonl.zst".
        rewrite
            Decode and encode even where Parquet could be spliced.
        workers
            A ceiling; as many start as the budget holds. Default: the cores this process may use.
        restart
            Discard what another plan, or this one, has done here.
        """
        from penstock.run import Settings
        from penstock.run import write as run_write

        if engine != "local":
            raise UsageError(f'engine is "local", not {engine!r}')
        place = scratch if scratch is not None else os.environ.get("PENSTOCK_SCRATCH") or None
        settings = Settings(
            budget=resolve_budget(memory),
            workers=worker_count(workers),
            scratch=None if place is None else Path(place),
            disk=None if disk is None else parse_size(disk, name="disk"),
            restart=restart,
            command=command if command is not None else shlex.join(["python", *map(os.path.basename, sys.argv[:1])]),
        )
        what = write_options(max_shard_size=max_shard_size, format=format, rewrite=rewrite)
        return run_write(self._chains, Path(to), what, settings, watch=watch or (lambda status: None))

    def push(self, to: str, *, memory: str | int | None = None, **options: Any) -> Receipt:
        """Publish all rows to the Hugging Face Hub as one transaction: see `penstock.push` for the keywords."""
        from penstock.publish.api import push

        return push(self, to, memory=memory, **options)


def write_options(
    *, max_shard_size: str | int = DEFAULT_SHARD, format: str = "parquet", rewrite: bool = False
) -> Write:
    from penstock.sinks import sink_of

    sink_of(format)
    return Write(format, parse_size(max_shard_size, name="max_shard_size"), rewrite)


def worker_count(workers: int | None) -> int:
    """The ceiling on workers: what was asked for, else the cores this process may use."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(workers, int) or workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers!r}")
    return workers

"""The table of laws: every source, step and sink, entered once. A line here is all the test a new one needs.

Each case is a dataset made from a folder of samples, and how it is written. `job.py` runs one in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import functions
import pyarrow.compute as pc
import pyarrow.parquet as pq

import penstock as ps


@dataclass(frozen=True)
class Case:
    """One way through Penstock. `user`: a user's function runs; `held`: what is read is the caller's own."""

    make: Callable[[Path], ps.Dataset]
    write: Mapping[str, Any] = field(default_factory=dict)
    user: bool = False
    held: bool = False


def parquet(folder: Path) -> ps.Dataset:
    return ps.read(folder / "parquet")


SCANS = {"scan": "nifti"}
SMALL_SHARDS = {"max_shard_size": "6MB"}
DECODED = {**SMALL_SHARDS, "rewrite": True}

CASES: dict[str, Case] = {
    # sources
    "read parquet": Case(parquet, DECODED),
    "read parquet, one row group": Case(lambda folder: ps.read(folder / "one-row-group"), DECODED),
    "read jsonl": Case(lambda folder: ps.read(folder / "jsonl" / "*.jsonl"), SMALL_SHARDS),
    "read jsonl.gz": Case(lambda folder: ps.read(folder / "jsonl" / "*.gz"), SMALL_SHARDS),
    "read jsonl.zst": Case(lambda folder: ps.read(folder / "jsonl" / "*.zst"), SMALL_SHARDS),
    "read table": Case(
        lambda folder: ps.read(pq.read_table(folder / "parquet" / "2.parquet")), {"max_shard_size": "1MB"}, held=True
    ),
    "read files": Case(lambda folder: ps.read_files(folder / "media" / "scans.csv", media=SCANS), SMALL_SHARDS),
    "read files, and steps on them": Case(
        lambda folder: ps.read_files(folder / "media" / "scans.csv", media=SCANS).filter(pc.field("id") != 3),
        SMALL_SHARDS,
    ),
    "read folder of media": Case(lambda folder: ps.read(folder / "media" / "scans"), SMALL_SHARDS),
    "read bids": Case(lambda folder: ps.read_bids(folder / "bids"), SMALL_SHARDS),
    "concat": Case(lambda folder: ps.concat([parquet(folder), ps.read(folder / "jsonl" / "*.jsonl")]), SMALL_SHARDS),
    # steps that only move columns, spliced
    "splice": Case(parquet, SMALL_SHARDS),
    "select": Case(lambda folder: parquet(folder).select(["text", "id"]), SMALL_SHARDS),
    "drop": Case(lambda folder: parquet(folder).drop("score"), SMALL_SHARDS),
    "rename": Case(lambda folder: parquet(folder).rename({"text": "content"}), SMALL_SHARDS),
    # steps on rows
    "limit": Case(lambda folder: parquet(folder).limit(7_777), SMALL_SHARDS),
    "limit after filter": Case(
        lambda folder: parquet(folder).filter(pc.field("score") < 0.3).limit(2_000).rename({"id": "key"}), SMALL_SHARDS
    ),
    "sample": Case(lambda folder: parquet(folder).sample(fraction=0.3, seed=7), SMALL_SHARDS),
    "filter": Case(lambda folder: parquet(folder).filter(functions.long_text), SMALL_SHARDS, user=True),
    "filter that keeps little": Case(
        lambda folder: parquet(folder).filter(pc.field("score") < 0.01), {"max_shard_size": "2MB"}
    ),
    "map arrow": Case(lambda folder: parquet(folder).map(functions.across_batch), SMALL_SHARDS, user=True),
    "map python": Case(lambda folder: parquet(folder).map(functions.upper, format="python"), SMALL_SHARDS, user=True),
    "map rows": Case(lambda folder: parquet(folder).map(functions.row, format="rows"), SMALL_SHARDS, user=True),
    "map numpy": Case(lambda folder: parquet(folder).map(functions.doubled, format="numpy"), SMALL_SHARDS, user=True),
    "map pandas": Case(lambda folder: parquet(folder).map(functions.ranked, format="pandas"), SMALL_SHARDS, user=True),
    "map polars": Case(lambda folder: parquet(folder).map(functions.lengths, format="polars"), SMALL_SHARDS, user=True),
    # sinks
    "write jsonl": Case(parquet, {**SMALL_SHARDS, "format": "jsonl"}),
    "write jsonl.gz": Case(parquet, {**SMALL_SHARDS, "format": "jsonl.gz"}),
    "write jsonl.zst": Case(parquet, {**SMALL_SHARDS, "format": "jsonl.zst"}),
}

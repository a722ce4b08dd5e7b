"""Small Parquet files of every writer at hand, and helpers to splice them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from penstock.files import Writing
from penstock.parquet.footer import read_footer
from penstock.parquet.splice import Span, Spliced, splice

ROWS = 3000


def sample(rows: int = ROWS) -> pa.Table:
    """Flat and nested columns, nulls, long and repeated strings."""
    numbers = range(rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": pa.array([None if i % 7 == 0 else f"row {i % 50} " * (i % 5) for i in numbers], pa.string()),
            "score": pa.array([i / 3 for i in numbers], pa.float64()),
            "tags": pa.array([None if i % 11 == 0 else list(range(i % 4)) for i in numbers], pa.list_(pa.int32())),
            "who": pa.array([{"name": f"n{i % 9}", "ages": [i, None]} for i in numbers]),
            "when": pa.array([datetime.datetime(2020, 1, 1 + i % 28) for i in numbers], pa.timestamp("us")),
            "flag": pa.array([i % 3 == 0 for i in numbers], pa.bool_()),
        }
    )


def with_map(table: pa.Table) -> pa.Table:
    pairs = [[(f"k{j}", i) for j in range(i % 3)] for i in range(len(table))]
    return table.append_column("more", pa.array(pairs, pa.map_(pa.string(), pa.int64())))


def arrow(**options: object) -> Callable[[Path], None]:
    return lambda path: pq.write_table(with_map(sample()), path, **{"row_group_size": 700, **options})


def empty_groups(path: Path) -> None:
    table = with_map(sample(10))
    with pq.ParquetWriter(path, table.schema) as writer:
        for part in (table[:0], table[:4], table[:0], table[4:]):
            writer.write_table(part)


def duck(options: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        rows = with_map(sample())  # noqa: F841 (DuckDB finds it by name)
        duckdb.sql(f"copy (from rows) to '{path}' (format parquet, {options})")

    return write


WRITERS: dict[str, Callable[[Path], None]] = {
    "arrow": arrow(),
    "arrow_v2_zstd": arrow(data_page_version="2.0", compression="zstd", data_page_size=1000, write_batch_size=50),
    "arrow_plain": arrow(use_dictionary=False, compression="none", write_statistics=False),
    "arrow_gzip": arrow(compression="gzip", version="1.0", store_schema=False),
    "arrow_index": arrow(write_page_index=True, data_page_size=500, write_batch_size=20, write_page_checksum=True),
    "arrow_bloom": arrow(bloom_filter_options={"id": True, "text": True}, write_page_index=True),
    "arrow_delta": arrow(
        use_dictionary=False, column_encoding={"id": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY"}
    ),
    "arrow_sorted": arrow(sorting_columns=[pq.SortingColumn(0), pq.SortingColumn(2, descending=True)]),
    "arrow_empty_groups": empty_groups,
    "arrow_no_groups": lambda path: pq.ParquetWriter(path, with_map(sample(1)).schema).close(),
    "polars": lambda path: pl.DataFrame(sample()).write_parquet(path, row_group_size=800, statistics="full"),
    "polars_snappy": lambda path: pl.DataFrame(sample()).write_parquet(
        path, compression="snappy", data_page_size=2000, use_pyarrow=False
    ),
    "duckdb": duck("compression zstd, row_group_size 2048"),
    "duckdb_v2": duck("compression snappy, row_group_size 2048, parquet_version v2"),
    "datasets": lambda path: (Dataset(sample()).to_parquet(path, batch_size=900), None)[1],
}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("written")
    for name, write in WRITERS.items():
        write(folder / f"{name}.parquet")
    return {name: str(folder / f"{name}.parquet") for name in WRITERS}


@pytest.fixture(params=WRITERS)
def any_file(request: pytest.FixtureRequest, written: dict[str, str]) -> str:
    return written[request.param]


Splice = Callable[..., tuple[str, Spliced]]


@pytest.fixture
def spliced(tmp_path: Path) -> Splice:
    """Splice whole files, or given spans, into a new file; its path, and what the splice said."""
    made = 0

    def run(
        *sources: str | Span,
        columns: Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        key_values: Mapping[str, str | bytes] | None = None,
        schema_from: str | None = None,
    ) -> tuple[str, Spliced]:
        nonlocal made
        made += 1
        path = tmp_path / f"spliced-{made}.parquet"
        spans = [Span(s, 0, read_footer(s).row_groups) if isinstance(s, str) else s for s in sources]
        with Writing(path) as out:
            done = splice(spans, out, columns=columns, rename=rename, key_values=key_values, schema_from=schema_from)
            out.commit()
        return str(path), done

    return run

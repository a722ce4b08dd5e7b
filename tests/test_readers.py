"""A written folder is read by everybody as their own: pyarrow, Polars, DuckDB, pandas and Hugging Face datasets."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import penstock as ps

ROWS = 3_000


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(5)
    numbers = np.arange(ROWS)
    return pa.table(
        {
            "id": numbers,
            "text": [None if at % 11 == 0 else f"sluice {at} Überlauf" * (at % 5) for at in range(ROWS)],
            "score": rng.random(ROWS),
            "flag": [bool(at % 3) for at in range(ROWS)],
            "tags": [[str(tag) for tag in range(at % 4)] for at in range(ROWS)],
            "where": [{"x": at, "y": at / 2} for at in range(ROWS)],
            "data": [bytes([at % 256]) * (at % 7) for at in range(ROWS)],
            "day": [dt.date(2026, 1, 1) + dt.timedelta(days=at % 300) for at in range(ROWS)],
            "kind": pa.array([f"kind {at % 5}" for at in range(ROWS)]),
        }
    )


@pytest.fixture(scope="module", params=["spliced", "rewritten", "mapped"])
def out(request: pytest.FixtureRequest, table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers")
    (folder / "source").mkdir()
    for at in range(3):
        part = table.slice(at * 1_000, 1_000)
        pq.write_table(part, folder / "source" / f"{at}.parquet", row_group_size=300, compression="zstd")
    dataset = ps.read(folder / "source")
    if request.param == "mapped":
        dataset = dataset.map(lambda batch: batch)
    dataset.write(
        folder / "out", memory="400MB", max_shard_size="100kB", rewrite=request.param == "rewritten", workers=1
    )
    assert len(list((folder / "out").glob("part-*"))) > 1
    return folder / "out"


def test_pyarrow(out: Path, table: pa.Table) -> None:
    assert pq.read_table(out).equals(table)
    assert pa.dataset.dataset(out).to_table().equals(table)
    assert pa.dataset.dataset(out).to_table(filter=pa.compute.field("id") == 2_345)["id"].to_pylist() == [2_345]


def test_polars(out: Path, table: pa.Table) -> None:
    assert pl.read_parquet(out / "*.parquet").equals(pl.DataFrame(table))
    found = pl.scan_parquet(out / "*.parquet").filter(pl.col("id") == 2_345).collect()
    assert found["score"].to_list() == [table["score"][2_345].as_py()]


def test_duckdb(out: Path, table: pa.Table) -> None:
    connection = duckdb.connect()
    found = connection.execute(f"select * from read_parquet('{out}/*.parquet') order by id").to_arrow_table()
    assert found is not None and found.to_pylist() == table.to_pylist()
    few = connection.execute(f"select count(*) from '{out}/*.parquet' where id between 100 and 199")
    assert few.fetchall() == [(100,)]


def test_pandas(out: Path, table: pa.Table) -> None:
    pd.testing.assert_frame_equal(pd.read_parquet(out), table.to_pandas())


def test_datasets(out: Path, table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    for where in ({"data_dir": str(out)}, {"data_files": str(out / "*.parquet")}):
        found: Any = datasets.load_dataset("parquet", split="train", cache_dir=str(tmp_path), **where)
        assert found.num_rows == ROWS
        assert found.with_format("arrow")[:].to_pylist() == table.to_pylist()

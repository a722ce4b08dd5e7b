"""Reading in the caller's own process: exact batches, rows, counts and schemas."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from command import as_lines, make_parquet
from penstock import memory
from penstock.errors import BadRow, NotFound, PenstockError, SchemaClash, UsageError
from penstock.iterate import exactly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("iterate")
    table = make_parquet(folder / "source", rows=2_500, files=3, groups=2)
    (folder / "a.jsonl").write_text(as_lines(table))
    return folder


@pytest.mark.parametrize("size", [1, 7, 100, 833, 834, 2_500, 10_000])
def test_batches_hold_exactly_as_many_rows_but_the_last(size: int, folder: Path) -> None:
    made = list(ps.read(folder / "source").batches(size))
    assert [batch.num_rows for batch in made[:-1]] == [size] * (len(made) - 1)
    assert 0 < made[-1].num_rows <= size
    assert pa.Table.from_batches(made).equals(pq.read_table(folder / "source"))


def test_batches_without_the_last(folder: Path) -> None:
    made = list(ps.read(folder / "source").batches(1_000, drop_last=True))
    assert [batch.num_rows for batch in made] == [1_000, 1_000]
    assert [batch.num_rows for batch in ps.read(folder / "source").batches(500, drop_last=True)] == [500] * 5


def test_batches_of_some_columns(folder: Path) -> None:
    batch = next(iter(ps.read(folder / "source").batches(10, columns=["score", "id"])))
    assert batch.schema.names == ["score", "id"]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "10"])
def test_wrong_batch_size(size: object, folder: Path) -> None:
    with pytest.raises(UsageError, match="at least 1 row"):
        list(ps.read(folder / "source").batches(size))  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 20), max_size=10), size=st.integers(1, 25))
def test_exactly(sizes: list[int], size: int) -> None:
    ends = np.cumsum([0, *sizes])
    given_ = [pa.record_batch({"n": pa.array(np.arange(a, b))}) for a, b in pairwise(ends)]
    made = list(exactly(iter(given_), size))
    assert [row for batch in made for row in batch["n"].to_pylist()] == list(range(sum(sizes)))
    assert all(batch.num_rows == size for batch in made[:-1])


def test_rows_and_head(folder: Path) -> None:
    expected = pq.read_table(folder / "source").to_pylist()
    for dataset in (ps.read(folder / "source"), ps.read(folder / "a.jsonl")):
        assert list(dataset.rows()) == expected
        assert dataset.head() == expected[:5]
        assert dataset.head(0) == []
        assert dataset.head(10**6) == expected


def test_head_reads_no_more_than_it_must(tmp_path: Path) -> None:
    """The second file is broken beyond its footer; nobody asked for it."""
    make_parquet(tmp_path / "source", rows=100, files=2)
    path = tmp_path / "source" / "01.parquet"
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    assert len(ps.read(tmp_path / "source").head(50)) == 50
    with pytest.raises(PenstockError, match=r"01\.parquet"):
        list(ps.read(tmp_path / "source").rows())


def test_count(folder: Path) -> None:
    source, lines = ps.read(folder / "source"), ps.read(folder / "a.jsonl")
    assert source.count() == lines.count() == 2_500
    assert source.limit(77).count() == lines.limit(77).count() == 77
    assert source.select("id").rename({"id": "key"}).count() == 2_500
    assert source.filter(lambda row: row["id"] < 10, format="rows").count() == 10
    assert source.map(lambda batch: batch.slice(0, 1)).limit(2).count() == 2
    assert ps.concat([source, lines]).limit(4_000).count() == 4_000


def test_count_of_parquet_decodes_nothing(tmp_path: Path) -> None:
    make_parquet(tmp_path / "source", rows=100, files=1)
    path = tmp_path / "source" / "00.parquet"
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    assert ps.read(tmp_path / "source").count() == 100


def test_schema(folder: Path) -> None:
    source = ps.read(folder / "source")
    assert source.schema.equals(pq.read_schema(folder / "source" / "00.parquet"))
    assert source.select(["score", "id"]).schema.names == ["score", "id"]
    assert ps.read(folder / "a.jsonl").schema.equals(pa.schema(source.schema))
    assert source.map(lambda c: {"n": [1.5]}, format="python").schema == pa.schema([("n", pa.float64())])
    with pytest.raises(UsageError, match="pass schema="):
        _ = source.limit(0).map(lambda c: {"n": [1.5]}, format="python").schema


def test_iterating_twice_gives_the_same(folder: Path) -> None:
    dataset = ps.read(folder / "source").limit(100).sample(fraction=0.5)
    assert list(dataset.rows()) == list(dataset.rows())
    one, two = iter(dataset.rows()), iter(dataset.rows())
    assert [next(one), next(two), next(one)] == [*dataset.head(1), *dataset.head(2)]


def test_iterating_in_another_thread(folder: Path) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(row["id"] for row in ps.read(folder / "source").rows()))
    thread.start()
    thread.join()
    assert found == list(range(2_500))


def test_iterating_starts_no_process_and_holds_little(tmp_path: Path) -> None:
    """100 MB of text in one row group, a batch at a time."""
    text = "weir and sluice " * 625
    table = pa.table({"id": np.arange(10_000), "text": pa.array([text] * 10_000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10_000, use_dictionary=False, compression="zstd")
    del table
    memory.release()
    before, highest = memory.anonymous(), 0
    children = memory.children(os.getpid())
    for _ in ps.read(tmp_path / "a.parquet").batches(100):
        highest = max(highest, memory.anonymous())
        assert memory.children(os.getpid()) == children
    assert highest - before < 80_000_000


def test_text_whose_type_changes_after_the_sample(tmp_path: Path) -> None:
    """`batches` knows the first few MiB alone: a later clash stops with the line, the column and what to pass."""
    padding = '{"id": 1, "text": "' + "x" * 1_000 + '", "score": 0.5}\n'
    (tmp_path / "a.jsonl").write_text(padding * 9_000 + '{"id": "late", "text": "a", "score": 0.5}\n')
    with pytest.raises((BadRow, SchemaClash), match=r"id.*a\.jsonl.*9,?001") as caught:
        list(ps.read(tmp_path / "a.jsonl").batches())
    assert "schema" in str(caught.value)


def test_order_of_files_is_bytewise(tmp_path: Path) -> None:
    for name in ("b.parquet", "B.parquet", "a/z.parquet", "a-1.parquet", "ä.parquet", "10.parquet", "9.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"name": [name]}), tmp_path / name)
    order = ["10.parquet", "9.parquet", "B.parquet", "a-1.parquet", "a/z.parquet", "b.parquet", "ä.parquet"]
    assert [row["name"] for row in ps.read(tmp_path).rows()] == order
    assert [row["name"] for row in ps.read(f"{tmp_path}/**/*.parquet").rows()] == order
    given_ = [tmp_path / "b.parquet", tmp_path / "9.parquet"]
    assert [row["name"] for row in ps.read(given_).rows()] == ["b.parquet", "9.parquet"]


def test_hidden_and_underscored_files_are_passed_by(tmp_path: Path) -> None:
    for name in ("a.parquet", ".hidden.parquet", "_SUCCESS.parquet", ".penstock/b.parquet", "_temporary/c.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"name": [name]}), tmp_path / name)
    assert [row["name"] for row in ps.read(tmp_path).rows()] == ["a.parquet"]


def test_wrong_words_when_reading(folder: Path) -> None:
    for options in ({"infer": "all"}, {"on_error": "ignore"}, {"format": "csv"}):
        with pytest.raises(UsageError):
            ps.read(folder / "source", **options).count()
    with pytest.raises(NotFound):
        ps.read([])
    (folder / "both").mkdir(exist_ok=True)
    pq.write_table(pa.table({"a": [1]}), folder / "both" / "a.parquet")
    (folder / "both" / "b.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match=r"a\.parquet is parquet and b\.jsonl is jsonl.*format="):
        ps.read(folder / "both")
    assert ps.read(folder / "both", format="jsonl").count() == 1

"""What each step means, against plain pyarrow; and the same through `batches` and `write`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import penstock as ps
from command import as_lines, make_parquet, read_back
from penstock.errors import FunctionFailed, PenstockError, SchemaClash, UsageError

ROWS = 3_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    table = make_parquet(folder / "source", rows=ROWS, files=3, groups=3)
    (folder / "lines").mkdir()
    (folder / "lines" / "a.jsonl").write_text(as_lines(table.slice(0, 1_000)))
    (folder / "lines" / "b.jsonl").write_text(as_lines(table.slice(1_000)))
    return folder


@pytest.fixture(scope="module")
def table(folder: Path) -> pa.Table:
    return pq.read_table(folder / "source")


@pytest.fixture
def source(folder: Path) -> ps.Dataset:
    return ps.read(folder / "source")


def collected(dataset: ps.Dataset) -> pa.Table:
    return pa.Table.from_batches(list(dataset.batches()), schema=dataset.schema)


def same_both_ways(dataset: ps.Dataset, expected: pa.Table, out: Path, **options: Any) -> None:
    assert collected(dataset).equals(expected)
    made = dataset.write(out, memory="400MB", max_shard_size="100kB", workers=1, **options)
    assert read_back(out).equals(expected)
    assert made.rows["written"] == len(expected)


LOW = pc.field("score") < 0.25


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {"n": columns["id"] * 2}


STEPS: dict[str, tuple[Callable[[ps.Dataset], ps.Dataset], Callable[[pa.Table], pa.Table]]] = {
    "select": (lambda d: d.select(["score", "id"]), lambda t: t.select(["score", "id"])),
    "select one": (lambda d: d.select("text"), lambda t: t.select(["text"])),
    "drop": (lambda d: d.drop(["text"]), lambda t: t.drop_columns("text")),
    "rename": (lambda d: d.rename({"id": "key"}), lambda t: t.rename_columns(["key", "text", "score"])),
    "rename that swaps": (
        lambda d: d.select(["id", "score"]).rename({"id": "score", "score": "id"}),
        lambda t: t.select(["id", "score"]).rename_columns(["score", "id"]),
    ),
    "renamed then selected": (
        lambda d: d.rename({"text": "content"}).select("content"),
        lambda t: t.select(["text"]).rename_columns(["content"]),
    ),
    "limit within a row group": (lambda d: d.limit(1_234), lambda t: t.slice(0, 1_234)),
    "limit at a row group": (lambda d: d.limit(1_000), lambda t: t.slice(0, 1_000)),
    "limit of nothing": (lambda d: d.limit(0), lambda t: t.slice(0, 0)),
    "limit beyond the end": (lambda d: d.limit(10**9), lambda t: t),
    "limit twice": (lambda d: d.limit(2_000).limit(1_500), lambda t: t.slice(0, 1_500)),
    "filter by expression": (lambda d: d.filter(LOW), lambda t: t.filter(LOW)),
    "filter by function": (
        lambda d: d.filter(lambda batch: pc.less(batch["score"], 0.25)),
        lambda t: t.filter(pc.less(t["score"], 0.25)),
    ),
    "filter rows": (
        lambda d: d.filter(lambda row: row["id"] % 7 == 0, format="rows"),
        lambda t: t.filter(pc.is_in(t["id"], pa.array(range(0, ROWS, 7)))),
    ),
    "filter that keeps nothing": (lambda d: d.filter(pc.field("score") > 2), lambda t: t.slice(0, 0)),
    "limit after filter": (
        lambda d: d.filter(pc.field("score") < 0.5).limit(700),
        lambda t: t.filter(pc.field("score") < 0.5).slice(0, 700),
    ),
    "filter after limit": (
        lambda d: d.limit(700).filter(pc.field("score") < 0.5),
        lambda t: t.slice(0, 700).filter(pc.field("score") < 0.5),
    ),
    "map": (
        lambda d: d.map(lambda batch: batch.select(["id"])),
        lambda t: t.select(["id"]),
    ),
    "map that makes more rows": (
        lambda d: d.select("id").map(lambda c: {"id": [n for n in c["id"] for _ in range(2)]}, format="python"),
        lambda t: pa.table({"id": np.repeat(np.arange(ROWS), 2)}),
    ),
    "map then limit then map": (
        lambda d: d.map(doubled, format="numpy").limit(10).map(lambda c: {"n": c["n"] + 1}, format="numpy"),
        lambda t: pa.table({"n": np.arange(10) * 2 + 1}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_step(case: str, source: ps.Dataset, table: pa.Table) -> None:
    step, plain = STEPS[case]
    assert collected(step(source)).equals(plain(table).combine_chunks())
    assert step(source).count() == len(plain(table))


@pytest.mark.parametrize(
    "case",
    [
        "rename that swaps",
        "limit of nothing",
        "limit twice",
        "filter that keeps nothing",
        "filter after limit",
        "map then limit then map",
    ],
)
def test_step_written(case: str, source: ps.Dataset, table: pa.Table, tmp_path: Path) -> None:
    """Those that the laws do not have."""
    step, plain = STEPS[case]
    same_both_ways(step(source), plain(table).combine_chunks(), tmp_path / "out")


def test_step_gives_a_new_dataset(source: ps.Dataset) -> None:
    source.limit(5)
    assert source.count() == ROWS


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.select([]),
        lambda d: d.select(["id", "id"]),
        lambda d: d.select([1]),
        lambda d: d.rename({}),
        lambda d: d.rename(["id"]),
        lambda d: d.limit(-1),
        lambda d: d.limit(True),
        lambda d: d.limit(1.5),
        lambda d: d.sample(fraction=1.1),
        lambda d: d.sample(fraction=-0.1),
        lambda d: d.sample(fraction="half"),
        lambda d: d.filter("score < 1"),
        lambda d: d.map(None),
        lambda d: d.map(len, format="spark"),
        lambda d: d.drop(["id", "text", "score"]).schema,
        lambda d: d.rename({"id": "text"}).schema,
    ],
)
def test_wrong_arguments(call: Callable[[ps.Dataset], object], source: ps.Dataset) -> None:
    with pytest.raises(UsageError):
        call(source)


# -- sample -----------------------------------------------------------------------------------------------------------


def test_sample_is_a_fair_share(folder: Path) -> None:
    """Of 3,000 rows, 30 % in 40 seeds: mean and spread as of a coin, and every row as likely as any other."""
    chosen = np.zeros(ROWS)
    counts = []
    for seed in range(40):
        ids = collected(ps.read(folder / "source", columns=["id"]).sample(fraction=0.3, seed=seed))["id"].to_numpy()
        assert (np.diff(ids) > 0).all()
        chosen[ids] += 1
        counts.append(len(ids))
    deviation = (ROWS * 0.3 * 0.7) ** 0.5
    assert abs(np.mean(counts) - 0.3 * ROWS) < 4 * deviation / 40**0.5
    assert 0.6 * deviation < np.std(counts) < 1.5 * deviation
    assert chosen.std() == pytest.approx((40 * 0.3 * 0.7) ** 0.5, rel=0.1)


def test_sample_is_the_same_for_the_same_seed(source: ps.Dataset, tmp_path: Path) -> None:
    one = collected(source.sample(fraction=0.2, seed=7))
    same_both_ways(source.sample(fraction=0.2, seed=7), one, tmp_path / "out")
    assert not collected(source.sample(fraction=0.2, seed=8)).equals(one)
    # A larger share holds the smaller one: the choice is a threshold on each row's key.
    more = collected(source.sample(fraction=0.5, seed=7))["id"].to_pylist()
    assert set(one["id"].to_pylist()) < set(more)


def test_sample_never_changes_from_release_to_release(source: ps.Dataset) -> None:
    ids = collected(source.sample(fraction=0.002, seed=7))["id"].to_pylist()
    assert ids == SAMPLED_7


SAMPLED_7 = [35, 140, 255, 411, 830, 1506, 1518, 1559, 1780, 2013, 2282, 2330, 2370, 2777]


def test_sample_edges(source: ps.Dataset) -> None:
    assert source.sample(fraction=0).count() == 0
    assert source.sample(fraction=1).count() == ROWS


def test_sample_does_not_depend_on_row_groups(table: pa.Table, tmp_path: Path) -> None:
    """A row's identity is its file and its place in it, however the file is cut."""
    found = []
    for groups in (ROWS, 100):
        (tmp_path / str(groups)).mkdir()
        pq.write_table(table, tmp_path / str(groups) / "a.parquet", row_group_size=groups)
        found.append(collected(ps.read(tmp_path / str(groups)).sample(fraction=0.1, seed=3)))
    assert found[0].equals(found[1])


@pytest.mark.parametrize(
    "made",
    [
        lambda folder: ps.read(folder / "source").limit(1_000).sample(fraction=0.3, seed=1),
        lambda folder: ps.read(folder / "source").filter(pc.field("score") < 0.5).sample(fraction=0.3, seed=1),
        lambda folder: (
            ps.read(folder / "source").filter(pc.field("score") < 0.5).limit(900).sample(fraction=0.3, seed=1)
        ),
        lambda folder: ps.read(folder / "source").sample(fraction=0.5, seed=1).limit(700).sample(fraction=0.5, seed=2),
        lambda folder: ps.read(folder / "lines").sample(fraction=0.3, seed=1),
        lambda folder: ps.concat([ps.read(folder / "source"), ps.read(folder / "lines")]).sample(fraction=0.3, seed=1),
    ],
    ids=["limited", "filtered", "filtered and limited", "sampled and limited", "lines", "concat"],
)
def test_sample_through_batches_and_write(made: Callable[[Path], ps.Dataset], folder: Path, tmp_path: Path) -> None:
    dataset = made(folder)
    found = collected(dataset)
    assert 0 < len(found) < 2 * ROWS
    same_both_ways(dataset, found, tmp_path / "out")


# -- map --------------------------------------------------------------------------------------------------------------


def test_map_sees_the_plans_batches(tmp_path: Path) -> None:
    """At most 16,384 rows, cut from the start of the file, whatever its row groups."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": np.arange(40_000)}), tmp_path / "in" / "a.parquet", row_group_size=7_000)
    dataset = ps.read(tmp_path / "in").map(lambda batch: pa.record_batch({"rows": [batch.num_rows]}))
    assert collected(dataset)["rows"].to_pylist() == [16_384, 16_384, 7_232]
    dataset.write(tmp_path / "out", memory="400MB", workers=1)
    assert read_back(tmp_path / "out")["rows"].to_pylist() == [16_384, 16_384, 7_232]


def test_map_schema_is_that_of_its_first_batch(source: ps.Dataset, tmp_path: Path) -> None:
    """Later batches are cast without loss."""

    def drifting(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        late = columns["id"][0] >= 1_000
        return {"n": [number if late else number + 0.5 for number in columns["id"]]}

    dataset = source.map(drifting, format="python")
    dataset.write(tmp_path / "out", memory="400MB", max_shard_size="20kB")
    assert read_back(tmp_path / "out").schema == pa.schema([("n", pa.float64())])
    assert dataset.schema == pa.schema([("n", pa.float64())])


def test_map_whose_later_batch_cannot_be_cast_fails(source: ps.Dataset, tmp_path: Path) -> None:
    def drifting(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        late = columns["id"][0] >= 1_000
        return {"n": [str(number) + "x" if late else number for number in columns["id"]]}

    with pytest.raises(PenstockError, match=r"step 1 \(map\), 01\.parquet rows .*'n'"):
        source.map(drifting, format="python").write(tmp_path / "out", memory="400MB", max_shard_size="20kB")


def test_map_with_a_schema(source: ps.Dataset, tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int16()), ("none", pa.string())])
    dataset = source.map(lambda c: {"n": c["id"], "none": [None] * len(c["id"])}, format="python", schema=schema)
    assert dataset.schema == schema
    dataset.write(tmp_path / "out", memory="400MB", workers=1)
    assert read_back(tmp_path / "out").schema == schema


@pytest.mark.parametrize("result", [None, 5, "text", {"a": [1], "b": [1, 2]}])
def test_map_that_returns_no_batch(result: Any, source: ps.Dataset) -> None:
    with pytest.raises(FunctionFailed, match=r"step 1 \(map\), 00\.parquet rows 0 to"):
        list(source.map(lambda columns: result, format="python").batches())


@pytest.mark.parametrize("mask", [True, np.True_, None, [True], [True] * 5_000, ["yes"] * 1_000])
def test_filter_that_returns_no_mask(mask: Any, source: ps.Dataset) -> None:
    with pytest.raises(FunctionFailed, match=r"step 1 \(filter\), 00\.parquet rows 0 to"):
        list(source.filter(lambda batch: mask).batches())


def test_filter_expression_on_a_column_that_is_not_there(source: ps.Dataset) -> None:
    with pytest.raises(PenstockError, match="filter"):
        list(source.filter(pc.field("nothing") > 1).batches())


def test_filter_drops_nulls(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, None, 3]}), tmp_path / "a.parquet")
    dataset = ps.read(tmp_path / "a.parquet")
    assert collected(dataset.filter(pc.field("n") > 0))["n"].to_pylist() == [1, 3]
    assert collected(dataset.filter(lambda batch: pc.greater(batch["n"], 0)))["n"].to_pylist() == [1, 3]


# -- concat -----------------------------------------------------------------------------------------------------------


def test_concat_of_the_same(source: ps.Dataset, table: pa.Table, tmp_path: Path) -> None:
    same_both_ways(ps.concat([source, source]), pa.concat_tables([table, table]).combine_chunks(), tmp_path / "out")


def test_concat_matches_columns_by_name(folder: Path, table: pa.Table, tmp_path: Path) -> None:
    """Order of the first; a missing column is null; types widen without loss."""
    a = ps.read(folder / "source").select(["id", "text"]).limit(5)
    b = ps.read(folder / "lines").select(["score", "id"]).limit(5)
    expected = pa.table(
        {
            "id": list(range(5)) * 2,
            "text": table["text"].to_pylist()[:5] + [None] * 5,
            "score": [None] * 5 + table["score"].to_pylist()[:5],
        }
    )
    same_both_ways(ps.concat([a, b]), expected, tmp_path / "out")


def test_concat_with_a_map_whose_schema_only_running_tells(source: ps.Dataset, tmp_path: Path) -> None:
    """It must be told: by the time it has run, the others may have been written."""
    few = source.select("id").limit(3)
    unknown = ps.concat([few, few.map(lambda c: {"id": c["id"], "more": c["id"] * 2}, format="numpy")])
    with pytest.raises(UsageError, match=r"schema="):
        unknown.write(tmp_path / "out", memory="400MB", workers=1)
    schema = pa.schema([("id", pa.int64()), ("more", pa.int64())])
    told = ps.concat([few, few.map(lambda c: {"id": c["id"], "more": c["id"] * 2}, format="numpy", schema=schema)])
    expected = pa.table({"id": [0, 1, 2] * 2, "more": [None] * 3 + [0, 2, 4]}, schema=schema)
    same_both_ways(told, expected, tmp_path / "out")


def test_concat_that_clashes(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["text"]}), tmp_path / "other.parquet")
    both = ps.concat([ps.read(folder / "source"), ps.read(tmp_path / "other.parquet")])
    with pytest.raises(SchemaClash, match=r"'id'.*00\.parquet.*other\.parquet"):
        both.write(tmp_path / "out", memory="400MB", workers=1)


def test_limit_on_a_concat_counts_through(source: ps.Dataset, table: pa.Table, tmp_path: Path) -> None:
    both = ps.concat([source, source]).limit(ROWS + 10)
    expected = pa.concat_tables([table, table.slice(0, 10)]).combine_chunks()
    same_both_ways(both, expected, tmp_path / "out")


def test_concat_of_limited(source: ps.Dataset, table: pa.Table, tmp_path: Path) -> None:
    """The same step object in two places counts for each."""
    few = source.limit(10)
    expected = pa.concat_tables([table.slice(0, 10)] * 2).combine_chunks()
    same_both_ways(ps.concat([few, few]), expected, tmp_path / "out")


def test_concat_of_nothing() -> None:
    with pytest.raises(UsageError, match="at least one"):
        ps.concat([])


# -- text -------------------------------------------------------------------------------------------------------------


def test_limit_on_text_with_malformed_lines(tmp_path: Path) -> None:
    lines = [f'{{"n": {at}}}' if at % 3 else "broken" for at in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    good = [at for at in range(30) if at % 3][:10]
    for at, options in enumerate(({}, {"schema": pa.schema([("n", pa.int64())])})):
        dataset = ps.read(tmp_path / "a.jsonl", on_error="skip", **options).limit(10)
        assert collected(dataset)["n"].to_pylist() == good
        dataset.write(tmp_path / f"out{at}", memory="400MB", workers=1)
        assert read_back(tmp_path / f"out{at}")["n"].to_pylist() == good

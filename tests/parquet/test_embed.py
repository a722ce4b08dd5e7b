"""A virtual shard reads back, in every reader, as the table that pyarrow would have written with the bytes in it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limits import require_kernel_limits, run_limited
from penstock.errors import BadFile, SchemaClash, SourceChanged, UsageError
from penstock.files import Writing
from penstock.media.kinds import LARGEST_VALUE, REFERENCE, Leaf, kinds_of, leaves_of, mark, stored_schema
from penstock.parquet import thrift, values
from penstock.parquet.embed import VirtualShard, arrow_schema, virtual_shard
from penstock.parquet.footer import open_parquet, read_footer
from penstock.parquet.pages import walk
from penstock.parquet.splice import Span, splice
from penstock.parquet.stream import Range, digest

Row = dict[str, Any]

SIZES = (0, 1, 5, 120, 700, 3000)
INLINE: Row = {"bytes": b"inline bytes", "path": "inline.bin", "file": None, "size": None, "modified": None}
EMPTY_INLINE = {**INLINE, "bytes": b""}
NAME_ONLY = {**INLINE, "bytes": None, "path": "elsewhere.bin"}
LISTED = pa.list_(REFERENCE)
RUNS = pa.large_list(pa.struct([("nifti", REFERENCE), ("task", pa.string())]))
COLUMNS = {
    "image": mark(pa.field("image", REFERENCE), {"": "image"}),
    "scans": mark(pa.field("scans", LISTED), {"[]": "nifti"}),
    "bold": mark(pa.field("bold", RUNS), {"[].nifti": "nifti"}),
    "pair": mark(pa.field("pair", pa.struct([("m", REFERENCE), ("n", REFERENCE)])), {".m": "audio", ".n": "bytes"}),
    "blob": mark(pa.field("blob", REFERENCE), {"": "bytes"}),
    "blobs": mark(pa.field("blobs", LISTED), {"[]": "bytes"}),
    "deep": mark(
        pa.field("deep", pa.list_(pa.struct([("runs", pa.list_(LISTED)), ("n", pa.int32())]))), {"[].runs[][]": "pdf"}
    ),
    "required": mark(pa.field("required", LISTED, nullable=False), {"[]": "video"}),
}
TEXT = pa.field("text", pa.string())
SCHEMA = pa.schema([pa.field("id", pa.int64()), *COLUMNS.values(), TEXT])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """References to real files of several sizes, one of none."""
    folder = tmp_path_factory.mktemp("media")
    return [reference(folder / f"{size}.bin", bytes(i % 251 for i in range(size))) for size in SIZES]


def reference(path: Path, content: bytes) -> Row:
    path.write_bytes(content)
    return refer(path)


def refer(path: Path) -> Row:
    stat = path.stat()
    return {
        "bytes": None, "path": path.name, "file": str(path), "size": stat.st_size, "modified": stat.st_mtime_ns
    }  # fmt: skip


def write_references(
    path: Path, schema: pa.Schema, rows: Sequence[Row], *, group: int = 1 << 20, **options: object
) -> Span:
    """A reference file, as a run writes them."""
    settings = {"compression": "zstd", "write_page_index": True, **options}
    with pq.ParquetWriter(path, schema, **settings) as writer:
        for at in range(0, len(rows), group):
            writer.write_table(pa.Table.from_pylist(rows[at : at + group], schema=schema))
        writer.add_key_value_metadata({"penstock:media": "{}"})
    return Span(str(path), 0, read_footer(str(path)).row_groups)


def stored(schema: pa.Schema, rows: Sequence[Row]) -> pa.Table:
    """What the shard should hold, as pyarrow's own writer gives it back."""
    table = pa.Table.from_pylist(
        [{field.name: _stored(row[field.name], field.type, kinds_of(field)) for field in schema} for row in rows],
        schema=stored_schema(schema),
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return pq.read_table(sink)


def _stored(value: Any, kind: pa.DataType, kinds: Mapping[str, str], place: str = "") -> Any:
    if value is None:
        return None
    if place in kinds:
        content = value["bytes"] if value["file"] is None else Path(value["file"]).read_bytes()
        return content if kinds[place] == "bytes" else {"bytes": content, "path": value["path"]}
    if pa.types.is_struct(kind):
        return {one.name: _stored(value[one.name], one.type, kinds, f"{place}.{one.name}") for one in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_stored(one, kind.value_type, kinds, place + "[]") for one in value]
    return value


def values_of(kind: pa.DataType, media: st.SearchStrategy[Any], nullable: bool = True) -> st.SearchStrategy[Any]:
    made: st.SearchStrategy[Any]
    if kind == REFERENCE:
        made = media
    elif pa.types.is_struct(kind):
        made = st.fixed_dictionaries({one.name: values_of(one.type, media, one.nullable) for one in kind})
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        made = st.lists(values_of(kind.value_type, media, kind.value_field.nullable), max_size=3)
    else:
        made = st.text("ab", max_size=3) if pa.types.is_string(kind) else st.integers(0, 9)
    return st.one_of(st.none(), made) if nullable else made


def read_all(shard: VirtualShard) -> bytes:
    with shard.open() as file:
        data = file.read()
    assert len(data) == shard.size
    return data


def write(shard: VirtualShard, path: Path) -> str:
    path.write_bytes(read_all(shard))
    return str(path)


def ask(query: str) -> list[Row]:
    found = duckdb.sql(query)
    assert found is not None
    return [*found.to_arrow_table().to_pylist()]


def check_file(path: str, shard: VirtualShard) -> None:
    """Beyond what readers look at: chunks tile the file, pages the chunks, and every number in the footer holds."""
    with open_parquet(path) as (fd, footer):
        data, end, total = Path(path).read_bytes(), 4, 0
        assert footer.rows == shard.rows and footer.row_groups == len(shard.row_groups)
        assert footer.created_by.startswith("penstock version ")
        assert "penstock:media" not in footer.key_values
        for g, (offset, length, rows) in enumerate(shard.row_groups):
            group = footer.group(g)
            assert (offset, rows) == (end, footer.group_rows(g))
            for chunk in footer.chunks(g):
                assert chunk.offset == end or not chunk.stored
                end += chunk.stored
                pages = [page for page in walk(fd, chunk, path=path) if page.kind == "DATA"]
                assert sum(page.num_values for page in pages) == chunk.num_values
                total += chunk.bytes
                if chunk.offset_index is not None:
                    at, size = chunk.offset_index
                    index, _ = thrift.read_struct(data[at : at + size])
                    locations = [thrift.read_struct(raw)[0] for raw in thrift.read_list(index[1][1])[1]]
                    ends = [thrift.integer(one, 1) + thrift.integer(one, 2) for one in locations]
                    assert ends == [page.offset + page.stored for page in pages]
                    firsts = [thrift.integer(one, 3) for one in locations]
                    assert firsts == sorted(firsts) and (not firsts or (firsts[0] == 0 and firsts[-1] < rows))
            assert (end - offset, end - offset) == (length, thrift.integer(group, 6))
            assert thrift.integer(group, 5) == offset and thrift.integer(group, 7) == g
        assert total == shard.bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.mark.parametrize("name", COLUMNS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape_reads_back(folder: Path, pool: list[Row], name: str, data: st.DataObject) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), COLUMNS[name], TEXT])
    sources = data.draw(st.sampled_from([[*pool], [*pool, INLINE, EMPTY_INLINE, NAME_ONLY], [INLINE, NAME_ONLY]]))
    row = st.fixed_dictionaries(
        {one.name: values_of(one.type, st.sampled_from(sources), one.nullable) for one in schema}
    )
    files = data.draw(st.lists(st.lists(row, max_size=7), min_size=1, max_size=3))
    group, page, lone = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 2000), st.integers(1, 3000)))
    spans = [write_references(folder / f"r{i}.parquet", schema, rows, group=group) for i, rows in enumerate(files)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "PAGE", page)
        patch.setattr(values, "LONE_ROW", lone)
        shard = virtual_shard(spans, leaves=leaves_of(schema))
        path = write(shard, folder / "out.parquet")
    check_file(path, shard)
    expected = stored(schema, [row for rows in files for row in rows])
    got = pq.read_table(path)
    assert got.schema.equals(expected.schema, check_metadata=True)
    assert got.equals(expected)
    if expected.num_rows:
        assert ask(f"from '{path}'") == expected.to_pylist()
    metadata = pq.ParquetFile(path).metadata
    for g in range(metadata.num_row_groups):
        for c in range(metadata.num_columns):
            found = metadata.row_group(g).column(c)
            if found.path_in_schema.endswith("bytes") or name.startswith("blob"):
                assert not found.path_in_schema.startswith(name) or not found.statistics.has_min_max


def rows_of(pool: list[Row], count: int = 40) -> list[Row]:
    """Everything at once: nulls at every level, empty lists, empty files, bytes without a file."""
    one = [*pool, None, INLINE, None, NAME_ONLY]

    def pick(i: int) -> Any:
        return one[i % len(one)]

    return [
        {
            "id": i,
            "image": pick(i),
            "scans": None if i % 7 == 3 else [pick(i + j) for j in range(i % 4)],
            "bold": None
            if i % 5 == 2
            else [None if j == 2 else {"nifti": pick(i * j), "task": f"t{j}"} for j in range(i % 4)],
            "pair": None if i % 6 == 1 else {"m": pick(i + 1), "n": pick(i + 2)},
            "blob": pick(i + 3),
            "blobs": [pick(j) for j in range(i % 3)],
            "deep": [None, {"runs": [[pick(i)], None, []], "n": None}][: i % 3],
            "required": [pick(i)] * (i % 2),
            "text": None if i % 9 == 4 else f"row {i}" * (i % 50),
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def example(folder: Path, pool: list[Row]) -> tuple[str, pa.Table, VirtualShard]:
    rows = rows_of(pool)
    spans = [
        write_references(folder / "a.parquet", SCHEMA, rows[:25], group=7),
        write_references(folder / "b.parquet", SCHEMA, rows[25:], group=9),
    ]
    shard = virtual_shard(spans, leaves=leaves_of(SCHEMA))
    return write(shard, folder / "example.parquet"), stored(SCHEMA, rows), shard


def test_arrow_duckdb_and_polars_read_it(example: tuple[str, pa.Table, VirtualShard]) -> None:
    path, expected, shard = example
    check_file(path, shard)
    assert pq.read_table(path).equals(expected)
    assert pq.ParquetFile(path, pre_buffer=True, page_checksum_verification=True).read().equals(expected)
    for batch_size in (1, 6):
        batches = pq.ParquetFile(path).iter_batches(batch_size)
        assert [row for batch in batches for row in batch.to_pylist()] == expected.to_pylist()
    assert ask(f"from '{path}'") == expected.to_pylist()
    assert ask(f"select id from '{path}' where id = 30") == [{"id": 30}]
    assert pl.read_parquet(path).to_dicts() == expected.to_pylist()
    assert pl.scan_parquet(path).filter(pl.col("id") == 30).collect().to_dicts() == expected[30:31].to_pylist()


def test_datasets_reads_it(folder: Path, pool: list[Row]) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), COLUMNS["image"], COLUMNS["bold"]])
    rows = [{name: row[name] for name in ("id", "image", "bold")} for row in rows_of(pool)]
    media = {"bytes": {"dtype": "binary", "_type": "Value"}, "path": {"dtype": "string", "_type": "Value"}}
    features = {
        "id": {"dtype": "int64", "_type": "Value"},
        "image": {"decode": False, "_type": "Image"},
        "bold": {"feature": {"nifti": media, "task": {"dtype": "string", "_type": "Value"}}, "_type": "LargeList"},
    }
    span = write_references(folder / "c.parquet", schema, rows, group=11)
    shard = virtual_shard(
        [span], leaves=leaves_of(schema), key_values={"huggingface": json.dumps({"info": {"features": features}})}
    )
    path = write(shard, folder / "features.parquet")
    loaded = load_dataset("parquet", data_files=path, split="train", cache_dir=str(folder / "cache"))
    assert isinstance(loaded, Dataset)
    assert type(loaded.features["image"]).__name__ == "Image"
    assert loaded.with_format("arrow")[:].to_pylist() == stored(schema, rows).to_pylist()


def test_the_footer_says_what_is_there(example: tuple[str, pa.Table, VirtualShard]) -> None:
    path, _, _ = example
    found = duckdb.execute(
        f"select path_in_schema, num_values, stats_null_count, compression, encodings, data_page_offset, "
        f"total_compressed_size, total_uncompressed_size from parquet_metadata('{path}') where row_group_id = 0"
    ).fetchall()
    by_path = {row[0].replace(", ", "."): row[1:] for row in found}
    footer = read_footer(path)
    assert list(by_path) == [".".join(leaf) for leaf in footer.leaves]
    for chunk in footer.chunks(0):
        values, nulls, codec, encodings, at, compressed, uncompressed = by_path[".".join(chunk.path)]
        assert (values, compressed, uncompressed) == (chunk.num_values, chunk.stored, chunk.bytes)
        if chunk.path[-1] == "bytes" or chunk.path[0] in ("blob", "blobs"):
            assert (codec, encodings, at) == ("UNCOMPRESSED", "PLAIN, RLE", chunk.offset)
            assert chunk.column_index is None and chunk.offset_index is not None
            assert chunk.decoded is not None and nulls is not None
        elif chunk.path[-1] in ("id", "text", "path"):
            assert chunk.column_index is not None and chunk.offset_index is not None
    names = {part for leaf in footer.leaves for part in leaf}
    assert not names & {"file", "size", "modified"}
    assert str(Path(path).parent).encode() not in Path(path).read_bytes()


def test_reading_an_id_touches_no_media(example: tuple[str, pa.Table, VirtualShard]) -> None:
    path, expected, _ = example
    touched: list[tuple[int, int]] = []

    class Noted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            at = self.tell()
            data = super().read(size)
            touched.append((at, at + len(data)))
            return data

    file = pq.ParquetFile(pa.PythonFile(Noted(path), "r"), pre_buffer=False)
    opened = len(touched)
    assert file.read(columns=["id"]).column("id").equals(expected.column("id"))
    media = [
        (chunk.offset, chunk.offset + chunk.stored)
        for g in range(read_footer(path).row_groups)
        for chunk in read_footer(path).chunks(g)
        if chunk.path != ("id",)
    ]
    assert touched[opened:]
    assert not [(a, b) for a, b in touched[opened:] for x, y in media if a < y and x < b]


def test_the_same_inputs_elsewhere_give_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"id": i, "image": reference(folder / f"{i}.png", bytes([i]) * i)} for i in range(9)]
        os.utime(folder / "3.png", ns=(5, len(name)))
        rows[3]["image"] = refer(folder / "3.png")
        schema = pa.schema([pa.field("id", pa.int64()), COLUMNS["image"]])
        shard = virtual_shard([write_references(folder / "r.parquet", schema, rows, group=4)], leaves=leaves_of(schema))
        found.append(read_all(shard))
    assert found[0] == found[1]


def test_columns_and_names(folder: Path, pool: list[Row]) -> None:
    rows = rows_of(pool)
    span = write_references(folder / "d.parquet", SCHEMA, rows, group=13)
    names = {"bold": "runs", "blob": "raw", "id": "number"}
    shard = virtual_shard(
        [span], leaves=leaves_of(SCHEMA), columns=["blob", "text", "bold", "id"], rename=names, key_values={"k": "v"}
    )
    path = write(shard, folder / "renamed.parquet")
    check_file(path, shard)
    expected = stored(SCHEMA, rows).select(["blob", "text", "bold", "id"])
    got = pq.read_table(path)
    assert got.column_names == ["raw", "text", "runs", "number"]
    assert got.rename_columns(expected.column_names).replace_schema_metadata(None).equals(expected)
    assert got.schema.metadata == {b"k": b"v"}
    assert pl.read_parquet(path).to_dicts() == got.to_pylist()


def test_some_row_groups_and_none(folder: Path, pool: list[Row]) -> None:
    rows = rows_of(pool)
    span = write_references(folder / "e.parquet", SCHEMA, rows, group=10)
    leaves = leaves_of(SCHEMA)
    shard = virtual_shard([Span(span.path, 2, 4), Span(span.path, 0, 1)], leaves=leaves)
    path = write(shard, folder / "some.parquet")
    check_file(path, shard)
    assert pq.read_table(path).equals(stored(SCHEMA, rows[20:] + rows[:10]))
    for empty in (
        virtual_shard([], leaves=leaves, schema_from=span.path),
        virtual_shard([Span(span.path, 1, 1)], leaves=leaves),
    ):
        path = write(empty, folder / "empty.parquet")
        assert (empty.rows, empty.bytes, empty.row_groups) == (0, 0, ())
        assert pq.read_table(path).equals(stored(SCHEMA, []))


def test_row_groups_without_rows(folder: Path, pool: list[Row]) -> None:
    rows, path = rows_of(pool, 6), folder / "none.parquet"
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    with pq.ParquetWriter(path, SCHEMA, write_page_index=True) as writer:
        for part in (table[:0], table[:4], table[:0], table[4:]):
            writer.write_table(part)
    shard = virtual_shard([Span(str(path), 0, 4)], leaves=leaves_of(SCHEMA))
    out = write(shard, folder / "out.parquet")
    check_file(out, shard)
    assert [rows for _, _, rows in shard.row_groups] == [0, 4, 0, 2]
    assert pq.read_table(out).equals(stored(SCHEMA, rows))
    assert ask(f"from '{out}'") == pl.read_parquet(out).to_dicts() == stored(SCHEMA, rows).to_pylist()


def test_files_with_columns_in_another_order(folder: Path, pool: list[Row]) -> None:
    schema = pa.schema([COLUMNS["image"], COLUMNS["blobs"]])
    other = pa.schema([COLUMNS["blobs"], COLUMNS["image"]])
    rows = [{name: row[name] for name in ("image", "blobs")} for row in rows_of(pool, 12)]
    spans = [
        write_references(folder / "f.parquet", schema, rows[:5]),
        write_references(folder / "g.parquet", other, rows[5:]),
    ]
    path = write(virtual_shard(spans, leaves=leaves_of(schema)), folder / "order.parquet")
    assert pq.read_table(path).equals(stored(schema, rows))


def test_values_that_all_came_inline_stay_in_their_pages(folder: Path) -> None:
    schema = pa.schema([COLUMNS["scans"]])
    rows: list[Row] = [
        {"scans": [{**INLINE, "bytes": bytes([i]) * 5000}] * (i % 3) + [None, NAME_ONLY]} for i in range(50)
    ]
    span = write_references(folder / "h.parquet", schema, rows, group=20)
    shard = virtual_shard([span], leaves=leaves_of(schema))
    assert shard.size < 20_000  # still compressed
    path = write(shard, folder / "inline.parquet")
    check_file(path, shard)
    assert pq.read_table(path).equals(stored(schema, rows))
    parts = [part for section in shard.sections for part in section.make()]
    assert sum(isinstance(part, Range) for part in parts) == 3


def test_a_file_without_statistics(folder: Path, pool: list[Row]) -> None:
    rows = rows_of(pool)
    for name, of_rows in (("mixed", rows), ("files", [{**row, "blob": pool[1], "image": pool[2]} for row in rows])):
        span = write_references(folder / "i.parquet", SCHEMA, of_rows, write_statistics=False, write_page_index=False)
        shard = virtual_shard([span], leaves=leaves_of(SCHEMA))
        assert pq.read_table(write(shard, folder / f"{name}.parquet")).equals(stored(SCHEMA, of_rows))


def test_a_large_row_is_cut_by_value(folder: Path, pool: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), COLUMNS["bold"]])
    big, small = {"nifti": pool[5], "task": "big"}, {"nifti": pool[3], "task": "small"}
    rows = [{"id": i, "bold": runs} for i, runs in enumerate([[small] * 3, [big] * 4, [], None, [small], [big, big]])]
    span = write_references(folder / "j.parquet", schema, rows)
    monkeypatch.setattr(values, "PAGE", 1000)
    monkeypatch.setattr(values, "LONE_ROW", 10_000)
    shard = virtual_shard([span], leaves=leaves_of(schema))
    path = write(shard, folder / "rows.parquet")
    check_file(path, shard)
    with open_parquet(path) as (fd, footer):
        chunk = next(chunk for chunk in footer.chunks(0) if chunk.path[-1] == "bytes")
        entries = [page.num_values for page in walk(fd, chunk, path=path)]
    # three small values; the four of the large row by themselves; two rows without and one with a small one; two large
    # values of a row that fits.
    assert entries == [3, 1, 1, 1, 1, 3, 2]
    assert chunk.offset_index is None  # its pages do not all begin with a row
    expected = stored(schema, rows)
    assert pq.read_table(path).equals(expected)
    for size in (1, 2):
        batches = pq.ParquetFile(path).iter_batches(size)
        assert [row for batch in batches for row in batch.to_pylist()] == expected.to_pylist()
    assert ask(f"from '{path}'") == expected.to_pylist()
    assert ask(f"from '{path}' where id = 5") == expected[5:].to_pylist()
    assert pl.read_parquet(path).to_dicts() == expected.to_pylist()


def test_pages_hold_about_a_mebibyte(folder: Path) -> None:
    schema = pa.schema([COLUMNS["image"]])
    small, large = reference(folder / "s.png", bytes(200_000)), reference(folder / "l.png", bytes(3 << 20))
    rows = [{"image": one} for one in [small] * 12 + [large, small, large, None, None]]
    shard = virtual_shard([write_references(folder / "k.parquet", schema, rows)], leaves=leaves_of(schema))
    path = write(shard, folder / "pages.parquet")
    check_file(path, shard)
    with open_parquet(path) as (fd, footer):
        assert [page.num_values for page in walk(fd, footer.chunks(0)[0], path=path)] == [5, 5, 2, 1, 1, 1, 2]


def test_a_shard_can_be_sent_to_another_process(example: tuple[str, pa.Table, VirtualShard]) -> None:
    path, _, shard = example
    again = pickle.loads(pickle.dumps(shard))
    assert digest(again.open()).sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()


def one_scan(folder: Path, **changes: object) -> tuple[Span, list[Leaf], Path]:
    schema = pa.schema([COLUMNS["image"], COLUMNS["scans"]])
    path = folder / "scan.nii"
    rows: list[Row] = [
        {"image": None, "scans": []},
        {"image": None, "scans": [None, {**reference(path, b"x" * 99), **changes}]},
    ]
    return write_references(folder / "refs.parquet", schema, rows), leaves_of(schema), path


def test_a_value_too_large_for_a_page_is_refused(tmp_path: Path) -> None:
    span, leaves, path = one_scan(tmp_path, size=LARGEST_VALUE + 1)
    with pytest.raises(UsageError) as caught:
        virtual_shard([span], leaves=leaves)
    assert f"{path}: column scans[], row 1: 2,147,418,113 bytes; a Parquet page holds up to" in str(caught.value)
    span, leaves, path = one_scan(tmp_path, size=None)
    with pytest.raises(UsageError, match=r"scan\.nii: column scans\[\], row 1: a file of unknown size"):
        virtual_shard([span], leaves=leaves)


def test_the_largest_value_can_be_laid_out(tmp_path: Path) -> None:
    span, leaves, _ = one_scan(tmp_path, size=LARGEST_VALUE)
    shard = virtual_shard([span], leaves=leaves)
    assert shard.size > LARGEST_VALUE
    with pytest.raises(SourceChanged, match="has 99 bytes, 2,147,418,112 when it was planned"):
        shard.open().read(10_000)


def test_sources_that_change_are_named(tmp_path: Path) -> None:
    span, leaves, path = one_scan(tmp_path)
    shard = virtual_shard([span], leaves=leaves)
    read_all(shard)
    path.write_bytes(b"y" * 99)
    with pytest.raises(SourceChanged, match=r"scan\.nii: was modified after it was planned"):
        read_all(shard)
    path.unlink()
    with pytest.raises(SourceChanged, match=r"scan\.nii: is gone since it was planned"):
        read_all(shard)
    os.utime(span.path)
    with pytest.raises(SourceChanged, match=r"refs\.parquet: was modified after it was planned"):
        read_all(shard)
    Path(span.path).unlink()
    with pytest.raises(SourceChanged, match=r"refs\.parquet: is gone"):
        read_all(shard)


def test_what_is_not_a_reference(tmp_path: Path) -> None:
    span, leaves, _ = one_scan(tmp_path)
    with pytest.raises(UsageError, match="is a file of references to media"):
        virtual_shard([span])
    with pytest.raises(UsageError, match=r"column scans\[\] holds references to media, and was not named as such"):
        virtual_shard([span], leaves=leaves[:1])
    plain = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"image": [b"x"], "scans": [[1]]}), plain)
    for leaf in (Leaf("image", "", "image"), Leaf("scans", "[]", "image"), Leaf("scans", ".none", "image")):
        with pytest.raises(SchemaClash, match="holds no references to media"):
            virtual_shard([Span(str(plain), 0, 1)], leaves=[leaf])


def test_bytes_that_may_not_be_null(tmp_path: Path, pool: list[Row]) -> None:
    field = mark(pa.field("raw", REFERENCE, nullable=False), {"": "bytes"})
    schema = pa.schema([field])
    span = write_references(tmp_path / "r.parquet", schema, [{"raw": pool[2]}, {"raw": INLINE}])
    path = write(virtual_shard([span], leaves=leaves_of(schema)), tmp_path / "out.parquet")
    assert pq.read_table(path).column("raw").to_pylist() == [bytes(range(5)), INLINE["bytes"]]
    assert not pq.read_schema(path).field("raw").nullable
    span = write_references(tmp_path / "r.parquet", schema, [{"raw": NAME_ONLY}])
    with pytest.raises(BadFile, match="column raw may not be null, and has a value without bytes"):
        virtual_shard([span], leaves=leaves_of(schema))


def plain_shards(written: dict[str, str]) -> Iterator[tuple[list[Span], dict[str, Any]]]:
    for path in written.values():
        groups = read_footer(path).row_groups
        yield [Span(path, 0, groups)], {}
        yield [Span(path, 0, groups)] * 2, {"columns": ["who", "id"], "rename": {"id": "n"}, "key_values": {"a": "b"}}
    yield [], {"schema_from": written["arrow"]}


def test_without_media_it_is_the_splice(written: dict[str, str], tmp_path: Path) -> None:
    """Page indexes and bloom filters included, for files of every writer at hand."""
    for spans, options in plain_shards(written):
        with Writing(tmp_path / "spliced") as out:
            done = splice(spans, out, **options)
            out.commit()
        shard = virtual_shard(spans, **options)
        assert read_all(shard) == (tmp_path / "spliced").read_bytes()
        assert (shard.rows, len(shard.row_groups), shard.bytes) == (done.rows, done.row_groups, done.bytes)
        footer = read_footer(str(tmp_path / "spliced"))
        groups = range(footer.row_groups)
        assert [rows for _, _, rows in shard.row_groups] == [footer.group_rows(g) for g in groups]
        assert sum(length for _, length, _ in shard.row_groups) == done.stored
        parts = [part for section in shard.sections for part in section.make()]
        held = sum(len(part) for part in parts if not isinstance(part, Range))
        assert held <= 20_000 + len(footer.raw)  # small chunks and indexes, never the data


def test_features_of_a_spliced_shard_reach_arrow(written: dict[str, str], tmp_path: Path) -> None:
    schema, values = pq.read_schema(written["arrow"]), {"huggingface": "{}"}
    shard = virtual_shard(
        [Span(written["arrow"], 0, 1)], key_values={**values, "ARROW:schema": arrow_schema(schema, values)}
    )
    assert pq.read_schema(write(shard, tmp_path / "a.parquet")).metadata == {b"huggingface": b"{}"}


def test_splicing_needs_neither_arrow_nor_numpy(written: dict[str, str]) -> None:
    code = (
        "import sys; from penstock.parquet.embed import virtual_shard; from penstock.parquet.splice import Span; "
        f"virtual_shard([Span({written['arrow']!r}, 0, 1)]).open().read(); "
        "print({'pyarrow', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


LIMITED = """
import sys
from pathlib import Path
from penstock.files import Writing
from penstock.media.kinds import Leaf
from penstock.parquet.embed import virtual_shard
from penstock.parquet.splice import Span
from penstock.parquet.stream import digest, lay_out
shard = virtual_shard([Span(sys.argv[1], 0, 1)], leaves=[Leaf("image", "", "nifti")])
with Writing(Path(sys.argv[2])) as out:
    lay_out(shard, out)
    out.commit()
print(digest(shard.open()).sha256, out.sha256())
assert "pandas" not in sys.modules, "25 MB"
"""


def test_a_value_larger_than_the_memory(tmp_path: Path) -> None:
    require_kernel_limits()
    path, size = tmp_path / "scan.nii", 150 << 20
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"not all zeros")
    schema = pa.schema([COLUMNS["image"]])
    span = write_references(tmp_path / "r.parquet", schema, [{"image": refer(path)}])
    out = tmp_path / "out.parquet"
    done = run_limited([sys.executable, "-c", LIMITED, span.path, str(out)], limit=90 << 20, timeout=60)
    assert (done.returncode, done.kernel_kills, done.stderr) == (0, 0, "")
    one, other = done.stdout.split()
    assert one == other
    value = pq.read_table(out).column("image")[0].as_py()["bytes"]
    assert value == path.read_bytes()

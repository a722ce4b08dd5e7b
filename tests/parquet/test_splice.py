"""What is spliced reads back equal everywhere, with its statistics, indexes and bloom filters still right."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value, load_dataset

from penstock.errors import BadFile, SchemaClash, UsageError
from penstock.files import Writing
from penstock.parquet import thrift
from penstock.parquet.footer import open_parquet, read_footer
from penstock.parquet.pages import walk
from penstock.parquet.splice import Span, Spliced, splice, why_not

Splice = Callable[..., tuple[str, Spliced]]


def read(path: str) -> pa.Table:
    return pq.ParquetFile(path, page_checksum_verification=True).read()


def ask(query: str) -> list[tuple[object, ...]]:
    return duckdb.execute(query).fetchall()


def check(path: str) -> None:
    """Every offset in the file points at what it says: pages tile the chunks, offset indexes name real pages."""
    with open_parquet(path) as (fd, footer):
        end = 4
        for g in range(footer.row_groups):
            for chunk in footer.chunks(g):
                assert chunk.offset == end or chunk.stored == 0
                end += chunk.stored
                pages = [page for page in walk(fd, chunk, path=path) if page.kind.startswith("DATA")]
                if chunk.offset_index is not None:
                    assert offset_index(path, *chunk.offset_index) == [page.offset + page.stored for page in pages]


def offset_index(path: str, offset: int, length: int) -> list[int]:
    """Where each page ends, as the offset index has it."""
    index, _ = thrift.read_struct(Path(path).read_bytes()[offset : offset + length])
    locations = [thrift.read_struct(raw)[0] for raw in thrift.read_list(index[1][1])[1]]
    return [thrift.integer(location, 1) + thrift.integer(location, 2) for location in locations]


def test_one_file_reads_back_the_same_everywhere(any_file: str, spliced: Splice) -> None:
    path, done = spliced(any_file)
    check(path)
    before, after = pq.ParquetFile(any_file), pq.ParquetFile(path)
    assert after.read().equals(before.read(), check_metadata=True)
    assert after.schema_arrow.equals(before.schema_arrow, check_metadata=True)
    assert pl.read_parquet(path).equals(pl.read_parquet(any_file))
    assert ask(f"from '{path}'") == ask(f"from '{any_file}'")
    assert done.rows == before.metadata.num_rows and done.row_groups == before.metadata.num_row_groups
    for g in range(done.row_groups):
        for c in range(before.metadata.num_columns):
            old, new = before.metadata.row_group(g).column(c), after.metadata.row_group(g).column(c)
            assert (old.statistics is None) == (new.statistics is None)
            assert old.statistics is None or old.statistics.equals(new.statistics)
            assert (old.has_offset_index, old.has_column_index) == (new.has_offset_index, new.has_column_index)


def test_several_files_one_after_the_other(any_file: str, spliced: Splice) -> None:
    path, done = spliced(any_file, any_file, any_file)
    check(path)
    assert read(path).equals(pa.concat_tables([read(any_file)] * 3))
    footer = read_footer(path)
    assert (done.rows, done.row_groups) == (footer.rows, footer.row_groups)
    groups = range(footer.row_groups)
    assert done.stored == sum(map(footer.group_stored, groups)) and done.bytes == sum(map(footer.group_bytes, groups))
    if done.rows:
        assert pl.read_parquet(path).equals(pl.concat([pl.read_parquet(any_file)] * 3, rechunk=True))


def test_some_columns_in_another_order(any_file: str, spliced: Splice) -> None:
    columns = ["who", "flag", "id"]
    path, _ = spliced(any_file, columns=columns, rename={"id": "number", "who": "person", "text": "not chosen"})
    check(path)
    expected = read(any_file).select(columns).rename_columns(["person", "flag", "number"])
    names = [field.name for field in expected.schema]
    assert read(path).column_names == names
    assert read(path).cast(expected.schema).equals(expected)
    assert pl.read_parquet(path).columns == names
    query = ask(f"select person, flag, number from '{path}'")
    assert query == ask(f"select who, flag, id from '{any_file}'")


def test_spans_take_their_row_groups(written: dict[str, str], spliced: Splice) -> None:
    a, b = written["arrow"], written["arrow_v2_zstd"]
    path, done = spliced(Span(a, 1, 3), Span(a, 0, 1), Span(b, 4, 5), Span(a, 2, 2))
    table = pq.read_table(a)
    assert read(path).equals(pa.concat_tables([table[700:2100], table[:700], table[2800:]]))
    assert done == Spliced(2300, 4, done.stored, done.bytes)


def test_files_of_one_schema_with_columns_in_another_order(tmp_path: Path, spliced: Splice) -> None:
    a, b = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": [1], "y": ["a"]}), a)
    pq.write_table(pa.table({"y": ["b"], "x": [2]}), b)
    path, _ = spliced(a, b)
    assert read(path).to_pydict() == {"x": [1, 2], "y": ["a", "b"]}


def test_no_row_groups(written: dict[str, str], spliced: Splice) -> None:
    schema = pq.read_schema(written["arrow"])
    for path, done in (spliced(schema_from=written["arrow"]), spliced(Span(written["arrow"], 2, 2))):
        assert done == Spliced(0, 0, 0, 0)
        assert pq.read_table(path).schema.equals(schema, check_metadata=True)
        assert pl.read_parquet(path).shape == (0, len(schema))
    with pytest.raises(UsageError, match="nothing to splice"):
        spliced()


@pytest.mark.parametrize("columns", [None, ["score", "id"]])
def test_page_indexes_still_find_rows(written: dict[str, str], spliced: Splice, columns: list[str] | None) -> None:
    path, _ = spliced(written["arrow_index"], written["arrow_index"], columns=columns)
    wanted = pads.dataset(path).to_table(filter=(pads.field("id") >= 1500) & (pads.field("id") < 1510))
    assert sorted(wanted["id"].to_pylist()) == sorted([*range(1500, 1510)] * 2)
    assert ask(f"select count(*) from '{path}' where id = 2900") == [(2,)]
    assert pl.scan_parquet(path).filter(pl.col("id") == 700).collect().height == 2
    column = pq.read_metadata(path).row_group(3).column(0)
    assert column.has_offset_index and column.has_column_index
    (lowest, highest), count = index_extent(path), 2 * 5 * (len(columns) if columns else 11)
    data = sum(map(read_footer(path).group_stored, range(10))) + 4
    assert data <= lowest < highest <= data + count * 8000


def index_extent(path: str) -> tuple[int, int]:
    footer = read_footer(path)
    found = [
        place
        for g in range(footer.row_groups)
        for chunk in footer.chunks(g)
        for place in (chunk.column_index, chunk.offset_index)
        if place
    ]
    return min(at for at, _ in found), max(at + length for at, length in found)


@pytest.mark.parametrize("name", ["duckdb", "arrow_bloom"])
def test_bloom_filters_still_exclude(written: dict[str, str], spliced: Splice, name: str) -> None:
    probe = "select bloom_filter_excludes from parquet_bloom_probe('{}', 'text', '{}')"
    for columns in (None, ["text", "id"]):
        path, _ = spliced(written[name], written[name], columns=columns)
        absent = ask(probe.format(path, "nowhere to be found"))
        present = ask(probe.format(path, "row 1 "))
        assert absent == ask(probe.format(written[name], "nowhere to be found")) * 2
        assert all(excluded for (excluded,) in absent) and not any(excluded for (excluded,) in present)


def test_a_bloom_filter_without_a_length(tmp_path: Path, written: dict[str, str], spliced: Splice) -> None:
    footer = read_footer(written["duckdb"])
    raw = edit_metadata(footer.raw, lambda meta: meta.pop(15, None))
    source = tmp_path / "old.parquet"
    data = Path(written["duckdb"]).read_bytes()[: -8 - len(footer.raw)]
    source.write_bytes(data + raw + len(raw).to_bytes(4, "little") + b"PAR1")
    path, _ = spliced(str(source))
    honest, bare, whole = (f.chunks(0)[1].bloom_filter for f in (footer, read_footer(str(source)), read_footer(path)))
    assert honest and bare and whole
    assert bare[1] is None and whole[1] == honest[1]
    excludes = ask(f"select bloom_filter_excludes from parquet_bloom_probe('{path}', 'text', '?')")
    assert excludes == [(True,)] * footer.row_groups


def edit_metadata(raw: bytes, edit: Callable[[thrift.Struct], object]) -> bytes:
    """A footer with the metadata of every column chunk edited."""
    top, _ = thrift.read_struct(raw)
    groups = []
    for group_raw in thrift.read_list(top[4][1])[1]:
        group, _ = thrift.read_struct(group_raw)
        columns = []
        for column in thrift.read_list(group[1][1])[1]:
            outer, _ = thrift.read_struct(column)
            meta, _ = thrift.read_struct(outer[3][1])
            edit(meta)
            outer[3] = thrift.STRUCT, thrift.write_struct(meta)
            columns.append(thrift.write_struct(outer))
        group[1] = thrift.LIST, thrift.write_list(thrift.STRUCT, columns)
        groups.append(thrift.write_struct(group))
    top[4] = thrift.LIST, thrift.write_list(thrift.STRUCT, groups)
    return thrift.write_struct(top)


def test_sorting_columns_follow(written: dict[str, str], spliced: Splice) -> None:
    def sorting(**options: list[str]) -> list[tuple[int, bool]]:
        path, _ = spliced(written["arrow_sorted"], **options)
        return [(s.column_index, s.descending) for s in pq.read_metadata(path).row_group(1).sorting_columns]

    assert sorting() == [(0, False), (2, True)]
    assert sorting(columns=["score", "who", "id"]) == [(3, False), (0, True)]
    assert sorting(columns=["text", "id"]) == [(1, False)]
    assert sorting(columns=["text", "score"]) == []


def test_metadata_that_would_be_stale(tmp_path: Path, spliced: Splice) -> None:
    source = str(tmp_path / "a.parquet")
    table = pa.table({"a": pa.array(["x"], pa.large_string()), "b": [1]})
    pq.write_table(table.replace_schema_metadata({"pandas": "{}", "mine": "kept"}), source)
    same = read_footer(spliced(source, rename={})[0]).key_values
    assert same == read_footer(source).key_values and "ARROW:schema" in same
    for options in ({"columns": ["b"]}, {"columns": ["b", "a"]}, {"rename": {"a": "c"}}):
        assert read_footer(spliced(source, **options)[0]).key_values == {"mine": b"kept"}
    new = base64.b64encode(pa.schema({"b": pa.int64()}).serialize())
    path, _ = spliced(source, columns=["b"], key_values={"ARROW:schema": new, "mine": "changed", "more": b"\xff"})
    assert read_footer(path).key_values == {"mine": b"changed", "ARROW:schema": new, "more": b"\xff"}
    assert pq.read_table(path, columns=["b"])["b"].to_pylist() == [1]


def test_datasets_features_follow(tmp_path: Path, spliced: Splice) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    source = str(tmp_path / "a.parquet")
    Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features).to_parquet(source)
    path, _ = spliced(source, source, columns=["label"], rename={"label": "y"})
    loaded = load_dataset("parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.features == Features({"y": ClassLabel(names=["no", "yes"])})
    assert loaded["y"][:] == [0, 1, 0, 1]
    described = json.loads(read_footer(path).key_values["huggingface"])
    assert list(described["info"]["features"]) == ["y"]


def test_files_that_disagree(tmp_path: Path, spliced: Splice) -> None:
    def write(name: str, **columns: pa.Array) -> str:
        pq.write_table(pa.table(columns), tmp_path / name)
        return str(tmp_path / name)

    a = write("a.parquet", x=pa.array([1]), y=pa.array(["a"]))
    b = write("b.parquet", x=pa.array([1], pa.int32()), y=pa.array(["b"]))
    c = write("c.parquet", y=pa.array(["c"]))
    d = write("d.parquet", x=pa.array([[1]]), y=pa.array(["d"]))
    footers = {path: read_footer(path) for path in (a, b, c, d)}
    assert why_not([footers[a], footers[a]]) is None
    assert why_not([footers[a], footers[b]]) == f"column x is optional INT64 x in {a}, optional INT32 x in {b}"
    assert why_not([footers[a], footers[c]]) == f"{c} has no column x, which {a} has"
    assert why_not([footers[c], footers[a]]) == f"{c} has no column x, which {a} has"
    assert "is optional INT64 x in" in str(why_not([footers[a], footers[d]]))
    assert why_not(footers.values(), columns=["y"]) is None
    with pytest.raises(SchemaClash, match="column x is optional INT64"):
        spliced(a, b)
    assert read(spliced(a, b, c, d, columns=["y"])[0])["y"].to_pylist() == ["a", "b", "c", "d"]


def test_columns_that_cannot_be(written: dict[str, str], spliced: Splice) -> None:
    source = written["arrow"]
    cases: dict[str, dict[str, object]] = {
        "has no column nope; choose from id, text,": {"columns": ["nope"]},
        "has no column gone": {"rename": {"gone": "a"}},
        "two columns would be named id": {"rename": {"text": "id"}},
        "two columns would be named text": {"columns": ["text", "text"]},
        "no columns are left": {"columns": []},
    }
    for message, options in cases.items():
        with pytest.raises(UsageError, match=message):
            spliced(source, **options)
    with pytest.raises(UsageError, match="has 5 row groups; 4 to 9 were asked for"):
        spliced(Span(source, 4, 9))


@pytest.mark.parametrize(
    ("created_by", "reason"),
    [
        (("parquet-mr version 1.2.5 (build x)",), "PARQUET-816"),
        (("parquet-mr version 1.6.0", "parquet-cpp-arrow version 26.0.1"), "PARQUET-251"),
        (("parquet-mr version 1.6.0", "parquet-mr version 1.6.0"), None),
        (("parquet-mr version 1.12.3", "Polars"), None),
    ],
)
def test_old_writers_are_not_mixed(tmp_path: Path, created_by: tuple[str, ...], reason: str | None) -> None:
    footers = []
    for i, name in enumerate(created_by):
        path = tmp_path / f"{i}.parquet"
        pq.write_table(pa.table({"a": ["x"]}), path)
        raw = read_footer(str(path)).raw
        top, _ = thrift.read_struct(raw)
        top[6] = thrift.BINARY, thrift.binary(name.encode())
        new = thrift.write_struct(top)
        path.write_bytes(path.read_bytes()[: -8 - len(raw)] + new + len(new).to_bytes(4, "little") + b"PAR1")
        footers.append(read_footer(str(path)))
    assert (why_not(footers) is None) if reason is None else (reason in str(why_not(footers)))


def test_statistics_without_a_common_order_are_left_alone(tmp_path: Path, spliced: Splice) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in paths:
        pq.write_table(pa.table({"a": ["x"]}), path)
    raw = read_footer(str(paths[1])).raw
    top, _ = thrift.read_struct(raw)
    del top[7]
    new = thrift.write_struct(top)
    paths[1].write_bytes(paths[1].read_bytes()[: -8 - len(raw)] + new + len(new).to_bytes(4, "little") + b"PAR1")
    assert 7 in read_footer(spliced(*map(str, paths[:1]))[0]).top
    both, _ = spliced(*map(str, paths))
    assert 7 not in read_footer(both).top and read(both)["a"].to_pylist() == ["x", "x"]


def test_row_groups_that_claim_the_same_bytes(tmp_path: Path, spliced: Splice) -> None:
    path = tmp_path / "lie.parquet"
    pq.write_table(pa.table({"a": range(1000)}), path, row_group_size=200, use_dictionary=False)
    raw = read_footer(str(path)).raw
    body = path.read_bytes()[: -8 - len(raw)]
    everything = {7: (thrift.I64, thrift.zigzag(len(body) - 4)), 9: (thrift.I64, thrift.zigzag(4))}
    new = edit_metadata(raw, lambda meta: meta.update(everything))
    path.write_bytes(body + new + len(new).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(BadFile, match=r"lie\.parquet: row group 1: its column chunks overlap others"):
        spliced(str(path))
    assert spliced(*[Span(str(path), 0, 1)] * 3)[1].row_groups == 3


def test_a_file_that_shrinks_or_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [str(i) for i in range(50_000)]}), source, compression="none", use_dictionary=False)
    span = Span(str(source), 0, 1)

    def shrink(*_: object) -> None:
        raise EOFError("7 bytes missing at offset 3")

    with Writing(tmp_path / "out.parquet") as out, monkeypatch.context() as patch:
        patch.setattr(out, "copy", shrink)
        with pytest.raises(BadFile, match=r"a\.parquet: is cut short .7 bytes missing"):
            splice([span], out)
    other = tmp_path / "b.parquet"
    pq.write_table(pa.table({"a": ["other"]}), other)
    with Writing(tmp_path / "out.parquet") as out, monkeypatch.context() as patch:
        patch.setattr(out, "write", lambda _: other.replace(source))
        with pytest.raises(BadFile, match=r"a\.parquet: changed while it was read"):
            splice([span], out)
    assert not (tmp_path / "out.parquet").exists()


def test_tens_of_thousands_of_row_groups(tmp_path: Path, spliced: Splice) -> None:
    source = str(tmp_path / "many.parquet")
    table = pa.table({"a": range(11_000)})
    pq.write_table(table, source, row_group_size=1, compression="none", use_dictionary=False)
    start = time.process_time()
    path, done = spliced(source, source, source)
    assert time.process_time() - start < 30
    assert done.row_groups == 33_000  # beyond the 16 bits of a row group's ordinal
    assert read(path).equals(pa.concat_tables([table] * 3))


def test_neither_arrow_nor_numpy_is_loaded() -> None:
    code = "import sys, penstock.parquet.splice, penstock.parquet.pages; print({'pyarrow', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"

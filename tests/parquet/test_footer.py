"""A footer says what pyarrow says of the same file; what cannot be true is refused in one line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from penstock.errors import BadFile, NotFound
from penstock.parquet import thrift
from penstock.parquet.footer import Chunk, Footer, read_footer


def test_it_says_what_pyarrow_says(any_file: str) -> None:
    footer, theirs = read_footer(any_file), pq.ParquetFile(any_file).metadata
    assert (footer.rows, footer.row_groups) == (theirs.num_rows, theirs.num_row_groups)
    assert footer.created_by == theirs.created_by
    assert footer.size == Path(any_file).stat().st_size
    assert footer.columns == tuple(pq.read_schema(any_file).names)
    paths = [theirs.schema.column(i).path for i in range(theirs.num_columns)]
    assert [".".join(leaf) for leaf in footer.leaves] == paths
    assert {key.encode(): value for key, value in footer.key_values.items()} == (theirs.metadata or {})
    for g in range(footer.row_groups):
        group = theirs.row_group(g)
        assert footer.group_rows(g) == group.num_rows
        assert footer.group_bytes(g) == group.total_byte_size
        chunks = footer.chunks(g)
        assert footer.group_stored(g) == sum(chunk.stored for chunk in chunks)
        for chunk in chunks:
            same_chunk(chunk, group.column(chunk.leaf))


def same_chunk(chunk: Chunk, column: pq.ColumnChunkMetaData) -> None:
    assert ".".join(chunk.path) == column.path_in_schema
    assert chunk.physical == column.physical_type
    assert chunk.codec == column.compression
    assert set(chunk.encodings) == set(column.encodings)
    assert chunk.num_values == column.num_values
    assert (chunk.stored, chunk.bytes) == (column.total_compressed_size, column.total_uncompressed_size)
    assert chunk.offset == (column.dictionary_page_offset or column.data_page_offset)
    assert chunk.has_dictionary == (column.has_dictionary_page or any("DICTIONARY" in e for e in column.encodings))
    assert (chunk.column_index is not None) == column.has_column_index
    assert (chunk.offset_index is not None) == column.has_offset_index


def test_schema_elements(written: dict[str, str]) -> None:
    footer = read_footer(written["arrow"])
    by_name = {element.name: element for element in footer.schema}
    assert by_name["id"].physical == "INT64" and by_name["id"].repetition == "OPTIONAL"
    assert by_name["text"].converted == 0 and by_name["text"].logical is not None
    assert by_name["who"].physical is None and by_name["who"].num_children == 2
    assert ("who", "ages", "list", "element") in footer.leaves


def test_decoded_bytes_and_blooms_are_found(written: dict[str, str]) -> None:
    text = read_footer(written["arrow_bloom"]).chunks(0)[1]
    strings = pq.ParquetFile(written["arrow_bloom"]).read_row_group(0)["text"].to_pylist()
    assert text.decoded == sum(len(value) for value in strings if value)
    assert text.bloom_filter is not None
    assert any(chunk.bloom_filter for chunk in read_footer(written["duckdb"]).chunks(0))


def test_a_name_with_a_line_break_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.table({"a\nb": [1]}), path)
    with pytest.raises(BadFile, match=r"row group 0, column 'a\\nb': its footer is damaged"):
        rewritten(str(path), path, {7: -1}).chunks(0)


def test_no_columns_at_all(tmp_path: Path) -> None:
    pq.write_table(pa.table({}), tmp_path / "a.parquet")
    footer = read_footer(str(tmp_path / "a.parquet"))
    assert (footer.columns, footer.leaves, footer.rows) == ((), (), 0)


def test_files_that_are_not_parquet(tmp_path: Path, written: dict[str, str]) -> None:
    whole = Path(written["arrow"]).read_bytes()
    cases = {
        b"": "is empty (0 bytes), not a Parquet file",
        b"PAR1": "is cut short or not Parquet (no PAR1 at its end)",
        b"PAR1PAR1": "is cut short or not Parquet (no PAR1 at its end)",
        b'{"a": 1}\n' * 9: "is cut short or not Parquet (no PAR1 at its start)",
        whole[: len(whole) // 2]: "is cut short or not Parquet (no PAR1 at its end)",
        b"PAR1" + b"\xff\xff\x00\x00PAR1": "is cut short or not Parquet (a footer of 65,535 bytes in a file of 12)",
        b"PAR1" + b"\x00\x00\x00\x00PAR1": "its footer is damaged (ends inside a struct)",
        b"PAR1" + b"\x00\x01\x00\x00\x00PAR1": "its footer is damaged (it has no list of row groups)",
    }
    path = tmp_path / "x.parquet"
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(BadFile) as caught:
            read_footer(str(path))
        assert str(caught.value) == f"{path}: {message}; fetch or write it again"


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no such file"):
        read_footer(str(tmp_path / "none.parquet"))
    with pytest.raises(BadFile, match="is not a regular file"):
        read_footer(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="is not a regular file"):
        read_footer(str(tmp_path / "pipe"))


class Wrapper(pe.KmsClient):  # type: ignore[misc]
    """Keys kept in the open: enough to make an encrypted file."""

    def __init__(self, _: object) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, master: str) -> bytes:
        return key.hex().encode()

    def unwrap_key(self, wrapped: bytes, master: str) -> bytes:
        return bytes.fromhex(wrapped.decode())


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_encrypted_files_are_refused(tmp_path: Path, plaintext_footer: bool) -> None:
    config = pe.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["id"]}, plaintext_footer=plaintext_footer, double_wrapping=False
    )
    properties = pe.CryptoFactory(Wrapper).file_encryption_properties(pe.KmsConnectionConfig(), config)
    path = tmp_path / "secret.parquet"
    table = pa.table({"id": [1, 2], "x": ["a", "b"]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(BadFile) as caught:
        read_footer(str(path))
    message = "is encrypted Parquet, which is not read; decrypt it with the tool that wrote it"
    assert str(caught.value) == f"{path}: {message}"


def test_data_in_another_file_is_refused(tmp_path: Path, written: dict[str, str]) -> None:
    metadata = pq.read_metadata(written["arrow"])
    metadata.set_file_path("elsewhere.parquet")
    path = tmp_path / "_metadata.parquet"
    metadata.write_metadata_file(path)
    footer = read_footer(str(path))
    with pytest.raises(BadFile, match=r"row group 0, column id: its footer is damaged .its data is in another file"):
        footer.chunks(0)


def rewritten(path: str, target: Path, edit: dict[int, int]) -> Footer:
    """The file with numbers in the metadata of its first column chunk changed."""
    footer = read_footer(path)
    top, _ = thrift.read_struct(footer.raw)
    groups = thrift.read_list(top[4][1])[1]
    group, _ = thrift.read_struct(groups[0])
    columns = thrift.read_list(group[1][1])[1]
    outer, _ = thrift.read_struct(columns[0])
    meta, _ = thrift.read_struct(outer[3][1])
    for number, value in edit.items():
        meta[number] = meta.get(number, (thrift.I64, b""))[0], thrift.zigzag(value)
    outer[3] = thrift.STRUCT, thrift.write_struct(meta)
    columns[0] = thrift.write_struct(outer)
    group[1] = thrift.LIST, thrift.write_list(thrift.STRUCT, columns)
    groups[0] = thrift.write_struct(group)
    top[4] = thrift.LIST, thrift.write_list(thrift.STRUCT, groups)
    raw = thrift.write_struct(top)
    data = Path(path).read_bytes()[: -8 - len(footer.raw)]
    target.write_bytes(data + raw + len(raw).to_bytes(4, "little") + b"PAR1")
    return read_footer(str(target))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({9: 1 << 40, 11: 0}, "its column chunk of .* is outside the"),
        ({7: 1 << 40}, "its column chunk of .* is outside the"),
        ({7: -1}, "a size of -1"),
        ({9: -5, 11: 0}, "is outside the"),
        ({9: 1, 11: 0}, "is outside the"),
        ({1: 77}, "there is no type 77"),
        ({14: 1 << 40}, "its bloom filter of .* is outside"),
    ],
)
def test_lies_are_refused(tmp_path: Path, written: dict[str, str], edit: dict[int, int], message: str) -> None:
    footer = rewritten(written["arrow"], tmp_path / "lie.parquet", edit)
    with pytest.raises(BadFile, match=f"lie.parquet: row group 0, column id: its footer is damaged .*{message}"):
        footer.chunks(0)
    assert footer.chunks(1)


@pytest.mark.parametrize("place", [0, 1 << 30])
def test_a_wrong_dictionary_offset_is_not_believed(tmp_path: Path, written: dict[str, str], place: int) -> None:
    honest = read_footer(written["arrow_plain"]).chunks(0)[0]
    chunk = rewritten(written["arrow_plain"], tmp_path / "old.parquet", {11: place}).chunks(0)[0]
    assert chunk == honest and not chunk.has_dictionary


def test_ten_thousand_row_groups_open_quickly(tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({name: range(10_000) for name in "abcde"}), path, row_group_size=1)
    start = time.process_time()
    footer = read_footer(str(path))
    assert time.process_time() - start < 3
    assert footer.row_groups == footer.rows == 10_000
    assert footer.chunks(9_999)[4].num_values == 1

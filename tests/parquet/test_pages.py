"""Page headers tile a chunk, and say what the footer and the values say."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadFile
from penstock.parquet.footer import open_parquet
from penstock.parquet.pages import PageFacts, page_facts, walk


def test_pages_fill_every_chunk(any_file: str) -> None:
    with open_parquet(any_file) as (fd, footer):
        for g in range(footer.row_groups):
            for chunk in footer.chunks(g):
                pages = list(walk(fd, chunk, path=any_file))
                assert sum(p.num_values for p in pages if p.kind.startswith("DATA")) == chunk.num_values
                assert all(p.kind != "DICTIONARY" for p in pages[1:])
                headers = chunk.stored - sum(p.stored for p in pages)
                assert sum(p.bytes for p in pages) + headers == chunk.bytes
                assert {p.encoding for p in pages if p.kind.startswith("DATA")} <= set(chunk.encodings)


def test_facts_of_a_column(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    values = [b"x" * 10] * 50 + [b"y" * 5000]
    pq.write_table(pa.table({"a": values}), path, use_dictionary=False, data_page_size=100, write_batch_size=10)
    pq.write_table(pa.table({"a": [1, 2, 3] * 100}), path + "2")
    with open_parquet(path) as (fd, footer):
        facts = page_facts(fd, footer.chunks(0)[0], path=path)
    assert facts.pages == 6 and facts.largest_values == 1 and facts.largest >= 5004
    assert (facts.dictionary, facts.dictionary_values) == (0, 0)
    with open_parquet(path + "2") as (fd, footer):
        facts = page_facts(fd, footer.chunks(0)[0], path=path)
    assert facts == PageFacts(
        pages=2,
        largest=facts.largest,
        largest_values=300,
        densest=facts.largest / 300,
        dictionary=24,
        dictionary_values=3,
    )


def test_headers_with_long_statistics(tmp_path: Path) -> None:
    path = str(tmp_path / "long.parquet")
    values = [str(i) * 1500 for i in range(10)]
    pq.write_table(pa.table({"a": values}), path, use_dictionary=False, data_page_size=1, write_batch_size=1)
    with open_parquet(path) as (fd, footer):
        pages = list(walk(fd, footer.chunks(0)[0], path=path))
    assert len(pages) == 10 and pages[0].offset > 2000


def test_headers_that_lie(tmp_path: Path, written: dict[str, str]) -> None:
    with open_parquet(written["arrow"]) as (fd, footer):
        chunk = footer.chunks(0)[0]
        for wrong in (
            replace(chunk, num_values=chunk.num_values + 1),
            replace(chunk, stored=chunk.stored - 1),
            replace(chunk, stored=chunk.stored + 5),
            replace(chunk, offset=chunk.offset + 1),
        ):
            with pytest.raises(BadFile, match=r"a\.parquet: column id: "):
                list(walk(fd, wrong, path="a.parquet"))
    path = tmp_path / "cut.parquet"
    path.write_bytes(Path(written["arrow"]).read_bytes()[: chunk.offset + 20])
    short = os.open(path, os.O_RDONLY)
    with pytest.raises(BadFile, match=r"cut\.parquet: column id: the page at byte"):
        list(walk(short, replace(chunk, num_values=0), path=str(path)))
    os.close(short)

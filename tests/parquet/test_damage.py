"""Damage is a `BadFile` that names the file, or it did no harm: never another error, never a hang."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import BadFile, PenstockError
from penstock.files import Writing
from penstock.parquet.footer import open_parquet, read_footer
from penstock.parquet.pages import page_facts
from penstock.parquet.splice import Span, splice

NAMES = ["arrow_index", "arrow_bloom", "arrow_sorted", "polars", "duckdb", "datasets"]
quietly = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def use(path: Path, target: Path) -> None:
    """Everything this folder can do with a file."""
    with open_parquet(str(path)) as (fd, footer):
        for g in range(footer.row_groups):
            footer.group_bytes(g), footer.group_stored(g)
            for chunk in footer.chunks(g):
                page_facts(fd, chunk, path=str(path))
    with Writing(target) as out:
        splice([Span(str(path), 0, footer.row_groups)], out)
        out.commit()
    again = read_footer(str(target))
    assert (again.rows, again.leaves) == (footer.rows, footer.leaves)
    with Writing(target) as out:
        splice([Span(str(path), 0, footer.row_groups)], out, columns=footer.columns[-1:])
        out.commit()
    read_footer(str(target))


def survives(data: bytes, folder: Path) -> None:
    path = folder / "damaged.parquet"
    path.write_bytes(data)
    try:
        use(path, folder / "out.parquet")
    except PenstockError as error:
        assert isinstance(error, BadFile) or "two columns" in str(error)
        assert "\n" not in str(error) and str(path) in str(error)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@quietly
def test_flipped_bytes_in_the_footer(name: str, data: st.DataObject, written: dict[str, str], tmp_path: Path) -> None:
    content = bytearray(Path(written[name]).read_bytes())
    start = len(content) - 8 - len(read_footer(written[name]).raw)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(start, len(content) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(content), tmp_path)


@given(data=st.data())
@quietly
def test_flipped_bytes_in_pages_and_indexes(data: st.DataObject, written: dict[str, str], tmp_path: Path) -> None:
    name = data.draw(st.sampled_from(NAMES))
    content = bytearray(Path(written[name]).read_bytes())
    for _ in range(data.draw(st.integers(1, 50))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(content), tmp_path)


def test_every_truncation(tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    pq.write_table(pa.table({"a": [1, 2], "b": [["x"], []]}), path, store_schema=False)
    whole, raw = path.read_bytes(), read_footer(str(path)).raw
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile, match=r"cut\.parquet: is (cut short or not Parquet|empty)"):
            read_footer(str(path))
    for length in range(len(raw)):
        path.write_bytes(whole[: -8 - len(raw)] + raw[:length] + length.to_bytes(4, "little") + b"PAR1")
        with pytest.raises(BadFile, match=r"cut\.parquet: its footer is damaged"):
            read_footer(str(path))


def test_undamaged_files_pass_all_of_it(tmp_path: Path, any_file: str) -> None:
    use(Path(any_file), tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").num_columns == 1

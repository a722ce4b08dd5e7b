"""What is done, durably: whole lines are believed, anything torn is not, and one run at a time writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Busy, DestinationConflict
from penstock.journal import Journal, difference, held

PLAN = {"sources": [{"inputs": {"a.parquet": "11", "b.parquet": "22"}}], "write": {"format": "parquet"}}


def journal(state: Path, *, key: str = "k", plan: Mapping[str, object] = PLAN) -> Journal:
    state.mkdir(exist_ok=True)
    return Journal(state, plan=plan, key=key)


def filled(state: Path, count: int = 5) -> Path:
    with journal(state) as made:
        for at in range(count):
            made.commit(f"task/{at}", {"rows": at, "name": "Übermaß\u2028\r\n"})
    return state / "journal.jsonl"


def test_what_was_committed_is_found_again(tmp_path: Path) -> None:
    filled(tmp_path)
    with journal(tmp_path) as again:
        assert [again.records[f"task/{at}"]["rows"] for at in range(5)] == [0, 1, 2, 3, 4]
        assert again.records["task/0"]["name"] == "Übermaß\u2028\r\n"


def test_new_journal(tmp_path: Path) -> None:
    with journal(tmp_path / "state") as made:
        assert made.records == {}


def test_every_torn_tail_is_survived(tmp_path: Path) -> None:
    """Cut anywhere: what is left is the records whose lines are whole, and it can be gone on with."""
    data = filled(tmp_path, 3).read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data)):
        (tmp_path / "journal.jsonl").write_bytes(data[:cut])
        with journal(tmp_path) as again:
            assert len(again.records) == max(0, sum(end <= cut for end in ends) - 1)
            again.commit("task/more", {"rows": 9})
        with journal(tmp_path) as again:
            assert again.records["task/more"]["rows"] == 9


@given(garbage=st.binary(min_size=1, max_size=200))
def test_garbage_at_the_end_is_ignored(garbage: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    state = tmp_path_factory.mktemp("state")
    with filled(state).open("ab") as f:
        f.write(garbage)
    with journal(state) as again:
        assert sorted(again.records) == [f"task/{at}" for at in range(5)]


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_believed(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    state = tmp_path_factory.mktemp("state")
    path = filled(state)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with journal(state) as again:
        for key, record in again.records.items():
            assert record["rows"] == int(key.removeprefix("task/"))
            assert record["name"] == "Übermaß\u2028\r\n"


def test_another_plan_is_refused_with_what_differs(tmp_path: Path) -> None:
    filled(tmp_path / ".penstock")
    other = {**PLAN, "write": {"format": "jsonl"}}
    with pytest.raises(DestinationConflict, match=r'write\.format was "parquet", is now "jsonl".*--restart') as caught:
        journal(tmp_path / ".penstock", key="other", plan=other)
    assert str(tmp_path) in str(caught.value)
    with journal(tmp_path / ".penstock") as again:  # nothing was harmed
        assert len(again.records) == 5


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with held(tmp_path / "out" / ".penstock"):
        with (
            pytest.raises(Busy, match=r"another run is writing here.*wait") as caught,
            held(tmp_path / "out" / ".penstock"),
        ):
            pass
        assert str(tmp_path / "out") in str(caught.value)
    with held(tmp_path / "out" / ".penstock"):
        pass


def test_difference_in_words() -> None:
    old = {"sources": [{"inputs": {"a": "1", "b": "2"}, "steps": []}]}
    assert difference(old, {"sources": [{"inputs": {"a": "1", "b": "3"}, "steps": []}]}) == ("input b has changed")
    assert difference(old, {"sources": [{"inputs": {"a": "1"}, "steps": []}]}) == ("input b is gone")
    assert "steps was 0 entries, is now 2 entries" in difference(
        old, {"sources": [{**old["sources"][0], "steps": [1, 2]}]}
    )
    many = difference({str(at): 0 for at in range(9)}, {str(at): 1 for at in range(9)})
    assert many.endswith("; and 6 more")

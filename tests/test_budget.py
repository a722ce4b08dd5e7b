"""The contract: sizes as people write them, limits as the kernel states them, and what fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import budget
from penstock.budget import Budget, budget_words, format_size, parse_size, resolve_budget, smallest_budget
from penstock.errors import DoesNotFit, UsageError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MB", 512_000_000),
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        (" 3 kb ", 3_000),
        ("7", 7),
        ("7B", 7),
        ("1g", 10**9),
        ("2TiB", 2 << 40),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MB", "2 GB more", "1e9", "-5MB", "two", "5 XB", "1,000MB", None, True, [1]])
def test_what_is_not_a_size(text: object) -> None:
    with pytest.raises(UsageError, match=r"memory .* is not a size"):
        parse_size(text, name="memory")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, "0", "0MB", "0.0001kB"])
def test_nothing_is_no_size(size: str | int) -> None:
    with pytest.raises(UsageError, match="more than zero"):
        parse_size(size)


@given(st.integers(1, 10**15))
def test_a_budget_in_words_is_enough(count: int) -> None:
    assert count <= parse_size(budget_words(count)) < count + 10**6


@given(st.integers(1, 10**15))
def test_a_size_in_words_is_near(count: int) -> None:
    assert parse_size(format_size(count).replace(",", "")) == pytest.approx(count, rel=0.006)


@given(st.integers(1, 10**13))
def test_the_smallest_budget_named_holds_what_was_needed(needed: int) -> None:
    named = Budget(parse_size(budget_words(smallest_budget(needed))))
    named.check(needed, what="it")
    assert named.allowed < needed * 1.05 + 25_000_000


@given(st.integers(10**7, 10**13))
def test_what_does_not_fit_is_refused_with_the_budget_that_would(needed: int) -> None:
    small = Budget(needed)
    with pytest.raises(DoesNotFit) as caught:
        small.check(needed, what="row group 3", where="a.parquet")
    said = str(caught.value)
    assert said.startswith("a.parquet: row group 3 needs ")
    Budget(parse_size(said.rpartition("--memory ")[2])).check(needed, what="row group 3")
    assert caught.value.exit_code == 3


def test_margin_is_held_back() -> None:
    assert Budget(1_000_000_000).grantable == 960_000_000
    assert Budget(100_000_000).grantable == 92_000_000


def test_budget_is_what_was_passed_then_the_environment_then_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "usable_memory", lambda: 6_000_000_000)
    monkeypatch.setenv("PENSTOCK_MEMORY", "700MB")
    assert resolve_budget("300MB").allowed == 300_000_000
    assert resolve_budget(None).allowed == 700_000_000
    monkeypatch.setenv("PENSTOCK_MEMORY", "")
    assert resolve_budget(None).allowed == 3_000_000_000
    monkeypatch.delenv("PENSTOCK_MEMORY")
    assert resolve_budget(None).allowed == 3_000_000_000


# -- limits of the kernel ---------------------------------------------------------------------------------------------


def group(root: Path, path: str, name: str, text: str) -> None:
    (root / path).mkdir(parents=True, exist_ok=True)
    (root / path / name).write_text(text + "\n")


def test_cgroup_version_2_and_all_above_it(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/user.slice/job\n")
    group(root, "user.slice", "memory.max", "3000000000")
    group(root, "user.slice/job", "memory.max", "max")
    assert budget._cgroup_limits(proc, root) == [3_000_000_000]
    group(root, "user.slice/job", "memory.max", "500000000")
    assert min(budget._cgroup_limits(proc, root)) == 500_000_000


def test_cgroup_version_1(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    group(root, "memory", "memory.limit_in_bytes", "9223372036854771712")  # no limit, in version 1's words
    group(root, "memory/docker/abc", "memory.limit_in_bytes", "800000000")
    assert budget._cgroup_limits(proc, root) == [800_000_000]


def test_cgroup_of_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    """The mount shows our own group as its root; the path in /proc names a folder that is not there."""
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/kubepods/pod-1/container-2\n")
    group(root, ".", "memory.max", "250000000")
    assert budget._cgroup_limits(proc, root) == [250_000_000]


def test_no_cgroups(tmp_path: Path) -> None:
    assert budget._cgroup_limits(tmp_path / "nothing", tmp_path) == []


def test_usable_memory_is_the_smallest_of_all_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = budget.usable_memory()
    assert usable > 0
    monkeypatch.setattr(budget, "_cgroup_limits", lambda: [123_456_789])
    assert budget.usable_memory() == min(usable, 123_456_789)

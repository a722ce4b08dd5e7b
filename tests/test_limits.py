"""The kernel limits themselves: a command over its limit is killed and reported, one under it is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import limits
from limits import KernelLimitsMissing, limited_group, require_kernel_limits, run_limited

MB = 1_000_000


@pytest.fixture
def kernel_limits() -> None:
    require_kernel_limits()


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def hold(size: int, seconds: float = 0.3) -> list[str]:
    return python(f"import time; held = bytes(1) * {size}; time.sleep({seconds})")


@pytest.mark.usefixtures("kernel_limits")
def test_a_command_over_its_limit_is_killed_by_the_kernel() -> None:
    result = run_limited(hold(300 * MB), limit=100 * MB, timeout=30)
    assert result.returncode == -signal.SIGKILL
    assert result.kernel_kills == 1
    assert 90 * MB < result.peak <= 100 * MB


@pytest.mark.usefixtures("kernel_limits")
def test_a_command_under_its_limit_is_measured() -> None:
    result = run_limited(hold(50 * MB), limit=100 * MB, timeout=30)
    assert (result.returncode, result.kernel_kills, result.left) == (0, 0, 0)
    assert 50 * MB <= result.anonymous <= 75 * MB
    assert result.anonymous <= result.peak
    assert result.seconds >= 0.3


@pytest.mark.usefixtures("kernel_limits")
def test_children_count_against_the_same_limit() -> None:
    code = f"import subprocess, sys; [p.wait() for p in [subprocess.Popen({hold(60 * MB)!r}) for _ in range(2)]]"
    result = run_limited(python(code), limit=100 * MB, timeout=30)
    assert result.kernel_kills >= 1


@pytest.mark.usefixtures("kernel_limits")
def test_leftovers_are_counted_and_ended() -> None:
    code = "import subprocess; [print(subprocess.Popen(['sleep', '60']).pid) for _ in range(2)]"
    result = run_limited(python(code), limit=100 * MB, timeout=30)
    assert result.left == 2
    assert result.seconds < 10
    for pid in result.stdout.split():
        with pytest.raises(ProcessLookupError):
            wait_for_end(int(pid))


@pytest.mark.usefixtures("kernel_limits")
def test_output_environment_and_folder_reach_the_command(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['A']); print('to stderr', file=sys.stderr); sys.exit(7)"
    result = run_limited(python(code), limit=100 * MB, timeout=30, env={"A": "b", "PATH": os.defpath}, cwd=tmp_path)
    assert (result.stdout, result.stderr, result.returncode) == (f"{tmp_path} b\n", "to stderr\n", 7)


@pytest.mark.usefixtures("kernel_limits")
def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited(["sleep", "60"], limit=100 * MB, timeout=0.2)


@pytest.mark.usefixtures("kernel_limits")
def test_a_whole_tree_can_be_killed_at_will() -> None:
    with limited_group(100 * MB) as group:
        tree = subprocess.Popen(group.enter_command(["sh", "-c", "sleep 60 & sleep 60 & wait"]))
        deadline = time.monotonic() + 10
        while len(group.pids()) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tree.pid in group.pids()
        group.kill_all()
        assert tree.wait(10) == -signal.SIGKILL
        assert group.pids() == []
    assert not group.path.exists()


def test_where_there_is_no_kernel_limit_tests_skip_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "kernel_limits_available", lambda: "no cgroups here")
    with (
        pytest.warns(KernelLimitsMissing, match="NOT TESTED under a kernel memory limit: no cgroups here"),
        pytest.raises(pytest.skip.Exception, match="no cgroups here"),
    ):
        require_kernel_limits()


def test_a_version_2_group_is_made_where_the_controller_is_handed_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    files = {
        "/proc/self/mounts": f"cgroup2 {tmp_path} cgroup2 rw 0 0\n",
        "/proc/self/cgroup": "0::/user.slice/session.scope\n",
    }
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: files.get(str(path)) or real(path))
    assert [folder for folder, _ in limits._parents()] == [own.parent, tmp_path]


def wait_for_end(pid: int) -> None:
    """Returns only if the process outlives ten seconds; a zombie nobody has reaped has ended too."""
    for _ in range(1000):
        os.kill(pid, 0)
        if " Z " in Path(f"/proc/{pid}/stat").read_text():
            raise ProcessLookupError(pid)
        time.sleep(0.01)

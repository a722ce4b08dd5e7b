"""Real kernel memory limits for tests: a command runs in a memory cgroup of its own (version 1 or 2).

What the promise of bounded memory is held against: the kernel counts and the kernel kills, not this project's gauge.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SAMPLE_SECONDS = 0.015
# Workers that end with their parent are still being torn down when the parent is gone; only what stays is a leftover.
SETTLE_SECONDS = 0.5
NOT_ENTERED = 125

_numbers = itertools.count()


class KernelLimitsMissing(UserWarning):
    """Tests that need a kernel memory limit did not run; pytest prints this in its summary."""


@dataclass(frozen=True)
class Limited:
    """What became of a command under a limit. Sizes are bytes; `peak` is the kernel's and includes page cache."""

    returncode: int
    stdout: str
    stderr: str
    kernel_kills: int
    peak: int
    anonymous: int
    left: int
    seconds: float


@dataclass(frozen=True)
class _Version:
    """The names one version of cgroups has for the same things."""

    limit: str
    swap: str
    swap_value: str | None  # None: the limit again (version 1 counts memory and swap together)
    peak: str
    anonymous: str
    kills: str


_V1 = _Version(
    limit="memory.limit_in_bytes",
    swap="memory.memsw.limit_in_bytes",
    swap_value=None,
    peak="memory.max_usage_in_bytes",
    anonymous="total_rss",
    kills="memory.oom_control",
)
_V2 = _Version(
    limit="memory.max",
    swap="memory.swap.max",
    swap_value="0",
    peak="memory.peak",
    anonymous="anon",
    kills="memory.events",
)


class Group:
    """One memory cgroup with a limit, from its making to its removal."""

    def __init__(self, parent: Path, version: _Version, limit: int) -> None:
        self.path = parent / f"penstock-test-{os.getpid()}-{next(_numbers)}"
        self._version = version
        self.path.mkdir()
        try:
            self._write(version.limit, str(limit))
            if (self.path / version.swap).exists():
                self._write(version.swap, version.swap_value or str(limit))
            self.peak()
        except OSError:
            self.path.rmdir()
            raise

    def enter_command(self, cmd: Sequence[str]) -> list[str]:
        """The command line that runs `cmd` inside this group from its first instruction."""
        script = f'echo $$ > "$0" || exit {NOT_ENTERED}; exec "$@"'
        return ["sh", "-c", script, str(self.path / "cgroup.procs"), *cmd]

    def pids(self) -> list[int]:
        """The processes in the group now."""
        # Version 2 shows a process of another pid namespace as 0, and a signal to 0 would reach ourselves.
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split() if pid != "0"]

    def anonymous(self) -> int:
        """Anonymous memory of all processes in the group now."""
        return self._table("memory.stat")[self._version.anonymous]

    def peak(self) -> int:
        """The most the kernel ever charged to the group, page cache included."""
        return int((self.path / self._version.peak).read_text())

    def kernel_kills(self) -> int:
        """How many processes the kernel has killed for passing the limit."""
        return self._table(self._version.kills)["oom_kill"]

    def kill_all(self) -> None:
        """SIGKILL every process in the group, and those they start meanwhile, until none is left."""
        deadline = time.monotonic() + 10
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.path}: processes {pids} do not end")
            time.sleep(0.005)

    def remove(self) -> None:
        """End what is left and remove the group."""
        self.kill_all()
        for _ in range(100):
            # EBUSY for a moment after the last process has gone
            with suppress(OSError):
                return self.path.rmdir()
            time.sleep(0.05)
        return self.path.rmdir()

    def _write(self, name: str, value: str) -> None:
        (self.path / name).write_text(value)

    def _table(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in (self.path / name).read_text().splitlines())
        return {key: int(value) for key, value in pairs}


@contextmanager
def limited_group(limit: int) -> Iterator[Group]:
    """A group of `limit` bytes to start processes in and to kill as a whole; at the end it and they are gone."""
    group = _make_group(limit)
    try:
        yield group
    finally:
        group.remove()


def run_limited(
    cmd: Sequence[str],
    *,
    limit: int,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Limited:
    """Run `cmd` and all it starts under `limit` bytes; leftovers are counted, then ended.

    Raises `subprocess.TimeoutExpired`, with everything ended, when the command takes longer than `timeout` seconds.
    """
    # Files, not pipes: a leftover that holds the pipe open would keep us reading long after the command has ended.
    with limited_group(limit) as group, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        process = subprocess.Popen(
            group.enter_command(cmd), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd
        )
        try:
            with _sampled(group) as highest:
                returncode = process.wait(timeout)
        except BaseException:
            group.kill_all()
            process.kill()  # it may not have entered the group yet
            process.wait()
            raise
        seconds = time.monotonic() - started
        left = _settled(group)
        group.kill_all()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Limited(
            returncode=returncode,
            stdout=texts[0],
            stderr=texts[1],
            kernel_kills=group.kernel_kills(),
            peak=group.peak(),
            anonymous=highest(),
            left=left,
            seconds=seconds,
        )


@functools.cache
def kernel_limits_available() -> str | None:
    """None where a process can be put under a kernel memory limit; else the reason why not."""
    try:
        with limited_group(64 << 20) as group:
            entered = subprocess.run(group.enter_command(["true"]), capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return None if entered.returncode == 0 else f"cannot enter a memory cgroup: {entered.stderr.strip()}"


def require_kernel_limits() -> None:
    """Skip the test, loudly, where the kernel cannot limit memory for us. Call it in a fixture or a test."""
    if reason := kernel_limits_available():
        text = f"NOT TESTED under a kernel memory limit: {reason}"
        warnings.warn(text, KernelLimitsMissing, stacklevel=2)
        pytest.skip(text)


@contextmanager
def _sampled(group: Group) -> Iterator[_Highest]:
    highest = _Highest(group)
    highest.start()
    try:
        yield highest
    finally:
        highest.done.set()
        highest.join()


class _Highest(threading.Thread):
    """Samples a group's anonymous memory until told to stop; call it for the highest value seen."""

    def __init__(self, group: Group) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self._group = group
        self._value = 0

    def __call__(self) -> int:
        return self._value

    def run(self) -> None:
        while not self.done.wait(SAMPLE_SECONDS):
            self._value = max(self._value, self._group.anonymous())


def _settled(group: Group) -> int:
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := len(group.pids())) and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
    return left


def _make_group(limit: int) -> Group:
    refusals: list[str] = []
    for parent, version in _parents():
        try:
            return Group(parent, version, limit)
        except OSError as error:
            refusals.append(str(error))
    raise OSError("; ".join(refusals) or "no memory cgroup: neither version 1 nor version 2 offers the controller here")


def _parents() -> Iterator[tuple[Path, _Version]]:
    """Folders in which a memory group may be made, the most likely first."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            yield Path(mount), _V1
        elif kind == "cgroup2":
            # A group has memory files only if its parent hands the controller down, and a group that does so may not
            # hold processes itself (the root may). So it is an ancestor of our own group, never a setting we change.
            for folder in _own_and_ancestors(Path(mount)):
                handed_down = folder / "cgroup.subtree_control"
                if handed_down.exists() and "memory" in handed_down.read_text().split():
                    yield folder, _V2


def _own_and_ancestors(mount: Path) -> list[Path]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = mount / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]

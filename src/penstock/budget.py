"""The contract: one number of bytes for the whole process tree, and how it is shared out.

Four words, used the same way everywhere: *allowed* is the user's number; *reserved* is what interpreters and imports
cost before any data, measured; *projected* is what the plan says a task will take; *measured* is what the kernel says.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DoesNotFit, UsageError

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(size: str | int, *, name: str = "size") -> int:
    """Bytes meant by a size as people write it.

    >>> parse_size("512MB"), parse_size("1.5GiB"), parse_size(4096)
    (512000000, 1610612736, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
        if match is None or match[2].lower() not in _UNITS:
            raise UsageError(f'{name} {size!r} is not a size; write it as "512MB", "2GB" or "1.5GiB"')
        value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise UsageError(f"{name} must be more than zero, not {size!r}")
    return value


def format_size(count: float) -> str:
    """A size as people read it.

    >>> format_size(400_000_000), format_size(1_530_000_000), format_size(999)
    ('400 MB', '1.53 GB', '999 B')
    """
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} B"


def counted(count: int, word: str) -> str:
    """So many of something.

    >>> counted(1, "shard"), counted(1_200, "row")
    ('1 shard', '1,200 rows')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def budget_words(count: int) -> str:
    """A budget as one types it after `--memory`, rounded up so that it is enough.

    >>> budget_words(1_530_200_001)
    '1531MB'
    """
    return f"{-(-count // 10**6)}MB"


@dataclass(frozen=True)
class Budget:
    """What a run may take, and what of it can be granted."""

    allowed: int

    @property
    def margin(self) -> int:
        """Held back for what the kernel counts beside anonymous memory (page tables, sockets, pages in write-back) and
        for what can be allocated between two samples of the supervisor."""
        return margin_of(self.allowed)

    @property
    def grantable(self) -> int:
        return self.allowed - self.margin

    def check(self, needed: int, *, what: str, where: str = "", do: str = "") -> None:
        """Refuse what fits in no way, naming the smallest budget that works."""
        if needed > self.grantable:
            smallest = smallest_budget(needed)
            raise DoesNotFit(
                f"{what} needs {format_size(needed)} beside a margin of {format_size(self.margin)},"
                f" and --memory {budget_words(self.allowed)} does not hold it",
                where=where,
                do=f"the smallest budget that works is --memory {budget_words(smallest)}" + (f", {do}" if do else ""),
            )


def margin_of(allowed: int) -> int:
    return max(8 * 10**6, allowed // 25)


def smallest_budget(needed: int) -> int:
    """The least `allowed` under which `needed` can be granted, with a little over.

    Reserved memory is measured anew in every run and moves by a megabyte or two: the budget named must still work then.
    """
    needed += 6 * 10**6
    return max(needed + 8 * 10**6, -(-needed * 25 // 24) + 1)


def resolve_budget(memory: str | int | None) -> Budget:
    """The budget of a run: what was passed, else `PENSTOCK_MEMORY`, else half of what this process may use."""
    given = memory if memory is not None else os.environ.get("PENSTOCK_MEMORY") or None
    if given is not None:
        return Budget(parse_size(given, name="memory"))
    return Budget(usable_memory() // 2)


def usable_memory() -> int:
    """What this process may use at most: cgroup limits, ulimits and available RAM, whichever is smallest."""
    limits = [_available(), *_cgroup_limits()]
    for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def _available() -> int:
    if sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _cgroup_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Memory limits of this process's cgroup and all above it, version 1 and version 2."""
    limits: list[int] = []
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return limits
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, name = [root, root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            bases, name = [root / "memory"], "memory.limit_in_bytes"
        else:
            continue
        for base in bases:
            # Inside a container the path may be the host's and the mount show only our own group: then the root tells.
            below = [base.joinpath(*Path(path).parts[1 : depth + 1]) for depth in range(len(Path(path).parts))]
            for folder in below:
                try:
                    text = (folder / name).read_text().strip()
                except OSError:
                    continue
                if text != "max" and int(text) < 1 << 60:  # version 1 writes "no limit" as a huge number
                    limits.append(int(text))
    return limits

"""What a run leaves behind: what was read, what was written, and what it took. People publish it: no host, no user."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.files import write_whole

NAME = "receipt.json"
FORMAT = 1
TRACE_POINTS = 240


@dataclass(frozen=True)
class Receipt:
    """A finished run, field by field as it is stored."""

    command: str
    plan: dict[str, Any]
    plan_key: str
    inputs: list[dict[str, Any]]
    rows: dict[str, Any]  # read, written, dropped by reason
    shards: list[dict[str, Any]]  # path, rows, bytes, sha256
    memory: dict[str, Any]  # allowed, reserved, projected, measured, workers, trace
    disk: dict[str, Any]  # projected, measured
    tasks: dict[str, int]  # planned, run
    seconds: float
    versions: dict[str, str]
    published: dict[str, Any] | None = None  # to, revision, commit, commits, config, splits
    format: int = FORMAT
    already_done: bool = field(default=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        made = dict(self.__dict__)
        del made["already_done"]
        return made

    def save(self, state: Path) -> None:
        write_whole(state / NAME, (json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n").encode())


def load(state: Path) -> Receipt | None:
    """The receipt in a state folder, if there is one that can be read."""
    try:
        stored = json.loads((state / NAME).read_bytes())
        return Receipt(**stored) if isinstance(stored, dict) and stored.get("format") == FORMAT else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


class Trace:
    """Measured memory over time: the largest value of each stretch, in a bounded number of points."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []
        self._stretch = 0.05

    def add(self, seconds: float, count: int) -> None:
        if self._points and seconds - self._points[-1][0] < self._stretch:
            self._points[-1] = (self._points[-1][0], max(self._points[-1][1], count))
            return
        self._points.append((seconds, count))
        if len(self._points) > TRACE_POINTS:
            self._stretch *= 2
            pairs = zip(self._points[::2], [*self._points[1::2], self._points[-1]], strict=False)
            self._points = [(a[0], max(a[1], b[1])) for a, b in pairs]

    def as_json(self) -> list[list[float]]:
        return [[round(seconds, 2), count] for seconds, count in self._points]


def versions(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The versions output bytes may depend on."""
    found = {"python": platform.python_version()}
    for name in ("penstock", "pyarrow", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, **(extra or {})}

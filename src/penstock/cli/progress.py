"""Progress: one live line on a terminal, a plain line now and then elsewhere; measured memory against the budget."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Self

from penstock.budget import format_size
from penstock.meter import Status

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 10.0
BAR = 24
WIDE = 120  # columns from which there is room for a bar


class Progress:
    """A watcher for `Dataset.write`. Writes to standard error, so that standard output stays clean."""

    def __init__(self, *, quiet: bool = False, unit: str = "rows") -> None:
        self._quiet, self._unit = quiet, unit
        self._live = sys.stderr.isatty()
        self._last = time.monotonic()
        self._phase, self._phase_start, self._phase_done = "", 0.0, 0
        self._shown = False

    def __call__(self, status: Status) -> None:
        now = time.monotonic()
        if status.phase != self._phase:
            self._phase, self._phase_start, self._phase_done = status.phase, now, status.done
        if self._quiet or now - self._last < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._last = now
        line = self._line(status, now)
        if self._live:
            width = shutil.get_terminal_size().columns
            sys.stderr.write("\r\x1b[K" + line[: width - 1])
            self._shown = True
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _line(self, status: Status, now: float) -> str:
        share = min(1.0, status.done / status.total) if status.total else 0.0
        spent = now - self._phase_start
        fresh = status.done - self._phase_done
        rate = fresh / spent if spent > 0.5 and fresh > 0 else 0.0
        left = (status.total - status.done) / rate if rate else 0.0
        # What must be seen comes first: a narrow terminal cuts the line.
        parts = [
            f"{status.phase:<8}",
            *([_bar(share)] if self._live and shutil.get_terminal_size().columns >= WIDE else []),
            *([f"{share:4.0%}"] if status.total else []),
            f"memory {format_size(status.anonymous)} of {format_size(status.allowed)}",
            *([f"{_clock(left)} left"] if rate else []),
            *([f"{status.rows:,} {self._unit}"] if status.workers else []),
            *([f"{format_size(status.done)} of {format_size(status.total)}"] if status.total else []),
            *([f"{format_size(rate)}/s"] if rate else []),
            *([f"{status.workers} worker{'s' if status.workers != 1 else ''}"] if status.workers else []),
        ]
        return "  ".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _bar(share: float) -> str:
    full = int(share * BAR)
    return "█" * full + "░" * (BAR - full)


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"

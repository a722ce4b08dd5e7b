"""What the laws share: how a case is run, and what of a destination is compared."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

JOB = Path(__file__).parent / "job.py"


def command(case: str, samples: Path, dest: Path, *, memory: str, workers: int) -> list[str]:
    return [sys.executable, str(JOB), case, str(samples), str(dest), memory, str(workers)]


def digests(dest: Path) -> dict[str, str]:
    """Every file a destination shows, by digest; and nothing may be left of the work."""
    assert [entry.name for entry in (dest / ".penstock").iterdir()] == ["receipt.json"]
    return {
        path.relative_to(dest).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(dest.rglob("*"))
        if path.is_file() and ".penstock" not in path.parts
    }


@dataclass(frozen=True)
class Finished:
    """A run that was never killed."""

    dest: Path
    files: dict[str, str]
    receipt: dict[str, Any]
    seconds: float

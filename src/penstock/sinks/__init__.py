"""Where rows go: one file per format or place. A new format is one file and one line in this table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.sinks.base import Sink

# What a user writes after `--format`, and the module whose `sink(format)` makes it.
FORMATS: dict[str, str] = {"parquet": "parquet", "jsonl": "jsonl", "jsonl.gz": "jsonl", "jsonl.zst": "jsonl"}


def sink_of(format: str) -> Sink:
    """The sink for a format, imported when it is first asked for."""
    if format not in FORMATS:
        raise UsageError(f"cannot write format {format!r}; one of {', '.join(FORMATS)}")
    return cast("Sink", import_module(f"penstock.sinks.{FORMATS[format]}").sink(format))

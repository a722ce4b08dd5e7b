"""Where rows come from: one file per format or place. A new format is one file and one line in this table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.sources.base import Source

# Format, and the file endings that mean it; the module of the same name holds a `SOURCE`.
FORMATS: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst"),
}


def source_of(format: str) -> Source:
    """The source for a format, imported when it is first asked for."""
    if format not in FORMATS:
        raise UsageError(f"format {format!r} is not known; one of {', '.join(FORMATS)}")
    return cast("Source", import_module(f"penstock.sources.{format}").SOURCE)


def format_of(name: str) -> str | None:
    """The format a file's ending stands for.

    >>> format_of("a/part-0.jsonl.zst"), format_of("notes.txt")
    ('jsonl', None)
    """
    lower = name.lower()
    return next((format for format, endings in FORMATS.items() if lower.endswith(endings)), None)

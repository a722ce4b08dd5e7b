"""The survey: a journalled first look at a text source, for its types, its rows and its longest row."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from penstock.engines.notes import Notes
from penstock.engines.task import Result
from penstock.sources import source_of
from penstock.sources.base import ReadOptions, SourceFile, Surveyed


@dataclass(frozen=True)
class SurveyJob:
    """One task surveys one span."""

    sources: tuple[tuple[tuple[SourceFile, ...], str, ReadOptions], ...]
    most_workers: ClassVar[int] = 1 << 16

    def warm_up(self) -> None:
        import numpy  # noqa: F401
        import pyarrow.json  # noqa: F401

        for _, format, _ in self.sources:
            source_of(format)

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        (at, span), _ = payload
        files, format, options = self.sources[at]
        notes.at(f"survey {format}", where=files[span.file].name)
        return as_record(source_of(format).survey(files[span.file], span, options, notes))


def as_record(found: Surveyed) -> Result:
    return {**asdict(found), "schema": base64.b64encode(found.schema).decode()}


def from_record(record: Result) -> Surveyed:
    names = Surveyed.__dataclass_fields__
    return Surveyed(**{**{name: record[name] for name in names}, "schema": base64.b64decode(record["schema"])})

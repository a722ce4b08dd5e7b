"""`drop`: all columns but these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.errors import UsageError
from penstock.steps.columns import MovesColumns, as_names, check_known


@dataclass(frozen=True)
class Drop(MovesColumns):
    columns: tuple[str, ...]
    name: ClassVar[str] = "drop"

    @classmethod
    def make(cls, columns: str | Sequence[str]) -> Drop:
        return cls(as_names(columns, step="drop"))

    def describe(self) -> dict[str, Any]:
        return {"columns": list(self.columns)}

    def moved(self, names: Sequence[str], *, strict: bool = True) -> list[tuple[str, str]]:
        if strict:
            check_known(self.columns, names, step="drop")
        kept = [(name, name) for name in names if name not in self.columns]
        if not kept:
            raise UsageError("leaves no column", where="drop")
        return kept

"""`select`: these columns, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.steps.columns import MovesColumns, as_names, check_known


@dataclass(frozen=True)
class Select(MovesColumns):
    columns: tuple[str, ...]
    name: ClassVar[str] = "select"

    @classmethod
    def make(cls, columns: str | Sequence[str]) -> Select:
        return cls(as_names(columns, step="select"))

    def describe(self) -> dict[str, Any]:
        return {"columns": list(self.columns)}

    def moved(self, names: Sequence[str], *, strict: bool = True) -> list[tuple[str, str]]:
        if strict:
            check_known(self.columns, names, step="select")
        return [(name, name) for name in self.columns if strict or name in names]

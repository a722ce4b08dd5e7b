"""`rename`: other names for some columns; their order stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.errors import UsageError
from penstock.steps.columns import MovesColumns, check_known


@dataclass(frozen=True)
class Rename(MovesColumns):
    columns: tuple[tuple[str, str], ...]
    name: ClassVar[str] = "rename"

    @classmethod
    def make(cls, columns: Mapping[str, str]) -> Rename:
        if not isinstance(columns, Mapping) or not columns:
            raise UsageError('takes a mapping of old to new names, such as {"content": "text"}', where="rename")
        return cls(tuple(columns.items()))

    def describe(self) -> dict[str, Any]:
        return {"columns": dict(self.columns)}

    def moved(self, names: Sequence[str], *, strict: bool = True) -> list[tuple[str, str]]:
        new = dict(self.columns)
        if strict:
            check_known(new, names, step="rename")
        pairs = [(name, new.get(name, name)) for name in names]
        after = [name for _, name in pairs]
        for name in after:
            if after.count(name) > 1:
                raise UsageError(f"gives two columns the name {name!r}", where="rename")
        return pairs

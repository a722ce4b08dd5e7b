"""`limit`: the first n rows, in order. The plan counts them off; where only running can tell, a pass before does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


@dataclass(frozen=True)
class Limit:
    rows: int
    name: ClassVar[str] = "limit"
    keeps_rows: ClassVar[bool] = False
    moves_columns: ClassVar[bool] = False
    calls_user: ClassVar[bool] = False

    @classmethod
    def make(cls, rows: int) -> Limit:
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
            raise UsageError(f"takes a number of rows, not {rows!r}", where="limit")
        return cls(rows)

    def describe(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        return schema

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        return rows  # a task cannot know how many rows came before it: the plan gives it only the rows it may read

    def cost(self, batch: int) -> int:
        return 0

"""What a concatenation adds to a branch whose columns are not quite the others': their order, types, and nulls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


@dataclass(frozen=True)
class Conform:
    schema: pa.Schema
    name: ClassVar[str] = "concat"
    keeps_rows: ClassVar[bool] = True
    moves_columns: ClassVar[bool] = False
    calls_user: ClassVar[bool] = False

    def describe(self) -> dict[str, Any]:
        return {"schema": str(self.schema)}

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        return self.schema

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        from penstock.schemas import conform

        return replace(rows, batch=conform(rows.batch, self.schema))

    def cost(self, batch: int) -> int:
        return batch

"""`filter`: the rows a function or an Arrow expression is true for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc

from penstock.errors import UsageError
from penstock.functions import fingerprint, name_of
from penstock.steps.map import FORMAT_COST, check_format

if TYPE_CHECKING:
    from penstock.rows import Rows


@dataclass(frozen=True)
class Filter:
    fn: Callable[[Any], object] | pc.Expression
    format: str
    version: str | None = None
    name: ClassVar[str] = "filter"
    keeps_rows: ClassVar[bool] = False
    moves_columns: ClassVar[bool] = False

    @property
    def calls_user(self) -> bool:
        return not _is_expression(self.fn)

    @classmethod
    def make(
        cls, fn: Callable[[Any], object] | pc.Expression, format: str = "arrow", version: str | None = None
    ) -> Filter:
        if not callable(fn) and not _is_expression(fn):
            raise UsageError(f"takes a function or an Arrow expression, not {type(fn).__name__}", where="filter")
        check_format(format, step="filter")
        return cls(fn, format, version)

    def describe(self) -> dict[str, Any]:
        if _is_expression(self.fn):
            return {"expression": str(self.fn)}
        assert callable(self.fn)
        return {"fn": name_of(self.fn), "code": self.version or fingerprint(self.fn), "format": self.format}

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        if _is_expression(self.fn):
            try:
                _evaluated(self.fn, schema.empty_table())
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                reason = str(error).splitlines()[0]
                raise UsageError(f"{self.fn} cannot be evaluated ({reason})", where="filter") from None
        return schema

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        from penstock.kernels.formats import call_filter

        if not _is_expression(self.fn):
            return rows.keep(call_filter(self.fn, rows.batch, self.format))
        return rows.keep(_evaluated(self.fn, pa.Table.from_batches([rows.batch])))

    def cost(self, batch: int) -> int:
        return batch + FORMAT_COST[self.format] * batch


def _is_expression(fn: object) -> bool:
    return isinstance(fn, pc.Expression)


def _evaluated(expression: pc.Expression, table: pa.Table) -> pa.BooleanArray:
    """The rows of a table an Arrow expression is true for; null counts as false."""
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
            acero.Declaration("project", acero.ProjectNodeOptions([expression], ["keep"])),
        ]
    )
    return pc.fill_null(plan.to_table(use_threads=False).column("keep").combine_chunks().cast(pa.bool_()), False)

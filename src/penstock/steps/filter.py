"""`filter`: the rows a function or an Arrow expression is true for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import FunctionFailed, UsageError
from penstock.functions import describe, fingerprint
from penstock.steps.map import FORMAT_COST, check_format

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


@dataclass(frozen=True)
class Filter:
    fn: Callable[[Any], object] | pa.compute.Expression
    format: str
    version: str | None = None
    name: ClassVar[str] = "filter"
    keeps_rows: ClassVar[bool] = False
    moves_columns: ClassVar[bool] = False
    calls_user: ClassVar[bool] = True

    @classmethod
    def make(
        cls, fn: Callable[[Any], object] | pa.compute.Expression, format: str = "arrow", version: str | None = None
    ) -> Filter:
        if not callable(fn) and not _is_expression(fn):
            raise UsageError(f"takes a function or an Arrow expression, not {type(fn).__name__}", where="filter")
        check_format(format, step="filter")
        return cls(fn, format, version)

    def describe(self) -> dict[str, Any]:
        if _is_expression(self.fn):
            return {"expression": str(self.fn)}
        assert callable(self.fn)
        return {"fn": describe(self.fn), "code": self.version or fingerprint(self.fn), "format": self.format}

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        return schema

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        from penstock.kernels.formats import call_filter

        if not _is_expression(self.fn):
            return rows.keep(call_filter(self.fn, rows.batch, self.format))
        import pyarrow as pa
        import pyarrow.acero as acero
        import pyarrow.compute as pc

        table = pa.Table.from_batches([rows.batch])
        plan = acero.Declaration.from_sequence(
            [
                acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
                acero.Declaration("project", acero.ProjectNodeOptions([self.fn], ["keep"])),
            ]
        )
        try:
            mask = plan.to_table(use_threads=False).column("keep").combine_chunks()
            return rows.keep(pc.fill_null(mask, False))
        except pa.ArrowInvalid as error:
            raise FunctionFailed(f"the expression {self.fn} cannot be evaluated: {error}") from error

    def cost(self, batch: int) -> int:
        return batch + FORMAT_COST[self.format] * batch


def _is_expression(fn: object) -> bool:
    import pyarrow.compute as pc

    return isinstance(fn, pc.Expression)

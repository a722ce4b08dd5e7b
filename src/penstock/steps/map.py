"""`map`: a user's function on every batch. Its output has one schema: given, or that of its first batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import UsageError
from penstock.functions import fingerprint, name_of

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows

# How many times its batch a function's arguments and result take, by format: the projection of a step whose real cost
# only running can tell. Python objects were measured at 8 to 30 times the Arrow bytes of what they hold for numbers and
# under 3 times for text; the supervisor guards what goes beyond, and a task that overran runs again alone.
FORMAT_COST = {"arrow": 2, "numpy": 3, "polars": 3, "pandas": 4, "python": 5, "rows": 5}


@dataclass(frozen=True)
class Map:
    fn: Callable[[Any], object]
    format: str
    schema: pa.Schema | None
    version: str | None = None
    name: ClassVar[str] = "map"
    keeps_rows: ClassVar[bool] = False
    moves_columns: ClassVar[bool] = False
    calls_user: ClassVar[bool] = True

    @classmethod
    def make(
        cls,
        fn: Callable[[Any], object],
        format: str = "arrow",
        schema: pa.Schema | None = None,
        version: str | None = None,
    ) -> Map:
        if not callable(fn):
            raise UsageError(f"takes a function, not {type(fn).__name__}", where="map")
        check_format(format, step="map")
        return cls(fn, format, schema, version)

    def describe(self) -> dict[str, Any]:
        return {
            "fn": name_of(self.fn),
            "code": self.version or fingerprint(self.fn),
            "format": self.format,
            "schema": None if self.schema is None else str(self.schema),
        }

    def schema_after(self, schema: pa.Schema) -> pa.Schema | None:
        return self.schema

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        from penstock.kernels.formats import call_map

        return rows.became(call_map(self.fn, rows.batch, self.format, schema))

    def cost(self, batch: int) -> int:
        return FORMAT_COST[self.format] * batch


def check_format(format: str, *, step: str) -> None:
    if format not in FORMAT_COST:
        raise UsageError(f"format {format!r} is not known; one of {', '.join(FORMAT_COST)}", where=step)

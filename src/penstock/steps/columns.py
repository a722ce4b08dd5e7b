"""What `select`, `drop` and `rename` share: they only name and order columns, so nothing needs decoding for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

from penstock.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


class MovesColumns(ABC):
    """A step that is fully told by which columns stay, in which order, under which names."""

    name: ClassVar[str]
    keeps_rows: ClassVar[bool] = True
    moves_columns: ClassVar[bool] = True
    calls_user: ClassVar[bool] = False

    @abstractmethod
    def moved(self, names: Sequence[str], *, strict: bool = True) -> list[tuple[str, str]]:
        """(name before, name after) of every column that stays.

        Unknown names are an error, unless the plan has already checked them and left out columns that no step keeps.
        """

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        import pyarrow as pa

        fields = [schema.field(old).with_name(new) for old, new in self.moved(schema.names, strict=False)]
        return pa.schema(fields, metadata=schema.metadata)

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        import pyarrow as pa

        after = self.schema_after(rows.batch.schema)
        arrays = [rows.batch.column(old) for old, _ in self.moved(rows.batch.schema.names, strict=False)]
        return replace(rows, batch=pa.RecordBatch.from_arrays(arrays, schema=after))

    def cost(self, batch: int) -> int:
        return 0


def as_names(columns: str | Iterable[str], *, step: str) -> tuple[str, ...]:
    """The names a user gave: one or several, each once."""
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names:
        raise UsageError("names no column", where=step)
    for at, name in enumerate(names):
        if not isinstance(name, str):
            raise UsageError(f"takes column names, not {name!r}", where=step)
        if name in names[:at]:
            raise UsageError(f"names column {name!r} twice", where=step)
    return names


def check_known(wanted: Iterable[str], names: Sequence[str], *, step: str) -> None:
    """Every name must be there; a near miss is pointed out."""
    for name in wanted:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, names[:20]))}"
            raise UsageError(f"there is no column {name!r}", where=step, do=hint)

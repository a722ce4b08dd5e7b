"""What every step is: a frozen description, and a function from rows to rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


class Step(Protocol):
    """One operation on rows. Equal descriptions mean equal bytes out: they are what a resume compares."""

    name: ClassVar[str]
    keeps_rows: ClassVar[bool]  # every row in is one row out, in order
    moves_columns: ClassVar[bool]  # names and order of columns alone: nothing needs decoding

    @property
    def calls_user(self) -> bool:
        """Whether it runs a user's function, whose cost only running can tell."""

    def describe(self) -> dict[str, Any]:
        """Its words and values, JSON-able; a function by its fingerprint."""

    def schema_after(self, schema: pa.Schema) -> pa.Schema | None:
        """The columns it gives for these; None where only running can tell."""

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        """The step itself. `schema` is what it must give, once that is known."""

    def cost(self, batch: int) -> int:
        """Bytes it takes for a batch of this many, beside the batch itself."""

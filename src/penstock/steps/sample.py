"""`sample`: a share of the rows, chosen by a keyed hash of each row's identity: no state, the same on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.rows import Rows


@dataclass(frozen=True)
class Sample:
    fraction: float
    seed: int
    name: ClassVar[str] = "sample"
    keeps_rows: ClassVar[bool] = False
    moves_columns: ClassVar[bool] = False
    calls_user: ClassVar[bool] = False

    @classmethod
    def make(cls, fraction: float, seed: int = 0) -> Sample:
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise UsageError(f"takes a fraction from 0 to 1, not {fraction!r}", where="sample")
        return cls(float(fraction), int(seed))

    def describe(self) -> dict[str, Any]:
        return {"fraction": self.fraction, "seed": self.seed}

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        return schema

    def apply(self, rows: Rows, schema: pa.Schema | None) -> Rows:
        import numpy as np
        import pyarrow as pa

        from penstock.kernels.permute import row_keys

        ordinals, parts = rows.identities()
        keys = row_keys(ordinals, parts, file=rows.file, seed=self.seed)
        # The top 53 bits are exact in a double, and so is the comparison.
        chosen = (keys >> np.uint64(11)).astype(np.float64) < self.fraction * 2.0**53
        # From bits: `pa.array` of anything from outside Arrow imports pandas, 32 MB, where it is installed.
        bits = pa.py_buffer(np.packbits(chosen, bitorder="little"))
        return rows.keep(pa.Array.from_buffers(pa.bool_(), len(chosen), [None, bits]))

    def cost(self, batch: int) -> int:
        return batch + (1 << 20)

"""A batch and who its rows are; and the cutter that makes the plan's batches of whatever a source gives.

A row's identity is (ordinal of its file, ordinal of its row in that file), plus a sub-ordinal where a step made several
rows of a batch. It never depends on the budget, the workers or the cutting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.kernels.sizes import bins
from penstock.sources.base import Small
from penstock.stage import BATCH_BYTES, BATCH_ROWS

Ordinals = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Rows:
    """What flows between steps: an Arrow batch, and the identity of each of its rows."""

    batch: pa.RecordBatch
    file: int
    first: int  # ordinal of the first row that went into this batch
    stop: int  # and one past the last
    ordinals: Ordinals | None = None  # None: consecutive from `first`
    parts: Ordinals | None = None  # sub-ordinals; None: all zero

    def identities(self) -> tuple[Ordinals, Ordinals]:
        count = self.batch.num_rows
        ordinals = self.ordinals
        if ordinals is None:
            ordinals = np.arange(self.first, self.first + count, dtype=np.uint64)
        return ordinals, np.zeros(count, np.uint64) if self.parts is None else self.parts

    def keep(self, mask: pa.BooleanArray) -> Rows:
        """The rows a mask is true for, each with the identity it had."""
        ordinals, parts = self.identities()
        chosen = np.asarray(mask.to_numpy(zero_copy_only=False), dtype=bool)
        return replace(
            self,
            batch=self.batch.filter(mask),
            ordinals=ordinals[chosen],
            parts=None if self.parts is None else parts[chosen],
        )

    def head(self, count: int) -> Rows:
        """The first few rows."""
        if count >= self.batch.num_rows:
            return self
        return replace(
            self,
            batch=self.batch.slice(0, count),
            ordinals=None if self.ordinals is None else self.ordinals[:count],
            parts=None if self.parts is None else self.parts[:count],
        )

    def became(self, batch: pa.RecordBatch) -> Rows:
        """The same rows after a step that may have made more or fewer of them."""
        if batch.num_rows == self.batch.num_rows:
            return replace(self, batch=batch)
        count = batch.num_rows
        return replace(
            self, batch=batch, ordinals=np.full(count, self.first, np.uint64), parts=np.arange(count, dtype=np.uint64)
        )


def cut_batches(small: Iterable[Small], *, file: int) -> Iterator[Rows]:
    """Recut a file's small batches into the plan's: greedy from the first row, by Arrow bytes and rows.

    A row larger than a batch is a batch.
    """
    held: list[Small] = []
    rows, size = 0, 0
    for given in small:
        for part in bins(given.batch, carry_rows=rows, carry_bytes=size, max_rows=BATCH_ROWS, max_bytes=BATCH_BYTES):
            if part.new and held:
                yield _joined(held, file)
                held, rows, size = [], 0, 0
            ordinals = None if given.ordinals is None else given.ordinals[part.start : part.stop]
            first = given.first + part.start if ordinals is None else int(ordinals[0])
            held.append(Small(first, part.batch, ordinals))
            rows += part.batch.num_rows
            size += part.bytes
    if held:
        yield _joined(held, file)


def _joined(held: list[Small], file: int) -> Rows:
    batch = held[0].batch if len(held) == 1 else pa.concat_batches([small.batch for small in held])
    first, rows = held[0].first, batch.num_rows
    last = held[-1]
    stop = last.first + last.batch.num_rows if last.ordinals is None else int(last.ordinals[-1]) + 1
    if stop - first == rows:
        return Rows(batch, file, first, stop)
    ordinals = [
        np.arange(small.first, small.first + small.batch.num_rows) if small.ordinals is None else small.ordinals
        for small in held
    ]
    return Rows(batch, file, first, stop, np.concatenate(ordinals).astype(np.uint64))

"""What the row groups of a reference file weigh with the files they refer to, read from its footer. No Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.parquet.footer import Footer

KEY = "penstock:media"


def stored_weights(weights: dict[str, list[int]], *, largest_row: int) -> str:
    """The metadata of a reference file: bytes of each media column in each row group, and of the largest row."""
    return json.dumps({"bytes": weights, "largest_row": largest_row})


def group_weights(footer: Footer, columns: Iterable[str] | None = None) -> list[int] | None:
    """Bytes of the files each row group refers to, in these columns; None for a file without references."""
    found = _stored(footer)
    if found is None:
        return None
    wanted = None if columns is None else set(columns)
    totals = [0] * footer.row_groups
    for column, weights in found["bytes"].items():
        if wanted is None or column in wanted:
            totals = [total + weight for total, weight in zip(totals, weights, strict=True)]
    return totals


def largest_row(footer: Footer) -> int | None:
    """The most that one row weighs; None where no reference file tells."""
    found = _stored(footer)
    return None if found is None else int(found["largest_row"])


def _stored(footer: Footer) -> dict[str, Any] | None:
    stored = footer.key_values.get(KEY)
    return None if stored is None else dict(json.loads(stored))

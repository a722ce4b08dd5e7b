"""Functions a user could have written. One looks across its batch: it must see the same batches on every budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def long_text(batch: pa.RecordBatch) -> pa.BooleanArray:
    return pc.greater(pc.binary_length(batch.column("text")), 1_500)


def across_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    place = pa.array(np.arange(batch.num_rows, dtype=np.int32))
    return batch.append_column("place", place).append_column("of", pa.array([batch.num_rows] * batch.num_rows))


def upper(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**columns, "text": [text[:200].upper() for text in columns["text"]]}


def row(one: dict[str, Any]) -> dict[str, Any]:
    return {"id": one["id"], "words": len(one["text"].split())}


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {"id": columns["id"], "twice": columns["score"] * 2}


def ranked(frame: Any) -> Any:
    return frame[["id"]].assign(rank=frame["score"].rank())


def lengths(frame: Any) -> Any:
    import polars as pl

    return frame.with_columns(pl.col("text").str.len_bytes().alias("length"))

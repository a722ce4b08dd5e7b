"""JSON lines, plain or compressed. Fragments are joined byte by byte: compressed members follow one another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import FunctionFailed, UsageError
from penstock.files import Writing
from penstock.sinks.base import Encoder

if TYPE_CHECKING:
    import pyarrow as pa

CODECS = {"jsonl": None, "jsonl.gz": "gzip", "jsonl.zst": "zstd"}
# Arrow bytes made Python objects at a time: small, because what the interpreter frees it is slow to give back.
BYTES_AT_ONCE = 256 << 10


@dataclass(frozen=True)
class JsonlSink:
    format: str

    @property
    def ending(self) -> str:
        return f".{self.format}"

    def check(self, schema: pa.Schema) -> None:
        for field in schema:
            _check_type(field.type, field.name)

    def encoder(self, out: Writing, schema: pa.Schema, *, large: bool) -> Encoder:
        return JsonlEncoder(out, CODECS[self.format])

    def assemble(self, paths: Sequence[Path], out: Writing) -> None:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                out.copy(fd, 0, os.fstat(fd).st_size)
            finally:
                os.close(fd)

    def cost(self, batch: int, piece: int) -> int:
        # Rows as Python objects, their JSON, and the joined lines of one slice; a batch of one large row is one slice.
        return batch + (32 << 20) if batch <= 8 << 20 else 6 * batch


class JsonlEncoder:
    def __init__(self, out: Writing, codec: str | None) -> None:
        import pyarrow as pa

        file = pa.PythonFile(out, mode="w")
        self._stream = file if codec is None else pa.CompressedOutputStream(file, codec)

    def write(self, batch: pa.RecordBatch) -> None:
        import orjson

        at_once = max(1, min(1024, batch.num_rows * BYTES_AT_ONCE // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, at_once):
            rows = batch.slice(start, at_once).to_pylist(maps_as_pydicts="strict")
            try:
                lines = [orjson.dumps(row) for row in rows]
            except orjson.JSONEncodeError as error:
                raise FunctionFailed(f"a value cannot be written as JSON: {error}") from error
            lines.append(b"")
            self._stream.write(b"\n".join(lines))

    def finish(self) -> None:
        self._stream.close()


def _check_type(kind: pa.DataType, column: str) -> None:
    import pyarrow as pa

    t = pa.types
    plain = (t.is_null, t.is_boolean, t.is_integer, t.is_floating, t.is_string, t.is_large_string, t.is_string_view)
    if any(test(kind) for test in plain):
        return
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind) or t.is_dictionary(kind):
        _check_type(kind.value_type, column)
    elif t.is_struct(kind):
        for field in kind:
            _check_type(field.type, f"{column}.{field.name}")
    elif t.is_map(kind) and (t.is_string(kind.key_type) or t.is_large_string(kind.key_type)):
        _check_type(kind.item_type, column)
    else:
        raise UsageError(
            f"JSON has no {kind}", where=f"column {column!r}", do="map it to text or numbers first, or write Parquet"
        )


def sink(format: str) -> JsonlSink:
    return JsonlSink(format)

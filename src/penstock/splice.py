"""The splicing job: column chunks moved into shards, nothing decoded. Imports no Arrow, so a worker takes 8 MB."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from penstock.engines.notes import Notes
from penstock.engines.task import Result
from penstock.files import Writing
from penstock.parquet.footer import Footer
from penstock.parquet.splice import Span, splice
from penstock.sinks.base import Fragment


@dataclass(frozen=True)
class SpliceJob:
    """One task is one shard: runs of row groups, in order."""

    paths: tuple[str, ...]
    folder: str
    columns: tuple[str, ...] | None
    schema_from: str
    rename: Mapping[str, str] = field(default_factory=dict)
    key_values: Mapping[str, str] = field(default_factory=dict)
    COST: ClassVar[int] = 8 << 20
    FOOTER_COST: ClassVar[int] = 6  # footers: the one that is read, and the new one as it grows
    # Two were no faster than one, which already hashes on a second core: the disk is the limit.
    most_workers: ClassVar[int] = 1

    def warm_up(self) -> None:
        """Nothing to warm: reserved memory is the interpreter."""

    def __call__(self, payload: Any, notes: Notes, say: Callable[[Any], None]) -> Result:
        (stem, runs), _ = payload
        spans = [Span(self.paths[file], first, stop) for file, first, stop in runs]
        notes.at("splice", where=Path(self.schema_from).name if not runs else Path(spans[0].path).name)
        with Writing(Path(self.folder) / f"{stem}-0000.parquet") as out:
            made = splice(
                spans, out, columns=self.columns, rename=self.rename, key_values=self.key_values,
                schema_from=self.schema_from,
            )  # fmt: skip
            out.commit()
        notes.count(rows_read=made.rows, bytes_read=made.bytes, rows_written=made.rows)
        fragment = Fragment(out.path.name, made.rows, made.bytes, out.tell(), out.sha256())
        return {
            "fragments": [fragment.as_record()],
            "read": made.rows,
            "written": made.rows,
            "dropped": {},
            "first_error": "",
        }


def moved_metadata(footer: Footer, moved: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Arrow's own schema, for the columns that stay: without it, types that Parquet has no word for would be lost."""
    import base64

    import pyarrow as pa

    made: dict[str, str] = {}
    if (stored := footer.key_values.get("ARROW:schema")) is not None:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored)))
        fields = [schema.field(old).with_name(new) for old, new in moved if old in schema.names]
        if len(fields) == len(moved):
            made["ARROW:schema"] = base64.b64encode(pa.schema(fields).serialize().to_pybytes()).decode()
    return made

"""What every sink is, and the writer that cuts a task's rows into fragments.

A fragment is a whole file of the sink's format with at most one shard's rows. Shards are fragments, or neighbouring
fragments put together without decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.files import Writing

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Fragment:
    """A committed file of output rows, not yet under its public name."""

    name: str
    rows: int
    bytes: int  # Arrow bytes, and those of the files that references stand for: what shards are cut by
    stored: int  # bytes of the file
    sha256: str

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


class Encoder(Protocol):
    """Rows into one open file."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def finish(self) -> None:
        """Everything is written; the file is whole."""


class Sink(Protocol):
    """A format that can be written."""

    format: str
    ending: str

    def check(self, schema: pa.Schema) -> None:
        """Refuse, by name and before the run, a column this format cannot hold."""

    def encoder(self, out: Writing, schema: pa.Schema, *, large: bool) -> Encoder:
        """Rows into a file. `large`: the plan has seen that a row may be larger than a batch."""

    def assemble(self, paths: Sequence[Path], out: Writing) -> None:
        """Several whole files into one, decoding nothing."""

    def cost(self, batch: int, piece: int) -> int:
        """Bytes a writer takes, at most, when it is handed batches of this many and a piece of that many in all."""


class FragmentWriter:
    """Writes batches into fragments, a new one before the row that would pass `max_bytes`."""

    def __init__(
        self, sink: Sink, folder: Path, stem: str, schema: pa.Schema, *, max_bytes: int, large: bool = False
    ) -> None:
        from penstock.media.declare import declare

        self._sink, self._folder, self._stem, self._schema = sink, folder, stem, declare(schema)
        self._max, self._large = max_bytes, large
        self._fragments: list[Fragment] = []
        self._out: Writing | None = None
        self._encoder: Encoder | None = None
        self._rows = self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        from penstock.kernels.sizes import bins
        from penstock.media.sizes import real_bytes

        sizes = real_bytes(batch)
        for part in bins(batch, carry_rows=self._rows, carry_bytes=self._bytes, max_bytes=self._max, sizes=sizes):
            if part.new and self._encoder is not None:
                self._end_fragment()
            if self._encoder is None:
                self._begin_fragment()
            assert self._encoder is not None
            self._encoder.write(part.batch)
            self._rows += part.batch.num_rows
            self._bytes += part.bytes

    def finish(self) -> list[Fragment]:
        if self._encoder is not None:
            self._end_fragment()
        return self._fragments

    def close(self) -> None:
        """Give up on an open fragment, if there is one."""
        if self._out is not None:
            self._out.discard()

    def write_empty(self) -> Fragment:
        """One fragment with the schema and no rows: an empty result is still a dataset."""
        self._begin_fragment()
        self._end_fragment()
        return self._fragments[0]

    def _begin_fragment(self) -> None:
        self._out = Writing(self._folder / f"{self._stem}-{len(self._fragments):04d}{self._sink.ending}")
        self._encoder = self._sink.encoder(self._out, self._schema, large=self._large)

    def _end_fragment(self) -> None:
        assert self._out is not None and self._encoder is not None
        self._encoder.finish()
        self._out.commit()
        self._fragments.append(
            Fragment(self._out.path.name, self._rows, self._bytes, self._out.tell(), self._out.sha256())
        )
        self._out = self._encoder = None
        self._rows = self._bytes = 0

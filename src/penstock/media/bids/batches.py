"""Rows of a tree as Arrow batches, bounded by rows, files and bytes of text."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from penstock.media.bids.arrays import array_of
from penstock.media.bids.columns import Layout, Value, changed, other, value_of
from penstock.media.bids.scans import Scan
from penstock.media.bids.subjects import Part, Row, Subject
from penstock.media.bids.tables import typed
from penstock.media.bids.texts import merged, read_texts

BATCH_ROWS, BATCH_FILES, BATCH_TEXT = 1_024, 4_096, 8 << 20


class Maker:
    """Takes subjects, gives batches of the tree's schema; counts rows, and files, each once."""

    def __init__(self, layout: Layout) -> None:
        self.rows = self.files = 0
        self._layout = layout
        self._rows: list[Value] = []
        self._held_files = self._held_text = 0
        self._flat = {one.name: one.type for one in layout.schema}
        self._members = {name: {one.name: one.type for one in self._flat[name].value_type} for name in layout.scans}

    def add(self, subject: Subject) -> Iterator[pa.RecordBatch]:
        visits = self._visits(subject)
        about = self._participant(subject.label)
        for row in subject.rows:
            head = {**about, "subject": subject.label}
            if self._layout.row == "subject":
                head["sessions"] = [{**values, "session": session} for session, values in visits.items()]
            else:
                head |= {**visits.get(row.session or "", {}), "session": row.session}
            for made in self._alone(row) if self._layout.row == "file" else self._whole(row):
                self._rows.append({**head, **made})
                if len(self._rows) >= BATCH_ROWS or self._held_files >= BATCH_FILES or self._held_text >= BATCH_TEXT:
                    yield self._batch()

    def end(self) -> Iterator[pa.RecordBatch]:
        if self._rows:
            yield self._batch()

    def _whole(self, row: Row) -> Iterator[Value]:
        """A session or a subject as a row: a list for each column of scans."""
        made: dict[str, list[Value]] = {name: [] for name in (*self._layout.scans, "others")}
        for part in row.parts:
            for scan, texts, metadata in self._scans(part):
                name = part.source.prefix + scan.column
                if name not in self._members:
                    raise changed(scan.file.file)
                made[name].append(value_of(scan, texts, metadata, self._members[name], session=part.session))
            made["others"] += map(other, part.found.others)
        yield made

    def _alone(self, row: Row) -> Iterator[Value]:
        """Scans, and files that go with none, each a row."""
        for part in row.parts:
            derived: Value = {"derivative": part.source.name} if part.source.name else {}
            for scan, texts, metadata in self._scans(part):
                value = value_of(scan, texts, metadata, self._flat, session=None)
                del value["session"]
                yield {**value, **derived, "suffix": scan.name.suffix}
            for file in part.found.others:
                yield {**other(file), **derived}

    def _scans(self, part: Part) -> Iterator[tuple[Scan, dict[str, str], str | None]]:
        """A part's scans with their texts. Files are counted once all texts are settled."""
        moved: set[str] = set()
        for scan in part.found.scans:
            texts = read_texts(scan, part.base, moved)
            metadata = merged(scan, texts) if scan.inherited else None
            self._held_text += sum(map(len, texts.values())) + len(metadata or "")
            yield scan, texts, metadata
        files = len(part.files())
        self.files += files
        self._held_files += files

    def _participant(self, label: str) -> Value:
        table, types = self._layout.participants, self._layout.participant_types
        values = table.rows.get(label)
        if values is None:
            return {}
        return {types[name][0]: typed(value, types[name][1]) for name, value in zip(table.names, values, strict=True)}

    def _visits(self, subject: Subject) -> dict[str, Value]:
        """What the table of a subject's sessions says of each."""
        types = self._layout.session_types
        table = subject.visits
        if not types.keys() >= set(table.names):
            raise changed(f"the table of sessions of sub-{subject.label}")
        return {
            session: {
                types[name][0]: typed(value, types[name][1]) for name, value in zip(table.names, row, strict=True)
            }
            for session, row in table.rows.items()
        }

    def _batch(self) -> pa.RecordBatch:
        rows, self._rows = self._rows, []
        self.rows += len(rows)
        self._held_files = self._held_text = 0
        schema = self._layout.schema
        return pa.RecordBatch.from_arrays(
            [array_of([row.get(one.name) for row in rows], one.type) for one in schema], schema=schema
        )

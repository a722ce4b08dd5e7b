"""Makes files like those of a scanner: real headers, content that does not compress, and a table of their paths.

The same arguments give the same files. What was written is told by name and SHA-256, to be looked for later.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STRETCH = 8 << 20
Told = tuple[str, str]  # a file's name and the SHA-256 of its content


@dataclass(frozen=True)
class Files:
    """A table of paths as JSON lines, and its rows with the name and digest of each file in place of its path."""

    table: Path
    rows: list[dict[str, Any]]
    count: int
    bytes: int


def make_scans(folder: Path, *, bytes: int, rows: int) -> Files:
    """A scan in each row: columns `id` and `scan`."""
    maker = _Maker(folder)
    size = bytes // rows
    return maker.table([{"id": row, "scan": maker.scan(f"scan-{row:05d}.nii", size)} for row in range(rows)])


def make_mixed(folder: Path, *, bytes: int, rows: int) -> Files:
    """In each row a scan, a list of scans, a picture and a document; one list in ten is empty and one is missing.

    The second half of the rows has the content of the first under names of its own, as links: half the disk.
    """
    maker = _Maker(folder)
    size = bytes // rows
    half = rows - rows // 2
    table: list[dict[str, Any]] = []
    for row in range(rows):
        of = row % half
        runs = {8: [], 9: None}.get(of % 10, [1, 2])
        # together the size of a row, on average
        table.append(
            {
                "id": row,
                "t1w": maker.scan(f"{row:05d}_T1w.nii", size * 4 // 10, of=f"{of:05d}_T1w.nii"),
                "bold": None
                if runs is None
                else [
                    maker.scan(f"{row:05d}_run-{run}_bold.nii", size // 4, of=f"{of:05d}_run-{run}_bold.nii")
                    for run in runs
                ],
                "photo": maker.picture(f"{row:05d}.bmp", size // 10, of=f"{of:05d}.bmp"),
                "report": maker.document(f"{row:05d}.pdf", size // 10, of=f"{of:05d}.pdf"),
            }
        )
    return maker.table(table)


class _Maker:
    """Writes files into a new folder and remembers them. Only raw generator words are drawn: NumPy keeps those."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._raw = np.random.PCG64(0)
        self._made: dict[str, Told] = {}
        self._bytes = 0

    def scan(self, name: str, size: int, *, of: str | None = None) -> str:
        """A NIfTI-1 file of 16-bit voxels."""
        slices = max(1, (size - 352) // 20_000)
        header = bytearray(352)
        struct.pack_into("<i", header, 0, 348)
        struct.pack_into("<8h", header, 40, 3, 100, 100, slices, 1, 1, 1, 1)
        struct.pack_into("<hh", header, 70, 4, 16)
        struct.pack_into("<8f", header, 76, *[1] * 8)
        struct.pack_into("<f", header, 108, 352)
        header[344:348] = b"n+1\0"
        return self._file(name, bytes(header), slices * 20_000, of)

    def picture(self, name: str, size: int, *, of: str | None = None) -> str:
        """A bitmap of 24 bits for each pixel."""
        lines = max(1, (size - 54) // 3_000)
        about = struct.pack("<IiiHHIIiiII", 40, 1_000, lines, 1, 24, 0, lines * 3_000, 2_835, 2_835, 0, 0)
        return self._file(name, struct.pack("<2sIHHI", b"BM", 54 + lines * 3_000, 0, 0, 54) + about, lines * 3_000, of)

    def document(self, name: str, size: int, *, of: str | None = None) -> str:
        """What begins as a PDF does."""
        return self._file(name, b"%PDF-1.7\n", max(1, size - 9), of)

    def table(self, rows: list[dict[str, Any]]) -> Files:
        table = self._folder / "table.jsonl"
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = [{name: self._told(value) for name, value in row.items()} for row in rows]
        return Files(table, told, len(self._made), self._bytes)

    def _file(self, name: str, head: bytes, more: int, of: str | None) -> str:
        path = self._folder / name
        if of is not None and of != name:
            os.link(self._folder / of, path)
            self._made[name] = (name, self._made[of][1])
        else:
            digest = hashlib.sha256(head)
            with path.open("wb") as out:
                out.write(head)
                for start in range(0, more, STRETCH):
                    count = min(STRETCH, more - start)
                    piece = np.asarray(self._raw.random_raw(-(-count // 8))).data.cast("B")[:count]
                    digest.update(piece)
                    out.write(piece)
            self._made[name] = (name, digest.hexdigest())
        self._bytes += len(head) + more
        return str(path)

    def _told(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._told(one) for one in value]
        return self._made[os.path.basename(value)] if isinstance(value, str) else value

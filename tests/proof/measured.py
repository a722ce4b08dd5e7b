"""What the proofs share: the data, digests of columns in bounded memory, and the figures they print."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from limits import Limited, run_limited

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
ROOT = Path(__file__).resolve().parents[2]
FILES = 13  # of about 0.5 GB each at full size


def digest(paths: Iterable[Path]) -> dict[str, Any]:
    """Rows and, column by column, a digest of the values in order: the same however files and row groups are cut."""
    hashes: dict[str, list[Any]] = {}
    rows = 0
    for path in paths:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            at_once = 1_000 if file.metadata.num_rows > 1_000 else 1
            for batch in file.iter_batches(at_once, use_threads=False):
                rows += batch.num_rows
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    values, lengths = hashes.setdefault(name, [hashlib.sha256(), hashlib.sha256()])
                    assert column.null_count == 0
                    if pa.types.is_string(column.type):
                        offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
                        lengths.update(np.diff(offsets).tobytes())
                        values.update(memoryview(column.buffers()[2])[offsets[0] : offsets[-1]])
                    else:
                        values.update(column.to_numpy(zero_copy_only=False).tobytes())
    columns = {name: f"{values.hexdigest()} {lengths.hexdigest()}" for name, (values, lengths) in hashes.items()}
    return {"rows": rows, "columns": columns}


def shards(dest: Path) -> list[Path]:
    assert [entry.name for entry in (dest / ".penstock").iterdir()] == ["receipt.json"]
    return sorted(dest.glob("part-*"))


def files_of(dest: Path) -> dict[str, str]:
    """Every file a destination shows, by digest of its bytes."""
    return {path.name: _sha256(path) for path in shards(dest)}


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def receipt_of(dest: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((dest / ".penstock" / "receipt.json").read_text())
    return found


def limited(words: Sequence[object], *, limit: int, timeout: float = 3_600) -> Limited:
    return run_limited([*PENSTOCK, *map(str, words)], limit=limit, timeout=timeout)


def say(text: str) -> None:
    sys.stdout.write(f"\n    {text}")
    sys.stdout.flush()


def mb(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def figures(run: Limited, memory: dict[str, Any]) -> str:
    return (
        f"{run.seconds:.1f} s; anonymous: {mb(memory['measured'])} in the receipt, {mb(run.anonymous)} by the kernel;"
        f" {mb(memory['projected'])} projected, {mb(memory['allowed'])} allowed;"
        f" the kernel's peak with page cache {mb(run.peak)}; {memory['workers']} workers; {run.kernel_kills} kills"
    )


@dataclass(frozen=True)
class Data:
    """The inputs, each made when first asked for, in a folder that may be kept."""

    folder: Path
    scale: float

    def bytes(self, full: float) -> int:
        return int(full * self.scale)

    @property
    def full(self) -> bool:
        """Whether figures that hang on size mean anything."""
        return self.scale >= 1

    def text(self) -> list[Path]:
        """At least 6 GB of Arrow text in Parquet, row groups of about 64 MB."""
        return self._made("text", lambda folder: _text_set(folder, self.bytes(6.4e9), FILES, "parquet"))

    def one_row_group(self) -> list[Path]:
        return self._made("one-row-group", lambda folder: _text_set(folder, self.bytes(1.65e9), 1, "one-row-group"))

    def lines(self) -> list[Path]:
        return self._made("lines", lambda folder: _text_set(folder, self.bytes(0.5e9), 1, "jsonl"))

    def inflating(self) -> tuple[Path, int, dict[str, Any]]:
        """A `.jsonl.zst` of repetitive lines, its inflated size, and the digest of its rows."""
        (path,) = self._made("inflating", lambda folder: _inflating(folder, self.bytes(2.3e9)))
        about = json.loads((path.parent / "about.json").read_text())
        return path, about["inflated"], about["digest"]

    def large_value(self, *, among: int) -> Path:
        """One value of 900 MB (less at a small scale), the other rows small."""
        (path,) = self._made(f"large-value-{among}", lambda folder: _large_value(folder, self.value(), among))
        return path

    def value(self) -> int:
        return int(900e6 * min(1.0, max(self.scale, 0.25)))

    def digest(self, name: str, paths: Sequence[Path]) -> dict[str, Any]:
        """Of a source, kept beside it."""
        kept = self.folder / f"digest-{name}-{self.scale:g}.json"
        if not kept.exists():
            kept.write_text(json.dumps(digest(paths)))
        found: dict[str, Any] = json.loads(kept.read_text())
        return found

    def _made(self, name: str, make: Callable[[Path], object]) -> list[Path]:
        folder = self.folder / f"{name}-{self.scale:g}"
        if not folder.exists():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)
        return sorted(path for path in folder.iterdir() if path.suffix in (".parquet", ".jsonl", ".zst"))


def _text_set(folder: Path, size: int, files: int, shape: str) -> None:
    """In a process of its own: one row group of 1.6 GB takes several times that to make."""
    words = ["--gb", str(size / 1e9), "--to", str(folder), "--files", str(files), "--shape", shape]
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "data.py"), *words], check=True, capture_output=True)


def _inflating(folder: Path, size: int) -> None:
    folder.mkdir(parents=True)
    text = "the gate lets in exactly as much water as the turbine can take " * 16
    rows = size // (len(text) + 30)
    values, lengths, ids = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    inflated = 0
    with pa.output_stream(folder / "a.jsonl.zst", compression="zstd") as stream:
        for start in range(0, rows, 10_000):
            stop = min(rows, start + 10_000)
            block = "".join(f'{{"id": {at}, "text": "{text}"}}\n' for at in range(start, stop)).encode()
            stream.write(block)
            inflated += len(block)
            ids.update(np.arange(start, stop, dtype=np.int64).tobytes())
            values.update(text.encode() * (stop - start))
            lengths.update(np.full(stop - start, len(text), np.int32).tobytes())
    nothing = hashlib.sha256().hexdigest()
    columns = {"id": f"{ids.hexdigest()} {nothing}", "text": f"{values.hexdigest()} {lengths.hexdigest()}"}
    about = {"inflated": inflated, "digest": {"rows": rows, "columns": columns}}
    (folder / "about.json").write_text(json.dumps(about))


def _large_value(folder: Path, size: int, among: int) -> None:
    code = f"""
import os, pyarrow as pa, pyarrow.parquet as pq
value = os.urandom({size} // 2).hex()  # half its size when compressed, as text is
texts = ["a small row"] * {among // 2} + [value] + ["a small row"] * ({among} - {among // 2})
table = pa.table({{"id": list(range(len(texts))), "text": texts}})
path, rows = {str(folder / "a.parquet")!r}, len(texts)
pq.write_table(table, path, compression="zstd", row_group_size=rows, use_dictionary=False, write_statistics=False)
"""
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))

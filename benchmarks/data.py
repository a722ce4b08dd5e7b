"""Makes the text set all claims are measured on: the same rows for the same arguments.

Words by Zipf's law, texts of 200 to 4,000 characters, an id, a score; one row in ten has the text of another row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Shape = Literal["parquet", "one-row-group", "jsonl", "jsonl.zst", "jsonl.gz"]
Write = Callable[[pa.Table], object]

SHORTEST, LONGEST = 200, 4_000
LONGEST_WORD = 16
VOCABULARY = 50_000
ZIPF = 1.25  # compresses as prose does: zstd leaves a bit under half
FILE_BYTES = 500_000_000
DUPLICATES = 10  # one row in ten
POOL_GROUPS = 8  # row groups whose texts wait to come a second time, so that the copies lie in other files too
PART_BYTES = 8 << 20
LETTER_WEIGHTS = (12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1)
ROW_BYTES = 20  # id, score and the text's offset
# log-uniform lengths, after room is left on both sides for the last word
MEAN_LENGTH = (LONGEST - SHORTEST - 2 * LONGEST_WORD) / np.log((LONGEST - LONGEST_WORD) / (SHORTEST + LONGEST_WORD))

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("score", pa.float64())])


def make_text_set(
    folder: Path,
    *,
    bytes: int,
    files: int | None = None,
    row_group_bytes: int = 64 << 20,
    seed: int = 0,
    shape: Shape = "parquet",
) -> list[Path]:
    """Write about `bytes` of Arrow data into a new folder, in files of about 0.5 GB of it unless told otherwise.

    Holds a few row groups at a time; `one-row-group` holds a whole file: pyarrow encodes a row group in one call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder")
    files = files or max(1, round(bytes / FILE_BYTES))
    per_group = max(1, round(row_group_bytes / (MEAN_LENGTH + ROW_BYTES)))
    rows = max(files, round(bytes / (MEAN_LENGTH + ROW_BYTES)))
    texts = _Texts(seed)
    paths = []
    for number in range(files):
        first, end = rows * number // files, rows * (number + 1) // files
        suffix = shape if shape.startswith("jsonl") else "parquet"
        paths.append(folder / f"part-{number:05d}.{suffix}")
        with _writer(paths[-1], shape) as write:
            for at in range(first, end, per_group):
                write(texts.table(at, min(at + per_group, end)))
    return paths


class _Texts:
    """The stream of rows. Only raw generator words are drawn: NumPy promises those never change."""

    def __init__(self, seed: int) -> None:
        self._raw = np.random.PCG64(seed)
        self._words = self._vocabulary()
        frequencies = (np.arange(VOCABULARY) + 2.7) ** -ZIPF  # Mandelbrot's form of Zipf's law
        steps = np.cumsum(frequencies) / frequencies.sum()
        self._rank_of = np.searchsorted(steps, (np.arange(1 << 20) + 0.5) / (1 << 20)).astype(np.int32)
        self._mean = float(pc.mean(pc.binary_length(self._words.take(pa.array(self._rank_of)))).as_py())
        self._pool = pa.array([], pa.string())

    def table(self, first: int, end: int) -> pa.Table:
        rows = end - first
        copies = rows // DUPLICATES
        fresh = self._fresh(rows - copies)
        missing = POOL_GROUPS * copies - len(self._pool)
        self._pool = pa.concat_arrays([self._pool, fresh.slice(0, missing)]) if missing > 0 else self._pool
        order = self._shuffled(len(self._pool))
        again, self._pool = self._pool.take(order[:copies]), self._pool.take(order[copies:])
        text = pa.concat_arrays([fresh, again]).take(self._shuffled(rows))
        score = self._uniform(rows)
        return pa.table([pa.array(np.arange(first, end)), text, pa.array(score)], schema=SCHEMA)

    def _fresh(self, rows: int) -> pa.Array:
        shortest, longest = SHORTEST + LONGEST_WORD, LONGEST - LONGEST_WORD
        lengths = (shortest * (longest / shortest) ** self._uniform(rows)).astype(np.int64)
        ends = np.cumsum(lengths)
        parts = []
        first = 0
        while first < rows:
            begun = ends[first] - lengths[first]
            end = max(first + 1, int(np.searchsorted(ends, begun + PART_BYTES)))
            parts.append(self._part(ends[first:end] - begun))
            first = end
        return pa.concat_arrays(parts)

    def _part(self, ends: npt.NDArray[np.int64]) -> pa.Array:
        """Texts that end near `ends`, each on the word boundary before."""
        # 2 % and 200 words more than expected: many standard deviations at every size
        count = int(1.02 * ends[-1] / self._mean) + 200
        words = self._words.take(pa.array(self._rank_of[self._draw(count // 2 + 1).view(np.uint32) >> np.uint32(12)]))
        offsets = np.frombuffer(words.buffers()[1], np.int32)[: len(words) + 1]
        cuts = offsets[np.searchsorted(offsets, ends, side="right") - 1]
        return pa.StringArray.from_buffers(
            len(ends), pa.py_buffer(np.concatenate([np.zeros(1, np.int32), cuts])), words.buffers()[2]
        )

    def _vocabulary(self) -> pa.Array:
        """Words by rank, the frequent ones short, letters as often as in English, a space at the end of each."""
        letters = np.repeat(np.frombuffer(b"etaoinsrhdlucmfywgpbvkxqjz", np.uint8), LETTER_WEIGHTS)
        usual = 1.5 + 0.42 * np.log2(np.arange(VOCABULARY) + 2)
        lengths = np.clip(usual + 3 * self._uniform(VOCABULARY), 2, LONGEST_WORD).astype(np.int32)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        spelled = letters[self._draw(int(offsets[-1])) % np.uint64(len(letters))]
        spelled[offsets[1:] - 1] = ord(" ")
        return pa.StringArray.from_buffers(VOCABULARY, pa.py_buffer(offsets), pa.py_buffer(spelled))

    def _draw(self, count: int) -> npt.NDArray[np.uint64]:
        return np.asarray(self._raw.random_raw(count), np.uint64)

    def _uniform(self, count: int) -> npt.NDArray[np.float64]:
        return np.asarray((self._draw(count) >> np.uint64(11)) * 2.0**-53)

    def _shuffled(self, count: int) -> pa.Array:
        return pa.array(np.argsort(self._draw(count), kind="stable"))


@contextmanager
def _writer(path: Path, shape: Shape) -> Iterator[Write]:
    """A function that adds a table to the file: as a row group, or as lines."""
    if shape == "parquet":
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as parquet:
            yield lambda table: parquet.write_table(table, row_group_size=len(table))
    elif shape == "one-row-group":
        tables: list[pa.Table] = []
        yield tables.append
        whole = pa.concat_tables(tables)
        pq.write_table(whole, path, compression="zstd", row_group_size=len(whole))
    else:
        with pa.output_stream(path, compression="detect") as stream:
            yield lambda table: stream.write(_lines(table))


def _lines(table: pa.Table) -> pa.Buffer:
    """The rows as JSON lines. The words hold nothing that needs escaping."""
    number, text, score = (table[name].combine_chunks().cast(pa.string()) for name in SCHEMA.names)
    parts = ['{"id": ', number, ', "text": "', text, '", "score": ', score, "}\n"]
    lines = pc.binary_join_element_wise(*parts, "")
    return lines.buffers()[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4, help="size as Arrow data, in 10^9 bytes")
    parser.add_argument("--to", type=Path, required=True, help="a new folder")
    parser.add_argument("--files", type=int, help="how many files; about 0.5 GB of Arrow data each if not given")
    parser.add_argument("--shape", choices=get_args(Shape), default="parquet")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    paths = make_text_set(given.to, bytes=int(given.gb * 1e9), files=given.files, shape=given.shape, seed=given.seed)
    print(f"{given.to}: {len(paths)} files, {sum(path.stat().st_size for path in paths):,} bytes")


if __name__ == "__main__":
    main()

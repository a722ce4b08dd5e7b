"""The claim: Parquet to zstd Parquet, re-sharded, moves bytes and decodes none; also against ours that does decode.

python benchmarks/data.py --gb 4 --to /data/text
python benchmarks/reshard.py /data/text --markdown reshard.md
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from measure import Case, compare, files_of, in_fresh_process

SHARD_BYTES = 500_000_000  # Arrow bytes in a file of the output, as in our default of --max-shard-size
CACHE = ".cache"
PENSTOCK = "from penstock.cli.main import main; raise SystemExit(main())"


def pyarrow_loop(source: str, dest: str) -> None:
    """`iter_batches` into a `ParquetWriter`, with a new file when one is full."""
    import pyarrow.parquet as pq

    Path(dest).mkdir()
    files = sorted(Path(source).glob("*.parquet"))
    batches = (batch for path in files for batch in pq.ParquetFile(path).iter_batches())
    batch = next(batches, None)
    for number in itertools.count():
        with pq.ParquetWriter(f"{dest}/{number:05d}.parquet", pq.read_schema(files[0]), compression="zstd") as writer:
            written = 0
            while batch is not None and written < SHARD_BYTES:
                writer.write_batch(batch)
                written += batch.nbytes
                batch = next(batches, None)
        if batch is None:
            return


def polars_sink(source: str, dest: str, level: str = "") -> None:
    """A streaming scan into files cut by size."""
    import polars as pl

    pl.scan_parquet(f"{source}/*.parquet").sink_parquet(
        pl.PartitionBy(dest, approximate_bytes_per_file=SHARD_BYTES),
        compression="zstd",
        compression_level=int(level) if level else None,
        mkdir=True,
    )


def duckdb_copy(source: str, dest: str, level: str = "") -> None:
    """`COPY` with the memory limit a careful user would set."""
    import duckdb

    options = ["FORMAT parquet", "COMPRESSION zstd"]
    # It counts compressed bytes, and the text set compresses to 0.44.
    options.append(f"FILE_SIZE_BYTES {SHARD_BYTES * 44 // 100}")
    if level:
        options.append(f"COMPRESSION_LEVEL {level}")
    with duckdb.connect() as connection:
        connection.execute("SET memory_limit = '1GB'")
        connection.execute(f"COPY (FROM '{source}/*.parquet') TO '{dest}' ({', '.join(options)})")


def datasets_cached(source: str, dest: str) -> None:
    """`load_dataset` into its cache, then `to_parquet` shard by shard."""
    import datasets

    Path(dest).mkdir()
    pattern = f"{source}/*.parquet"
    data = datasets.load_dataset("parquet", data_files=pattern, split="train", cache_dir=f"{dest}{CACHE}")
    shards = max(1, round(data.data.nbytes / SHARD_BYTES))
    for number in range(shards):
        data.shard(num_shards=shards, index=number).to_parquet(f"{dest}/{number:05d}.parquet")


def datasets_streaming(source: str, dest: str) -> None:
    """The loop of its documentation: one output file for each input file, which is then held in memory."""
    import datasets

    Path(dest).mkdir()
    data = datasets.load_dataset("parquet", data_files=f"{source}/*.parquet", split="train", streaming=True)
    for number in range(data.num_shards):
        data.shard(num_shards=data.num_shards, index=number).to_parquet(f"{dest}/{number:05d}.parquet")


PEERS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "pyarrow, zstd 1 (its default)": (pyarrow_loop, ()),
    "polars, zstd at its default": (polars_sink, ()),
    "polars, zstd 1": (polars_sink, ("1",)),
    "duckdb, 1GB, zstd at its default": (duckdb_copy, ()),
    "duckdb, 1GB, zstd 1": (duckdb_copy, ("1",)),
    # datasets 5.2 sets the codec itself and refuses `compression=`: its files are snappy
    "datasets, snappy": (datasets_cached, ()),
    "datasets streaming, snappy": (datasets_streaming, ()),
}
OURS: dict[str, tuple[str, ...]] = {
    "penstock, spliced, 400MB": ("--memory", "400MB"),
    "penstock, rewritten, 400MB": ("--rewrite", "--memory", "400MB"),
    "penstock, rewritten, 1GB": ("--rewrite", "--memory", "1GB"),
}


def make_cases(source: Path, dest: Path, only: set[str]) -> list[Case]:
    """Ours first, then the peers; `only` holds tools, none for all."""
    rows = _rows(source)

    def check(output: Path) -> str | None:
        found = _rows(output)
        return None if found == rows else f"{found:,} rows where {rows:,} were given"

    cases = []
    for name, options in OURS.items():
        command = [sys.executable, "-c", PENSTOCK, "convert", str(source), str(dest), *options]
        cases.append(Case(name, command, dest, check, ours=True))
    for name, (function, extra) in PEERS.items():
        cases.append(Case(name, in_fresh_process(function, source, dest, *extra), dest, check))
    return [case for case in cases if not only or _tool(case.name) in only]


def _tool(name: str) -> str:
    return name.split(",")[0].split()[0]


def _rows(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in files_of(folder) if path.suffix == ".parquet")


def _prepare(source: Path, dest: Path) -> None:
    """Read the source once, so that every case finds as much of it in the page cache as the last; no old caches."""
    shutil.rmtree(f"{dest}{CACHE}", ignore_errors=True)
    for path in files_of(source):
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def main() -> None:
    tools = list(dict.fromkeys(map(_tool, [*OURS, *PEERS])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of Parquet files, as made by data.py")
    parser.add_argument("--work", type=Path, help="where outputs go, one at a time; beside the source if not given")
    parser.add_argument("--only", default="", help=f"a comma-separated choice of {', '.join(tools)}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    given = parser.parse_args()
    only = {name for name in given.only.split(",") if name}
    if unknown := only.difference(tools):
        parser.error(f"--only: no such tool: {', '.join(sorted(unknown))}")
    source = given.source.resolve()
    files = files_of(source)
    size = sum(path.stat().st_size for path in files)
    with tempfile.TemporaryDirectory(dir=given.work or source.parent) as work:
        dest = Path(work, "out").resolve()
        compare(
            make_cases(source, dest, only),
            title=f"Re-shard {_rows(source):,} rows, {size / 1e6:,.0f} MB of Parquet in {len(files)} files",
            repeat=given.repeat,
            before_each=lambda: _prepare(source, dest),
            markdown=given.markdown,
        )


if __name__ == "__main__":
    main()

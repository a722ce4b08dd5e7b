"""Tables that exist only in memory, or only as a walk over a folder, written down so that workers can read them.

A spooled table is told by its content, so the same call in another process is the same input. Each process has a folder
of its own; it goes at exit, and what a killed one left goes when the next one spools.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.chains import Chain, Write
from penstock.files import disk_errors
from penstock.media.references import ROW_GROUP_BYTES, ROW_GROUP_ROWS, write_references
from penstock.media.weights import group_weights
from penstock.parquet.footer import read_footer
from penstock.sources.base import SourceFile


def spool(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, name: str, row_group_bytes: int = ROW_GROUP_BYTES
) -> tuple[SourceFile, ...]:
    """Write batches as reference files in this process's folder."""
    folder = _folder() / uuid.uuid4().hex
    folder.mkdir()
    files: list[SourceFile] = []
    for out in write_references(folder, schema, batches, row_group_bytes=row_group_bytes):
        about = out.path.stat()
        label = name if not files else f"{name} ({len(files) + 1})"
        digest = out.sha256()[:32]
        files.append(
            SourceFile(str(out.path), label, about.st_size, about.st_mtime_ns, about.st_ino, digest, by_content=True)
        )
    return tuple(files)


def fitted(chains: Sequence[Chain], write: Write) -> tuple[Chain, ...]:
    """Chains whose spooled tables have row groups small enough for the shards that are asked for.

    A row group is the least a shard can be made of, and a table is spooled before anybody says how large shards are.
    """
    return tuple(_fitted(chain, write) for chain in chains)


def _fitted(chain: Chain, write: Write) -> Chain:
    if write.format != "parquet" or not all(file.by_content for file in chain.read.files):
        return chain
    if write.num_shards is None and write.max_shard // 4 >= ROW_GROUP_BYTES:
        return chain
    sizes = [(size, rows) for file in chain.read.files for size, rows in _weighed(file)]
    # Shards of a size are cut between row groups of a quarter of it; shards of a number, of a quarter of their share.
    share = write.max_shard if write.num_shards is None else sum(size for size, _ in sizes) // write.num_shards
    small = max(1, share // 4)
    if small >= ROW_GROUP_BYTES or not any(size > small and rows > 1 for size, rows in sizes):
        return chain
    files = spool(
        pq.read_schema(chain.read.files[0].path),
        (batch for file in chain.read.files for batch in _batches(file)),
        name=chain.read.files[0].name,
        row_group_bytes=small,
    )
    return replace(chain, read=replace(chain.read, files=files))


def _weighed(file: SourceFile) -> list[tuple[int, int]]:
    """Bytes, media included, and rows of each row group."""
    footer = read_footer(file.path)
    weights = group_weights(footer) or [0] * footer.row_groups
    return [(weights[at] + footer.group_bytes(at), footer.group_rows(at)) for at in range(footer.row_groups)]


def _batches(file: SourceFile) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file.path, pre_buffer=False) as opened:
        yield from opened.iter_batches(ROW_GROUP_ROWS, use_threads=False)


def state_home() -> Path:
    """Where Penstock keeps what it must find again: `PENSTOCK_STATE`, else the user's state folder."""
    given = os.environ.get("PENSTOCK_STATE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "penstock"


@cache
def _folder() -> Path:
    scratch = os.environ.get("PENSTOCK_SCRATCH")
    tables = (Path(scratch) if scratch else state_home()) / "tables"
    with disk_errors(tables):
        tables.mkdir(parents=True, exist_ok=True)
    for old in tables.iterdir():
        _remove_if_left(old)
    folder = tables / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _remove_if_left(folder: Path) -> None:
    """The kernel lets go of a dead process's lock."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(fd)

"""A value many times larger than the memory goes through a virtual shard, at full size."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from limits import run_limited
from penstock.media.kinds import REFERENCE, mark
from proof.measured import mb, say

pytestmark = pytest.mark.proof

SIZE = 800_000_000
CODE = """
import sys
from penstock.media.kinds import Leaf
from penstock.parquet.embed import virtual_shard
from penstock.parquet.splice import Span
from penstock.parquet.stream import digest

shard = virtual_shard([Span(sys.argv[1], 0, 1)], leaves=[Leaf("scan", "", "nifti")])
file = shard.open()
file.seek(shard.row_groups[0][0])
head = file.read(200)
file.seek(0)
value = shard.row_groups[0][0] + head.index(int(sys.argv[2]).to_bytes(4, "little")) + 4
print(*digest(file, stretches=[(value, int(sys.argv[2]))]).stretches)
"""


def test_800_mb_in_one_value(work: Path) -> None:
    path, references = work / "scan.nii", work / "references.parquet"
    with path.open("wb") as file:
        file.truncate(SIZE)
        for at in range(0, SIZE, 100_000_000):
            file.seek(at)
            file.write(f"at {at}".encode())
    stat = path.stat()
    value = {"path": path.name, "file": str(path), "size": SIZE, "modified": stat.st_mtime_ns}
    schema = pa.schema([mark(pa.field("scan", REFERENCE), {"": "nifti"})])
    pq.write_table(pa.Table.from_pylist([{"scan": value}], schema=schema), references)
    done = run_limited([sys.executable, "-c", CODE, str(references), str(SIZE)], limit=100_000_000, timeout=300)
    with path.open("rb") as file:
        expected = hashlib.file_digest(file, "sha256").hexdigest()
    assert (done.returncode, done.kernel_kills, done.stdout.strip()) == (0, 0, expected), done.stderr
    say(f"{mb(SIZE)} in a value: {done.seconds:.1f} s, {mb(done.anonymous)} anonymous, {mb(done.peak)} with page cache")
    assert done.anonymous < 60_000_000

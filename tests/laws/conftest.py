"""Samples that all laws run on, and one finished run of each case to compare the others with."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import Finished, command, digests

ROWS = 24_000


def make_table(rows: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    words = np.array(
        ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 10)))) for _ in range(3_000)], dtype=object
    )
    ranks = np.minimum(rng.zipf(1.3, size=rows * 150) - 1, len(words) - 1)
    lengths = rng.integers(20, 280, rows)
    starts = rng.integers(0, len(ranks) - 300, rows)
    texts = [" ".join(words[ranks[start : start + length]]) for start, length in zip(starts, lengths, strict=True)]
    return pa.table({"id": np.arange(rows), "text": texts, "score": rng.random(rows)})


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 MB of text in each shape that a case reads."""
    folder = tmp_path_factory.mktemp("samples")
    table = make_table(ROWS, 0)
    (folder / "parquet").mkdir()
    for at, rows in enumerate((10_000, 9_000, 5_000)):
        part = table.slice(at * 9_000 + min(at, 1) * 1_000, rows)
        pq.write_table(part, folder / "parquet" / f"{at}.parquet", row_group_size=1_500, compression="zstd")
    (folder / "one-row-group").mkdir()
    pq.write_table(table, folder / "one-row-group" / "all.parquet", row_group_size=ROWS)
    (folder / "jsonl").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
    half = lines.index(b"\n", len(lines) // 2) + 1
    (folder / "jsonl" / "a.jsonl").write_bytes(lines[:half])
    (folder / "jsonl" / "b.jsonl").write_bytes(lines[half:])
    with gzip.open(folder / "jsonl" / "a.jsonl.gz", "wb", compresslevel=1) as f:
        f.write(lines[:half])
    with pa.output_stream(folder / "jsonl" / "a.jsonl.zst", compression="zstd") as stream:
        stream.write(lines[:half])
    _make_media(folder)
    return folder


def _make_media(folder: Path) -> None:
    """Scans of some megabytes in two classes, a table that names them, and a BIDS tree with files beside its rows."""
    rng = np.random.default_rng(1)
    rows = ["id,scan"]
    for at in range(12):
        path = folder / "media" / "scans" / ("well" if at % 2 else "ill") / f"{at:02d}.nii"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.bytes(1_500_000 + at))
        rows.append(f"{at},{path.relative_to(folder / 'media')}")
    (folder / "media" / "scans.csv").write_text("\n".join(rows) + "\n")
    for at in range(1, 5):
        scan = folder / "bids" / f"sub-{at}" / "anat" / f"sub-{at}_T1w.nii.gz"
        scan.parent.mkdir(parents=True)
        scan.write_bytes(rng.bytes(2_000_000))
        scan.with_name(f"sub-{at}_T1w.json").write_text(json.dumps({"EchoTime": at}))
    (folder / "bids" / "dataset_description.json").write_text(json.dumps({"Name": "law", "BIDSVersion": "1.9.0"}))
    (folder / "bids" / "participants.tsv").write_text("participant_id\tage\nsub-1\t30\nsub-2\tn/a\n")


@pytest.fixture(scope="session")
def finished(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """One undisturbed run of a case, made once: what every other run of it must equal."""
    made: dict[str, Finished] = {}

    def run(case: str) -> Finished:
        if case not in made:
            dest = tmp_path_factory.mktemp("finished") / "out"
            done = subprocess.run(
                command(case, samples, dest, memory="1GB", workers=2), capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            receipt = json.loads((dest / ".penstock" / "receipt.json").read_text())
            made[case] = Finished(dest, digests(dest), receipt, receipt["seconds"])
        return made[case]

    return run

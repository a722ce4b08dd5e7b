"""Measuring: anonymous memory as the kernel counts it, of a process and of all it has started."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from command import until
from penstock import memory

MB = 1_000_000


def test_anonymous_counts_what_is_touched() -> None:
    before = memory.anonymous()
    held = np.ones(10_000_000)
    assert memory.anonymous() - before == pytest.approx(80 * MB, abs=4 * MB)
    del held
    assert memory.anonymous() - before < 8 * MB


def test_reserved_but_untouched_is_not_counted() -> None:
    before, data = memory.anonymous(), memory.data_size()
    held = mmap.mmap(-1, 200 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert memory.anonymous() - before < 4 * MB
    assert memory.data_size() - data >= 199 * MB
    held.close()


def test_mapped_file_pages_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1 << 20) * 50)
    before = memory.anonymous()
    mapped = np.memmap(tmp_path / "file", mode="r")
    assert mapped.sum() > 0
    assert memory.anonymous() - before < 4 * MB


def test_process_that_is_gone_holds_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert memory.anonymous(process.pid) == 0
    assert memory.children(process.pid) == []
    assert memory.tree(process.pid) == 0


def test_tree_counts_all_the_way_down() -> None:
    leaf = "import sys; held = bytearray(b'x' * 50_000_000); print('up', flush=True); sys.stdin.read()"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {leaf!r}])"
    process = subprocess.Popen([sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "up\n"
        below = memory.children(process.pid)
        assert len(below) == 1
        assert process.pid in memory.children(os.getpid())
        assert memory.anonymous(process.pid) < 30 * MB
        assert memory.tree(process.pid) > 50 * MB
        process.stdin.close()
        until(lambda: memory.tree(process.pid) == 0, seconds=10)
    finally:
        process.kill()
        process.wait()


def test_release_gives_back_what_arrow_keeps() -> None:
    import pyarrow as pa

    before = memory.anonymous()
    held = pa.allocate_buffer(100 * MB)
    np.frombuffer(held, np.uint8).view()[:] = 1
    del held
    memory.release()
    assert memory.anonymous() - before < 16 * MB

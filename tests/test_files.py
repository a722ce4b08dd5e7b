"""Files become visible only complete, hashed as they pass; and what the disk says is said to the user."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DiskFull, UsageError
from penstock.files import BUFFER, STRETCH, Writing, disk_errors, on_tmpfs, write_whole


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_nothing_is_visible_before_commit(tmp_path: Path) -> None:
    with Writing(tmp_path / "a.bin") as out:
        out.write(b"half")
        assert "a.bin" not in names(tmp_path)
        out.write(b" and half")
        out.commit()
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"half and half"
    assert out.sha256() == hashlib.sha256(b"half and half").hexdigest()


def test_block_left_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Writing(tmp_path / "a.bin") as out:
        out.write(b"x" * 3_000_000)
        raise RuntimeError
    assert names(tmp_path) == []


def test_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with Writing(tmp_path / "a") as out:
        out.write(b"new")
        assert (tmp_path / "a").read_bytes() == b"old"
        out.commit()
    assert (tmp_path / "a").read_bytes() == b"new"
    write_whole(tmp_path / "a", b"newer")
    assert (tmp_path / "a").read_bytes() == b"newer"


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 1, 7, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER]), max_size=8))
def test_bytes_and_digest_whatever_the_pieces(sizes: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("writing")
    pieces = [os.urandom(size) for size in sizes]
    with Writing(folder / "a") as out:
        for at, piece in enumerate(pieces):
            assert out.write(memoryview(piece) if at % 2 else piece) == len(piece)
        assert out.tell() == sum(sizes)
        out.commit()
    assert (folder / "a").read_bytes() == b"".join(pieces)
    assert out.sha256() == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_long_file_passes_the_window_of_stretches(tmp_path: Path) -> None:
    piece = os.urandom(1 << 20)
    with Writing(tmp_path / "a") as out:
        for _ in range(6 * STRETCH // len(piece)):
            out.write(piece)
        out.commit()
    assert out.sha256() == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert out.tell() == 6 * STRETCH


def test_copy_of_a_range(tmp_path: Path) -> None:
    data = os.urandom(5 << 20)
    (tmp_path / "from").write_bytes(data)
    fd = os.open(tmp_path / "from", os.O_RDONLY)
    with Writing(tmp_path / "to") as out:
        out.write(b"before")
        out.copy(fd, 1_000, 4 << 20)
        out.write(b"after")
        out.commit()
    assert (tmp_path / "to").read_bytes() == b"before" + data[1_000 : 1_000 + (4 << 20)] + b"after"
    with Writing(tmp_path / "short") as out, pytest.raises(EOFError, match="bytes missing"):
        out.copy(fd, len(data) - 10, 11)
    os.close(fd)
    assert names(tmp_path) == ["from", "to"]


def test_arrow_writes_to_it_and_may_close_it(tmp_path: Path) -> None:
    with Writing(tmp_path / "a.gz") as out:
        with pa.CompressedOutputStream(pa.PythonFile(out, mode="w"), "gzip") as stream:
            stream.write(b"hello " * 100)
        out.commit()
    with pa.input_stream(tmp_path / "a.gz", compression="gzip") as stream:
        assert stream.read() == b"hello " * 100


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(code: int, tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"no space left.*same command again") as caught, disk_errors(tmp_path / "a"):
        raise OSError(code, "full")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR])
def test_place_that_cannot_be_written(code: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose"), disk_errors(tmp_path / "a"):
        raise OSError(code, "no")


def test_other_errors_pass() -> None:
    with pytest.raises(OSError, match="odd"), disk_errors(Path("a")):
        raise OSError(errno.EIO, "odd")


def test_tmpfs_is_told_from_disk(tmp_path: Path) -> None:
    assert on_tmpfs(Path("/dev/shm"))
    assert on_tmpfs(Path("/dev/shm/not/there/yet"))
    assert not on_tmpfs(Path("/proc"))

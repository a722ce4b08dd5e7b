"""A virtual file reads like the real one, from any place, and names the source that is not what was planned."""

from __future__ import annotations

import hashlib
import io
import os
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils._lfs import SliceFileObj
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SourceChanged
from penstock.files import Writing
from penstock.parquet.stream import STRETCH, Part, Range, Section, VirtualFile, digest, lay_out

SIZES = (0, 1, 70, 5_000, 70_000, 2 << 20, 5 << 20)


def planned(path: Path, offset: int = 0, length: int | None = None) -> Range:
    stat = path.stat()
    rest = stat.st_size - offset if length is None else length
    return Range(str(path), offset, rest, stat.st_size, stat.st_mtime_ns)


def fixed(parts: Sequence[Part]) -> Section:
    return Section(sum(part.length if isinstance(part, Range) else len(part) for part in parts), lambda: parts)


def content(parts: Sequence[Part]) -> bytes:
    return b"".join(
        Path(part.path).read_bytes()[part.offset : part.offset + part.length]
        if isinstance(part, Range)
        else bytes(part)
        for part in parts
    )


class Shard:
    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = sections

    def open(self) -> VirtualFile:
        return VirtualFile(self.sections)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("sources"), random.Random(7)
    paths = []
    for i, size in enumerate(SIZES):
        paths.append(folder / f"{i}.bin")
        paths[-1].write_bytes(rng.randbytes(size))
    return paths


@pytest.fixture(scope="module")
def parts(files: list[Path]) -> list[Part]:
    """Whole files and stretches of one that stays open between them, as a shard has them."""
    table = files[4]
    found: list[Part] = [b"PAR1"]
    for i, path in enumerate(files):
        found += [planned(table, i * 1000, 1000), b"length", planned(path), memoryview(b"inline"), b""]
    return [*found, b"footer"]


@pytest.fixture(scope="module")
def shard(parts: list[Part]) -> Shard:
    return Shard([fixed(parts[:3]), fixed([]), fixed(parts[3:20]), fixed(parts[20:])])


def test_is_a_file_object(shard: Shard, parts: list[Part]) -> None:
    whole = content(parts)
    file = VirtualFile(shard.sections, name="a.parquet")
    assert isinstance(file, io.BufferedIOBase) and file.readable() and file.seekable() and not file.writable()
    assert file.name == "a.parquet" and file.size == len(file) == len(whole)
    assert file.read() == whole and file.read() == file.read1() == b"" and file.tell() == len(whole)
    assert file.seek(-10, io.SEEK_END) == len(whole) - 10 and file.read(4) == whole[-10:-6]
    assert file.seek(2, io.SEEK_CUR) == len(whole) - 4 and file.read(None) == whole[-4:]
    assert file.seek(5) == 5 and file.read(0) == b"" and file.read1(0) == b"" and file.read(1) == whole[5:6]
    assert file.seek(len(whole) + 9) and file.read(3) == b"" and file.readinto(bytearray(3)) == 0
    with pytest.raises(ValueError, match="negative"):
        file.seek(-1)
    with pytest.raises(ValueError, match="whence"):
        file.seek(0, 9)
    with pytest.raises(io.UnsupportedOperation):
        file.write(b"x")
    file.close()
    file.close()
    for act in (file.read, file.tell, file.read1, lambda: file.seek(0), lambda: file.readinto(bytearray(1))):
        with pytest.raises(ValueError, match="closed"):
            act()


def test_every_way_of_reading_gives_the_same(shard: Shard, parts: list[Part]) -> None:
    whole = content(parts)
    for size in (700, 65_536, 3 << 20):
        with shard.open() as file:
            assert b"".join(iter(partial(file.read, size), b"")) == whole
        with shard.open() as file:
            assert b"".join(iter(partial(file.read1, size), b"")) == whole
        with shard.open() as file:
            buffer, got = bytearray(size), []
            while count := file.readinto(buffer):
                assert count == size or file.tell() == len(whole)
                got.append(bytes(buffer[:count]))
            assert b"".join(got) == whole
        with shard.open() as file:
            got = []
            while count := file.readinto1(buffer):
                got.append(bytes(buffer[:count]))
            assert b"".join(got) == whole


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_reads_after_jumps(shard: Shard, parts: list[Part], data: st.DataObject) -> None:
    whole = content(parts)
    edges = sorted({0, 4, 1004, 1010, len(whole) - 6, len(whole), *(len(whole) * i // 7 for i in range(7))})
    places = st.one_of(st.sampled_from(edges), st.integers(0, len(whole) + 5))
    sizes = st.one_of(st.integers(0, 100), st.sampled_from([1 << 16, 1 << 20, 3 << 20]))
    with shard.open() as file:
        for at, size, into in data.draw(st.lists(st.tuples(places, sizes, st.booleans()), min_size=1, max_size=8)):
            file.seek(at)
            if into:
                buffer = bytearray(size)
                assert bytes(buffer[: file.readinto(buffer)]) == whole[at : at + size]
            else:
                assert file.read(size) == whole[at : at + size]
            assert file.tell() == max(at, min(at + size, len(whole)))


def test_a_file_is_opened_once_a_pass(
    shard: Shard, parts: list[Part], files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[str] = Counter()
    real = os.open

    def counted(path: str, flags: int) -> int:
        opened[str(path)] += 1
        return real(path, flags)

    def now_open() -> int:
        folder, links = str(files[0].parent), []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                continue
        return sum(link.startswith(folder) for link in links)

    monkeypatch.setattr(os, "open", counted)
    with shard.open() as file:
        assert not opened and now_open() == 0
        while file.read(50_000):
            assert now_open() <= 2
        assert now_open() == 1  # the file of many ranges, until the end
    assert now_open() == 0
    # The fifth is there twice: whole, and as the file of many ranges.
    assert opened == {str(path): 2 if i == 4 else 1 for i, path in enumerate(files)}


def test_threads_read_the_same_shard_at_once(shard: Shard, parts: list[Part]) -> None:
    whole = content(parts)

    def one(seed: int) -> bool:
        rng = random.Random(seed)
        with shard.open() as file:
            for _ in range(30):
                at = file.seek(rng.randrange(len(whole)))
                size = rng.choice([10, 100_000, 1 << 20])
                if file.read(size) != whole[at : at + size]:
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(8)))


def test_one_section_is_held_at_a_time() -> None:
    made: list[int] = []

    def make(i: int) -> list[Part]:
        made.append(i)
        return [b"%03d" % i]

    file = VirtualFile([Section(3, partial(make, i)) for i in range(5)])
    assert not made
    assert file.read(4) == b"0000" and made == [0, 1]
    assert file.read() == b"01002003004" and made == [0, 1, 2, 3, 4]
    file.seek(1)
    assert file.read(1) == b"0" and made == [0, 1, 2, 3, 4, 0]


def test_parts_that_do_not_make_up_their_section() -> None:
    file = VirtualFile([Section(3, lambda: [b"four"])], name="a.parquet")
    with pytest.raises(SourceChanged, match=r"a\.parquet: its parts are not those it was laid out with"):
        file.read()


def test_large_ranges_are_read_in_one_call(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    file, buffer = VirtualFile([fixed([b"ab", planned(files[6]), b"c"])]), bytearray((5 << 20) + 3)
    assert file.readinto(buffer) == len(buffer) and calls == 1
    assert buffer[2:-1] == files[6].read_bytes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "scan.nii"
    path.write_bytes(b"x" * 3000)
    return path


def grow(path: Path) -> None:
    path.write_bytes(b"x" * 3001)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def vanish(path: Path) -> None:
    path.unlink()


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def break_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("annex-object-that-is-not-here")


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES = {
    grow: "has 3,001 bytes, 3,000 when it was planned",
    touch: "was modified after it was planned",
    vanish: "is gone since it was planned",
    break_link: "is gone since it was planned",
    become_a_folder: "is not a regular file",
    become_a_pipe: "is not a regular file",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_source_is_named(source: Path, change: object) -> None:
    file = VirtualFile([fixed([b"before", planned(source)])])
    change(source)  # type: ignore[operator]
    assert file.read(6) == b"before"
    with pytest.raises(SourceChanged) as caught:
        file.read(1)
    assert CHANGES[change] in str(caught.value) and str(source) in str(caught.value)  # type: ignore[index]
    assert caught.value.do


def test_a_source_that_changes_while_it_is_read(source: Path) -> None:
    file = VirtualFile([fixed([planned(source)])])
    assert file.read(1000)
    touch(source)
    with pytest.raises(SourceChanged, match="was modified after it was planned"):
        file.read()


def test_a_source_shorter_than_its_range(source: Path, tmp_path: Path) -> None:
    section = fixed([Range(str(source), 2000, 2000)])
    with pytest.raises(SourceChanged, match=r"scan\.nii: ends at byte 3,000, inside a range"):
        VirtualFile([section]).read()
    with pytest.raises(SourceChanged, match="inside a range"):
        VirtualFile([section]).readinto(bytearray(2000))
    large = fixed([Range(str(source), 2000, 5 << 20)])
    with Writing(tmp_path / "out") as out, pytest.raises(SourceChanged, match="inside a range"):
        lay_out(Shard([large]), out)


def test_an_empty_file_must_stay_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    section = fixed([b"a", planned(path), b"b"])
    assert VirtualFile([section]).read() == b"ab"
    path.write_bytes(b"no longer")
    with pytest.raises(SourceChanged, match="has 9 bytes, 0 when"):
        VirtualFile([section]).read()
    path.unlink()
    with pytest.raises(SourceChanged, match="is gone"):
        VirtualFile([section]).read()


def test_laid_out_it_is_the_same(shard: Shard, parts: list[Part], tmp_path: Path) -> None:
    with Writing(tmp_path / "real") as out:
        lay_out(shard, out)
        out.commit()
    assert (tmp_path / "real").read_bytes() == content(parts)
    assert out.sha256() == hashlib.sha256(content(parts)).hexdigest()


def test_digest(shard: Shard, parts: list[Part]) -> None:
    whole = content(parts)
    stretches = [(3 << 20, 2 << 20), (0, 4), (4, 0), (1000, 5 << 20), (len(whole) - 6, 6), (0, len(whole))]
    steps: list[int] = []
    with shard.open() as file:
        found = digest(file, stretches=stretches, on_bytes=steps.append)
    assert found.sha256 == hashlib.sha256(whole).hexdigest()
    assert found.size == len(whole) == sum(steps) and found.sample == whole[:512]
    assert list(found.stretches) == [hashlib.sha256(whole[at : at + n]).hexdigest() for at, n in stretches]
    assert digest(VirtualFile([])).sha256 == hashlib.sha256().hexdigest()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux only")
def test_what_is_behind_leaves_the_cache_unless_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(2 * STRETCH + 5))
    dropped: list[int] = []

    def noted(fd: int, at: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append(length)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    for keep, expected in ((True, 0), (False, 2 * STRETCH)):
        with VirtualFile([fixed([planned(path)])], keep_cache=keep) as file:
            digest(file)
        assert sum(dropped) == expected


def test_the_real_client_takes_it(shard: Shard, parts: list[Part]) -> None:
    whole = content(parts)
    with shard.open() as file:
        operation = CommitOperationAdd("data/a.parquet", cast(BinaryIO, file))
        assert operation.upload_info.size == len(whole)
        assert operation.upload_info.sha256 == hashlib.sha256(whole).digest()
        assert operation.upload_info.sample == whole[:512]
        with operation.as_file() as again:
            assert again.read(10) == whole[:10]
        size, got = 3 << 20, []
        for at in range(0, len(whole), size):  # as a multipart upload takes it
            with SliceFileObj(cast(BinaryIO, file), seek_from=at, read_limit=size) as part:
                got.append(part.read(size // 2) + part.read())
        assert b"".join(got) == whole

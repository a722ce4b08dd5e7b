"""Lines come out once each, however the file is cut or compressed, and damage is never silent."""

from __future__ import annotations

import gzip
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadFile, BadRow, UsageError
from penstock.sources.lines import BOM, blocks, compression_of, longest_line, zstd_window

TEXT = b"".join(b"line %d\n" % i for i in range(5000))
SKIPPABLE = b"\x50\x2a\x4d\x18" + (10).to_bytes(4, "little") + b"0123456789"


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def read(path: Path, **options: int) -> bytes:
    return b"".join(block.data for block in blocks(str(path), compression=compression_of(str(path)), **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


lines_of_text = st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=30)


@settings(deadline=None)
@given(lines_of_text, st.booleans(), st.booleans(), st.lists(st.integers(0, 400), max_size=6), st.integers(1, 60))
def test_any_cut_gives_each_line_once(
    folder: Path, lines: list[bytes], ends: bool, bom: bool, cuts: list[int], size: int
) -> None:
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    text = text if text[:2] != b"\x1f\x8b" and text[:4] != b"\x28\xb5\x2f\xfd" and not text.startswith(BOM) else b""
    path = folder / "cut.txt"
    path.write_bytes(BOM * bom + text)
    edges: list[int | None] = [0, *sorted(cuts), None]
    pieces = []
    for start, stop in pairwise(edges):
        for block in blocks(str(path), start=start or 0, stop=stop, size=size):
            pieces.append(block.data)
            assert (BOM * bom + text)[block.offset :].startswith(block.data)
            assert block.offset == len(BOM) * bom or (BOM * bom + text)[block.offset - 1 : block.offset] == b"\n"
            assert len(block.data) <= max(size, 4) or block.lines == 1
            assert block.lines == block.data.count(b"\n") + (not block.data.endswith(b"\n"))
    assert b"".join(pieces) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(0, 40))
def test_the_longest_line_is_found(lengths: list[int], last: int) -> None:
    data = b"".join(b"x" * length + b"\n" for length in lengths) + b"x" * last
    assert longest_line(data) == max([last, *(length + 1 for length in lengths)])


def test_a_line_belongs_to_the_range_it_starts_in(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthree")
    assert read(path, start=0, stop=4) == b"one\n"
    assert read(path, start=0, stop=5) == b"one\ntwo\n"
    assert read(path, start=4, stop=8) == b"two\n"
    assert read(path, start=5, stop=8) == b""
    assert read(path, start=8, stop=9) == b"three"
    assert read(path, start=9) == b""
    assert read(path, start=900) == b""


def test_windows_line_ends_and_blank_lines_are_kept_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(BOM + b"one\r\n\r\n\ntwo")
    (block,) = blocks(str(path))
    assert (block.data, block.offset, block.lines) == (b"one\r\n\r\n\ntwo", 3, 4)


@pytest.mark.parametrize("data", [b"", BOM])
def test_an_empty_file_has_no_blocks(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    assert list(blocks(str(path))) == []


def test_a_long_line_is_a_block_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nb\n" + b"c" * 1000 + b"\nd\ne\n")
    got = [(block.offset, len(block.data), block.lines) for block in blocks(str(path), size=16)]
    assert got == [(0, 4, 2), (4, 1001, 1), (1005, 4, 2)]


@pytest.mark.parametrize("size", [16, 100, 1 << 20])
def test_a_line_over_the_longest_allowed_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nb\n" + b"c" * 1000 + b"\nd\n")
    with pytest.raises(BadRow, match=r"a\.txt: the line that starts at byte 4 has \d+ bytes or more, .* allowed, 50;"):
        list(blocks(str(path), size=size, longest=50))
    assert len(list(blocks(str(path), size=1 << 20, longest=1001))) == 1


def test_gzip_members_are_read_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(TEXT) + gzip.compress(b"") + gzip.compress(TEXT))
    assert read(path, size=1000) == TEXT * 2


def test_zstd_frames_are_read_to_the_end_and_skippable_ones_stepped_over(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(SKIPPABLE + zst(TEXT) + SKIPPABLE + zst(TEXT) + SKIPPABLE)
    assert read(path, size=1000) == TEXT * 2


@pytest.mark.parametrize("tool", ["gzip", "zstd"])
def test_files_of_the_command_line_tools(tmp_path: Path, tool: str) -> None:
    try:
        packed = subprocess.run([tool, "-c"], input=TEXT, capture_output=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip(f"no {tool} here")
    path = tmp_path / {"gzip": "a.gz", "zstd": "a.zst"}[tool]
    path.write_bytes(packed)
    assert read(path) == TEXT


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_stream_cut_anywhere_is_an_error(tmp_path: Path, ending: str) -> None:
    member = gzip.compress(TEXT[:600]) if ending == ".gz" else zst(TEXT[:600])
    path = tmp_path / f"a{ending}"
    for length in range(4, 2 * len(member)):
        if length != len(member):
            path.write_bytes((member * 2)[:length])
            with pytest.raises(BadFile, match=r"is cut short before compressed byte \d+, after \d+ bytes of text"):
                read(path)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_damage_and_trailing_garbage_are_errors(tmp_path: Path, ending: str) -> None:
    member = gzip.compress(TEXT) if ending == ".gz" else zst(TEXT)
    path = tmp_path / f"a{ending}"
    for data in (member + b"garbage here", member + bytes(512), member[:-6] + b"\x55\xaa" + member[-4:]):
        path.write_bytes(data)
        with pytest.raises(BadFile, match=rf"a{ending}: \w+ data is damaged before compressed byte .*; fetch it again"):
            read(path)


def test_names_that_lie_are_found_out(tmp_path: Path) -> None:
    for name, data, message in [
        ("a.zst", gzip.compress(TEXT), "is not zstd: it begins with 1f 8b"),
        ("a.gz", b"plain text", "is not gzip: it begins with 70 6c 61 69"),
        ("a.gz", b"", "is not gzip: it is empty"),
        ("a.jsonl", zst(TEXT), r"holds zstd data, not text; rename it to end in \.zst"),
        ("a.jsonl", gzip.compress(TEXT), r"holds gzip data, not text; rename it to end in \.gz"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadFile, match=message):
            read(tmp_path / name)


def test_compressed_files_have_no_middle(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(TEXT))
    with pytest.raises(UsageError, match="only plain text can be read from the middle"):
        read(path, start=5)


@pytest.mark.parametrize("log", [10, 17, 27])
@pytest.mark.parametrize("sized", [False, True])
def test_the_window_is_what_the_header_says(tmp_path: Path, log: int, sized: bool) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=log, write_content_size=sized)
    packer = zstandard.ZstdCompressor(compression_params=parameters)
    path = tmp_path / "a.zst"
    packed = packer.compress(TEXT) if sized else (stream := packer.compressobj()).compress(TEXT) + stream.flush()
    path.write_bytes(SKIPPABLE + packed)
    assert zstd_window(str(path)) == zstandard.get_frame_parameters(packed).window_size
    assert read(path) == TEXT


def test_a_window_beyond_reach_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    parameters = zstandard.ZstdCompressionParameters(window_log=28, hash_log=10, chain_log=10, strategy=1)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(stream.compress(TEXT) + stream.flush())
    with pytest.raises(BadFile, match=r"a zstd window of 268435456 bytes.*zstd --long=27 or less"):
        read(path)


def test_a_file_without_a_frame_has_no_window(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(b"not zstd at all")
    with pytest.raises(BadFile, match="has no zstd frame"):
        zstd_window(str(path))


MEASURE = """
import sys
from itertools import pairwise
from pathlib import Path
from penstock.sources.lines import blocks

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) >> 10

before = peak = anonymous()
total = 0
for block in blocks(sys.argv[1], compression=sys.argv[2]):
    total += len(block.data)
    peak = max(peak, anonymous())
sys.stdout.write(f"{total} {peak - before}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_300_mb_out_of_a_small_file_stay_flat(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    line = b'{"text": "' + b"x" * 989 + b'"}\n'
    with path.open("wb") as raw:
        packer = (
            zstandard.ZstdCompressor().stream_writer(raw) if kind == "zstd" else gzip.GzipFile(fileobj=raw, mode="wb")
        )
        with packer as stream:
            for _ in range(300):
                stream.write(line * 999)
    assert path.stat().st_size < 3_000_000
    done = subprocess.run([sys.executable, "-c", MEASURE, path, kind], capture_output=True, text=True, check=True)
    total, grown = map(int, done.stdout.split())
    assert total == 300 * 999 * len(line)
    assert grown < 40

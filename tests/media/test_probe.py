"""Each kind of file, whole, cut short and damaged: what is whole passes, what is not is told, and in plain words."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import struct
import tarfile
import wave
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from media import samples
from penstock.media.check_files import Item, Verdict, check_file
from penstock.media.probes import images, kind_of
from penstock.media.probes.audio import ogg_crc
from penstock.media.probes.reader import Broken
from penstock.media.probes.text import Tokens

TEXT = b"a line of some text\n" * 5_000


def nifti(
    shape: tuple[int, ...] = (6, 5, 4), *, order: str = "<", version: int = 1, seed: int = 0, pair: bool = False
) -> bytes:
    """A scan as the standard describes it, written here field by field."""
    dims = (len(shape), *shape, *([1] * (7 - len(shape))))
    data = np.random.default_rng(seed).integers(-500, 500, shape).astype(f"{order}i2").tobytes()
    if version == 1:
        head = bytearray(348 if pair else 352)
        struct.pack_into(f"{order}i", head, 0, 348)
        struct.pack_into(f"{order}8h", head, 40, *dims)
        struct.pack_into(f"{order}2h", head, 70, 4, 16)
        struct.pack_into(f"{order}f", head, 108, 0 if pair else 352)
        head[344:348] = b"ni1\0" if pair else b"n+1\0"
    else:
        head = bytearray(544)
        struct.pack_into(f"{order}i", head, 0, 540)
        head[4:12] = b"n+2\0\r\n\x1a\n"
        struct.pack_into(f"{order}2h", head, 12, 4, 16)
        struct.pack_into(f"{order}8q", head, 16, *dims)
        struct.pack_into(f"{order}q", head, 168, 544)
    return bytes(head) if pair else bytes(head) + data


def png(width: int = 30, height: int = 20) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = np.random.default_rng(0).integers(0, 255, (height, 1 + 3 * width)).astype("u1")
    rows[:, 0] = 0
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows.tobytes()))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def bmp() -> bytes:
    return (
        b"BM"
        + struct.pack("<4I", 54 + 48, 0, 54, 40)
        + struct.pack("<2i2H6I", 5, 3, 1, 24, 0, 48, 0, 0, 0, 0)
        + bytes(range(48))
    )


def wav() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(range(200)) * 10)
    return out.getvalue()


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for at in range(3):
            info = tarfile.TarInfo("x" * 90 * (at + 1))
            info.size = len(TEXT)
            file.addfile(info, io.BytesIO(TEXT))
    return out.getvalue()


def zipped(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for at in range(5):
            file.writestr(f"{at}.txt", random.Random(at).randbytes(3_000))
    return out.getvalue()


def npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(600, dtype="f4").reshape(20, 30))
    return out.getvalue()


def npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, a=np.arange(600), b=np.ones(7))
    return out.getvalue()


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"a": np.arange(2_000), "b": [str(at) for at in range(2_000)]}), out, row_group_size=500)
    return out.getvalue()


def arrow() -> bytes:
    out = io.BytesIO()
    feather.write_feather(pa.table({"a": np.arange(2_000)}), out)
    return out.getvalue()


def pdf() -> bytes:
    body = b"%PDF-1.4\n1 0 obj\n<</Type/Catalog>>\nendobj\n"
    return (
        body
        + b"xref\n0 2\n0000000000 65535 f \n0000000009 00000 n \ntrailer\n<</Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
        % len(body)
    )


def stl() -> bytes:
    return bytes(80) + struct.pack("<I", 12) + random.Random(0).randbytes(50 * 12)


def ply() -> bytes:
    head = (
        "ply\nformat binary_little_endian 1.0\nelement vertex 4\nproperty float x\nproperty float y\nproperty float z\n"
        "element face 2\nproperty list uchar int vertex_indices\nend_header\n"
    )
    return head.encode() + bytes(48) + (b"\3" + bytes(12)) * 2


def glb() -> bytes:
    text = b'{"asset":{"version":"2.0"}}'.ljust(28)
    return struct.pack("<4s2I", b"glTF", 2, 12 + 8 + len(text)) + struct.pack("<I4s", len(text), b"JSON") + text


def tensors() -> bytes:
    head = json.dumps(
        {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [50], "data_offsets": [0, 200]}}
    ).encode()
    return struct.pack("<Q", len(head)) + head + bytes(200)


def edf() -> bytes:
    head = b"0".ljust(8) + bytes(160).replace(b"\0", b" ") + b"01.01.0101.01.01" + b"512".ljust(8) + b" " * 44
    head += b"10".ljust(8) + b"1".ljust(8) + b"1".ljust(4)
    signal = b" " * 216 + b"100".ljust(8) + b" " * 32
    return head + signal + bytes(10 * 100 * 2)


def avi() -> bytes:
    inner = (
        b"AVI " + struct.pack("<4sI4s", b"LIST", 14, b"hdrl") + bytes(10) + struct.pack("<4sI", b"idx1", 16) + bytes(16)
    )
    return struct.pack("<4sI", b"RIFF", len(inner)) + inner


def aiff() -> bytes:
    inner = b"AIFF" + struct.pack(">4sI", b"COMM", 18) + bytes(18) + struct.pack(">4sI", b"SSND", 208) + bytes(208)
    return struct.pack(">4sI", b"FORM", len(inner)) + inner


def mgh() -> bytes:
    return struct.pack(">6i", 1, 5, 4, 3, 2, 4).ljust(284, b"\0") + bytes(5 * 4 * 3 * 2 * 2)


def hdf5() -> bytes:
    head = b"\x89HDF\r\n\x1a\n" + bytes([2, 8, 8, 0]) + struct.pack("<4Q", 0, 0xFFFFFFFFFFFFFFFF, 3000, 48)
    return head.ljust(3000, b"\0")


def long_json() -> bytes:
    rows = [{"id": at, "name": "é" * 9, "box": [1.5, -2e9, None, True]} for at in range(20_000)]
    return json.dumps(rows, ensure_ascii=False).encode()


WHOLE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a.nii": (nifti, "nifti"),
    "big-endian.nii": (lambda: nifti(order=">"), "nifti"),
    "two.nii": (lambda: nifti(version=2), "nifti"),
    "two-big.nii": (lambda: nifti(version=2, order=">"), "nifti"),
    "a.nii.gz": (lambda: gzip.compress(nifti()), "nifti"),
    "A.NII.GZ": (lambda: gzip.compress(nifti()), "nifti"),
    "members.nii.gz": (lambda: gzip.compress(nifti()[:300]) + gzip.compress(nifti()[300:]), "nifti"),
    "a.mgh": (mgh, "mgh"),
    "a.mgz": (lambda: gzip.compress(mgh()), "mgh"),
    "a.png": (png, "image"),
    "a.jpg": (lambda: samples.JPEG, "image"),
    "progressive.jpeg": (lambda: samples.PROGRESSIVE, "image"),
    "a.gif": (lambda: samples.GIF, "image"),
    "a.webp": (lambda: samples.WEBP, "image"),
    "a.tiff": (lambda: samples.TIFF, "image"),
    "a.bmp": (bmp, "image"),
    "a.wav": (wav, "audio"),
    "a.aiff": (aiff, "audio"),
    "a.flac": (lambda: samples.FLAC, "audio"),
    "a.opus": (lambda: samples.OGG, "audio"),
    "a.mp3": (lambda: samples.MP3, "audio"),
    "a.aac": (lambda: samples.AAC, "audio"),
    "a.mp4": (lambda: samples.MP4, "video"),
    "a.webm": (lambda: samples.WEBM, "video"),
    "a.avi": (avi, "video"),
    "a.pdf": (pdf, "pdf"),
    "a.stl": (stl, "mesh"),
    "a.ply": (ply, "mesh"),
    "a.glb": (glb, "mesh"),
    "a.gii": (lambda: b"<?xml version='1.0'?><GIFTI><Data>AAAA</Data></GIFTI>", "mesh"),
    "a.gltf": (lambda: b'{"asset": {"version": "2.0"}}', "mesh"),
    "a.json": (lambda: b'{"RepetitionTime": 2.0, "SliceTiming": [0, NaN]}', "json"),
    "long.json": (long_json, "json"),
    "a.parquet": (parquet, "parquet"),
    "a.feather": (arrow, "arrow"),
    "a.npy": (npy, "array"),
    "a.npz": (npz, "array"),
    "a.zip": (zipped, "archive"),
    "stored.zip": (lambda: zipped(zipfile.ZIP_STORED), "archive"),
    "a.tar.gz": (lambda: gzip.compress(tar()), "archive"),
    "a.tgz": (lambda: gzip.compress(tar()), "archive"),
    "a.safetensors": (tensors, "safetensors"),
    "a.h5": (hdf5, "hdf5"),
    "a.edf": (edf, "signal"),
    "a.txt.gz": (lambda: gzip.compress(TEXT), "text"),
    "a.txt.bz2": (lambda: bz2.compress(TEXT), "text"),
    "a.txt.xz": (lambda: lzma.compress(TEXT), "text"),
    "a.txt.zst": (lambda: zstandard.compress(TEXT), "text"),
    "a.dat.gz": (lambda: gzip.compress(TEXT), "compressed"),
}  # fmt: skip


def verdict(folder: Path, name: str, data: bytes) -> Verdict:
    path = folder / name
    path.write_bytes(data)
    return check_file(Item(str(path)))


def problems(found: Verdict) -> list[str]:
    return [one.problem for one in found.found]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_and_cut(tmp_path: Path, name: str) -> None:
    """Whole it passes; half of it, nine tenths, a few bytes, or all but its last byte do not."""
    make, kind = WHOLE[name]
    data = make()
    whole = verdict(tmp_path, name, data)
    assert (whole.found, whole.kind, whole.size) == ([], kind, len(data))
    ends = {len(data) // 2, len(data) * 9 // 10, len(data) - (5 if name == "a.pdf" else 1)} | (
        {20} if len(data) > 99 else set()
    )
    for end in sorted(ends):
        assert problems(verdict(tmp_path, name, data[:end])) in (["truncated"], ["undecodable"]), (name, end)


@pytest.mark.parametrize("name", ["a.nii.gz", "a.png", "a.opus", "a.npz", "a.zip", "stored.zip", "a.tar.gz",
                                  "a.txt.gz", "a.txt.xz"])  # fmt: skip
def test_one_bit_changed(tmp_path: Path, name: str) -> None:
    """Formats with checksums tell every changed bit of their content."""
    data = WHOLE[name][0]()
    for seed in range(8):
        wrong = bytearray(data)
        wrong[random.Random(seed).randrange(len(data) // 4, len(data) * 3 // 4)] ^= 1 << seed
        assert problems(verdict(tmp_path, name, bytes(wrong))), seed


@pytest.mark.parametrize("name", WHOLE)
def test_something_else_under_the_name(tmp_path: Path, name: str) -> None:
    """A web page saved in the place of the file, or noise, is told, and never trips the check."""
    for data in (b"<!DOCTYPE html><html><body>503</body></html>" * 40, random.Random(1).randbytes(5_000), bytes(5_000)):
        found = verdict(tmp_path, name, data)
        # A gzip, bz2 and so on of anything is a file; an unpacked one under that name is not.
        assert found.found, data[:20]
        assert found.found[0].problem in ("truncated", "undecodable")
        assert found.found[0].do


def test_noise_never_trips_the_check(tmp_path: Path) -> None:
    """Whatever bytes come after a right beginning, there is a verdict."""
    rng = random.Random(7)
    for name, (make, _) in WHOLE.items():
        data = make()
        for _ in range(6):
            start = rng.randrange(4, min(len(data), 400))
            wrong = bytearray(data)
            for _ in range(rng.randrange(1, 20)):
                wrong[rng.randrange(start, len(wrong))] = rng.randrange(256)
            verdict(tmp_path, name, bytes(wrong))


def test_a_scan_cut_in_half_says_where(tmp_path: Path) -> None:
    data = gzip.compress(nifti((40, 40, 40)))
    (found,) = verdict(tmp_path, "a.nii.gz", data[: len(data) // 2]).found
    assert found.problem == "truncated"
    assert f"ends at byte {len(data) // 2:,}" in found.detail


def test_a_whole_gzip_of_half_a_scan_is_truncated(tmp_path: Path) -> None:
    """The stream's own checksum is right; the header asks for more."""
    (found,) = verdict(tmp_path, "a.nii.gz", gzip.compress(nifti((10, 10, 10))[:1500])).found
    assert found.problem == "truncated"
    assert "2,000 bytes of image" in found.detail


def test_a_scan_with_the_wrong_ending(tmp_path: Path) -> None:
    (found,) = verdict(tmp_path, "a.nii", gzip.compress(nifti())).found
    assert "call it .nii.gz" in found.detail
    (found,) = verdict(tmp_path, "a.nii.gz", nifti()).found
    assert "not gz-compressed as its name says" in found.detail


def test_line_ends_changed_on_the_way(tmp_path: Path) -> None:
    (found,) = verdict(tmp_path, "a.nii", nifti(version=2).replace(b"\r\n", b"\n\n")).found
    assert "sent as text" in found.detail


def test_pairs_are_held_against_their_header(tmp_path: Path) -> None:
    (tmp_path / "a.hdr").write_bytes(nifti(pair=True))
    assert verdict(tmp_path, "a.hdr", nifti(pair=True)).kind == "header"
    whole = verdict(tmp_path, "a.img", bytes(6 * 5 * 4 * 2))
    assert (whole.kind, whole.found) == ("nifti", [])
    assert problems(verdict(tmp_path, "a.img", bytes(6 * 5 * 4 * 2 - 1))) == ["truncated"]
    assert verdict(tmp_path, "disk.img", b"anything at all").kind == "other"


def test_zeros_after_a_gzip_pass_and_garbage_does_not(tmp_path: Path) -> None:
    assert not verdict(tmp_path, "a.nii.gz", gzip.compress(nifti()) + bytes(512)).found
    (found,) = verdict(tmp_path, "a.nii.gz", gzip.compress(nifti()) + b"garbage").found
    assert "what follows its gzip data" in found.detail


def test_pictures_go_by_their_bytes(tmp_path: Path) -> None:
    """Half the web's .png are JPEG, and every decoder reads them."""
    assert not verdict(tmp_path, "a.png", samples.JPEG).found
    assert not verdict(tmp_path, "a.jpg", png()).found


def test_pictures_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "pillow", lambda: None)
    for data in (samples.JPEG, samples.PROGRESSIVE, samples.GIF, samples.WEBP, samples.TIFF):
        assert not verdict(tmp_path, "a.jpg", data).found
        assert problems(verdict(tmp_path, "a.jpg", data[: len(data) * 2 // 3])) == ["truncated"]


def test_pictures_with_pillow_are_decoded(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    wrong = bytearray(samples.GIF)
    wrong[-40:-20] = bytes(20)
    assert not problems(verdict(tmp_path, "a.gif", samples.GIF))
    tiff = bytearray(samples.TIFF)
    tiff[8:40] = b"\xff" * 32
    assert problems(verdict(tmp_path, "a.tiff", bytes(tiff)))


def test_sound_streamed_without_a_length_passes(tmp_path: Path) -> None:
    """FFmpeg writing to a pipe cannot come back to fill in the sizes."""
    data = bytearray(wav())
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"
    assert not verdict(tmp_path, "a.wav", bytes(data)).found


def test_ogg_crc_is_the_one_libogg_wrote() -> None:
    page = bytearray(samples.OGG[: 27 + 1 + samples.OGG[27]])
    stated = struct.unpack_from("<I", page, 22)[0]
    page[22:26] = bytes(4)
    assert ogg_crc(bytes(page)) == stated


def test_recording_without_its_index(tmp_path: Path) -> None:
    data = samples.MP4[: samples.MP4.index(b"moov") - 4]
    (found,) = verdict(tmp_path, "a.mp4", data).found
    assert (found.problem, "moov" in found.detail) == ("truncated", True)


def test_text_meshes(tmp_path: Path) -> None:
    stl = "solid a\n" + "facet normal 0 0 1\nouter loop\nendloop\nendfacet\n" * 3 + "endsolid a\n"
    assert not verdict(tmp_path, "a.stl", stl.encode()).found
    assert problems(verdict(tmp_path, "a.stl", stl[:100].encode())) == ["truncated"]
    obj = "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n"
    assert not verdict(tmp_path, "a.obj", obj.encode()).found
    assert problems(verdict(tmp_path, "a.obj", obj.replace("f 1 2 3", "f 1 2 4").encode())) == ["truncated"]
    assert problems(verdict(tmp_path, "a.obj", obj.replace("1 0 0", "1 zero 0").encode())) == ["undecodable"]
    off = "OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n"
    assert not verdict(tmp_path, "a.off", off.encode()).found
    assert problems(verdict(tmp_path, "a.off", off[:24].encode())) == ["truncated"]
    ply = "ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nend_header\n1\n2\n"
    assert not verdict(tmp_path, "a.ply", ply.encode()).found
    assert problems(verdict(tmp_path, "a.ply", ply[:-2].encode())) == ["truncated"]


# -- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "a\tb\n1\t2\n3\t4\n"),
        ("a.tsv", "a\tb\r\n1\t2\r\n\r\n"),
        ("a.tsv", "a\tb\n1\t2"),
        ("a.tsv", "only\none\n"),
        ("a.tsv", 'a\tb\n5" disk\t2\n3\t4\n'),
        ("a.tsv", '\ufeffa\tb\n"x\ty\nz"\t2\n'),
        ("a.csv", 'a,b\n"x, ""y""\n z",2\n'),
        ("a.csv", "a;b\n1,5;2\n"),
        ("a.csv.gz", "a,b\n1,2\n"),
        ("a.bval", "0 1000 2000\n"),
        ("a.bvec", "0 1 0\n0 0 1\n1 0 0\n"),
        ("a.bvec", "0 1 0\n0 0 1\n"),
        ("a.jsonl", '{"a": 1}\n\n[2]\n3'),
        ("a.jsonl", json.dumps("x" * 1_500_000) + "\n{}\n"),
    ],
)
def test_whole_text(tmp_path: Path, name: str, text: str) -> None:
    data = text.encode()
    assert verdict(tmp_path, name, gzip.compress(data) if name.endswith(".gz") else data).found == []


@pytest.mark.parametrize(
    ("name", "data", "problem", "says"),
    [
        ("a.tsv", b"a\tb\n1\t2\n3\n4\t5\n", "undecodable", "line 3 has 1 fields where the first has 2"),
        ("a.tsv", b"a\tb\tc\n1\t2\t3\n3\t4", "truncated", "line 3 has 2 fields where the first has 3"),
        ("a.tsv", b"a\tb\n\n1\t2\t3\n", "undecodable", "line 3 has 3 fields"),
        ("a.csv", b"a,b\ncaf\xe9,2\n", "undecodable", "not UTF-8 at byte 7"),
        ("a.bval", b"0 1000 x\n", "undecodable", "no number"),
        ("a.bval", b" \n", "undecodable", "no numbers"),
        ("a.bvec", b"0 1 0\n0 0 1\n1 0\n", "truncated", "2, 3 numbers"),
        ("a.bvec", b"0 1\n1 1\n", "undecodable", "three rows"),
        ("a.json", b'{"a": [1, 2', "truncated", "ends early"),
        ("a.json", b'{"a": 1,}', "undecodable", "malformed"),
        ("a.json", b'{"a": "\xff"}', "undecodable", "UTF-8"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n{"a": 2}\n', "undecodable", "line 2 is no JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": ', "truncated", "line 2 is no JSON"),
        ("a.svg", b"<svg><g></svg>", "undecodable", "mismatched tag"),
    ],
)  # fmt: skip
def test_wrong_text(tmp_path: Path, name: str, data: bytes, problem: str, says: str) -> None:
    (found,) = verdict(tmp_path, name, data).found
    assert (found.problem, says in found.detail) == (problem, True), found


def test_long_tables_are_counted_across_pieces(tmp_path: Path) -> None:
    line = b'"a ""quoted"" word, with\nends",2,3\n'
    assert not verdict(tmp_path, "a.csv", b"a,b,c\n" + line * 40_000).found
    (found,) = verdict(tmp_path, "a.csv", b"a,b,c\n" + b"1,2,3\n" * 200_000 + b"1,2\n" + b"1,2,3\n").found
    assert "line 200,002 has 2 fields where the first has 3" in found.detail


def by_tokens(data: bytes, step: int) -> bool:
    tokens = Tokens()
    try:
        for at in range(0, len(data), step):
            tokens.feed(data[at : at + step])
        tokens.end()
    except Broken:
        return False
    return True


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


@given(_VALUES, st.booleans(), st.sampled_from([1, 2, 5, 4096]), st.randoms(use_true_random=False), st.integers(0, 3))
def test_tokens_agree_with_the_whole_parser(
    value: object, ascii: bool, step: int, rng: random.Random, edits: int
) -> None:
    """However a document is cut into pieces and whatever is changed in it, both parsers say the same."""
    data = bytearray(json.dumps(value, ensure_ascii=ascii, indent=rng.choice([None, 1])).encode())
    for _ in range(edits):
        data[rng.randrange(len(data)) : rng.randrange(len(data) + 1)] = bytes([rng.choice(b'[]{},:"\\ 01.eE-tn')])
        if not data:
            return
    try:
        json.loads(bytes(data).decode())
        right = True
    except ValueError:
        right = False
    assert by_tokens(bytes(data), step) is right


def test_deep_json_is_followed_and_not_recursed(tmp_path: Path) -> None:
    assert not verdict(tmp_path, "a.json", b"[" * 50_000 + b"]" * 50_000).found
    assert problems(verdict(tmp_path, "a.json", b"[" * 50_000 + b"]" * 49_999)) == ["truncated"]


# -- what has no kind -----------------------------------------------------------------------------------------------


def test_names_and_kinds() -> None:
    assert [kind_of(name) for name in ("README", ".bidsignore", "a.tar.zst", "x.b/T1w.NII.gz", "a.gz", "a.weird")] == [
        "other", "other", "archive", "nifti", "compressed", "other",
    ]  # fmt: skip


def test_files_without_an_ending_go_by_their_bytes(tmp_path: Path) -> None:
    for data, kind in ((png(), "image"), (nifti(), "nifti"), (pdf(), "pdf"), (gzip.compress(b"x"), "compressed"),
                       (zipped(), "archive"), (b"anything", "other")):  # fmt: skip
        assert verdict(tmp_path, "README", data).kind == kind
    assert problems(verdict(tmp_path, "README", png()[:-3])) == ["truncated"]


def test_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    """Also where a probe stopped long before the end, or jumped about."""
    import hashlib

    for name, (make, _) in WHOLE.items():
        data = make()
        assert verdict(tmp_path, name, data).digest == hashlib.sha256(data).digest()[:16], name
        wrong = verdict(tmp_path, name, b"garbage" + data)
        assert wrong.digest == hashlib.sha256(b"garbage" + data).digest()[:16], name


def test_every_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = os.open

    def counted(path: str, flags: int) -> int:
        opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", counted)
    for name in ("a.nii.gz", "a.png", "a.zip", "a.json", "a.npy", "a.tar.gz"):
        (tmp_path / name).write_bytes(WHOLE[name][0]())
        opened.clear()
        check_file(Item(str(tmp_path / name)))
        assert opened == [str(tmp_path / name)]

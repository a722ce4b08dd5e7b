"""Scans: NIfTI-1 and -2 in either byte order, header and image pairs, FreeSurfer's MGH.

The header tells how many bytes the image has; a file is whole when they are there. Compressed, they come through a
reader that verifies checksums to the last byte.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from penstock.media.probes.reader import Broken, FileReader, Gzip, Reader, Truncated

# Bits of a value by NIfTI's code for its type. `bitpix` says it again, and old writers got it wrong.
_BITS = {
    1: 1, 2: 8, 4: 16, 8: 32, 16: 32, 32: 64, 64: 64, 128: 24, 256: 8, 512: 16, 768: 32, 1024: 64, 1280: 64,
    1536: 128, 1792: 128, 2048: 256, 2304: 32,
}  # fmt: skip
_MGH_BYTES = {0: 1, 1: 4, 3: 4, 4: 2, 10: 2}


@dataclass(frozen=True)
class Header:
    """What a header says: where the image starts, how many bytes it has, and whether it lies in this same file."""

    offset: int
    bytes: int
    single: bool
    version: str


def nifti(reader: Reader, path: str) -> None:
    """A single file, `.nii`."""
    head = reader.read(540)
    if head[:2] == b"\x1f\x8b":
        raise Broken("it is gzip-compressed and its name does not say so; readers go by the name: call it .nii.gz")
    header = parse(head)
    if not header.single:
        raise Broken("its header says that the image is in another file (.img), and the name is that of a single file")
    end = header.offset + header.bytes
    reader.drain()
    if reader.position < end:
        raise Truncated(
            f"its header asks for {header.bytes:,} bytes of image from byte {header.offset:,},"
            f" and it holds {max(0, reader.position - header.offset):,}"
        )


def header_file(reader: Reader, path: str) -> str:
    """The header of a pair, `.hdr`; other formats use that ending too."""
    head = reader.read(540)
    if _order(head, 348) is None and _order(head, 540) is None:
        return "other"
    parse(head)
    return "header"


def image_file(reader: Reader, path: str) -> str:
    """The image of a pair, `.img`, against the header beside it; without one it is some other format's."""
    header = _header_beside(path)
    if header is None:
        return "other"
    reader.drain()
    if reader.position < header.offset + header.bytes:
        raise Truncated(
            f"the header beside it asks for {header.bytes:,} bytes of image from byte {header.offset:,},"
            f" and it holds {reader.position:,}"
        )
    return "nifti"


def mgh(reader: Reader, path: str) -> None:
    """FreeSurfer's volumes: big-endian, the image from byte 284."""
    head = reader.exactly(284, "the header")
    version, width, height, depth, frames, kind = struct.unpack_from(">6i", head)
    if version != 1 or min(width, height, depth, frames) < 1 or kind not in _MGH_BYTES:
        raise Broken(f"it is not MGH: it begins with {head[:8].hex(' ')}")
    reader.skip(width * height * depth * frames * _MGH_BYTES[kind], "the image its header asks for")


def parse(head: bytes) -> Header:
    """A header of NIfTI-1, NIfTI-2 or Analyze 7.5, from the first bytes of a file."""
    if (order := _order(head, 540)) is not None:
        return _parse_2(head, order)
    order = _order(head, 348)
    if order is None:
        raise Broken(f"it is not NIfTI: {begins_with(head)}")
    if len(head) < 348:
        raise Truncated(f"it ends at byte {len(head):,}, inside the header")
    dims = struct.unpack_from(f"{order}8h", head, 40)
    code, bits = struct.unpack_from(f"{order}2h", head, 70)
    (offset,) = struct.unpack_from(f"{order}f", head, 108)
    magic = head[344:348]
    single = magic == b"n+1\0"
    version = "NIfTI-1" if single or magic == b"ni1\0" else "Analyze"
    if not 0 <= offset < 1 << 40:
        raise Broken(f"its header says that the image starts at byte {offset}")
    start = int(offset)
    return Header(max(start, 352) if single else start, _image_bytes(dims, code, bits), single, version)


def _parse_2(head: bytes, order: str) -> Header:
    if len(head) < 540:
        raise Truncated(f"it ends at byte {len(head):,}, inside the header")
    magic = head[4:12]
    if magic[:4] not in (b"n+2\0", b"ni2\0"):
        raise Broken(f"its header has the length of NIfTI-2 and not its mark, but {magic.hex(' ')}")
    if magic[4:] != b"\r\n\x1a\n":
        raise Broken("its line ends were changed on the way (sent as text), which damages all of it")
    code, bits = struct.unpack_from(f"{order}2h", head, 12)
    dims = struct.unpack_from(f"{order}8q", head, 16)
    (start,) = struct.unpack_from(f"{order}q", head, 168)
    if not 0 <= start < 1 << 60:
        raise Broken(f"its header says that the image starts at byte {start:,}")
    single = magic[:4] == b"n+2\0"
    return Header(max(start, 544) if single else start, _image_bytes(dims, code, bits), single, "NIfTI-2")


def _order(head: bytes, length: int) -> str | None:
    for order in "<>":
        if head[:4] == struct.pack(f"{order}i", length):
            return order
    return None


def _image_bytes(dims: tuple[int, ...], code: int, bits: int) -> int:
    count = dims[0]
    if not 1 <= count <= 7 or min(dims[1 : count + 1]) < 0:
        raise Broken(f"its header has dimensions that cannot be: {', '.join(map(str, dims))}")
    each = _BITS.get(code, bits)
    if each <= 0:
        raise Broken(f"its header has no type of value that is known (code {code}, {bits} bits)")
    values = 1
    for size in dims[1 : count + 1]:
        values *= max(1, size)  # 0 is written for "not used"
    return -(-values * each // 8)


def _header_beside(path: str) -> Header | None:
    stem = path[: path.lower().rindex(".img")]
    for ending in (".hdr", ".hdr.gz", ".HDR"):
        try:
            fd = os.open(stem + ending, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            file = FileReader(fd, path=stem + ending)
            head = (Gzip(file) if ending.endswith(".gz") else file).read(540)
        finally:
            os.close(fd)
        if _order(head, 348) or _order(head, 540):
            return parse(head)
    return None


def begins_with(head: bytes) -> str:
    """What a file that is not what it should be looks like."""
    start = head[:256].lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "it holds a web page, as a failed download does"
    if start.startswith((b"<?xml", b"<error")):
        return "it holds XML, as a failed download does"
    if start.startswith(b"{"):
        return "it holds JSON, as a failed download does"
    if not any(head):
        return f"its first {len(head):,} bytes are all zero"
    return f"it begins with {head[:8].hex(' ')}"

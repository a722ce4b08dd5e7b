"""Pictures: PNG, JPEG, GIF, WebP, TIFF, BMP, and those in MP4 boxes, told by their first bytes and not by the name.

PNG is inflated and all its checksums compared. JPEG has none: its markers are followed to the end mark and, where
Pillow is installed, it is decoded; so are the others, as long as the picture is small enough to hold.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from functools import cache
from importlib import import_module
from typing import Any

from penstock.media.probes.nifti import begins_with
from penstock.media.probes.reader import FEED, PIECE, Broken, FileReader, Reader, Truncated
from penstock.media.probes.video import boxes

# What a decoded picture may take beside the usual: 8 million pixels of four bytes, or the coefficients of a
# progressive JPEG as large. A baseline JPEG is decoded at an eighth of its width, which reads every bit of it too.
DECODED = 64 << 20
MOST_PIXELS = 8 << 20
MOST_BASELINE = MOST_PIXELS * 16
MOST_WEBP = MOST_PIXELS // 3  # its decoder holds the picture four times over: 138 MB for 8 million pixels
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def image(reader: Reader, path: str) -> None:
    """A picture of any kind that is known."""
    head = reader.peek(16)
    for magic, probe in _PROBES:
        if head.startswith(magic):
            probe(reader, path)
            return
    if head[4:8] in (b"ftyp", b"jP  "):
        boxes(reader, path)
        return
    if path.lower().endswith((".svg", ".hdr", ".exr", ".tga", ".pnm", ".pgm", ".ppm", ".ico", ".dds", ".psd")):
        reader.drain()
        return
    raise Broken(f"it is no image of a kind that is known: {begins_with(head)}")


def png(reader: Reader, path: str) -> None:
    reader.exactly(8, "the signature")
    codec = zlib.decompressobj()
    expected = inflated = 0
    first = True
    while True:
        length, kind = struct.unpack(">I4s", reader.exactly(8, "the head of a chunk"))
        word = kind.decode("latin-1")
        if length > 1 << 31 or not word.isalpha():
            raise Broken(f"a chunk is damaged before byte {reader.position:,}")
        if first and kind != b"IHDR":
            raise Broken(f"its first chunk is {word}, not IHDR")
        if kind == b"IHDR" and length != 13:
            raise Broken(f"its header has {length:,} bytes, not 13")
        first = False
        crc = zlib.crc32(kind)
        header = b""
        for piece in reader.pieces(length, f"its chunk {word}"):
            crc = zlib.crc32(piece, crc)
            if kind == b"IHDR":
                header += piece
            elif kind == b"IDAT":
                inflated += _inflate(codec, piece)
        (stated,) = struct.unpack(">I", reader.exactly(4, f"its chunk {word}"))
        if stated != crc:
            raise Broken(f"its chunk {word} before byte {reader.position:,} has another CRC than it says")
        if kind == b"IHDR":
            expected = _png_bytes(header)
        if kind == b"IEND":
            break
    if inflated < expected or not codec.eof:
        raise Truncated(f"its picture has {inflated:,} bytes where its header asks for {expected:,}")
    reader.drain()


def _inflate(codec: Any, piece: memoryview) -> int:
    total = 0
    try:
        for start in range(0, len(piece), FEED):
            left: bytes | memoryview = piece[start : start + FEED]
            while True:
                got = len(codec.decompress(left, PIECE))
                total += got
                left = codec.unconsumed_tail
                if not left and got < PIECE:
                    break
    except zlib.error as error:
        raise Broken(f"its picture is damaged ({error})") from error
    return total


def _png_bytes(header: bytes) -> int:
    """Bytes of all lines, each with its filter's byte."""
    width, height, depth, color, _, _, interlaced = struct.unpack(">2I5B", header)
    if not width or not height or color not in _CHANNELS:
        raise Broken(f"its header says {width:,} by {height:,} pixels of type {color}")
    bits = depth * _CHANNELS[color]
    if not interlaced:
        return int(height * (1 + -(-width * bits // 8)))
    total = 0
    for x, y, dx, dy in _PASSES:
        across, down = -(-(width - x) // dx), -(-(height - y) // dy)
        if across > 0 and down > 0:
            total += down * (1 + -(-across * bits // 8))
    return total


def jpeg(reader: Reader, path: str) -> None:
    reader.exactly(2, "the start mark")
    pixels, progressive, scans = 0, False, 0
    marker = _next_marker(reader)
    while marker != 0xD9:
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            marker = _next_marker(reader)
            continue
        (length,) = struct.unpack(">H", reader.exactly(2, "a segment's length"))
        if length < 2:
            raise Broken(f"a segment before byte {reader.position:,} has a length of {length}")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = reader.exactly(length - 2, "the frame's header")
            _, height, width = struct.unpack_from(">B2H", frame)
            pixels, progressive = height * width, marker != 0xC0 and marker != 0xC1
        else:
            reader.skip(length - 2, "a segment")
        if marker == 0xDA:
            scans += 1
            marker = _after_scan(reader)
        else:
            marker = _next_marker(reader)
    if not scans:
        raise Truncated("it ends before its first scan: it holds no picture")
    reader.drain()
    if pixels <= (MOST_PIXELS if progressive else MOST_BASELINE):
        decode(reader)


def _next_marker(reader: Reader) -> int:
    byte = reader.exactly(1, "a segment's mark")
    if byte != b"\xff":
        raise Broken(f"there is no mark at byte {reader.position - 1:,}, where a segment should begin")
    while byte == b"\xff":
        byte = reader.exactly(1, "a segment's mark")
    return byte[0]


def _after_scan(reader: Reader) -> int:
    """The mark that ends the coded data."""
    carried = False  # the piece before ended in 0xff
    while piece := reader.peek(FEED):
        if carried and piece[0] not in (0, 0xFF) and not 0xD0 <= piece[0] <= 0xD7:
            reader.skip(1, "a mark")
            return piece[0]
        found = _MARKER.search(piece)
        if found is not None:
            reader.skip(found.end(), "a scan")
            return piece[found.end() - 1]
        carried = piece[-1] == 0xFF
        reader.skip(len(piece), "a scan")
    raise Truncated(f"it ends at byte {reader.position:,} without its end mark, inside the coded picture")


def gif(reader: Reader, path: str) -> None:
    head = reader.exactly(13, "the header")
    width, height, flags = struct.unpack_from("<2HB", head, 6)
    if flags & 0x80:
        reader.skip(3 << ((flags & 7) + 1), "the colours")
    frames = 0
    while (kind := reader.exactly(1, "a block's mark")) != b"\x3b":
        if kind == b"\x21":
            reader.skip(1, "an extension")
        elif kind == b"\x2c":
            frames += 1
            local = reader.exactly(9, "a frame's header")[8]
            reader.skip((3 << ((local & 7) + 1) if local & 0x80 else 0) + 1, "a frame's colours")
        else:
            raise Broken(f"there is no block at byte {reader.position - 1:,}, but {kind.hex()}")
        while length := reader.exactly(1, "a block")[0]:
            reader.skip(length, "a block")
    if not frames:
        raise Broken("it holds no frame")
    reader.drain()
    if width * height <= MOST_PIXELS:
        decode(reader)


def webp(reader: Reader, path: str) -> None:
    head = reader.exactly(12, "the header")
    (length,) = struct.unpack_from("<I", head, 4)
    if head[8:] != b"WEBP":
        raise Broken(f"it is RIFF and no WebP: {head[8:12]!r}")
    end, seen = 8 + length, set()
    width = height = 0
    while reader.position + 8 <= end:
        kind, size = struct.unpack("<4sI", reader.exactly(8, "the head of a chunk"))
        seen.add(kind)
        head = reader.peek(min(size, 10))
        if kind == b"VP8X" and len(head) == 10:
            width, height = 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
        elif kind == b"VP8 " and len(head) == 10:
            width, height = (value & 0x3FFF for value in struct.unpack_from("<2H", head, 6))
        elif kind == b"VP8L" and len(head) >= 5:
            bits = int.from_bytes(head[1:5], "little")
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        reader.skip(size + (size & 1), f"its chunk {kind.decode('latin-1')}")
    if not seen & {b"VP8 ", b"VP8L", b"ANMF"}:
        raise Truncated("it holds no picture")
    reader.drain()
    if 0 < width * height <= MOST_WEBP:
        decode(reader)


def bmp(reader: Reader, path: str) -> None:
    head = reader.exactly(26, "the header")
    _, _, start, own = struct.unpack_from("<4I", head, 2)
    if own < 40:
        reader.drain()
        return
    reader_rest = reader.exactly(14, "the header")
    width, height = struct.unpack_from("<2i", head, 18)
    _, bits, packed = struct.unpack_from("<2HI", reader_rest)
    lines = -(-width * bits // 32) * 4
    expected = start + lines * abs(height) if packed in (0, 3) else start + 1
    reader.drain()
    if reader.position < expected:
        raise Truncated(f"its header asks for {expected:,} bytes, and it holds {reader.position:,}")


def tiff(reader: Reader, path: str) -> None:
    """Every directory, and every strip or tile within the file."""
    reader.drain()
    if not isinstance(reader, FileReader):
        return
    head = reader.at(0, 16)
    order = "<" if head[:2] == b"II" else ">"
    big = struct.unpack_from(f"{order}H", head, 2)[0] == 43
    place = struct.unpack_from(f"{order}Q", head, 8)[0] if big else struct.unpack_from(f"{order}I", head, 4)[0]
    seen: set[int] = set()
    pixels = 0
    while place:
        if place in seen or len(seen) > 65_535:
            raise Broken("its directories go in a circle")
        seen.add(place)
        place, across = _tiff_directory(reader, place, order, big)
        pixels = max(pixels, across)
    if not seen:
        raise Broken("it has no directory")
    if pixels <= MOST_PIXELS:
        decode(reader)


_TIFF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_TIFF_CODES = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}


def _tiff_directory(reader: FileReader, place: int, order: str, big: bool) -> tuple[int, int]:
    """Where the next directory is, and how many pixels this one's picture has."""
    wide, each, word = (8, 20, "Q") if big else (2, 12, "I")
    head = reader.at(place, wide)
    if len(head) < wide:
        raise Truncated(f"a directory should be at byte {place:,}, and it ends at {reader.size:,}")
    (count,) = struct.unpack(f"{order}{'Q' if big else 'H'}", head)
    if count > 65_535:
        raise Broken(f"a directory at byte {place:,} has {count:,} entries")
    body = reader.at(place + wide, count * each + (8 if big else 4))
    if len(body) < count * each + (8 if big else 4):
        raise Truncated(f"it ends inside its directory at byte {place:,}")
    fields: dict[int, tuple[int, int, int]] = {}
    width = height = 0
    for at in range(0, count * each, each):
        tag, kind = struct.unpack_from(f"{order}2H", body, at)
        (values,) = struct.unpack_from(f"{order}{word}", body, at + 4)
        size = _TIFF_BYTES.get(kind, 1) * values
        inline = 8 if big else 4
        value_at = place + wide + at + (12 if big else 8)
        where = value_at if size <= inline else struct.unpack_from(f"{order}{word}", body, at + each - inline)[0]
        if where + size > reader.size:
            raise Truncated(f"its field {tag} goes beyond its end")
        fields[tag] = kind, values, where
        if tag in (256, 257) and kind in _TIFF_CODES:
            value = struct.unpack(f"{order}{_TIFF_CODES[kind]}", reader.at(where, _TIFF_BYTES[kind]))[0]
            width, height = (value, height) if tag == 256 else (width, value)
    for offsets, lengths in ((273, 279), (324, 325)):
        if offsets in fields and lengths in fields:
            _check_strips(reader, order, fields[offsets], fields[lengths])
    return int(struct.unpack_from(f"{order}{word}", body, count * each)[0]), width * height


def _check_strips(reader: FileReader, order: str, offsets: tuple[int, int, int], lengths: tuple[int, int, int]) -> None:
    step = 8192
    for first in range(0, min(offsets[1], lengths[1]), step):
        columns = []
        for kind, values, where in (offsets, lengths):
            if kind not in _TIFF_CODES:
                raise Broken(f"its places are of type {kind}")
            count = min(step, values - first)
            data = reader.at(where + first * _TIFF_BYTES[kind], count * _TIFF_BYTES[kind])
            columns.append(struct.unpack(f"{order}{count}{_TIFF_CODES[kind]}", data))
        furthest = max((at + length for at, length in zip(*columns, strict=False)), default=0)
        if furthest > reader.size:
            raise Truncated(f"its picture goes to byte {furthest:,}, and it ends at {reader.size:,}")


@cache
def pillow() -> Any:
    """Pillow's `Image`, where it is installed."""
    try:
        return import_module("PIL.Image")
    except ImportError:
        return None


def decode(reader: Reader) -> None:
    """Have Pillow decode the picture, each frame of it, at the least size it offers."""
    library = pillow()
    if library is None or not isinstance(reader, FileReader):
        return
    end = os.lseek(reader.fd, 0, os.SEEK_CUR)  # a duplicate shares it
    with os.fdopen(os.dup(reader.fd), "rb") as file:
        file.seek(0)
        try:
            with library.open(file) as picture:
                if picture.format == "JPEG":
                    picture.draft("RGB", (1, 1))
                for frame in range(getattr(picture, "n_frames", 1)):
                    picture.seek(frame)
                    picture.load()
        except MemoryError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            if "truncated" in said:
                raise Truncated(f"decoding it ends early ({said})") from error
            if "cannot identify" in said or "not supported" in said:
                return  # Pillow was built without this kind: its structure was followed, and holds
            raise Broken(f"it cannot be decoded ({said})") from error
        finally:
            os.lseek(reader.fd, end, os.SEEK_SET)


_PROBES: tuple[tuple[bytes, Any], ...] = (
    (b"\x89PNG\r\n\x1a\n", png),
    (b"\xff\xd8", jpeg),
    (b"GIF87a", gif),
    (b"GIF89a", gif),
    (b"RIFF", webp),
    (b"BM", bmp),
    (b"II*\0", tiff),
    (b"MM\0*", tiff),
    (b"II+\0", tiff),
    (b"MM\0+", tiff),
)

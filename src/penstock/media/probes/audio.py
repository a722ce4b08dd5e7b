"""Sound: WAV, AIFF, FLAC, Ogg and MP3, followed frame by frame or page by page to their end."""

from __future__ import annotations

import re
import struct
import zlib

from penstock.media.probes.nifti import begins_with
from penstock.media.probes.reader import FEED, Broken, Reader, Truncated
from penstock.media.probes.video import boxes, matroska, riff


def audio(reader: Reader, path: str) -> None:
    """A recording of any kind that is known, told by its first bytes."""
    head = reader.peek(12)
    if head[:4] in (b"RIFF", b"RF64", b"BW64"):
        if b"data" not in riff(reader, path, forms=(b"WAVE",)):
            raise Truncated("it holds no samples (chunk 'data')")
    elif head[:4] == b"FORM":
        if b"SSND" not in riff(reader, path, forms=(b"AIFF", b"AIFC"), order=">"):
            raise Truncated("it holds no samples (chunk 'SSND')")
    elif head[:4] == b"fLaC":
        flac(reader, path)
    elif head[:4] == b"OggS":
        ogg(reader, path)
    elif head[4:8] == b"ftyp":
        boxes(reader, path)
    elif head[:4] == b"\x1a\x45\xdf\xa3":
        matroska(reader, path)
    elif head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0):
        _after_id3(reader, path)
    else:
        raise Broken(f"it is no sound of a kind that is known: {begins_with(head)}")


def _after_id3(reader: Reader, path: str) -> None:
    while reader.peek(3) == b"ID3":
        head = reader.exactly(10, "its tags")
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        reader.skip(size + (10 if head[5] & 0x10 else 0), "its tags")
    if reader.peek(4) == b"fLaC":
        flac(reader, path)
    elif len(start := reader.peek(2)) == 2 and start[0] == 0xFF and start[1] & 0xF6 == 0xF0:
        adts(reader, path)
    else:
        mp3(reader, path)


# -- MP3 and AAC --------------------------------------------------------------------------------------------------

_RATES = (44_100, 48_000, 32_000)
_KBITS = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
# What may follow the last frame: tags of several kinds, and zeros.
_TAGS = (b"TAG", b"APE", b"LYR", b"ID3", b"3DI")


def mp3(reader: Reader, path: str) -> None:
    """Frame after frame. Where the first says how many there are, that many must be there."""
    frames = lost = 0
    stated: int | None = None
    while len(head := reader.peek(4)) == 4:
        length = _mp3_length(head)
        if not length:
            if frames and (head[:3] in _TAGS or not any(head)):
                break
            reader.skip(1, "a frame")
            lost += 1
            if lost > FEED and not frames:
                break
            continue
        frame = reader.read(length)
        if len(frame) < length:
            raise Truncated(f"it ends inside frame {frames:,}")
        if not frames:
            stated = _stated_frames(frame)
        frames += 1
    reader.drain()
    if not frames or lost > max(FEED, reader.position // 2):
        raise Broken("it holds no MP3 frames")
    # The frame that says so is not counted by all who write it.
    if stated is not None and frames < stated:
        raise Truncated(f"its first frame counts {stated:,} frames, and it holds {frames:,}")


def _mp3_length(head: bytes) -> int:
    if head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    version, layer = head[1] >> 3 & 3, 4 - (head[1] >> 1 & 3)
    rate, kbits = head[2] >> 2 & 3, head[2] >> 4
    if version == 1 or layer == 4 or rate == 3 or not 0 < kbits < 15:
        return 0
    hertz = _RATES[rate] >> {3: 0, 2: 1, 0: 2}[version]
    bits = _KBITS[1 if version == 3 else 2, layer][kbits - 1] * 1000
    padding = head[2] >> 1 & 1
    if layer == 1:
        return (12 * bits // hertz + padding) * 4
    return (72 if layer == 3 and version != 3 else 144) * bits // hertz + padding


def _stated_frames(frame: bytes) -> int | None:
    for mark in (b"Xing", b"Info"):
        at = frame.find(mark, 0, 64)
        if at >= 0 and len(frame) >= at + 12 and frame[at + 7] & 1:
            return int.from_bytes(frame[at + 8 : at + 12], "big")
    return None


def adts(reader: Reader, path: str) -> None:
    """AAC frames, each with its length."""
    frames = 0
    while len(head := reader.peek(7)) == 7 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        length = (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
        if length < 7:
            raise Broken(f"frame {frames:,} has a length of {length}")
        reader.skip(length, f"frame {frames:,}")
        frames += 1
    if head and head[:3] not in _TAGS:
        raise Broken(f"there is no frame at byte {reader.position:,}, after {frames:,}")
    reader.drain()


# -- Ogg ----------------------------------------------------------------------------------------------------------

_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def ogg_crc(page: bytes) -> int:
    """Ogg's CRC is zlib's with the bits of every byte, and of the result, the other way round."""
    crc = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{crc:032b}"[::-1], 2)


def ogg(reader: Reader, path: str) -> None:
    """Every page's CRC; every stream that begins must end."""
    open_streams: set[int] = set()
    pages = 0
    while head := reader.read(27):
        if len(head) < 27:
            raise Truncated(f"it ends inside the header of page {pages:,}")
        if head[:4] != b"OggS":
            raise Broken(f"page {pages:,} has no mark, but {head[:4].hex(' ')}")
        flags, serial, stated, count = (
            head[5],
            *struct.unpack_from("<I", head, 14),
            *struct.unpack_from("<IB", head, 22),
        )
        table = reader.exactly(count, f"page {pages:,}")
        body = reader.exactly(sum(table), f"page {pages:,}")
        if ogg_crc(head[:22] + bytes(4) + head[26:] + table + body) != stated:
            raise Broken(f"page {pages:,} has another CRC than it says")
        if flags & 2:
            open_streams.add(serial)
        if flags & 4:
            open_streams.discard(serial)
        pages += 1
    if open_streams:
        raise Truncated(f"it ends after {pages:,} pages without the page that ends its stream")


# -- FLAC ---------------------------------------------------------------------------------------------------------

_FLAC_SYNC = re.compile(rb"\xff[\xf8\xf9]")
_FLAC_HEADER = 16  # bytes, at most
_FLAC_LONGEST = 8 << 20  # a frame's length has 24 bits, and no encoder comes near a megabyte


def flac(reader: Reader, path: str) -> None:
    """The frames' headers, found by their own CRC, must count up to the samples its first block states.

    Frames carry no length, so what lies between two headers is not compared with its CRC; the last one is.
    """
    reader.exactly(4, "the mark")
    total = 0
    last = False
    first = True
    while not last:
        head = reader.exactly(4, "a block's header")
        last = bool(head[0] & 0x80)
        length = int.from_bytes(head[1:4], "big")
        if first:
            if head[0] & 0x7F or length != 34:
                raise Broken("its first block is not the one that describes the stream")
            info = reader.exactly(length, "the description of the stream")
            total = int.from_bytes(info[13:18], "big") & 0xFFFFFFFFF
        else:
            reader.skip(length, "a block")
        first = False
    samples, tail = _flac_frames(reader)
    if total and samples < total:
        raise Truncated(f"it says it has {total:,} samples, and its frames hold {samples:,}")
    if not samples:
        raise Truncated("it holds no frame")
    # Some taggers put an ID3v1 tag after the last frame.
    if tail[-128:-125] == b"TAG":
        tail = tail[:-128]
    if flac_crc16(tail):
        raise Truncated("its last frame has another CRC than it says")


def _flac_frames(reader: Reader) -> tuple[int, bytes]:
    """How many samples the frames hold together, and the bytes of the last frame."""
    samples = fixed = at = 0
    window, ended = b"", False  # from the start of the last frame on
    while not ended:
        piece = reader.piece()
        ended = not piece
        window += bytes(_FLAC_HEADER) if ended else piece
        start = 0
        while (found := _FLAC_SYNC.search(window, at)) and found.start() + _FLAC_HEADER <= len(window):
            at = found.start() + 1
            head = _flac_header(window, found.start())
            if head is None:
                continue
            number, block, variable = head
            if not variable:
                fixed = fixed or block
                number *= fixed
            # What only looks like a header does not go on where the last frame ended.
            if number == samples:
                samples, start = samples + block, found.start()
        at = (found.start() if found else max(at, len(window) - 1)) - start
        window = window[start:]
        if len(window) > _FLAC_LONGEST:
            raise Broken(f"there is no frame in {len(window):,} bytes before byte {reader.position:,}")
    return samples, window[:-_FLAC_HEADER]


def _flac_header(data: bytes, at: int) -> tuple[int, int, bool] | None:
    """(number of the frame or sample, samples in it, whether block sizes vary), if a frame starts here."""
    if data[at + 1] & 0xFE != 0xF8:
        return None
    size_code, rate_code = data[at + 2] >> 4, data[at + 2] & 15
    if not size_code or rate_code == 15 or data[at + 3] & 1:
        return None
    place = at + 4
    first = data[place]
    if first < 0x80:
        number, more = first, 0
    else:
        more = 8 - (first ^ 0xFF).bit_length() - 1
        if not 1 <= more <= 6:
            return None
        number = first & (0x3F >> more)
    place += 1
    for byte in data[place : place + more]:
        number = number << 6 | byte & 0x3F
    place += more
    if size_code in (6, 7):
        wide = size_code - 5
        block = int.from_bytes(data[place : place + wide], "big") + 1
        place += wide
    else:
        block = 192 if size_code == 1 else 576 << (size_code - 2) if size_code < 6 else 256 << (size_code - 8)
    place += {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if _crc8(data[at:place]) != data[place]:
        return None
    return number, block, bool(data[at + 1] & 1)


def _crc8(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ (0x07 if crc & 0x80 else 0)) & 0xFF
    return crc


def _crc16_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ (0x8005 if crc & 0x8000 else 0)) & 0xFFFF
        table.append(crc)
    return tuple(table)


_CRC16 = _crc16_table()


def flac_crc16(data: bytes) -> int:
    """0 over a whole frame, its own CRC included."""
    crc = 0
    for byte in data:
        crc = (crc << 8 & 0xFFFF) ^ _CRC16[crc >> 8 ^ byte]
    return crc
